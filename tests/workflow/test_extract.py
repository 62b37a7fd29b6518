"""scripts/extract.py by hand, with the real engine on a tiny verifier."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from safetensors import safe_open

from eyrie.files import write_json
from eyrie.shards import read_rows

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYERS, HIDDEN = 4, 64


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
        command = [sys.executable, SCRIPTS / "shard.py", "--out", folder / name, *more]
        command += ["--conversations", inputs / "conversations.jsonl"]
        command += ["--tokenizer", inputs / "verifier", "--limit", "24", "--shard-size", "6"]
        command += ["--max-length", "96", "--max-new-tokens", "16"]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
    write_json(folder / "identity.json", {"source": "path:here", "files": {}})
    return folder


def command(shards: Path, inputs: Path, name: str, folder: Path, *options) -> list[str]:
    tokens = sorted((shards / name / "shards").glob("*.safetensors"))
    parts = [SCRIPTS / "extract.py", "--shards", *tokens]
    parts += ["--out", *(folder / "hidden" / path.name for path in tokens)]
    parts += ["--store", folder / "store", "--verifier", inputs / "verifier"]
    parts += ["--identity", shards / "identity.json", "--summary", folder / "hidden.json"]
    parts += ["--log", folder / "log.jsonl", "--layer-ids", 1, 2, 3, "--dtype", "float32"]
    parts += ["--answers", "dataset" if name == "dataset" else "verifier"]
    parts += ["--max-new-tokens", 16, "--max-length", 96, "--max-model-len", 128]
    parts += ["--max-num-seqs", 8, "--max-num-batched-tokens", 256, *options]
    return [str(part) for part in parts]


def extract(*args, code: str = "") -> subprocess.CompletedProcess:
    """Run extract.py; `code` runs before it in its process."""
    script, *rest = command(*args)
    start = [sys.executable, script]
    if code:
        code = f"import runpy, sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{code}\n"
        start = [sys.executable, "-c", code + f"runpy.run_path({script!r}, run_name='__main__')"]
    return subprocess.run([*start, *rest], capture_output=True, text=True)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name, options",
    [("dataset", []), ("verifier", ["--temperature", 1.0, "--top-p", 0.9]), ("talks", [])],
)
def test_log_probabilities_of_other_than_greedy_answers(shards, inputs, tmp_path, name, options):
    done = extract(shards, inputs, name, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    errors = [line["log_prob_error"] for line in log_of(tmp_path)]
    assert len(errors) == 4 and 0 < max(errors) < 0.05


def test_fp8_takes_half_and_says_what_it_loses(shards, inputs, tmp_path):
    done = extract(shards, inputs, "verifier", tmp_path, "--states", "fp8")
    assert done.returncode == 0, done.stderr
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
