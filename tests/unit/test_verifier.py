import json
import re
from pathlib import Path

import pytest
import transformers
from tiny_kimi import make_tiny_kimi
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eyrie.verifier import (
    ONE_PLUS_W,
    load_tensor,
    load_verifier_config,
    read_text_config,
    text_config,
)


def load(folder: Path, model_type: str, **config):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return load_verifier_config(folder)


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "deepseek_v3", "phi3"],
)
def test_others_are_taken(tmp_path, model_type):
    assert load(tmp_path, model_type).hidden_size


def test_sizes_and_tensors_of_a_nested_verifier(tmp_path):
    folder = make_tiny_kimi(tmp_path / "kimi")
    config = load_verifier_config(folder)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 6, 512)
    assert config.extraction_ids([2, 3, 4]) == [2, 3, 4, 6]
    assert len(config.eos_token_ids) == 1 and config.bos_token_id is not None
    for name in ("lm_head.weight", "model.norm.weight", "embed_tokens.weight"):
        assert load_tensor(folder, name).shape[-1] == 64


@pytest.mark.parametrize(
    "model_type, config",
    [
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gemma3", {"text_config": {"model_type": "gemma3_text"}}),
        ("qwen3_next", {}),
    ],
)
def test_a_norm_of_1_plus_w_is_refused(tmp_path, model_type, config):
    with pytest.raises(ValueError, match=rf"type {model_type}\w*: its final norm .* 1 \+ w"):
        load(tmp_path, model_type, **config)


def test_every_norm_of_1_plus_w_is_known():
    """All that transformers has, but for encoders, and for one whose final norm is another."""
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"1\.0 \+ self\.weight|self\.weight \+ 1\.0", path.read_text())
    }
    assert found - {"muse_glimmer", "t5gemma", "t5gemma2", "videoprism"} <= ONE_PLUS_W
    assert {kind for kind in ONE_PLUS_W if kind in CONFIG_MAPPING} == ONE_PLUS_W


@pytest.mark.parametrize(
    "model_type, config, found",
    [
        ("gpt_oss", {}, "full_attention, sliding_attention"),
        ("llama4_text", {}, "chunked_attention, full_attention"),
        ("minimax", {}, "full_attention, linear_attention"),
        ("kimi_linear", {}, "full_attention, linear_attention"),
        ("jamba", {}, "mamba_d_state"),
        ("falcon_h1", {}, "mamba_d_state"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            "full_attention, sliding_attention",
        ),
    ],
)
def test_caches_of_several_kinds_are_refused(tmp_path, model_type, config, found):
    with pytest.raises(ValueError, match=rf"type {model_type}: .* several kinds \({found}\)"):
        load(tmp_path, model_type, **config)


@pytest.mark.parametrize("model_type", ["phi", "cohere", "mamba2"])
def test_another_final_norm_is_refused(tmp_path, model_type):
    with pytest.raises(ValueError, match=f"type {model_type}: its config has no rms_norm_eps"):
        load(tmp_path, model_type)


def test_scaled_logits_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"type granite: it scales .* \(logits_scaling\)"):
        load(tmp_path, "granite", logits_scaling=8.0)
    assert load(tmp_path, "granite", logits_scaling=1.0).hidden_size


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_config_that_is_none_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: "):
        load_verifier_config(tmp_path)
    if "x" not in text:
        with pytest.raises(ValueError, match=f"{tmp_path}/config.json: "):
            read_text_config(tmp_path)


def test_the_text_model_is_found_wherever_it_lies():
    text = {"hidden_size": 64}
    assert text_config(text) is text
    assert text_config({"text_config": None, "llm_config": text}) is text
    assert text_config({"thinker_config": {"text_config": text}, "vision_config": {}}) is text
    with pytest.raises(ValueError, match=r"no hidden_size .* its keys are \['text_config'\]"):
        text_config({"text_config": None})


def test_a_config_without_a_text_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no hidden_size in the config"):
        load(tmp_path, "gpt2")


def test_every_config_names_ends(tmp_path):
    """Llama 3 has a list of them in generation_config.json, beside another in the config."""
    assert load(tmp_path, "llama", eos_token_id=9).eos_token_ids == [9]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 8]}))
    assert load(tmp_path, "llama", eos_token_id=9).eos_token_ids == [9, 7, 8]
    assert load(tmp_path, "llama", eos_token_id=None).eos_token_ids == [7, 9, 8]
    text = {"model_type": "llama", "eos_token_id": 5}
    nested = load(tmp_path, "llava", text_config=text, eos_token_id=6)
    assert nested.eos_token_ids == [5, 6, 7, 9, 8]


@pytest.mark.parametrize(
    "model_type, config",
    [
        ("llama", {"hidden_size": 64, "text_config": None}),
        ("llava", {"text_config": {"model_type": "llama", "hidden_size": 64}}),
        (
            "qwen2_5_omni",
            {"thinker_config": {"text_config": {"hidden_size": 64, "num_attention_heads": 4}}},
        ),
    ],
)
def test_the_right_level_is_read(tmp_path, model_type, config):
    assert load(tmp_path, model_type, **config).hidden_size == 64
