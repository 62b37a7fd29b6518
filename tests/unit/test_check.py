"""What vLLM would load without a word and serve badly."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from test_draft_model import IDS, model_of, shape
from test_vocab import BAD_MAPS

from check import check_folder
from eyrie.draft import flat_config, flat_tensors, write_flat
from eyrie.verifier import load_verifier_config


@pytest.fixture
def draft(inputs, tmp_path):
    """Writes a flat checkpoint; returns its failed checks after a change of config or weights."""
    verifier = load_verifier_config(inputs / "verifier")

    def failed(change_config=None, change_tensors=None, size=200, **changes) -> list[str]:
        draft_shape = shape(**changes)
        model = model_of(Eagle3DraftModel, inputs, draft_shape, size)
        config = flat_config(draft_shape, verifier, IDS, size)
        write_flat(tmp_path, config, flat_tensors(model))
        if change_config:
            (tmp_path / "config.json").write_text(json.dumps(config | change_config))
        if change_tensors:
            tensors = load_file(tmp_path / "model.safetensors")
            save_file(change_tensors(tensors), tmp_path / "model.safetensors")
        checks = check_folder(tmp_path, verifier, inputs / "verifier")
        return [check["check"] for check in checks if not check["ok"]]

    return failed


@pytest.mark.parametrize("size", [200, 512])
@pytest.mark.parametrize("changes", [{}, {"norms": "eagle3.1", "sliding_window": 8}])
def test_a_right_draft(draft, size, changes):
    assert draft(size=size, **changes) == []


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_bad_map(draft, name):
    def change(tensors):
        d2t, t2d = BAD_MAPS[name](tensors["d2t"], tensors["t2d"])
        return tensors | {"d2t": d2t.contiguous(), "t2d": t2d.contiguous()}

    found = draft(change_tensors=change)
    assert found and {*found} <= {"vocabulary map", "tensor d2t", "tensor t2d"}


def test_a_map_of_other_tokens_than_the_heads(draft):
    def change(tensors):
        return tensors | {"d2t": tensors["d2t"] + 1, "t2d": tensors["t2d"].roll(1)}

    assert draft(change_tensors=change) == ["lm_head is the verifier's rows"]


def test_a_map_where_none_is_wanted(draft):
    def change(tensors):
        return tensors | {"d2t": torch.zeros(512, dtype=torch.int64)}

    assert draft(change_tensors=change, size=512) == ["tensor d2t"]


@pytest.mark.parametrize("change", [{"sliding_window": 8}, {"layer_types": ["sliding_attention"]}])
def test_a_window_that_vllm_would_not_see(draft, change):
    assert draft(change_config=change) == ["config.layer_types"]
