"""The CPU training step against speculators' own, on the same batch."""

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel

from eyrie.draft import DraftShape, build_model, expected_tensors, flat_config, flat_tensors
from eyrie.draft_model import CPUEagle3DraftModel
from eyrie.verifier import load_verifier_config

IDS = [1, 2, 3]


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


def model_of(cls, inputs, draft_shape, size=200):
    verifier = load_verifier_config(inputs / "verifier")
    ids = torch.arange(0, 2 * size, 2)
    t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    torch.manual_seed(1)
    model = build_model(
        cls, draft_shape, verifier, inputs / "verifier", IDS, 3, size, ids - torch.arange(size), t2d
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


def test_a_batch_without_supervised_tokens_adds_nothing(inputs):
    model = model_of(CPUEagle3DraftModel, inputs, shape())
    empty = batch()
    empty["loss_mask"].zero_()
    _, loss, _ = model(**empty)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_exported_names_shapes_and_dtypes(inputs):
    for changes in ({}, {"norms": "eagle3.1"}, {"num_hidden_layers": 2}):
        draft_shape = shape(**changes)
        verifier = load_verifier_config(inputs / "verifier")
        tensors = flat_tensors(model_of(Eagle3DraftModel, inputs, draft_shape))
        names = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
        found = {n: (names[t.dtype], list(t.shape)) for n, t in tensors.items()}
        assert found == expected_tensors(flat_config(draft_shape, verifier, IDS, 200))
