"""The CPU training step against speculators' own, on the same batch."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_kimi
import torch
import yaml
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from tiny import remade
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyrie.checkpoint import WEIGHTS, expected_tensors
from eyrie.checks import check_config, check_light, check_reference, check_values
from eyrie.config import load_config, with_reference
from eyrie.draft import (
    DraftShape,
    build_model,
    differences,
    flat_config,
    flat_state,
    flat_tensors,
    speculator_config,
    write_flat,
)
from eyrie.draft_model import CPUEagle3DraftModel
from eyrie.shards import SAFETENSORS_DTYPES
from eyrie.trainer import walk
from eyrie.verifier import load_verifier_config, read_text_config

ROOT = Path(__file__).parents[2]
IDS = [1, 2, 3]


def flat_header(model: torch.nn.Module) -> dict[str, tuple[str, list[int]]]:
    """What `read_header` would read of the flat checkpoint of a model, of one on meta too."""
    return {
        name: (SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape))
        for name, tensor in flat_state(model).items()
    }


def shape(**changes) -> DraftShape:
    values = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "norms": "eagle3",
        "norm_before_residual": False,
    }
    return DraftShape(**values | changes)


def model_of(cls, inputs, draft_shape, size=200, folder="verifier"):
    verifier = load_verifier_config(inputs / folder)
    # Every other token, or all.
    ids = torch.arange(size) * (2 if size < 256 else 1)
    t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    torch.manual_seed(1)
    model = build_model(
        cls, draft_shape, verifier, inputs / folder, IDS, 3, size, ids - torch.arange(size), t2d
    )
    return model.float()


def batch(hidden=64, lengths=(9, 14, 5), padding=4) -> dict[str, torch.Tensor]:
    """Rows of which some begin unsupervised, one is supervised to its end, and padding."""
    torch.manual_seed(2)
    total = sum(lengths) + padding
    mask = torch.zeros(1, total, dtype=torch.long)
    documents, positions, start = [], [], 0
    for number, length in enumerate(lengths):
        mask[0, start + 2 * number + 1 : start + length - (number == 1)] = 1
        documents += [number] * length
        positions += range(1, length + 1)
        start += length
    return {
        "hidden_states": torch.randn(1, total, 3 * hidden) * 5,
        "input_ids": torch.randint(0, 512, (1, total)),
        "verifier_last_hidden_states": torch.randn(1, total, hidden) * 5,
        "loss_mask": mask,
        "document_ids": torch.tensor([documents + [-1] * padding]),
        "position_ids": torch.tensor([positions + [0] * padding]),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norms": "eagle3.1"},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
    ],
)
def test_losses_gradients_and_accuracies_equal_the_stock_step(inputs, changes):
    results = []
    for cls in (Eagle3DraftModel, CPUEagle3DraftModel):
        model = model_of(cls, inputs, shape(**changes))
        _, loss, metrics = model(
            **batch(),
            ttt_steps=3,
            ttt_step_loss_decay=0.8,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.item(), metrics, gradients))
    (stock_loss, stock_metrics, stock_gradients), (loss, metrics, gradients) = results
    assert loss == pytest.approx(stock_loss, rel=1e-5)
    assert gradients.keys() == stock_gradients.keys()
    for name, gradient in stock_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, value in metrics.items():
        assert float(value) == pytest.approx(float(stock_metrics[name]), rel=1e-5), name


def test_a_server_walks_over_the_stock_steps_draft_tokens(inputs):
    found = []
    for cls in (Eagle3DraftModel, CPUEagle3DraftModel):
        # Of two tokens every other one is right.
        model, rows = model_of(cls, inputs, shape(), size=2), batch(lengths=(40, 60))
        loss = resolve_loss_config("kl_div", "eager")
        drafted, _, _ = model(**rows, ttt_steps=3, loss_config=loss)
        last = model.verifier_norm(rows["verifier_last_hidden_states"])
        target_ids = model.verifier_lm_head(last).argmax(-1)
        found.append(walk(drafted, target_ids, rows["loss_mask"]))
    assert found[0] == found[1]
    assert found[0]["served_acc_0_sum"] > found[0]["served_acc_1_sum"] > 0


def test_a_server_drafts_where_its_own_token_follows_the_accepted():
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 1, 1]])
    target_ids = torch.arange(10)[None]
    steps = [target_ids.roll(-step).clone() for step in range(2)]
    # From 1 and 3 the first step alone is right.
    steps[1][0, 1] = steps[1][0, 3] = -1
    # It drafts at 1, 3 and 5, where the answer ends behind the first step, and at 8.
    found = walk(steps, target_ids, mask)
    assert found == {
        "served_acc_0_sum": 4.0,
        "served_acc_0_total": 4.0,
        "served_acc_1_sum": 1.0,
        "served_acc_1_total": 4.0,
    }


def test_a_batch_without_supervised_tokens_adds_nothing(inputs):
    model = model_of(CPUEagle3DraftModel, inputs, shape())
    empty = batch()
    empty["loss_mask"].zero_()
    _, loss, _ = model(**empty)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("size", [200, 512])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms": "eagle3.1"},
        {"num_hidden_layers": 2},
        # hidden_size, 64, is neither
        {"num_attention_heads": 8, "head_dim": 16},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32},
    ],
)
def test_exported_names_shapes_and_dtypes(inputs, changes, size):
    draft_shape = shape(**changes)
    model = model_of(Eagle3DraftModel, inputs, draft_shape, size)
    config = flat_config(draft_shape, load_verifier_config(inputs / "verifier"), IDS, size)
    assert flat_header(model) == expected_tensors(config)
    tensors = flat_tensors(model)
    # The whole vocabulary needs no map.
    assert ("d2t" in tensors) == ("t2d" in tensors) == (size == 200)
    assert config["head_dim"] == draft_shape.head_dim and config["tie_word_embeddings"] is False


def test_kimis_draft_is_the_reference(tmp_path):
    """Of configs/kimi_k25.yaml, at its full size, against a public draft for it."""
    over = with_reference(yaml.safe_load((ROOT / "configs/kimi_k25.yaml").read_text()))
    values = yaml.safe_load((ROOT / "config.yaml").read_text())
    for block, keys in over.items():
        values[block] = values[block] | keys if isinstance(keys, dict) else keys
    job = load_config(values)
    draft_shape = DraftShape(**job.draft.model_dump(exclude={"reference"}))
    text = tiny_kimi.TEXT | {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}
    text |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": text})
    )
    verifier = load_verifier_config(tmp_path)
    ids, size = job.extract.layer_ids, job.vocab.draft_vocab_size
    with torch.device("meta"):
        model = Eagle3DraftModel(speculator_config(draft_shape, verifier, ids, 3, size))
    config = flat_config(draft_shape, verifier, ids, size)

    reference = ROOT / "configs/reference/kimi_k2_eagle3.json"
    assert flat_header(model) == expected_tensors(config)
    checks = check_reference(flat_header(model), config, reference)
    # The last is of the draft for K2.5.
    others = {"bos_token_id", "eos_token_id", "max_position_embeddings"}
    assert len(checks) > 30
    assert {c["check"].split()[1] for c in checks if not c["ok"]} == others


def test_what_differs_from_the_verifier_is_told(inputs):
    verifier = load_verifier_config(inputs / "verifier")
    same = shape(intermediate_size=128, max_position_embeddings=512, rms_norm_eps=1e-6)
    assert differences(same, verifier) == []
    verifier.text["rms_norm_eps"] = float(torch.tensor(1e-6, dtype=torch.float32))
    assert differences(same, verifier) == []
    assert differences(replace(same, head_dim=16, num_hidden_layers=2), verifier) == [
        "draft.head_dim 16, the verifier's 32"
    ]


def test_heads_that_no_llama_can_have(inputs):
    with pytest.raises(ValueError, match=r"draft.num_attention_heads: 6 does not divide .* 64"):
        model_of(Eagle3DraftModel, inputs, shape(num_attention_heads=6))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [None, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_what_is_trained_is_what_the_config_says(inputs, tmp_path, scaling):
    """transformers reads the flat config, as vLLM does, to the angles and window of training."""
    draft_shape = shape(rope_scaling=scaling, sliding_window=4, num_hidden_layers=2)
    model = model_of(Eagle3DraftModel, inputs, draft_shape)
    config = flat_config(draft_shape, load_verifier_config(inputs / "verifier"), IDS, 200)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = LlamaConfig.from_pretrained(tmp_path)
    positions = torch.arange(200)[None]
    angles = LlamaRotaryEmbedding(read)(torch.zeros(1), positions)
    trained = model.rotary_emb(torch.zeros(1), positions)
    assert all(torch.equal(a, b) for a, b in zip(angles, trained, strict=True))
    plain = model_of(Eagle3DraftModel, inputs, shape()).rotary_emb(torch.zeros(1), positions)
    assert torch.equal(plain[0], trained[0]) == (scaling is None)
    assert read.sliding_window == 4 and read.layer_types == ["sliding_attention"] * 2
    assert draft_shape.rope_scaling == scaling and (scaling is None or "rope_theta" not in scaling)
    verifier = read_text_config(inputs / "verifier")
    assert all(c["ok"] for c in check_config(config, verifier, length=200))


def test_a_window_hides_what_lies_before_it(inputs):
    """The gradient of the last token's loss with regard to the states: 4 tokens of 14 count."""
    rows = batch()
    rows["loss_mask"].zero_()
    rows["loss_mask"][0, 22] = 1
    for window, first in ((None, 9), (4, 19)):
        model = model_of(Eagle3DraftModel, inputs, shape(sliding_window=window))
        states = rows["hidden_states"].clone().requires_grad_()
        loss = model(
            **rows | {"hidden_states": states},
            ttt_steps=1,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )[1]
        loss.backward()
        seen = states.grad[0].abs().sum(-1).nonzero().flatten().tolist()
        assert seen == [*range(first, 23)]


def test_a_tied_verifiers_head_is_its_embeddings(inputs, tmp_path):
    config = json.loads((inputs / "verifier/config.json").read_text())
    folder = tmp_path / "tied"
    remade(
        inputs / "verifier",
        folder,
        config | {"tie_word_embeddings": True},
        **{"lm_head.weight": None},
    )
    model = model_of(Eagle3DraftModel, tmp_path, shape(), folder="tied")
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for head in (model.lm_head, model.verifier_lm_head):
        assert torch.equal(head.weight, embeddings[model.t2d].float())
    verifier = load_verifier_config(folder)
    flat = flat_config(shape(), verifier, IDS, 200)
    assert flat["tie_word_embeddings"] is False
    write_flat(tmp_path / "draft", flat, flat_tensors(model))
    checks, _ = check_light(tmp_path / "draft", read_text_config(folder), length=256)
    checks += check_values(tmp_path / "draft" / WEIGHTS, flat, folder)
    assert len(checks) > 80 and all(c["ok"] for c in checks)


@pytest.mark.parametrize("where", ["null", "text_config", "thinker", "outer_eos"])
def test_a_verifiers_sizes_wherever_they_lie(inputs, tmp_path, where):
    """Trained on the same embeddings, head and norm as those of a flat config."""
    config = json.loads((inputs / "verifier/config.json").read_text())
    changed = {
        "null": config | {"text_config": None},
        "text_config": {"model_type": "llava", "text_config": config},
        "thinker": {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": config}},
        "outer_eos": config | {"text_config": None, "eos_token_id": [7, 8]},
    }[where]
    remade(inputs / "verifier", tmp_path / "v", changed)
    if where == "thinker":
        # transformers takes no Llama in there; the reader of config.json does.
        assert read_text_config(tmp_path / "v")["hidden_size"] == 64
        return
    model = model_of(Eagle3DraftModel, tmp_path, shape(), folder="v")
    plain = model_of(Eagle3DraftModel, inputs, shape())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_the_verifiers_answers_have_its_own_eps(inputs):
    model = model_of(Eagle3DraftModel, inputs, shape(rms_norm_eps=0.5))
    assert model.verifier_norm.variance_epsilon == 1e-6 and model.norm.variance_epsilon == 0.5
