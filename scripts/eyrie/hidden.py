"""Hidden shards as a training set: which rows are held out, and each row when it is asked for."""

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from eyrie.shards import Rows, ShardError, read_rows, read_states


def split(shards: list[Rows], fraction: float) -> tuple[list, list]:
    """(training, held out), each a list of (shard, row), ordered by the conversations' ids.

    A conversation's side and place follow its content alone, so neither changes with the order
    in which the engine finished. All of its rows are on one side, and at least one row is on each.

    Raises:
        ValueError: there is but one conversation.
    """
    ids = np.concatenate([of.row_ids.numpy() for of in shards])
    shard = np.repeat(np.arange(len(shards)), [len(of) for of in shards])
    index = np.concatenate([np.arange(len(of)) for of in shards])
    high, low = ids.view(">u8").T
    order = np.lexsort((low, high))
    ids, shard, index = ids[order], shard[order], index[order]
    number = np.cumsum(np.r_[False, (ids[1:] != ids[:-1]).any(1)])
    if not number[-1]:
        raise ValueError("one conversation cannot be split into training and validation")
    value = ids.view("<u8")[:, 0]
    held_out = value < fraction * 2.0**64
    if not held_out.any():
        held_out = number == number[value.argmin()]
    if held_out.all():
        held_out = number > 0
    return tuple(
        list(zip(shard[side].tolist(), index[side].tolist(), strict=True))
        for side in (~held_out, held_out)
    )


def read_hidden_rows(paths: list[Path]) -> list[Rows]:
    """The rows of hidden shards, without their states.

    Raises:
        ShardError: one cannot be read, or holds tokens alone.
    """
    shards = [read_rows(path) for path in paths]
    for path, rows in zip(paths, shards, strict=True):
        if "fingerprint" not in rows.metadata:
            raise ShardError(f"{path}: a token shard, which has no states; give its hidden shard")
    return shards


class HiddenStates:
    """The states of hidden shards, read through memory maps, one row at a time."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.rows = read_hidden_rows(paths)
        self.files: dict[int, object] = {}

    def require_layers(self, layer_ids: list[int]) -> None:
        """Raises ValueError where a shard holds the states of other layers than `layer_ids`."""
        for path, rows in zip(self.paths, self.rows, strict=True):
            held = rows.metadata["layer_ids"]
            if held != layer_ids:
                raise ValueError(
                    f"{path}: holds the states of layers {held}, {layer_ids} are asked for; give "
                    f"--layer-ids {' '.join(map(str, held[:-1]))}, or extract those"
                )

    def file(self, shard: int):
        """A shard's file, opened when it is first asked for."""
        if shard not in self.files:
            self.files[shard] = safe_open(self.paths[shard], "pt").__enter__()
        return self.files[shard]

    @property
    def state_shape(self) -> list[int]:
        """[n_aux + 1, H], from the first shard's header."""
        return self.file(0).get_slice("hidden_states").get_shape()[1:]

    def row(self, shard: int, index: int) -> dict[str, torch.Tensor]:
        """input_ids int32 [n], loss_mask bool [n], hidden_states bf16 [n, n_aux + 1, H]."""
        rows = self.rows[shard]
        start, end = rows.row_offsets[index : index + 2].tolist()
        return {
            "input_ids": rows.input_ids[start:end],
            "loss_mask": rows.loss_mask[start:end],
            "hidden_states": read_states(self.file(shard), start, end),
        }
