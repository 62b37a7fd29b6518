"""The plan against the reference job, against published sizes and against what really came out."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import plan as script
from eyrie import plan as planning
from eyrie.checkpoint import expected_tensors
from eyrie.config import load_config
from eyrie.draft import DraftShape, flat_config
from eyrie.memory import GIB
from eyrie.plan import draft_parameters, make_plan, parameters, read_verifier
from eyrie.rates import measured, passes, read_rates, record_rate
from eyrie.totals import summed

ROOT = Path(__file__).parents[2]
KIMI = ROOT / "configs/kimi_k25.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory without results, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def kimi(tmp_path, **changes):
    """configs/kimi_k25.yaml with `changes`, a block a name."""
    (tmp_path / "changes.yaml").write_text(yaml.safe_dump(changes))
    return script.read_config([KIMI, tmp_path / "changes.yaml"])


@pytest.mark.parametrize(
    "name, total, used",
    [
        ("kimi_k25", 1.03e12, 32e9),
        ("llama31_8b", 8.03e9, 7.5e9),
        ("qwen3_8b", 8.19e9, 7.6e9),
        ("smollm2_135m", 134.5e6, 134.5e6),
    ],
)
def test_parameters_are_those_that_are_published(name, total, used):
    sizes = read_verifier(ROOT / f"configs/reference/{name}.json")
    found = parameters(sizes.text)
    assert found == (pytest.approx(total, rel=0.02), pytest.approx(used, rel=0.03))


def test_the_reference_job(tmp_path):
    """503,000 tokens of 1,000 rows, each a step of its own, prefilled and trained on ten times."""
    config = kimi(tmp_path, shard={"answers": "dataset"}, train={"total_seq_len": 530})
    plan = make_plan(config, "1k")
    parts = {row["part"]: row for row in plan["times"]}
    assert plan["tokens"]["total"] == 503_000
    assert plan["states"]["bytes_a_token"] == 57_344
    assert parts["load"]["seconds"] == pytest.approx(22.5 * 60, rel=0.2)
    assert parts["extract"]["seconds"] == pytest.approx(2.9 * 60, rel=0.2)
    assert parts["train"]["seconds"] == pytest.approx(27.7 * 60, rel=0.2)
    assert parts["train"]["steps"] == pytest.approx(9_500, rel=0.2)
    assert {row["source"] for row in plan["times"]} == {"given as plan.rates", "default"}
    assert plan["faults"] == []


def test_two_thousand_sequences_are_refused_and_four_are_not(tmp_path):
    assert make_plan(kimi(tmp_path), "1k")["faults"] == []
    (fault,) = make_plan(kimi(tmp_path, extract={"max_num_seqs": 2000}), "1k")["faults"]
    # 61 latents of 576 numbers and 4 states of 7,168, in bf16.
    for part in (
        "max_num_seqs 2,000 x 503 tokens a row x 127,616 bytes",
        "70,272 of keys and values, 57,344 of states) = 119.6 GiB",
        "72.0 GiB of a device, less 63.7 of weights and 1.5 of activations, leave 6.79 GiB",
        "hold 113 such rows, or 27 of the longest, 2,048 tokens",
    ):
        assert part in fault
    assert make_plan(kimi(tmp_path, extract={"max_num_seqs": 113}), "1k")["faults"] == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"plan": {"gpu_memory_gib": 64}}, "a row of 2,048 tokens needs 0.24 GiB"),
        ({"extract": {"max_num_batched_tokens": 65536}}, "less 63.7 of weights and 12.2 of"),
        ({"train": {"total_seq_len": 200_000}}, "training needs"),
    ],
)
def test_what_no_device_holds_is_refused(tmp_path, changes, message):
    faults = make_plan(kimi(tmp_path, **changes), "1k")["faults"]
    assert any(message in fault for fault in faults)


def test_a_full_disk_is_refused_with_the_numbers(tmp_path):
    (fault,) = make_plan(kimi(tmp_path), "1k", free_bytes=10**9)["faults"]
    assert fault.startswith("results/kimi_k25: 175.87 GB may be needed, 1.00 GB are free")


def test_memory_that_is_not_known_is_not_judged(tmp_path):
    config = kimi(tmp_path, plan={"gpu_memory_gib": None}, extract={"max_num_seqs": 2000})
    plan = make_plan(config, "1k")
    assert plan["memory"]["device_bytes"] is None and plan["faults"] == []
    assert "not known" in script.table(plan)


def test_heads_and_latents(tmp_path):
    """Keys and values are divided among the GPUs, the states and MLA's latent are not."""
    llama = script.read_config([ROOT / "configs/llama31_8b.yaml"])
    one = make_plan(llama, "1k")["memory"]
    llama.extract.gpus = 8
    eight = make_plan(llama, "1k")["memory"]
    assert one["attention"] == "GQA" and one["kv_bytes_a_token"] == 2 * 8 * 128 * 32 * 2
    assert eight["kv_bytes_a_token"] == one["kv_bytes_a_token"] / 8
    assert eight["weights_bytes"] == one["weights_bytes"] / 8
    assert eight["states_bytes_a_token"] == one["states_bytes_a_token"] == 4 * 4096 * 2
    assert make_plan(kimi(tmp_path), "1k")["memory"]["kv_bytes_a_token"] == 576 * 61 * 2


@pytest.mark.parametrize("layers", [1, 2])
def test_draft_parameters_are_those_of_its_tensors(tmp_path, layers):
    config = kimi(tmp_path, draft={"num_hidden_layers": layers})
    run = config.runs["1k"]
    text = read_verifier(ROOT / "configs/reference/kimi_k25.json").text
    draft = {k: v for k, v in run.draft.model_dump().items() if k != "reference"}
    verifier = SimpleNamespace(
        hidden_size=7168, vocab_size=163840, bos_token_id=0, eos_token_ids=[1], text=text
    )
    flat = flat_config(DraftShape(**draft), verifier, config.extract.layer_ids, 32_000)
    tensors = expected_tensors(flat)
    matrices = [s for _, s in tensors.values() if len(s) == 2]
    whole = sum(a * b for a, b in matrices)
    assert draft_parameters(run, text, 3) == (whole - 32_000 * 7168, whole)


def test_tokens_are_counted_where_they_are(tmp_path):
    """First of the same data, then of another as a sample, then prompts alone, then estimates."""
    config = load_config(yaml.safe_load((ROOT / "config.yaml").read_text()))
    assert make_plan(config, "10k")["tokens"]["total"] == 2_560_000

    def write(data: str, name: str, **values):
        path = tmp_path / f"results/data/{data}/{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    write("1k", "shards.json", kept=1_000, tokens=50_000, answers="verifier")
    tokens = make_plan(config, "10k")["tokens"]
    assert (tokens["prompt"], tokens["answers"]) == (500_000, 1_710_000)
    assert tokens["source"] == "prompts counted in results/data/1k/shards.json"
    # Of the data's own answers these say nothing.
    write("10", "hidden.json", rows=10, tokens=9_000, supervised_tokens=8_000, answers=0)
    write("1k", "hidden.json", rows=1_000, tokens=150_000, supervised_tokens=90_000, answers=1_000)
    tokens = make_plan(config, "10k")["tokens"]
    assert (tokens["prompt"], tokens["answers"]) == (600_000, 900_000)
    assert tokens["source"] == "counted in results/data/1k/hidden.json"
    write(
        "10k", "hidden.json", rows=10_000, tokens=70_000, supervised_tokens=30_000, answers=10_000
    )
    plan = make_plan(config, "10k", free_bytes=10**12)
    assert plan["tokens"]["total"] == 70_000 and plan["disk"]["states_at_most"] == 0


def test_what_was_measured_goes_before_a_default(tmp_path):
    config = load_config(yaml.safe_load((ROOT / "config.yaml").read_text()))
    rates, source = tmp_path / "results/.state/rates.jsonl", config.verifier.source
    before = make_plan(config, "1k")
    assert {row["source"] for row in before["times"]} == {"default"}
    record_rate(rates, "answers", source, 0, 1_000, 100.0, "data 10")
    record_rate(rates, "answers", source, 0, 100_000, 1_000.0, "data 1k")
    record_rate(rates, "train", source, 0, 5_000 * passes(3), 10.0, "run 1k")
    record_rate(rates, "answers", "path:other", 0, 1, 1.0, "data x")
    record_rate(rates, "answers", source, 8, 1, 1.0, "data x")
    record_rate(rates, "load", source, 0, 0, 0.0, "data all in the store")
    after = {row["part"]: row for row in make_plan(config, "1k")["times"]}
    # 171,000 answer tokens at what both runs together had.
    assert after["extract"]["seconds"] == pytest.approx(171_000 * 1_100 / 101_000, abs=0.1)
    assert after["extract"]["source"].startswith(
        "measured in data 10, data 1k, 101,000 tokens, last on "
    )
    assert after["train"]["rate"] == pytest.approx(500)
    assert after["load"]["source"] == after["bench"]["source"] == "default"
    given = copy.deepcopy(config)
    given.plan.rates.answer_tokens_per_s = 171.0
    given = {row["part"]: row for row in make_plan(given, "1k")["times"]}
    assert given["extract"]["seconds"] == 1_000 and given["extract"]["source"].startswith("given")


WHOLE = {"stage": "load", "verifier": "v", "gpus": 0, "device": None, "amount": 1, "seconds": 1}
WHOLE |= {"of": "r", "at": "2026-01-01"}


ZEROS = [json.dumps(WHOLE | {key: 0}) for key in ("amount", "seconds")]


@pytest.mark.parametrize("text", ["[]", "5", '{"stage": "lo', "", "{}", '{"a": "\xff"}', *ZEROS])
def test_a_line_that_is_no_measurement_is_named(tmp_path, text):
    path = tmp_path / "rates.jsonl"
    path.write_bytes(f"{json.dumps(WHOLE)}\n{text}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{path}: line 2 is no measurement .*; delete that line"):
        read_rates(path)
    path.write_text(json.dumps(WHOLE))
    assert read_rates(path) == [WHOLE]


COUNTS = {"answers": 0, "tokens": 1, "supervised_tokens": 1, "rows": 0, "kept": 0}
TEXTS = [json.dumps(COUNTS | {"rows": n, "kept": n}) for n in (0, -1, "x", None)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"answers": 0, "tokens": 1}', *TEXTS])
@pytest.mark.parametrize("name", ["hidden.json", "shards.json"])
def test_what_an_earlier_stage_left_damaged_is_named(tmp_path, name, text):
    config = kimi(tmp_path)
    path = Path(config.results) / "data/1k" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: "):
        make_plan(config, "1k")


def test_the_verifier_that_is_asked_for_is_planned(tmp_path):
    """And not another that the results have."""
    config = kimi(tmp_path)
    known = json.loads((ROOT / "configs/reference/smollm2_135m.json").read_text())["config"]
    folder = Path(config.results) / "verifier"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(known))
    config.extract.layer_ids = [2, 15, 27]
    assert make_plan(config, "1k")["states"]["hidden_size"] == 576
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="cannot be read as JSON"):
            make_plan(config, "1k", verifier=path)
    other = ROOT / "configs/reference/kimi_k25.json"
    assert make_plan(config, "1k", verifier=other)["states"]["hidden_size"] == 7168


def test_another_device_is_another_rate():
    line = {"stage": "train", "verifier": "v", "gpus": 1, "device": "NVIDIA H200", "amount": 10}
    line |= {"seconds": 5, "of": "run 1k", "at": "2026-01-01"}
    assert measured([line], "train", "v", 1, "NVIDIA H200")[0] == 2
    assert measured([line], "train", "v", 1, None)[0] == 2
    assert measured([line], "train", "v", 1, "NVIDIA A100") is None


def test_weights_of_an_index_of_files_and_of_a_guess(tmp_path):
    config = json.loads((ROOT / "configs/reference/llama31_8b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    guessed = read_verifier(tmp_path)
    assert guessed.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert guessed.weight_source == "estimated, 16 bits a parameter"
    config["quantization_config"] = {"config_groups": {"a": {"weights": {"num_bits": 4}}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_verifier(tmp_path).weight_bytes == pytest.approx(guessed.weight_bytes / 4)
    index = {"metadata": {"total_size": 12345}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_verifier(tmp_path).weight_bytes == 12345
    (tmp_path / "model.safetensors").write_bytes(b"x" * 77)
    assert read_verifier(tmp_path).weight_bytes == 77


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", "64"),
        ("num_key_value_heads", -1),
        ("head_dim", 1.5),
        ("n_routed_experts", "many"),
        ("v_head_dim", None),
        ("first_k_dense_replace", 100),
        ("quantization_config", "fp8"),
        ("quantization_config", {"bits": [4]}),
        ("quantization_config", {"config_groups": {"g": {"weights": [4]}}}),
    ],
)
def test_a_size_that_is_none_is_named(tmp_path, key, value):
    config = json.loads((ROOT / "configs/reference/kimi_k25.json").read_text())["config"]
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=key):
        read_verifier(tmp_path)


@pytest.mark.parametrize(
    "quantization, width",
    [
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "awq", "w_bit": 4}, 4),
        ({"quant_method": "fp8"}, 8),
        (None, 16),
    ],
)
def test_bits_of_a_weight(quantization, width):
    assert planning.bits({"quantization_config": quantization}) == width


def test_no_more_prompts_are_held_out_than_there_are_rows():
    config = script.read_config([])
    few, many = (planning.benchmark(config.bench, n, 100)[0] for n in (2, 1_000))
    assert many - few == (config.bench.held_out_prompts - 2) * 100


def test_gpus_that_do_not_divide_the_heads_are_refused(tmp_path):
    faults = make_plan(kimi(tmp_path, extract={"gpus": 7}), "1k")["faults"]
    assert any("extract.gpus: vLLM divides the verifier's 64" in fault for fault in faults)


def test_sizes_that_a_config_leaves_out_are_not_guessed(tmp_path):
    config = json.loads((ROOT / "configs/reference/kimi_k25.json").read_text())["config"]
    del config["text_config"]["v_head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_verifier(tmp_path) is None
    with pytest.raises(ValueError, match=r"sizes of the verifier .* are not known"):
        make_plan(kimi(tmp_path, plan={"verifier": str(tmp_path)}), "1k")


def run_plan(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts/plan.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_a_table_and_writes_the_plan(tmp_path):
    done = run_plan("--config", str(KIMI), "--run", "1k", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "547.0 GB at 0.405 GB/s, given as plan.rates" in done.stdout
    assert json.loads(Path("plan.json").read_text())["states"]["bf16_bytes"] == 503_000 * 57_344
    Path("many.yaml").write_text("extract: {max_num_seqs: 2000}")
    done = run_plan("--config", str(KIMI), "many.yaml", "--run", "1k")
    assert done.returncode == 1 and "hold 113 such rows" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--run", "2k"], "run '2k' is not defined: the config has 10, 1k"),
        (["--run", "1k", "--config", "none.yaml"], "none.yaml"),
        (["--run", "1k", "--config", "odd.yaml"], "config: odd: there is no such key"),
        (["--run", "1k", "--config", "hub.yaml"], "hf:a/b@main are not known; name a whole"),
        (["--run", "1k", "--config", "bad.yaml"], "bad.json: cannot be read as JSON"),
        (["--run", "1k", "--config", "list.yaml"], "list.yaml: holds no keys but ['results']"),
        (["--run", "1k", "--config", "binary.yaml"], "binary.yaml: cannot be read as a config"),
        (["--run", "1k", "--settings", "[]"], "config: holds no keys but []"),
        (["--run", "1k", "--settings", "5"], "config: holds no keys but 5"),
        (["--run", "1k", "--json", "folder"], "Is a directory"),
        (["--run", "1k", "--config", "layers.yaml"], "layer_ids [2, 99]: give ascending ids"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, arguments, message):
    Path("list.yaml").write_text("[results]")
    Path("layers.yaml").write_text("extract: {layer_ids: [2, 99]}")
    Path("odd.yaml").write_text("odd: 1")
    Path("folder").mkdir()
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("hub.yaml").write_text("verifier: {source: 'hf:a/b@main', sha256: null}")
    Path("bad.json").write_text("{")
    bad = "verifier: {source: 'hf:a/b@main', sha256: null}\nplan: {verifier: bad.json}"
    Path("bad.yaml").write_text(bad)
    done = run_plan(*arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_a_fetched_verifier_may_lie_elsewhere(tmp_path):
    """As the copy does that a job gets from a bucket."""
    Path("hub.yaml").write_text("verifier: {source: 'hf:a/b@main', sha256: null}")
    known = json.loads((ROOT / "configs/reference/smollm2_135m.json").read_text())["config"]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/config.json").write_text(json.dumps(known))
    options = ["--config", "hub.yaml", "--run", "1k", "--json", "plan.json"]
    done = run_plan(*options, "--verifier", "copy")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("plan.json").read_text())["states"]["hidden_size"] == 576
    # As the rule names none where it is known.
    assert "are not known" in run_plan(*options, "--verifier").stderr


def test_a_plan_needs_no_heavy_import():
    code = "import sys, plan; print({'torch', 'transformers', 'vllm', 'numpy'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_closing_line_adds_up():
    jobs = [
        {"gpu": 8, "runtime": 60, "disk_mb": 117_440, "mem_mb": 24_000, "_cores": 2},
        {"gpu": 1, "runtime": 30, "mem_mb": 14_000},
        {"runtime": 30, "mem_mb": "<TBD>"},
    ]
    assert summed(jobs).startswith(
        "Plan: 3 jobs left; at most 2.0 h one after the other, 8.5 GPU-hours, 117.44 GB of disk, "
        "24.0 GB of memory for one."
    )


@pytest.mark.parametrize("name", ["kimi_k25", "llama31_8b", "qwen3_8b"])
def test_a_config_tells_its_plan(name):
    path = ROOT / f"configs/{name}.yaml"
    plan = make_plan(script.read_config([path]), "1k")
    assert plan["faults"] == []
    assert script.summary(plan) in path.read_text()


def test_the_tiny_configs_tell_their_plans(inputs, tmp_path):
    import tiny_kimi

    (tmp_path / "inputs").mkdir()
    tiny_kimi.make_tiny_kimi(tmp_path / "kimi")
    for name, verifier in {"tiny": inputs / "verifier", "tiny_kimi": tmp_path / "kimi"}.items():
        config = script.read_config([ROOT / f"configs/{name}.yaml"])
        config.verifier.source = f"path:{verifier}"
        plan = make_plan(config, "tiny")
        assert plan["faults"] == []
        assert script.summary(plan) in (ROOT / f"configs/{name}.yaml").read_text()


def test_a_cpu_is_refused_what_it_has_not(monkeypatch):
    config = load_config(yaml.safe_load((ROOT / "config.yaml").read_text()))
    # As on a CPU that does not multiply bfloat16.
    config.verifier.dtype = "float32"
    monkeypatch.setattr(planning, "devices", lambda config: (4 * GIB, "this machine's memory"))
    faults = make_plan(config, "1k")["faults"]
    assert any("extract needs 6." in f and "the machine has 4.0" in f for f in faults)
