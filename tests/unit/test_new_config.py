"""Configs written for verifiers: those that come with the project, tiny ones, a nested one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_kimi
from transformers import Qwen3Config

import new_config as script
from eyrie.plan import make_plan, read_verifier
from plan import read_config

ROOT = Path(__file__).parents[2]


def write(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts/new_config.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["llama31_8b", "qwen3_8b"])
def test_the_projects_own_are_what_it_writes(tmp_path, name):
    sizes = read_verifier(ROOT / f"configs/reference/{name}.json")
    own = (ROOT / f"configs/{name}.yaml").read_text()
    source = read_config([ROOT / f"configs/{name}.yaml"]).verifier.source
    assert own.endswith(script.new_config(sizes, source, f"results/{name}", None, 80))


def test_a_tiny_verifier_of_each_kind_plans(inputs, tmp_path):
    """A Llama and a Qwen3 of four layers and a nested Kimi of six, on a CPU and on a GPU."""
    tiny.make_verifier(tmp_path / "qwen", config_class=Qwen3Config)
    tiny_kimi.make_tiny_kimi(tmp_path / "kimi")
    for verifier in (inputs / "verifier", tmp_path / "qwen", tmp_path / "kimi"):
        sizes = read_verifier(verifier)
        for memory in (None, 24.0):
            text = script.new_config(sizes, f"path:{verifier}", "results/x", None, memory)
            (tmp_path / "x.yaml").write_text(text)
            config = read_config([tmp_path / "x.yaml"])
            assert config.extract.gpus == (1 if memory else 0)
            assert make_plan(config, "1k")["faults"] == []
            last = sizes.text["num_hidden_layers"]
            ids = config.extract.layer_ids
            assert ids == sorted(set(ids)) and len(ids) == 3 and ids[0] > 0 and ids[2] < last


def test_a_nested_kimi_gets_eight_gpus_and_a_draft_that_vllm_takes(tmp_path):
    done = write(
        ROOT / "configs/reference/kimi_k25.json", "--gpu-memory", 80, "--out", tmp_path / "k.yaml"
    )
    assert done.returncode == 0, done.stderr
    config = read_config([tmp_path / "k.yaml"])
    assert config.extract.layer_ids == [2, 30, 58] and config.extract.gpus == 8
    assert config.draft.head_dim == 128 and config.draft.num_key_value_heads == 64
    # 27 of the longest rows fit.
    assert config.extract.max_num_seqs == 16
    text = (tmp_path / "k.yaml").read_text()
    keys = [line for line in text.splitlines() if line.startswith("  ") and ":" in line]
    told = ("source", "sha256", "max_model_len", "dtype", "runtime", "gpus", "gpu_memory_gib")
    bare = [line.split(":")[0].strip() for line in keys if "#" not in line]
    explained = {"layer_ids", "max_num_seqs", "max_num_batched_tokens", "draft_vocab_size"}
    assert set(bare) <= {*told, *explained, "max_new_tokens", "answer_tokens"}


def test_layers_of_small_and_large_verifiers():
    assert script.default_layers(61) == [2, 30, 58] and script.default_layers(7) == [2, 3, 4]
    assert script.default_layers(4) == [1, 2, 3] and script.default_layers(6) == [1, 3, 5]


def test_what_cannot_be_is_refused(tmp_path):
    reference = ROOT / "configs/reference/kimi_k25.json"
    out = tmp_path / "x.yaml"
    done = write(reference, "--gpu-memory", 80, "--gpus", 4, "--out", out)
    assert done.returncode == 1 and "less 127.4 of weights" in done.stderr
    assert "Traceback" not in done.stderr and not out.exists()
    (tmp_path / "config.json").write_text(reference.read_text())
    done = write(tmp_path / "none", "--gpu-memory", 80, "--out", out)
    assert done.returncode == 1 and "cannot be read as JSON" in done.stderr
    config = json.loads(reference.read_text())
    config["config"]["text_config"]["num_attention_heads"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = write(tmp_path / "config.json", "--gpu-memory", 80, "--out", out)
    assert done.returncode == 1 and "num_attention_heads is 0" in done.stderr
    done = write(reference, "--gpu-memory", "nan", "--out", out)
    assert done.returncode == 1 and "--gpu-memory: nan is not" in done.stderr
    out.write_text("kept")
    done = write(reference, "--gpu-memory", 80, "--out", out)
    assert done.returncode == 1 and "exists" in done.stderr and out.read_text() == "kept"
