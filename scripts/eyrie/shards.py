"""The format of a shard: rows of tokens, packed end to end, in one safetensors file.

    input_ids      int32  [tokens]
    loss_mask      bool   [tokens]              true where the verifier wrote the token
    row_offsets    int64  [rows + 1]            row r is tokens row_offsets[r] : row_offsets[r + 1]
    row_ids        uint8  [rows, 16]            hash of the conversation
    turns          uint8  [bytes]               JSON, each row's later user turns; prompts only
    hidden_states  bf16   [tokens, n_aux + 1, hidden]   hidden shards only; or float8_e4m3fn, with
    state_scales   f32    [tokens, n_aux + 1]           what to multiply them by

Nothing is padded. The header's metadata says what made the file, in one entry of JSON:
safetensors writes several entries in an order that differs from one process to the next. A hidden
shard is written by `HiddenShardWriter` while the engine runs, each state once; its header comes
last.
"""

import hashlib
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eyrie.files import atomic

FORMAT = "eyrie-shard-2"

# Room for the header of a hidden shard, whose sizes are known only at the end. Six tensors
# and their metadata take under 2 KiB.
HEADER_BYTES = 4096

# Tokens whose states are looked at together; those of a large verifier take 57 KB each.
BLOCK = 1024

# What states are stored in, whatever the engine computes in.
STATES_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

SAFETENSORS_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


def token_hash(ids: list[int]) -> str:
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16).hexdigest()


class ShardError(Exception):
    """A shard that is not what it should be; the message names the file."""


@dataclass
class Rows:
    """The tokens of some conversations.

    input_ids int32 [tokens], loss_mask bool [tokens], row_offsets int64 [rows + 1],
    row_ids uint8 [rows, 16]; metadata is the header's. turns: of each prompt, None or the messages
    and tools of a conversation with several user turns to answer.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    row_offsets: torch.Tensor
    row_ids: torch.Tensor
    metadata: dict
    turns: list[dict | None] | None = None

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def lengths(self) -> list[int]:
        return self.row_offsets.diff().tolist()

    def row(self, index: int) -> torch.Tensor:
        start, end = self.row_offsets[index : index + 2].tolist()
        return self.input_ids[start:end]

    def mask(self, index: int) -> torch.Tensor:
        start, end = self.row_offsets[index : index + 2].tolist()
        return self.loss_mask[start:end]

    @classmethod
    def pack(
        cls,
        ids: list[list[int]],
        masks: list[list[bool]],
        row_ids: list[bytes],
        metadata: dict,
        turns: list[dict | None] | None = None,
    ) -> "Rows":
        lengths = [0] + [len(row) for row in ids]
        return cls(
            torch.from_numpy(np.concatenate(ids).astype(np.int32)),
            torch.from_numpy(np.concatenate(masks).astype(bool)),
            torch.tensor(lengths).cumsum(0),
            torch.from_numpy(np.frombuffer(b"".join(row_ids), np.uint8).reshape(-1, 16).copy()),
            metadata,
            list(turns) if turns and any(turns) else None,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
            "row_offsets": self.row_offsets,
            "row_ids": self.row_ids,
        }
        if self.turns:
            text = json.dumps(self.turns, sort_keys=True).encode()
            tensors["turns"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors


def runs(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where each run of True in a mask bool [n] begins and ends: the answers of a row."""
    edges = torch.cat([torch.zeros(1), mask.float(), torch.zeros(1)]).diff()
    return list(
        zip((edges > 0).nonzero()[:, 0].tolist(), (edges < 0).nonzero()[:, 0].tolist(), strict=True)
    )


def header_metadata(rows: Rows) -> dict[str, str]:
    return {"eyrie": json.dumps({"format": FORMAT, **rows.metadata}, sort_keys=True)}


def write_tokens(path: str | Path, rows: Rows) -> None:
    """Write a token shard; the same rows and metadata give the same bytes."""
    with atomic(path) as partial:
        save_file(rows.tensors(), partial, header_metadata(rows))


def read_rows(path: str | Path) -> Rows:
    """Read everything but the states. Raises ShardError where the file is not a whole shard."""
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get("eyrie", "{}"))
            if metadata.pop("format", None) != FORMAT:
                raise ShardError(f"{path}: not a shard of format {FORMAT}; delete it and rerun")
            rows = Rows(
                *(file.get_tensor(k) for k in ("input_ids", "loss_mask", "row_offsets", "row_ids")),
                metadata,
            )
            if "turns" in file.keys():
                rows.turns = json.loads(file.get_tensor("turns").numpy().tobytes())
    except ShardError:
        raise
    except Exception as error:  # safetensors raises its own SafetensorError, OSError, KeyError
        raise ShardError(f"{path}: cannot be read as a shard ({error})") from error
    if int(rows.row_offsets[-1]) != len(rows.input_ids):
        raise ShardError(
            f"{path}: row offsets end at {int(rows.row_offsets[-1])}, not at "
            f"the number of tokens, {len(rows.input_ids)}"
        )
    return rows


def to_fp8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [tokens, layers, hidden] -> float8_e4m3fn of the same shape, and float32 scales
    [tokens, layers] that they are to be multiplied by.

    Each layer has a scale of its own: late layers' states are a hundred times as large as early
    ones', which a scale for all would round to nothing. The largest element becomes the largest
    float8, and what rounding takes beyond it is held there.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    states = states.float()
    # A state of zeros has any scale.
    scales = states.abs().amax(-1).clamp(min=1e-30) / largest
    scaled = (states / scales[..., None]).clamp(-largest, largest)
    return scaled.to(torch.float8_e4m3fn), scales


def from_fp8(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `to_fp8` stored, in float32."""
    return states.float() * scales[..., None]


def read_states(file, start: int, end: int) -> torch.Tensor:
    """States bf16 [end - start, layers, hidden] of an open hidden shard, however stored."""
    states = file.get_slice("hidden_states")[start:end]
    if states.dtype != torch.float8_e4m3fn:
        return states
    return from_fp8(states, file.get_slice("state_scales")[start:end]).bfloat16()


def write_at(path: Path, position: int, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes at a place of a file, which is made if it is not there."""
    data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        while data:
            written = os.pwrite(descriptor, data, position)
            data, position = data[written:], position + written
    finally:
        os.close(descriptor)


class HiddenShardWriter:
    """Writes one hidden shard into `path`, states first, as rows arrive in any order.

    The states lie at a fixed place in the file, so each is written once and never moved. The
    scales of fp8 states wait in `path`.scales, a hundredth of their size.
    Only the process that owns the engine's worker writes states (`write_states`); the process
    that owns the requests calls `finish`.
    """

    @staticmethod
    def write_states(
        path: Path, token_offset: int, states: torch.Tensor, scales: torch.Tensor | None = None
    ) -> None:
        """Write states [tokens, layers, hidden] at a token offset of the shard."""
        token_bytes = states[0].numel() * states.element_size()
        write_at(path, HEADER_BYTES + token_offset * token_bytes, states)
        if scales is not None:
            token_bytes = scales[0].numel() * scales.element_size()
            write_at(Path(f"{path}.scales"), token_offset * token_bytes, scales)

    @staticmethod
    def finish(path: Path, rows: Rows, state_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Append the rows after their states, then write the header. The file is then whole."""
        tokens = len(rows.input_ids)
        size = tokens * int(np.prod(state_shape)) * dtype.itemsize
        header: dict = {"__metadata__": header_metadata(rows)}
        header["hidden_states"] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": [tokens, *state_shape],
            "data_offsets": [0, size],
        }
        tensors = rows.tensors()
        names = ["row_offsets", "input_ids", "loss_mask", "row_ids"]
        if dtype == torch.float8_e4m3fn:
            scales = torch.from_numpy(np.fromfile(f"{path}.scales", np.float32))
            tensors["state_scales"] = scales.view(tokens, state_shape[0])
            names.insert(1, "state_scales")
        with open(path, "r+b") as file:
            file.truncate(HEADER_BYTES + size)
            file.seek(0, os.SEEK_END)
            # Widest type first keeps every tensor aligned.
            for name in names:
                tensor = tensors[name]
                data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                header[name] = {
                    "dtype": SAFETENSORS_DTYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [size, size + len(data)],
                }
                file.write(data)
                size += len(data)
            text = json.dumps(header).encode()
            room = HEADER_BYTES - 8
            if len(text) > room:
                raise ShardError(f"{path}: header of {len(text)} bytes, room for {room}")
            file.seek(0)
            file.write(room.to_bytes(8, "little") + text.ljust(room))


def check_hidden(path: str | Path, rows: Rows, layers: int, hidden: int) -> list[float]:
    """Check a finished hidden shard and return the mean norm of each layer's states.

    Each row must be finite, as long as its tokens, nowhere zero and not constant.

    Raises:
        ShardError: naming the file, the row and what is wrong with it.
    """
    tokens = len(rows.input_ids)
    with safe_open(path, "pt") as file:
        shape = file.get_slice("hidden_states").get_shape()
        expected = [tokens, layers, hidden]
        if shape != expected:
            raise ShardError(f"{path}: hidden_states are {shape}, expected {expected}")
        # A row at a time costs ten times as much. What is not finite or zero shows in the norms,
        # and states that are all the same have the same.
        blocks = (
            read_states(file, start, min(start + BLOCK, tokens)).float().norm(dim=-1)
            for start in range(0, tokens, BLOCK)
        )
        norms = torch.cat(list(blocks)).numpy()
        for index, (start, end) in enumerate(itertools.pairwise(rows.row_offsets.tolist())):
            row = norms[start:end]
            if not np.isfinite(row).all():
                raise ShardError(f"{path}: row {index} holds NaN or infinite states")
            if not row.all():
                raise ShardError(f"{path}: row {index} holds states that are all zero")
            if end - start > 1 and (row == row[0]).all(0).any():
                states = read_states(file, start, end)
                if (states == states[0]).all(-1).all(0).any():
                    raise ShardError(f"{path}: row {index} holds the same state at every token")
    return norms.mean(0, dtype=np.float64).tolist()
