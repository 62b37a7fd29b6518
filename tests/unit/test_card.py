"""The model card: what comes from data is text in it, and its commands are whole ones."""

import json
import shlex

from test_report import SCRIPT, made_up

import card
from eyrie.checkpoint import layer_id_fields

CONFIG = {
    "num_hidden_layers": 1,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
    **layer_id_fields([2, 15, 27], False),
}
FIELDS = {"license": None, "base_model": None}


def test_markup_in_data_is_text():
    data = made_up()
    data["bench"]["settings"]["dtype"] = SCRIPT
    data["bench"]["prompt_set"]["name"] = SCRIPT
    data["shards"]["sources"] = {SCRIPT: {"read": 12, "kept": 10, "rejected": 2}}
    data["manifest"]["versions"] = {SCRIPT: SCRIPT}
    text = card.card(SCRIPT, dict(FIELDS), CONFIG, data)
    assert "<script" not in text and text.count("&lt;script&gt;") == 6


def test_a_name_is_one_word_of_the_commands():
    name = f"x\n```\n{SCRIPT} $(id)"
    text = card.serving(CONFIG, name, 3)
    blocks = text.split("````")
    assert len(blocks) == 5 and SCRIPT not in "".join(blocks[::2])
    vllm, sglang = (shlex.split(block) for block in blocks[1::2])
    assert vllm[:3] == ["vllm", "serve", name] and json.loads(vllm[-1])["method"] == "eagle3"
    assert sglang[4] == name


def test_outputs_are_counted_in_every_repetition():
    data = made_up()
    draft = data["bench"]["methods"][-1]
    draft |= {"prompts": 4, "repeats": 2, "identical": 7, "compared": 8}
    text = card.card("1k", dict(FIELDS), CONFIG, data)
    assert "7 of 8 outputs are identical" in text
