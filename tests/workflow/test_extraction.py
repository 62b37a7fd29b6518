"""scripts/extract.py by hand, with the real engine on a tiny verifier."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forking import OPENMP, run_to_end, start
from safetensors import safe_open

from eyrie.files import write_json
from eyrie.shards import read_rows

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYERS, HIDDEN = 4, 64


def command(shards: Path, inputs: Path, name: str, folder: Path, *options) -> list[str]:
    tokens = sorted((shards / name / "shards").glob("*.safetensors"))
    parts = [SCRIPTS / "extract.py", "--shards", *tokens]
    parts += ["--out", *(folder / "hidden" / path.name for path in tokens)]
    parts += ["--store", folder / "store", "--verifier", inputs / "verifier"]
    parts += ["--identity", shards / "identity.json", "--summary", folder / "hidden.json"]
    parts += ["--log", folder / "log.jsonl", "--layer-ids", 1, 2, 3, "--dtype", "float32"]
    parts += ["--answers", "dataset" if name == "dataset" else "verifier"]
    parts += ["--max-new-tokens", 16, "--max-length", 96, "--max-model-len", 128]
    parts += ["--max-num-seqs", 8, "--max-num-batched-tokens", 256, "--kv-cache-gib", 0.1, *options]
    return [str(part) for part in parts]


@pytest.fixture(scope="module")
def shards(inputs, tmp_path_factory):
    """Folders of token shards: `verifier` prompts to answer, `talks` of several turns to answer,
    `dataset` rows with answers of their own."""
    folder = tmp_path_factory.mktemp("shards")
    options = {
        "verifier": ["--answers", "verifier"],
        "talks": ["--answers", "verifier", "--max-turns", "0"],
        "dataset": ["--answers", "dataset"],
    }
    for name, more in options.items():
        command = [SCRIPTS / "shard.py", "--out", folder / name, *more]
        command += ["--conversations", inputs / "conversations.jsonl"]
        command += ["--tokenizer", inputs / "verifier", "--limit", "24", "--shard-size", "6"]
        command += ["--max-length", "96", "--max-new-tokens", "16"]
        code, output = run_to_end([str(part) for part in command], folder / name)
        assert code == 0, output
    write_json(folder / "identity.json", {"source": "path:here", "files": {}})
    return folder


@pytest.fixture(scope="module")
def extract(shards, inputs):
    """Run extract.py to its end: (exit code, output)."""

    def extract(name: str, folder: Path, *options, code: str = "") -> tuple[int, str]:
        return run_to_end(command(shards, inputs, name, folder, *options), folder, code)

    return extract


@pytest.fixture(scope="module")
def whole(extract, tmp_path_factory):
    """Extractions of each kind of shard that nothing disturbed, made when asked for."""

    @functools.cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        code, output = extract(name, folder)
        assert code == 0, output
        return folder

    return made


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name, options",
    [("dataset", []), ("verifier", ["--temperature", 1.0, "--top-p", 0.9]), ("talks", [])],
)
def test_log_probabilities_of_other_than_greedy_answers(extract, whole, tmp_path, name, options):
    folder = tmp_path if options else whole(name)
    if options:
        code, output = extract(name, folder, *options)
        assert code == 0, output
    errors = [line["log_prob_error"] for line in log_of(folder)]
    assert len(errors) == 4 and 0 < max(errors) < 0.05


def test_fp8_takes_half_and_says_what_it_loses(extract, tmp_path):
    code, output = extract("verifier", tmp_path, "--states", "fp8")
    assert code == 0, output
    for line in log_of(tmp_path):
        assert line["given_back"] > 0.9
        assert len(line["round_trip_error"]) == LAYERS
        assert all(0.01 < error < 0.04 for error in line["round_trip_error"])
    for path in (tmp_path / "hidden").iterdir():
        tokens = len(read_rows(path).input_ids)
        with safe_open(path, "pt") as file:
            assert file.get_slice("hidden_states").get_dtype() == "F8_E4M3"
            assert file.get_slice("state_scales").get_shape() == [tokens, LAYERS]
    assert not list((tmp_path / "store").glob("*.scales"))


# The engine's own step fails where it is asked for more than 40 tokens at once.
OUT_OF_MEMORY = """
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
execute = CPUModelRunner.execute_model
def fail_when_large(self, scheduled, *args, **kwargs):
    if scheduled.total_num_scheduled_tokens > 40:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return execute(self, scheduled, *args, **kwargs)
CPUModelRunner.execute_model = fail_when_large
"""


@pytest.mark.parametrize("name", ["dataset", "verifier", "talks"])
def test_out_of_memory_halves_the_bounds_and_loses_nothing(extract, whole, tmp_path, name):
    code, output = extract(name, tmp_path, code=OUT_OF_MEMORY)
    assert code == 0, output
    assert "out of memory; goes on with max_num_seqs 4" in output
    halvings = json.loads((tmp_path / "hidden.json").read_text())["halvings"]
    assert len(halvings) >= 2 and halvings[0]["max_num_batched_tokens"] == 128

    def tokens(path: Path) -> dict[bytes, list[int]]:
        rows = read_rows(path)
        return {rows.row_ids[i].numpy().tobytes(): rows.row(i).tolist() for i in range(len(rows))}

    for path in sorted((whole(name) / "hidden").iterdir()):
        assert tokens(tmp_path / "hidden" / path.name) == tokens(path)


def test_a_bound_that_cannot_work_is_refused_with_the_arithmetic(extract, tmp_path):
    code, output = extract("dataset", tmp_path, "--kv-cache-gib", 0)
    assert code == 1
    # 2 x 2 heads x 32 x 4 layers of keys and values, 4 x 64 of states, in float32
    assert "2,048 bytes of keys and values and 1,024 of states a token), the cache has 0" in output
    assert not list((tmp_path / "store").iterdir())


def test_a_row_as_long_as_the_engines_context_is_named(extract, shards, tmp_path):
    longest = max(read_rows(shards / "dataset/shards/00000.safetensors").lengths)
    options = ("--max-model-len", longest)
    code, output = extract("dataset", tmp_path, *options)
    assert code == 1
    assert f"has {longest} tokens, the engine takes {longest - 1}" in output
    assert f"raise extract.max_model_len to {longest + 1}" in output


def test_nothing_missing_loads_no_engine(whole, shards, inputs):
    """In a process that has not imported vLLM before."""
    folder = whole("dataset")
    before = {path: path.stat().st_mtime_ns for path in (folder / "store").iterdir()}
    script, *options = command(shards, inputs, "dataset", folder)
    code = f"import runpy, sys; sys.path.insert(0, {str(SCRIPTS)!r}); sys.argv = sys.argv[1:]\n"
    code += f"runpy.run_path({script!r}, run_name='__main__')\n"
    code += "print('vllm imported:', 'vllm' in sys.modules)"
    again = [sys.executable, "-c", code, script, *options]
    environment = os.environ | {"LD_PRELOAD": OPENMP}
    done = subprocess.run(again, capture_output=True, text=True, env=environment)
    assert "4 shards, 4 in the store, 0 to make" in done.stdout, done.stderr
    assert "vllm imported: False" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (folder / "store").iterdir()} == before


def test_killed_twenty_times_it_ends_with_the_same_bytes(extract, whole, shards, inputs, tmp_path):
    undisturbed = whole("dataset")
    seconds = json.loads((undisturbed / "hidden.json").read_text())["seconds"]
    chance = random.Random(0)
    kills = 0
    while kills < 20:
        process = start(command(shards, inputs, "dataset", tmp_path), tmp_path)
        code = process.wait(chance.uniform(0, 1.1 * seconds))
        if code is None:
            os.kill(process.pid, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            process.wait()
            kills += 1
        else:
            # All is there: the next run finds one missing, and one damaged in a way of disks.
            assert code == 0, (tmp_path / "output").read_text()
            stored = sorted((tmp_path / "store").glob("*.safetensors"))
            gone, damaged = chance.sample(stored, 2)
            gone.unlink()
            with open(damaged, "r+b") as file:
                file.truncate(chance.choice([0, 1000, damaged.stat().st_size - 1]))
    code, output = extract("dataset", tmp_path)
    assert code == 0, output
    for path in (undisturbed / "hidden").iterdir():
        assert (tmp_path / "hidden" / path.name).read_bytes() == path.read_bytes()
    left = {path.suffix for path in (tmp_path / "store").iterdir()}
    assert left <= {".safetensors", ".json", ".damaged"}
