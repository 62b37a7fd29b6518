"""Starting from an existing draft."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from test_draft_model import IDS, model_of, shape

from eyrie.draft import flat_config, flat_tensors, write_flat
from eyrie.verifier import load_verifier_config
from eyrie.warm_start import content, warm_start

CHANGES = {"norms": "eagle3.1", "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def drafts(inputs, tmp_path_factory):
    """A trained draft of 200 tokens in both formats, in weights that bf16 holds."""
    folder = tmp_path_factory.mktemp("drafts")
    model = model_of(Eagle3DraftModel, inputs, shape(**CHANGES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    verifier = load_verifier_config(inputs / "verifier")
    config = flat_config(shape(**CHANGES), verifier, IDS, 200)
    write_flat(folder / "flat", config, flat_tensors(model))
    model.save_pretrained(folder / "speculators")
    return folder, model


@pytest.mark.parametrize("kind", ["flat", "speculators"])
@pytest.mark.parametrize("size", [200, 150, 512])
def test_the_same_weights_before_the_first_step(inputs, drafts, kind, size):
    """Of the same vocabulary, another one, and the verifier's whole."""
    folder, trained = drafts
    model = model_of(Eagle3DraftModel, inputs, shape(**CHANGES), size)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert warm_start(model, shape(**CHANGES), folder / kind) == []
    own = {n for n, p in model.named_parameters() if p.requires_grad}
    there = trained.state_dict()
    for name, tensor in model.state_dict().items():
        expected = there[name] if name in own else before[name]
        assert torch.equal(tensor, expected), name
    assert not torch.equal(before["fc.weight"], there["fc.weight"])
    if size == 200:
        assert all(torch.equal(tensor, there[n]) for n, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "changes, listed",
    [
        (
            {"head_dim": 16},
            ["layers.0.self_attn.q_proj.weight: [128, 128] there, [64, 128] here",
             "layers.1.self_attn.o_proj.weight: [64, 128] there, [64, 64] here"],
        ),
        ({"num_hidden_layers": 1}, ["layers.1.mlp.up_proj.weight: [96, 64] there, none here"]),
        ({"norms": "eagle3"}, ["input_norm.weight: [192] there, none here"]),
        ({"num_hidden_layers": 3}, ["layers.2.mlp.up_proj.weight: none there, [96, 64] here"]),
    ],
)  # fmt: skip
def test_other_shapes_are_listed(inputs, drafts, changes, listed):
    draft_shape = shape(**CHANGES | changes)
    model = model_of(Eagle3DraftModel, inputs, draft_shape)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="flat are of another shape") as error:
        warm_start(model, draft_shape, drafts[0] / "flat")
    assert all(line in str(error.value) for line in listed)
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())


def test_what_no_weight_tells_is_told(inputs, drafts):
    other = shape(**CHANGES, rope_theta=5000.0, norm_before_residual=True)
    model = model_of(Eagle3DraftModel, inputs, other)
    assert warm_start(model, other, drafts[0] / "flat") == [
        "draft.rope_theta 5000.0, 10000.0 there",
        "draft.norm_before_residual True, False there",
    ]


def test_the_content_of_its_files_decides(drafts, tmp_path):
    folder = shutil.copytree(drafts[0] / "flat", tmp_path / "copy")
    assert content(folder) == content(drafts[0] / "flat") != content(drafts[0] / "speculators")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")
    assert content(folder) != content(drafts[0] / "flat")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{folder} is no draft"):
        content(folder)
