"""A tiny nested Kimi-K2.5 from conversations to a served draft."""

import json

import pytest
import tiny
from safetensors.torch import load_file
from tiny_job import snakemake
from tiny_kimi import TEXT, make_tiny_kimi


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The results of a finished job."""
    folder = tmp_path_factory.mktemp("kimi")
    (folder / "inputs").mkdir()
    make_tiny_kimi(folder / "inputs/verifier")
    tiny.make_conversations(folder / "inputs/conversations.jsonl")
    tiny.make_prompts(folder / "inputs/prompts.jsonl")
    snakemake(folder, "results/tiny_kimi/bench_tiny.json", config="tiny_kimi")
    return folder / "results/tiny_kimi"


def test_states_give_the_answers_back(tree):
    log = (tree / "logs/extract_tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["given_back"] >= 0.98 for line in log] == [True] * 2


def test_the_draft_has_the_shape_of_the_config(tree):
    config = json.loads((tree / "ckpt_tiny/config.json").read_text())
    assert config["hidden_size"] == TEXT["hidden_size"]
    assert config["vocab_size"] == TEXT["vocab_size"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    weights = load_file(tree / "ckpt_tiny/model.safetensors")
    # 2 heads of 128; not of the 64 in the verifier's config, nor of hidden / heads.
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (256, 128)
    assert weights["fc.weight"].shape == (64, 192)
    # Among others, that its head is rows of language_model.lm_head.
    assert json.loads((tree / "check_tiny.json").read_text())["ok"]


def test_it_is_served(tree):
    bench = json.loads((tree / "bench_tiny.json").read_text())
    assert [m["method"] for m in bench["methods"]] == ["baseline", "eagle3"]
    assert all(m["identical"] == m["compared"] == 16 for m in bench["methods"])
    assert bench["methods"][1]["drafts"] > 0
