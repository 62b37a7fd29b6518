"""Rows, batches and steps of training, without the training."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eyrie.batches import HiddenRows, StepBatches, cut_at_turn, make_loader
from eyrie.hidden import HiddenStates, split
from eyrie.shards import HiddenShardWriter, Rows

HIDDEN, LAYERS = 8, 4


def write_shard(path: Path, masks: list[str]) -> Path:
    """A hidden shard whose rows' loss masks are spelled with . and s; a state tells its row,
    token and layer."""
    path.touch()
    token = 0
    for number, mask in enumerate(masks):
        states = torch.arange(len(mask) * LAYERS).reshape(-1, LAYERS, 1) + 1000.0 * number
        states = states.expand(-1, -1, HIDDEN).bfloat16()
        HiddenShardWriter.write_states(path, token, states)
        token += len(mask)
    ids = [list(range(len(mask))) for mask in masks]
    supervised = [[c == "s" for c in mask] for mask in masks]
    row_ids = [number.to_bytes(16, "little") for number in range(len(masks))]
    rows = Rows.pack(ids, supervised, row_ids, {"fingerprint": "f", "layer_ids": [1, 2, 3, 4]})
    HiddenShardWriter.finish(path, rows, (LAYERS, HIDDEN), torch.bfloat16)
    return path


def shards_of(row_ids: list[list[bytes]]) -> list[Rows]:
    return [Rows.pack([[1]] * len(ids), [[True]] * len(ids), ids, {}) for ids in row_ids]


def test_split_is_a_matter_of_the_id_alone():
    """By its first eight bytes, least significant first; both sides in the order of ids."""
    random = np.random.default_rng(0)
    pool = [random.bytes(16) for _ in range(2000)]
    of_shards = [[pool[i] for i in random.integers(0, 2000, 1000)] for _ in range(3)]
    for ids in (of_shards, [part[::-1] for part in of_shards[::-1]]):
        rows = sorted((row_id, s, i) for s, part in enumerate(ids) for i, row_id in enumerate(part))
        sides = [], []
        for row_id, *place in rows:
            held_out = int.from_bytes(row_id[:8], "little") < 0.05 * 2**64
            sides[held_out].append(tuple(place))
        assert split(shards_of(ids), 0.05) == sides
        assert 60 < len(sides[1]) < 240


def test_a_split_leaves_something_on_either_side():
    near, far, last = (bytes([n] * 8 + [9 - n] * 8) for n in (1, 2, 3))
    shards = shards_of([[last, near], [near, far]])
    assert split(shards, 0.0) == ([(1, 1), (0, 0)], [(0, 1), (1, 0)])
    assert split(shards, 1.0) == ([(0, 1), (1, 0)], [(1, 1), (0, 0)])
    with pytest.raises(ValueError, match="one conversation cannot be split"):
        split(shards_of([[near], [near]]), 0.5)


@pytest.mark.parametrize(
    "mask, length, kept",
    [
        ("..ss..ss..ss", 9, 8),
        ("..ss..ss..ss", 8, 8),
        ("..ss..ss..ss", 7, 4),
        ("..ssssssssss", 7, 7),
        ("..ss..ssssss", 3, 3),
    ],
)
def test_a_row_is_cut_at_a_turn(mask, length, kept):
    assert cut_at_turn(torch.tensor([c == "s" for c in mask]), length) == kept


def test_rows_without_a_target_are_left_out_and_long_ones_cut(tmp_path):
    path = write_shard(
        tmp_path / "s.safetensors",
        ["..ss", "....", "s...", "..ss..ss..ss", "............ss", ".s"],
    )
    rows = HiddenRows(HiddenStates([path]), [(0, i) for i in range(6)], 8)
    # The first token of a row cannot be drafted, and the fifth's answer lies past the cut.
    assert [index for _, index in rows.row_list] == [0, 3, 5]
    assert (rows.cut, rows.left_out) == (1, 3)
    assert rows.approx_lengths.tolist() == [3, 7, 1]
    assert len(rows[1]["input_ids"]) == 8
    assert rows[1]["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def lengths(count: int = 203) -> np.ndarray:
    return np.random.default_rng(3).integers(5, 60, count)


def test_batches_hold_every_row_once_and_no_more_than_fits():
    sampler = StepBatches(lengths(), 128, seed=0)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert sorted(np.concatenate(batches)) == list(range(203))
        assert max(lengths()[b].sum() for b in batches) <= 128
        assert len(batches) == sampler.steps_of(epoch)
    assert sampler.batches_of(0)[0].tolist() != sampler.batches_of(1)[0].tolist()


@pytest.mark.parametrize("done", [0, 3])
def test_processes_and_micro_batches_make_the_same_steps(done):
    whole = StepBatches(lengths(), 128, seed=0)
    alone = StepBatches(lengths(), 128, seed=0, accumulate=4)
    pairs = [StepBatches(lengths(), 128, seed=0, rank=r, ranks=2, accumulate=2) for r in (0, 1)]
    for sampler in (alone, *pairs):
        sampler.set_epoch(1, done)
    whole.set_epoch(1)
    taken = []
    for step in range(done, alone.steps_of(1)):
        used = {}
        for sampler in pairs:
            for micro in range(2):
                weight = sampler.weight(step, micro)
                if weight:
                    used[sampler.place(step, micro)[1]] = weight
        mine = {alone.place(step, m)[1]: alone.weight(step, m) for m in range(4)}
        assert used == {k: v for k, v in mine.items() if v}
        assert sum(used.values()) == pytest.approx(1)
        taken += sorted(used)
    assert taken == list(range(4 * done, len(whole.batches)))
    assert len(list(alone)) == len(alone) == 4 * (alone.steps_of(1) - done)


def test_every_supervised_token_keeps_its_target(tmp_path):
    """The state before a token goes with the token, the mask of the token drafted next with its
    own state: the first answer token is trained, and nothing after the last."""
    path = write_shard(tmp_path / "s.safetensors", ["...sss."])
    rows = HiddenRows(HiddenStates([path]), [(0, 0)], 16)
    batch = next(iter(make_loader(rows, 16, seed=0)))
    length = int((batch["document_ids"] >= 0).sum())
    assert length == 6
    # Place p drafts token p + 2 of the row from token p + 1 and the state that wrote it.
    assert batch["input_ids"][0, :length].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["hidden_states"][0, :length, 0].tolist() == [0, 4, 8, 12, 16, 20]
    assert batch["verifier_last_hidden_states"][0, :length, 0].tolist() == [7, 11, 15, 19, 23, 27]
    assert batch["loss_mask"][0, :length].tolist() == [0, 0, 1, 1, 1, 0]


def test_a_hundred_gigabytes_of_states_are_not_read_at_the_start(tmp_path):
    """Files with the states as holes: reading them all would take this test many minutes."""
    ids, mask = list(range(600)), [False] * 100 + [True] * 500
    row_ids = [i.to_bytes(16, "big") for i in range(500)]
    rows = Rows.pack([ids] * 500, [mask] * 500, row_ids, {"fingerprint": "f"})
    paths = [tmp_path / f"{number}.safetensors" for number in range(6)]
    for path in paths:
        path.touch()
        HiddenShardWriter.finish(path, rows, (LAYERS, 7168), torch.bfloat16)
    assert sum(p.stat().st_size for p in paths) > 100e9
    states = HiddenStates(paths)
    training, _ = split(states.rows, 0.05)
    batch = next(iter(make_loader(HiddenRows(states, training, 2048), 2048, seed=0)))
    assert batch["hidden_states"].shape == (1, 2048, 3 * 7168)
