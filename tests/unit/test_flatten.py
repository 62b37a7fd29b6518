"""Drafts of other projects' forms, made flat and back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.model import SpeculatorModel
from test_check import accepts, environment, failed, write_draft  # noqa: F401

from eyrie.files import write_json
from eyrie.layouts import write_layout
from eyrie.verifier import load_tensor, load_verifier_config
from flatten import flat_draft

ROPE = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture(params=[{"norms": "eagle3.1"}, {"rope_scaling": ROPE, "sliding_window": 8}])
def draft(request, inputs, tmp_path):
    return write_draft(tmp_path / "draft", inputs, **request.param)


def flattened(folder, inputs, **options):
    verifier = load_verifier_config(inputs / "verifier")
    return flat_draft(folder, verifier, inputs / "verifier", **options)


def written(source, folder, inputs, layout, config, tokens=3, name=None):
    verifier = inputs / "verifier"
    write_layout(
        source, folder, layout, config, tokens, name,
        lambda: load_tensor(verifier, "embed_tokens.weight"),
    )  # fmt: skip


def same(folder, config, tensors):
    assert config == json.loads((folder / "config.json").read_text())
    wanted = load_file(folder / "model.safetensors")
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_to_nested_and_back(draft, inputs, tmp_path):
    """speculators and vLLM read the nested form, each all of it."""
    config = json.loads((draft / "config.json").read_text())
    written(draft, tmp_path / "nested", inputs, "speculators", config, 5, "org/verifier")
    nested = json.loads((tmp_path / "nested/config.json").read_text())
    inner = nested["speculators_config"]
    assert inner["verifier"]["name_or_path"] == "org/verifier"
    assert inner["proposal_methods"][0]["speculative_tokens"] == 5
    (tmp_path / "nested/manifest.json").write_text((draft / "manifest.json").read_text())
    assert failed(tmp_path / "nested", inputs, layout="speculators") == []
    assert failed(tmp_path / "nested", inputs, layout="flat") == ["layout"]
    # What speculators itself writes of it has fewer fields and other names for the angles.
    inner["verifier"]["name_or_path"] = str(inputs / "verifier")
    write_json(tmp_path / "nested/config.json", nested)
    model = SpeculatorModel.from_pretrained(tmp_path / "nested")
    weights = load_file(draft / "model.safetensors")
    assert torch.equal(model.fc.weight.bfloat16(), weights["fc.weight"])
    assert torch.equal(model.d2t, weights["d2t"])
    model.save_pretrained(tmp_path / "theirs")
    same(draft, *flattened(tmp_path / "nested", inputs))
    same(draft, *flattened(tmp_path / "theirs", inputs))


def test_for_sglang_and_back(draft, inputs, tmp_path):
    config = json.loads((draft / "config.json").read_text())
    with pytest.raises(ValueError, match=r"states of layers \[2, 3, 4\], not \[1, 2, 3\]"):
        written(draft, tmp_path / "sglang", inputs, "sglang", config)
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3]
    written(draft, tmp_path / "sglang", inputs, "sglang", config)
    found = json.loads((tmp_path / "sglang/config.json").read_text())
    assert found["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert found["eagle_config"]["layer_ids"] == found["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    assert found["torch_dtype"] == "bfloat16"


FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FIELDS += ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
FIELDS += ("vocab_size", "draft_vocab_size", "rope_theta", "tie_word_embeddings")


@pytest.mark.parametrize("form", ["SpecForge", "SafeAILab"])
def test_other_projects_drafts(inputs, tmp_path, form):
    """With the fields and names that their files have; ids of SpecForge tell of layers left."""
    good = write_draft(tmp_path / "good", inputs)
    config = json.loads((good / "config.json").read_text())
    tensors = load_file(good / "model.safetensors")
    other = {key: config[key] for key in FIELDS}
    if form == "SpecForge":
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
        other |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}
        other |= {"model_type": "kimi_k2", "torch_dtype": "bfloat16"}
        tensors["embed_tokens.weight"] = load_file(inputs / "verifier/model.safetensors")[
            "model.embed_tokens.weight"
        ].bfloat16()
        tensors = {f"draft_model.{name}": t for name, t in tensors.items()}
        options = {"ids_are": "left"}
    else:
        other |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        tensors = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
        del tensors["t2d"]
        tensors["d2t"] = tensors["d2t"].int()
        options = {}
    (tmp_path / "other").mkdir()
    write_json(tmp_path / "other/config.json", other)
    save_file(tensors, tmp_path / "other/model.safetensors")
    flat, weights = flattened(tmp_path / "other", inputs, **options)
    if form == "SafeAILab":
        # vLLM's default of 4 layers, as neither the file nor the project tells of any.
        assert flat["eagle_aux_hidden_state_layer_ids"] == [2, 2, 1]
        return
    same(good, flat, weights)


def test_what_is_no_draft_for_the_verifier(draft, inputs, tmp_path):
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 600}, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t holds no offsets: .* from 600 to 998"):
        flattened(draft, inputs)
    save_file(
        tensors | {"fc.weight": tensors["fc.weight"][:, :9].contiguous()},
        draft / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"fc.weight: \[64, 9\], by the config \[64, 192\]"):
        flattened(draft, inputs)
    whole = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: .* bytes, its header tells of"):
        flattened(draft, inputs)
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    with pytest.raises(ValueError, match="may run code when they are read"):
        flattened(draft, inputs)
