"""The workflow from conversations to report, on a tiny verifier, through the real engine."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
import tiny
import torch
import yaml
from forking import run_to_end, start
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import GemmaConfig

from eyrie import figures
from eyrie.batches import HiddenRows, make_loader
from eyrie.draft import DraftShape, build_model
from eyrie.figures import cell_of
from eyrie.hidden import HiddenStates
from eyrie.jobs import running
from eyrie.shards import read_rows
from eyrie.verifier import load_verifier_config

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
REPORT = "results/tiny/report_tiny.html"


def snakemake(
    cwd: Path, *arguments: str, ok: bool = True, repo: Path = ROOT, config: str = "tiny"
) -> str:
    """Run Snakemake on a job of configs/ in `cwd`; returns all that it printed."""
    done = subprocess.run(
        snakemake_command(repo, config, *arguments),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stdout[-6000:]
    return done.stdout


def snakemake_command(repo: Path, config: str, *arguments: str) -> list[str]:
    program = str(Path(sys.executable).with_name("snakemake"))
    options = ["--configfile", str(repo / f"configs/{config}.yaml"), "-j", "2", *arguments]
    return [program, "-s", str(repo / "Snakefile"), *options]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A finished job, made from another working directory than the repository's, with a blank
    and a quote in its path."""
    folder = tmp_path_factory.mktemp("a job's folder")
    tiny.make_inputs(folder / "inputs")
    snakemake(folder, REPORT)
    return folder


def jobs_of(output: str) -> set[str]:
    """The rules that a dry run would run."""
    if "Nothing to be done" in output:
        return set()
    table = output.split("Job stats:")[1].split("total")[0].splitlines()[3:]
    return {line.split()[0] for line in table if line.strip()}


def test_the_account_adds_up(job):
    account = json.loads((job / "results/tiny/data/tiny/shards.json").read_text())
    rejects = (job / "results/tiny/data/tiny/rejects.jsonl").read_text().splitlines()
    assert account["read"] == account["kept"] + account["rejected"]
    assert account["kept"] == 24
    assert account["rejected"] == len(rejects) == sum(account["reasons"].values())


def check_states(verifier: Path, tree: Path) -> tuple[int, int]:
    """Compare each stored layer with transformers' own forward; a layer off by one must fail.

    Returns the supervised tokens, and how many of them the verifier's own head gives on the last
    state of the token before.
    """
    from transformers import AutoModelForCausalLM

    from eyrie.hidden import HiddenStates

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    paths = sorted((tree / "data/tiny/hidden").glob("*.safetensors"))
    states = HiddenStates(paths)
    assert len(paths) == 3 and sum(map(len, states.rows)) == 24
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    greedy = total = 0
    for shard, rows in enumerate(states.rows):
        for index in range(len(rows)):
            row = states.row(shard, index)
            with torch.no_grad():
                out = model(row["input_ids"].long()[None], output_hidden_states=True)
            expected = [h[0] for h in out.hidden_states[:4]] + [before_norm[-1]]
            for position, layer in enumerate([1, 2, 3, 4]):
                found = row["hidden_states"][:, position].float()
                errors = [float((found - e).norm() / e.norm()) for e in expected]
                # 4e-3 is bf16's own rounding.
                assert errors[layer] < 4e-3, (layer, errors)
                assert min(errors[:layer] + errors[layer + 1 :]) > 0.05, (layer, errors)
            last = row["hidden_states"][:, 3].float()
            predicted = model.lm_head(model.model.norm(last)).argmax(-1)
            written = row["loss_mask"][1:]
            greedy += int((predicted[:-1] == row["input_ids"][1:])[written].sum())
            total += int(written.sum())
    return total, greedy


def test_states_are_the_verifiers(job):
    total, greedy = check_states(job / "inputs/verifier", job / "results/tiny")
    assert total > 200
    assert greedy >= 0.98 * total


def test_answers_of_the_data_itself(job):
    """With `answers: dataset` the states are of the whole talks and their own answers count."""
    from transformers import AutoTokenizer

    config = ["results=results/own", "shard={answers: dataset}"]
    snakemake(job, "results/own/data/tiny/hidden.json", "--config", *config)
    total, greedy = check_states(job / "inputs/verifier", job / "results/own")
    # A random verifier would not have written these.
    assert total > 200 and greedy < 0.2 * total
    tokenizer = AutoTokenizer.from_pretrained(job / "inputs/verifier")
    rows = read_rows(job / "results/own/data/tiny/hidden/00000.safetensors")
    start, end = rows.row_offsets[:2].tolist()
    written = rows.input_ids[start:end][rows.loss_mask[start:end]]
    answers = [
        json.loads(line)["conversations"][1]["value"] + "<|im_end|>"
        for line in (job / "inputs/conversations.jsonl").read_text().splitlines()
    ]
    assert tokenizer.decode(written) in answers


def test_several_turns_are_answered_in_one_load(job):
    from transformers import AutoTokenizer

    config = ["results=results/turns", "shard={max_turns: 0, max_length: 100}"]
    snakemake(job, "results/turns/data/tiny/hidden.json", "--config", *config)
    check_states(job / "inputs/verifier", job / "results/turns")
    summary = json.loads((job / "results/turns/data/tiny/hidden.json").read_text())
    assert summary["rows"] == 24 and summary["answers"] == 48
    tokenizer = AutoTokenizer.from_pretrained(job / "inputs/verifier")
    rows = read_rows(job / "results/turns/data/tiny/hidden/00000.safetensors")
    supervised = []
    for index in range(len(rows)):
        start, end = rows.row_offsets[index : index + 2].tolist()
        mask = rows.loss_mask[start:end].int()
        text = tokenizer.decode(rows.input_ids[start:end])
        assert text.count("<|im_start|>user") == 2 and text.count("<|im_start|>assistant") == 2
        supervised.append(int((mask.diff() == 1).sum()))
    # A random verifier writes bytes that are no text, too, and of some answers nothing is left.
    assert set(supervised) <= {0, 1, 2} and sum(supervised) > 1.5 * len(rows)
    log = (job / "results/turns/logs/extract_tiny.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["answers"] for line in log) == 48


def test_bytes_on_disk_are_the_states_and_little_else(job):
    summary = json.loads((job / "results/tiny/data/tiny/hidden.json").read_text())
    states = summary["tokens"] * 4 * summary["hidden_size"] * 2
    assert states < summary["bytes"] < states + summary["header_bytes"] + 40 * summary["tokens"]


def test_the_checkpoint_is_whole(job):
    folder = job / "results/tiny/ckpt_tiny"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["0", "1"]
    chosen = folder / str(manifest["chosen_epoch"])
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (chosen / name).read_bytes()
    metrics = pd.read_parquet(folder / "metrics.parquet")
    steps = metrics[metrics.kind == "step"]
    assert steps.step.tolist() == list(range(1, len(steps) + 1))
    assert (metrics[metrics.kind == "epoch"].epoch == [0, 1]).all()
    # Of the first draft token: the first epoch looks no further ahead.
    assert steps.loss_0.iloc[-1] < steps.loss_0.iloc[0]
    vocab = load_file(job / "results/tiny/vocab_tiny.safetensors")
    assert torch.equal(load_file(folder / "model.safetensors")["d2t"], vocab["d2t"])
    assert json.loads((job / "results/tiny/check_tiny.json").read_text())["ok"]


def test_the_checkpoint_has_a_card_without_a_path_of_this_machine(job):
    folder = job / "results/tiny/ckpt_tiny"
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["tags"] == ["eagle3", "speculative-decoding"] and "license" not in head
    bench = json.loads((job / "results/tiny/bench_tiny.json").read_text())
    (draft,) = [m for m in bench["methods"] if m["method"] == "eagle3"]
    assert f"| eagle3 | 3 | {draft['acceptance_length']:.2f} |" in text
    # Ids that begin with 1 are others to SGLang.
    assert "vllm serve VERIFIER" in text and "SGLang does not serve it: it would take" in text
    for file in (folder / "README.md", folder / "config.json"):
        assert str(job) not in file.read_text() and "inputs/verifier" not in file.read_text()


def test_drafting_changes_no_output(job):
    """At any setting, at temperature 0."""
    bench = json.loads((job / "results/tiny/bench_tiny.json").read_text())
    assert [m["method"] for m in bench["methods"]] == ["baseline", "ngram", "eagle3"]
    assert bench["left_out"] == {"suffix": "arctic-inference is not installed"}
    for method in bench["methods"]:
        # Four prompts of two turns.
        assert method["identical"] == method["prompts"] == 8
    settings = {(c["draft_tokens"], c["concurrency"]) for c in bench["cells"]}
    # The last is the held-out conversations'.
    assert settings == {(0, 1), (3, 1), (1, 1), (0, 4), (3, 4), (3, 8)}
    assert all(c["faults"] == c["failed"] == c["beyond"] == 0 for c in bench["cells"])
    eagle = bench["methods"][2]
    assert eagle["drafts"] > 0 and 0 < eagle["draft_share"] < 1
    assert eagle["acceptance_length"] == pytest.approx(
        1 + eagle["accepted"] / eagle["drafts"], abs=1e-4
    )
    assert sum(eagle["acceptance_per_position"]) == pytest.approx(
        eagle["acceptance_length"] - 1, abs=1e-3
    )
    # vLLM 0.32 on a CPU verifies samples with a temperature that it never sets, so what this says
    # there is chance.
    assert [s["method"] for s in bench["sampling"]] == ["ngram", "eagle3"]
    assert all(s["samples"] == 8 and 0 <= s["p"] <= 1 for s in bench["sampling"])


def test_figures_are_those_of_the_rows(job):
    """The summary's are computed from the CSV alone, and the page shows them."""
    tree = job / "results/tiny"
    bench = json.loads((tree / "bench_tiny.json").read_text())
    rows = pd.read_csv(tree / "bench_tiny.csv", converters={"category": str}).to_dict("records")
    assert figures.cells(rows, bench["partings"], "float32") == bench["cells"]
    page = (tree / "report_tiny.html").read_text()
    for method in bench["methods"]:
        assert f"<td>{method['tokens_per_s']:,.1f}</td>" in page
    whole = [json.loads(line) for line in (tree / "bench_tiny.jsonl").read_text().splitlines()]
    assert len(whole) == len(rows)
    for row in whole:
        assert row["new_tokens"] == len(row["tokens"])
        # The engine's counters over a group are those of its requests.
        group = [r for r in whole if figures.group_of(r) == figures.group_of(row)
                 and figures.cell_of(r) == figures.cell_of(row)]  # fmt: skip
        for name in ("drafts", "proposed", "accepted"):
            assert row[f"group_{name}"] == sum(r[name] for r in group)


def test_a_killed_benchmark_goes_on_and_measures_the_same(job, tmp_path):
    """With a draft more, whose context is shorter than what is served."""
    tree = job / "results/tiny"
    short = shutil.copytree(tree / "ckpt_tiny", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    command = [SCRIPTS / "bench.py", "--run", "tiny", "--checkpoint", tree / "ckpt_tiny"]
    command += ["--draft", f"short={short}", "--methods", "--verifier", tree / "verifier"]
    command += ["--identity", tree / "verifier.json", "--prompts", tree / "prompts"]
    command += ["--hidden", *sorted((tree / "data/tiny/hidden").glob("*.safetensors"))]
    options = {"num-prompts": 4, "turns": 2, "held-out": 0.2, "num-held-out": 0}
    options |= {"max-new-tokens": 8, "draft-tokens": 3, "max-model-len": 128, "max-num-seqs": 8}
    options |= {"max-num-batched-tokens": 256, "dtype": "float32", "state": tmp_path / "state"}
    options |= {"summary": tmp_path / "bench.json", "rows": tmp_path / "bench.jsonl"}
    options |= {"measurements": tmp_path / "bench.csv"}
    command += [part for name, value in options.items() for part in ("--" + name, value)]
    command = [str(part) for part in command]

    mark = f"import os; os.environ['EYRIE_TEST'] = {str(tmp_path)!r}"
    process = start(command, tmp_path / "killed", mark)
    state = tmp_path / "state"
    while process.is_alive():
        lines = [line for file in state.rglob("*.jsonl") for line in file.read_text().splitlines()]
        if sum('"seconds"' in line for line in lines) >= 5:
            break
        time.sleep(0.05)
    process.kill()
    process.join()
    (file,) = state.rglob("measured.jsonl")
    before = [json.loads(line)[1] for line in file.read_text().splitlines(keepends=True)
              if line.endswith("\n")]  # fmt: skip
    seconds = [row["seconds"] for value in before if isinstance(value, list) for row in value]
    assert len(seconds) >= 5 and not (tmp_path / "bench.json").exists()
    deadline = time.time() + 20
    while left := processes_with(str(tmp_path)):
        assert time.time() < deadline, left
        time.sleep(0.2)

    code, output = run_to_end(command, tmp_path / "resumed")
    assert code == 0, output[-3000:]
    assert f"bench: {len(seconds)} of 24 groups were measured before" in output
    rows = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and set(seconds) <= {row["seconds"] for row in rows}
    assert not state.exists()
    bench = json.loads((tmp_path / "bench.json").read_text())
    _, eagle, short = bench["methods"]
    first = json.loads((tree / "bench_tiny.json").read_text())["methods"][2]
    for name in ("acceptance_length", "acceptance_per_position", "drafts", "accepted"):
        assert eagle[name] == first[name], name
    # The other draft reaches no prompt's end, so none of its drafts count.
    assert short["method"] == "eagle3, short" and short["identical"] == 8
    assert short["beyond"] == 8 and short["drafts"] == 0 and short["acceptance_length"] is None


def test_the_server_accepts_what_the_engine_did(job):
    output = snakemake(job, "results/tiny/serve_tiny.json")
    assert "through the server" in output
    served = json.loads((job / "results/tiny/serve_tiny.json").read_text())
    assert served["failed"] == 0 and served["identical"] == served["requests"] == 8
    names = ("drafts", "proposed", "accepted", "acceptance_length", "acceptance_per_position")
    assert [served[n] for n in names] == [served["in_process"][n] for n in names]
    assert served["drafts"] > 0 and not processes_with(str(job))


def processes_with(text: str) -> list[str]:
    """The processes in whose environment `text` is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_a_run_is_compared_with_its_plan_and_tells_the_next_one(job):
    plan = json.loads((job / "results/tiny/plan_tiny.json").read_text())
    assert {row["source"] for row in plan["times"]} == {"default"} and plan["faults"] == []
    assert "Planned and measured" in (job / REPORT).read_text()
    command = [sys.executable, SCRIPTS / "plan.py", "--config", ROOT / "configs/tiny.yaml"]
    command += ["--run", "tiny", "--json", job / "next.json"]
    subprocess.run(command, cwd=job, check=True)
    following = json.loads((job / "next.json").read_text())
    assert following["tokens"]["source"] == "counted in results/tiny/data/tiny/hidden.json"
    parts = {row["part"]: row for row in following["times"]}
    assert all(row["source"].startswith("measured in ") for row in parts.values())
    lines = (job / "results/tiny/bench_tiny.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    groups = {(cell_of(r), r["repeat"], r["group"]): r["group_seconds"] for r in rows}
    served = sum(row["new_tokens"] for row in rows)
    assert parts["bench"]["rate"] == pytest.approx(served / sum(groups.values()), rel=0.01)
    manifest = json.loads((job / "results/tiny/ckpt_tiny/manifest.json").read_text())
    # The estimate of what is held out differs from what is, by some of few rows.
    assert parts["train"]["seconds"] == pytest.approx(manifest["seconds"], rel=0.4)


def test_nothing_is_to_be_done_again(job):
    assert jobs_of(snakemake(job, "-n", REPORT)) == set()


def test_nothing_is_to_be_done_again_once_the_folder_has_moved(job):
    moved = job.rename(job.with_name("moved"))
    output = snakemake(moved, "-n", REPORT)
    moved.rename(job)
    assert jobs_of(output) == set()


def test_touching_scripts_and_inputs_reruns_nothing(job, tmp_path):
    repo = copy_of_repo(tmp_path)
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == set()
    now = time.time() + 5
    for path in [*repo.rglob("*.py"), repo / "config.yaml", *(job / "inputs").glob("*.jsonl")]:
        os.utime(path, (now, now))
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == set()


def test_an_edit_reruns_what_uses_it(job, tmp_path):
    repo = copy_of_repo(tmp_path)
    template = repo / "templates/report.html"
    template.write_text(template.read_text() + "<!-- edited -->")
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == {"report"}
    shutil.copy(ROOT / "templates/report.html", template)
    bench = repo / "scripts/bench.py"
    bench.write_text(bench.read_text().replace("SAMPLES = 4", "SAMPLES = 3"))
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == {"bench", "card", "report"}
    # A plan is made anew for any setting, and makes no other report.
    memory = "extract={max_num_seqs: 4}"
    assert jobs_of(snakemake(job, "-n", REPORT, "--config", memory)) == {"plan"}
    trained = {"plan", "train", "check", "bench", "card", "report"}
    shape = str(repo / "configs/reference/kimi_k2_eagle3.json")
    for change, jobs in {
        "train={lr: 0.5}": trained,
        "train={init_from: inputs/draft}": trained,
        "draft={sliding_window: 8}": {"preflight", *trained},
        f"draft={{reference: {shape}}}": {"preflight", *trained},
        "vocab={draft_vocab_size: 300}": {"preflight", "vocab", *trained},
        "vocab={draft_vocab_size: full}": {"preflight", "vocab", *trained},
        # Another run on the same states is none of this one's concern.
        "runs={tiny: {data: tiny}, other: {data: tiny, train: {lr: 1}}}": {"plan"},
        "bench={max_model_len: 120}": {"plan", "check", "bench", "card", "report"},
        "extract={layer_ids: [1, 2]}": {
            "preflight",
            "preflights",
            "extract_tiny",
            "vocab",
            *trained,
        },
    }.items():
        (job / "inputs/draft").mkdir(exist_ok=True)
        assert jobs_of(snakemake(job, "-n", REPORT, "--config", change)) == jobs, change


def copy_of_repo(folder: Path) -> Path:
    ignore = shutil.ignore_patterns(".*", "results", "tests", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "repo", ignore=ignore))


def test_a_killed_extraction_makes_only_what_is_missing(job):
    """Without the middle shard in the store, one shard is made and the others are not touched."""
    hidden = job / "results/tiny/data/tiny/hidden"
    middle = hidden / "00001.safetensors"
    before = {p.name: (p.stat().st_ino, p.read_bytes()) for p in hidden.iterdir()}
    store = job / "results/tiny/.state/store"
    (stored,) = [p for p in store.glob("*.safetensors") if p.samefile(middle)]
    stored.unlink()
    middle.unlink()
    output = snakemake(job, str(middle.relative_to(job)))
    assert "3 shards, 2 in the store, 1 to make" in output
    for path in hidden.iterdir():
        if path != middle:
            assert path.stat().st_ino == before[path.name][0]
    assert len(list(store.glob("*.safetensors"))) == len(list(store.glob("*.json"))) == 3
    log = (job / "results/tiny/logs/extract_tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["shard"] for line in log] == [1]


def test_a_damaged_shard_is_set_aside_and_made_again(job):
    hidden = job / "results/tiny/data/tiny/hidden"
    store = job / "results/tiny/.state/store"
    with open(hidden / "00002.safetensors", "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    command = [sys.executable, str(ROOT / "scripts/store.py"), "verify", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.count("its content is not what was written") == 1
    (hidden / "00000.safetensors").unlink()
    output = snakemake(job, "results/tiny/data/tiny/hidden/00000.safetensors")
    assert "is made again, its content is not what was written" in output
    assert "3 shards, 2 in the store, 1 to make" in output
    subprocess.run(command, check=True)
    check_states(job / "inputs/verifier", job / "results/tiny")
    command[2:] = ["prune", str(store), "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("deleted") == 1 and ".damaged" in done.stdout
    command[2:] = ["list", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tiny: " in done.stdout and "(no output)" not in done.stdout


def train(job: Path, folder: Path, **changes) -> list[str]:
    """scripts/train.py on the job's states, with its settings but for `changes`."""
    tree = job / "results/tiny"
    settings = json.loads((tree / "ckpt_tiny/manifest.json").read_text())["config"] | changes
    given = {k: v for k, v in settings.items() if not isinstance(v, bool | list | None)}
    given |= {"vocab": tree / "vocab_tiny.safetensors", "verifier": tree / "verifier"}
    given |= {"identity": tree / "verifier.json", "state": folder / "state"}
    given |= {"out": folder / "ckpt"}
    command = [SCRIPTS / "train.py", "--layer-ids", 1, 2, 3, "--hidden"]
    command += sorted((tree / "data/tiny/hidden").glob("*.safetensors"))
    flags = [name for name, value in settings.items() if value is True]
    command += ["--" + name.replace("_", "-") for name in flags]
    for name, value in given.items():
        command += ["--" + name.replace("_", "-"), value]
    return [str(part) for part in command]


def test_a_map_of_other_data_or_another_size_is_refused(job, tmp_path):
    command = train(job, tmp_path)
    first = command.index("--hidden") + 1
    for arguments, message in (
        ([*command, "--draft-vocab-size", "300"], "draft_vocab_size is 384, not 300"),
        ([*command, "--held-out", "0.3"], "held_out is 0.2, not 0.3"),
        ([*command[:first], *command[first + 1 :]], "data is "),
    ):
        code, output = run_to_end(arguments, tmp_path)
        assert code == 1
        assert "vocab_tiny.safetensors: not the vocabulary map" in output
        assert message in output and "Traceback" not in output
    assert not (tmp_path / "ckpt").exists()


def test_a_draft_of_the_whole_vocabulary_with_a_window_from_another_draft(job, tmp_path):
    """Trained on the same states, checked and served."""
    copy = tmp_path / "job"
    subprocess.run(["cp", "-a", job, copy], check=True)
    shutil.copytree(copy / "results/tiny/ckpt_tiny", copy / "first")
    config = [
        "vocab={draft_vocab_size: full}",
        "draft={sliding_window: 8, rope_scaling: {rope_type: linear, factor: 2.0}}",
        "train={init_from: first, lr: 0, muon_lr: 0}",
        "bench={draft_tokens: [3], concurrency: [1], samples: 0}",
    ]
    output = snakemake(copy, "results/tiny/bench_tiny.json", "--config", *config)
    assert "train: the draft is not as the verifier: draft.sliding_window 8" in output
    assert "train: starts from first" in output
    folder = copy / "results/tiny/ckpt_tiny"
    found = json.loads((folder / "config.json").read_text())
    assert found["draft_vocab_size"] == found["vocab_size"] == 512
    assert (found["sliding_window"], found["layer_types"]) == (8, ["sliding_attention"])
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    # Nothing was learnt, so all that is trained is the other draft's.
    weights, others = (load_file(f / "model.safetensors") for f in (folder, copy / "first"))
    assert "d2t" in others and not {"d2t", "t2d"} & weights.keys()
    assert weights["lm_head.weight"].shape == (512, 64)
    for name in weights.keys() - {"lm_head.weight"}:
        assert torch.equal(weights[name], others[name]), name
    bench = json.loads((copy / "results/tiny/bench_tiny.json").read_text())
    assert bench["methods"][2]["drafts"] > 0
    assert all(m["identical"] == m["prompts"] == 8 for m in bench["methods"])


# The benchmark's own measurement of a draft, of prompts that are tokens.
SERVE = """
import argparse, json
from eyrie import engine
from eyrie.serving import Serving
parser = argparse.ArgumentParser()
for name in ("verifier", "checkpoint", "prompts", "out"):
    parser.add_argument("--" + name)
engine.add_arguments(parser)
args = parser.parse_args()
args.traces, args.draft_gpus = None, 0
engine.prepare(0, in_process=True)
prompts = json.load(open(args.prompts))
method = {"name": "eagle3", "kind": "eagle3", "model": args.checkpoint}
rows = Serving(method, 3, prompts, args).serve(prompts, 8, 3, 8)
names = ("drafts", "accepted_1", "accepted_2", "accepted_3")
json.dump([sum(row[name] for row in rows) for name in names], open(args.out, "w"))
"""


def test_another_run_of_the_same_data_is_looked_at_and_trained_alone(job):
    config = ["--config", "runs={tiny: {data: tiny}, other: {data: tiny, draft: {head_dim: 16}}}"]
    output = snakemake(job, "-n", "results/tiny/ckpt_other", *config)
    assert jobs_of(output) == {"preflight", "vocab", "train"}


def test_what_is_accepted_is_what_the_trained_model_drafts(job, tmp_path):
    """speculators' own model drafts from every place of the answers as training has them. Walked
    through as a server does, so much must be accepted when vLLM serves the same prompts."""
    tree = job / "results/tiny"
    # A draft that knows its rows by heart, as this verifier's answers have little else to learn.
    by_heart = {"epochs": 60, "noise": 0.0, "ttt_warmup_epochs": 0, "muon_lr": 0.02}
    code, output = run_to_end(train(job, tmp_path, **by_heart), tmp_path)
    assert code == 0, output
    settings = json.loads((tmp_path / "ckpt/manifest.json").read_text())["config"]
    shape = DraftShape(**{field.name: settings[field.name] for field in fields(DraftShape)})
    vocab = load_file(tree / "vocab_tiny.safetensors")
    d2t, t2d = vocab["d2t"], vocab["t2d"]
    verifier = load_verifier_config(tree / "verifier")
    model = build_model(
        Eagle3DraftModel, shape, verifier, tree / "verifier", [1, 2, 3], 3, len(d2t), d2t, t2d
    ).float()
    # The last epoch's; the chosen one may be an early one.
    weights = load_file(tmp_path / "ckpt/59/model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items()}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys

    token_of = torch.arange(len(d2t)) + d2t
    states = HiddenStates(sorted((tree / "data/tiny/hidden").glob("*.safetensors")))
    prompts, drafts, accepted = [], 0, [0, 0, 0]
    for shard, rows in enumerate(states.rows):
        for index in range(len(rows)):
            (batch,) = make_loader(HiddenRows(states, [(shard, index)], 128), 128, seed=0)
            batch = {k: v for k, v in batch.items() if torch.is_tensor(v)}
            loss = resolve_loss_config("kl_div", "eager")
            with torch.no_grad():
                drafted, _, _ = model(**batch, ttt_steps=3, loss_config=loss)
            ids = rows.row(index).tolist()
            first = int(rows.mask(index).nonzero()[0])
            prompts.append(ids[:first])
            last = min(len(ids), first + 8) - 1
            # The state before token `place` and that token draft the next three.
            place = first
            while place < last:
                proposed = [int(token_of[step[0, place - 1]]) for step in drafted]
                right = [t == w for t, w in zip(proposed, ids[place + 1 :], strict=False)]
                count = len(list(itertools.takewhile(bool, right)))
                for k in range(count):
                    accepted[k] += 1
                drafts += 1
                place += count + 1
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "serve.py").write_text(SERVE)
    flat, nested = tmp_path / "ckpt/59", tmp_path / "nested"
    command = [SCRIPTS / "flatten.py", flat, "--verifier", tree / "verifier", "--out", nested]
    code, output = run_to_end([*map(str, command), "--to", "speculators"], tmp_path / "flatten")
    assert code == 0, output
    options = {"verifier": tree / "verifier", "prompts": tmp_path / "prompts.json"}
    options |= {"dtype": "float32", "max-model-len": 128, "max-num-seqs": 8}
    found = []
    for checkpoint in (flat, nested):
        options |= {"checkpoint": checkpoint, "out": tmp_path / "served.json"}
        command = [part for name, value in options.items() for part in ("--" + name, str(value))]
        code, output = run_to_end([str(tmp_path / "serve.py"), *command], tmp_path / "serving")
        assert code == 0, output
        found.append(json.loads((tmp_path / "served.json").read_text()))
    served, of_nested = found
    assert served == of_nested
    assert accepted[0] > 0.3 * drafts
    # But for tokens that two logits are nearly level on.
    assert served == pytest.approx([drafts, *accepted], abs=3)


def test_training_and_serving_agree_on_held_out_rows(job):
    served = json.loads((job / "results/tiny/bench_tiny.json").read_text())["held_out"]
    assert served["prompts"] == 5 and served["drafts"] > 5
    assert abs(served["acceptance_length"] - served["estimated_acceptance_length"]) < 0.1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config", "epochs=3"], "epochs: there is no such key"),
        (["--config", "train={epoch: 3}"], "did you mean epochs"),
        (["--config", "train={epochs: many}"], "train.epochs"),
        (["--config", "vocab={draft_vocab_size: 513}"], "513 is more than the verifier's"),
        (["--config", "draft={reference: none.json}"], "none.json: cannot be read as a draft's"),
        (["results/tiny/report_2k.html"], "run '2k' is not defined: the config has"),
    ],
)
def test_mistakes_are_told_before_anything_runs(job, arguments, message):
    target = [] if arguments[0].startswith("results") else [REPORT]
    output = snakemake(job, *target, *arguments, ok=False)
    assert message in output
    assert "Traceback (most recent call last)" not in output


@pytest.mark.parametrize(
    "config, message",
    [
        ("conversations={source: 'path:inputs/none.jsonl'}", "no such file"),
        (
            "conversations={source: 'path:inputs/conversations.jsonl', sha256: %s}" % ("0" * 64),
            "the config says 0000",
        ),
        ("verifier={source: 'path:inputs/bare'}", "no chat template"),
        ("verifier={source: 'path:inputs/gemma'}", "type gemma: its final norm"),
        ("verifier={source: 'hf:someone/model@main'}", "Is there a network"),
        ("data={tiny: {conversations: 4000}}", "4,000 usable conversations asked for"),
        ("draft={num_attention_heads: 6}", "FAIL an untrained draft: found draft.num_attention"),
    ],
)
def test_bad_input_stops_before_the_engine(inputs, tmp_path, config, message):
    tiny.make_inputs(tmp_path / "inputs")
    tiny.make_verifier(tmp_path / "inputs/bare", template=None)
    tiny.make_verifier(tmp_path / "inputs/gemma", config_class=GemmaConfig)
    output = snakemake(tmp_path, REPORT, "--config", config, ok=False)
    assert message in output
    assert not list((tmp_path / "results").rglob("hidden*"))
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "config, target, total",
    [
        (
            None,
            "results/report_10k.html",
            "14 jobs left; at most 6.9 h one after the other, 0.0 GPU",
        ),
        ("llama31_8b", "results/llama31_8b/ckpt_1k", "9 jobs left; at most 11.2 h"),
        ("qwen3_8b", "results/qwen3_8b/ckpt_1k", "9 jobs left; at most 11.2 h"),
        ("tiny", "results/tiny/ckpt_tiny", "9 jobs left"),
        ("tiny_kimi", "results/tiny_kimi/ckpt_tiny", "9 jobs left"),
    ],
)
def test_dry_runs_need_nothing_but_the_config(tmp_path, inputs, config, target, total):
    # A local source is linked to, so it must be there.
    (tmp_path / "inputs").symlink_to(inputs)
    done = dry_run(tmp_path, config and ROOT / f"configs/{config}.yaml", target)
    assert {"train", "vocab", "fetch_verifier"} <= jobs_of(done)
    jobs = [line for line in done.splitlines() if line.startswith("    resources:")]
    assert all("runtime=" in job and "mem_mb=" in job for job in jobs)
    assert sum("gpu=" in job and "disk_mb=" in job for job in jobs) == 2
    closing = done.strip().splitlines()[-1]
    assert closing.startswith(f"Plan: {total}") and closing.endswith(
        "make plan tells what is expected"
    )


def test_a_dry_run_of_a_verifier_that_nobody_knows_yet(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("verifier: {source: 'hf:a/b@main', sha256: null}")
    assert "Plan: 14 jobs left" in dry_run(tmp_path, config, "results/report_1k.html")


def dry_run(folder: Path, config: Path | None, target: str) -> str:
    """Its output, of a job with its own config or of the default one."""
    snakemake = Path(sys.executable).with_name("snakemake")
    command = [snakemake, "-n", "-j", "8", "-s", ROOT / "Snakefile", target]
    command += ["--configfile", config] if config else []
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plan(folder: Path, *arguments: str) -> str:
    snakemake = Path(sys.executable).with_name("snakemake")
    command = [snakemake, "-n", "-j", "8", "-s", ROOT / "Snakefile", "results/report_sweep.html"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_a_sweep_of_one_data_set_extracts_once(tmp_path):
    output = plan(tmp_path)
    counts = re.findall(r"^(extract_\w+|train|report\w*) +(\d+)$", output, re.MULTILINE)
    assert dict(counts) == {"extract_1k": "1", "train": "2", "report_sweep": "1"}


@pytest.mark.parametrize(
    "sweep, message",
    [
        ("[]", "sweep: no run is named"),
        ("[1k, 2k]", "run '2k' is not defined: the config has 10, 1k, 10k, 1k-classic."),
    ],
)
def test_a_sweep_of_no_run_is_an_error(tmp_path, sweep, message):
    assert message in plan(tmp_path, "--config", f"sweep={sweep}")


def readme_dry_runs() -> list[str]:
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.split("#")[0] for line in lines if line.startswith(".venv/bin/snakemake -n")]


@pytest.mark.parametrize("command", readme_dry_runs())
def test_dry_runs_that_the_readme_names_run(tmp_path, command):
    options = command.split()[1:]
    for name in ("Snakefile", "config.yaml", "configs", "rules", "scripts", "templates",
                 "profiles", "envs"):  # fmt: skip
        (tmp_path / name).symlink_to(ROOT / name)
    snakemake = Path(sys.executable).with_name("snakemake")
    done = subprocess.run(
        [snakemake, *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"train", "vocab", "fetch_verifier"} <= jobs_of(done.stdout + done.stderr)
    if "kimi" in command:
        assert "gpu=8" in done.stdout + done.stderr
        assert "9.0 GPU-hours, 722.87 GB of disk" in done.stdout


class Killable:
    """Snakemake on the tiny job in a process group of its own, as a terminal gives it."""

    def __init__(self, job: Path, *arguments: str):
        self.output = job / "killed.log"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                snakemake_command(ROOT, "tiny", *arguments),
                cwd=job,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """The processes of its jobs, without their shells."""
        return [pid for pid, ids in running().items() if ids[1] == self.process.pid]

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def ends_with_all_processes(self) -> int:
        """Snakemake's exit code, once none of its jobs' processes is left."""
        code = self.process.wait(timeout=30)
        deadline = time.monotonic() + 30
        while found := self.processes():
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return code


# What follows starts stages of the finished job again, and ends them.


def test_sigterm_lets_the_running_job_finish(job):
    run = Killable(job, "results/tiny/bench_tiny.json", "-R", "check", "bench")
    run.wait_for(run.processes)
    run.process.terminate()
    assert run.ends_with_all_processes()
    assert "Will exit after finishing currently running jobs" in run.output.read_text()
    assert jobs_of(snakemake(job, "-n", "results/tiny/bench_tiny.json")) == {"bench"}


def test_ctrl_c_ends_a_benchmark_with_its_forkserver_and_what_that_forked(job):
    run = Killable(job, "results/tiny/bench_tiny.json", "-f")
    run.wait_for(lambda: len(run.processes()) >= 4)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends_with_all_processes()


def test_the_ranks_of_a_killed_training_end(job):
    arguments = ["-f", "results/tiny/ckpt_tiny", "--config", "train={gpus: 2}"]
    run = Killable(job, *arguments)
    run.wait_for(lambda: len(run.processes()) >= 3)
    run.process.kill()
    run.ends_with_all_processes()
    snakemake(job, *arguments, "--unlock")


def test_a_killed_training_goes_on_once_unlocked(job):
    """No step is done twice; a second run beside a live one is refused, without that advice."""
    arguments = ["results/tiny/ckpt_tiny", "--config", "train={epochs: 4}"]
    run = Killable(job, *arguments)
    states = job / "results/tiny/.state/train/tiny"
    before = set(states.glob("*"))

    def saved() -> list[int]:
        new = [path for folder in set(states.glob("*")) - before for path in folder.iterdir()]
        return [int(p.name.split("-")[1]) for p in new if p.match("state-*.safetensors")]

    run.wait_for(saved)
    refused = snakemake(job, *arguments, ok=False)
    assert "Directory cannot be locked" in refused and "--unlock\n" not in refused
    run.process.kill()
    run.ends_with_all_processes()
    last = max(saved())
    refused = snakemake(job, *arguments, ok=False)
    assert "Directory cannot be locked" in refused
    (unlock,) = [line for line in refused.splitlines() if line.endswith(" --unlock")]
    subprocess.run(shlex.split(unlock), cwd=job, check=True, capture_output=True)
    assert f", step {last}\n" in snakemake(job, *arguments)


def test_extraction_ends_with_a_killed_snakemake(job):
    arguments = ["results/tiny/data/tiny/hidden.json", "--config", "extract={states: fp8}"]
    run = Killable(job, *arguments)
    run.wait_for(run.processes)
    run.process.kill()
    run.ends_with_all_processes()
    snakemake(job, *arguments, "--unlock")


def test_too_few_gpus_are_told_before_the_load(job):
    target, config = "results/tiny/data/tiny/hidden.json", "extract={gpus: 2, states: fp8}"
    os.environ["CUDA_VISIBLE_DEVICES"] = "5"
    output = snakemake(job, target, "--config", config, ok=False)
    del os.environ["CUDA_VISIBLE_DEVICES"]
    assert "extract: 2 GPUs needed, 0 visible (CUDA_VISIBLE_DEVICES is 5)" in output
