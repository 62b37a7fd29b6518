"""A draft's shape from the config of another one."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from eyrie.config import load_config, with_reference
from eyrie.reference import draft_fields

ROOT = Path(__file__).parents[2]
KIMI = ROOT / "configs/reference/kimi_k2_eagle3.json"

FIELDS = {
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "intermediate_size": 18432,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "norms": "eagle3",
    "norm_before_residual": False,
}


def flat(**changes) -> dict:
    return json.loads(KIMI.read_text())["config"] | changes


def nested(layer=(), **changes) -> dict:
    """As speculators writes it."""
    theta = {"rope_theta": 1000000.0, "rope_type": "default"}
    names = [name for name in FIELDS if not name.startswith(("norm", "rope"))]
    inner = {k: FIELDS[k] for k in names} | {"model_type": "llama", "rope_parameters": theta}
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32000,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "transformer_layer_config": inner | dict(layer),
        **changes,
    }


def written(folder: Path, config: dict) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_kimis(tmp_path):
    assert draft_fields(KIMI) == FIELDS
    assert draft_fields(written(tmp_path, flat())) == FIELDS
    assert draft_fields(written(tmp_path, nested())) == FIELDS


@pytest.mark.parametrize(
    "config, name, value",
    [
        (flat(norm_before_fc=True, norm_output=True), "norms", "eagle3.1"),
        (flat(eagle_config={"norm_before_fc": True}, norm_output=True), "norms", "eagle3.1"),
        (nested(norm_before_fc=True, norm_output=True), "norms", "eagle3.1"),
        (flat(norm_before_residual=True), "norm_before_residual", True),
        # What vLLM takes where a file of this kind does not tell.
        ({k: v for k, v in nested().items() if "residual" not in k}, "norm_before_residual", True),
        ({k: v for k, v in flat().items() if k != "head_dim"}, "head_dim", 112),
        ({k: v for k, v in flat().items() if "key_value" not in k}, "num_key_value_heads", 64),
        (flat(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_scaling",
         {"rope_type": "yarn", "factor": 4.0}),
        (nested({"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}}),
         "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        (nested({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}),
         "rope_theta", 7.0),
        # Ignored by vLLM without layer_types.
        (flat(sliding_window=512), "sliding_window", None),
        (flat(sliding_window=512, layer_types=["sliding_attention"]), "sliding_window", 512),
    ],
)  # fmt: skip
def test_one_field(tmp_path, config, name, value):
    assert draft_fields(written(tmp_path, config))[name] == value


@pytest.mark.parametrize(
    "config, message",
    [
        (flat(architectures=["DeepseekV3ForCausalLMEagle3"]), "architecture .*DeepseekV3"),
        (nested({"model_type": "qwen3"}), "architecture qwen3"),
        (flat(attention_bias=True), "attention_bias True"),
        (flat(fc_norm=True), "fc_norm True"),
        (flat(hidden_act="gelu"), "hidden_act gelu"),
        (flat(norm_before_fc=True), "norm_before_fc is True and norm_output is False"),
        ({k: v for k, v in flat().items() if k != "intermediate_size"}, "no intermediate_size"),
        # A verifier's.
        ({k: v for k, v in flat().items() if k != "draft_vocab_size"}, "no draft_vocab_size"),
        (nested({"layer_types": ["sliding_attention", "full_attention"]}), "layers differ"),
    ],
)
def test_what_is_no_draft_as_made_here(tmp_path, config, message):
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: .*{message}"):
        draft_fields(written(tmp_path, config))


def test_keys_beside_a_reference_go_over_it_and_those_of_config_yaml_do_not():
    over = {"draft": {"reference": str(KIMI), "head_dim": 96}}
    draft = with_reference(over)["draft"]
    assert draft == FIELDS | over["draft"]
    assert with_reference({"draft": {"head_dim": 96}}) == {"draft": {"head_dim": 96}}
    values = yaml.safe_load((ROOT / "config.yaml").read_text())
    merged = copy.deepcopy(values)
    merged["draft"] |= draft
    loaded = load_config(merged).draft
    assert loaded.head_dim == 96 and loaded.intermediate_size == 18432 and loaded.norms == "eagle3"


def test_a_reference_of_the_workflow_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kimi = yaml.safe_load((ROOT / "configs/kimi_k25.yaml").read_text())
    draft = with_reference(kimi)["draft"]
    assert draft == FIELDS | kimi["draft"]
    assert draft["max_position_embeddings"] == 262144
