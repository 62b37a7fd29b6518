"""The vocabulary map: which of the verifier's tokens a draft writes, and what the map is made of.

    d2t  int64  [draft_vocab_size]   offsets: draft token i is verifier token i + d2t[i]
    t2d  bool   [verifier's]         true at these tokens

as vLLM and SGLang read them. The header's metadata says of which verifier, rows and size it is.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyrie.files import atomic
from eyrie.shards import Rows


def map_fault(d2t: torch.Tensor, t2d: torch.Tensor, size: int, vocab_size: int) -> str | None:
    """What is wrong with the map of a draft of `size` tokens, or None."""
    for name, tensor, dtype, length in (
        ("d2t", d2t, torch.int64, size),
        ("t2d", t2d, torch.bool, vocab_size),
    ):
        if tensor.dtype != dtype or list(tensor.shape) != [length]:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} [{length}]"
    ids, marked = torch.arange(size) + d2t, t2d.nonzero().flatten()
    if not torch.equal(ids, marked):
        return (
            f"d2t holds other offsets than t2d: draft tokens 0, 1, ... are {ids[:4].tolist()}... "
            f"up to {int(ids.max())}, and the {len(marked)} that t2d marks are "
            f"{marked[:4].tolist()}..."
        )
    return None


def pinned(tokenizer, eos_token_ids: list[int], vocab_size: int) -> list[int]:
    """The tokens that are always in, ascending: special ones, those that end a turn or a text, and
    those of single bytes, of which any text can be made.

    Byte tokens are SentencePiece's <0x00> to <0xFF>, or the characters that byte-level BPE writes
    bytes as, as far as the tokenizer has them.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    from eyrie.chat import Chat

    vocabulary = tokenizer.get_vocab()
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    if alphabet[0] not in vocabulary:
        alphabet = ByteLevel.alphabet()
    single = [vocabulary[token] for token in alphabet if token in vocabulary]
    # Some tokenizers have tokens for which the model has no row.
    ids = {*Chat(tokenizer).special, *eos_token_ids, *single}
    return sorted(i for i in ids if i < vocab_size)


def require_room(size: int, always: list[int]) -> None:
    """Raise ValueError where a draft's vocabulary is too small for the tokens of `pinned`."""
    if size < len(always):
        raise ValueError(
            f"vocab.draft_vocab_size: {size:,} leaves no room for the {len(always):,} special, "
            "end-of-turn and byte tokens that are always in; raise it"
        )


def made_of(identity: dict, rows: list[Rows], held_out: float, size: int) -> dict:
    """What decides a map. identity: the verifier's; rows: of the hidden shards."""

    def short(value) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

    return {
        "verifier": short(identity["files"]),
        "data": short(sorted(shard.metadata["fingerprint"] for shard in rows)),
        "held_out": held_out,
        "draft_vocab_size": size,
    }


def save_map(path: Path, d2t: torch.Tensor, t2d: torch.Tensor, made_of: dict) -> None:
    with atomic(path) as partial:
        # One entry: safetensors writes several in an order that differs between processes.
        metadata = {"eyrie": json.dumps(made_of, sort_keys=True)}
        save_file({"d2t": d2t, "t2d": t2d}, partial, metadata)


def load_map(path: Path, made_of: dict, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t and t2d of a map that must be made of what `made_of` says.

    Raises:
        ValueError: it is of another verifier, other data or another size, or is no map.
    """
    again = "Delete it, and make it again with scripts/vocab.py"
    try:
        with safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {}).get("eyrie", "{}"))
            d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error}). {again}") from None
    others = [
        f"{key} is {found.get(key, 'not told')}, not {value}"
        for key, value in made_of.items()
        if found.get(key) != value
    ]
    fault = "; ".join(others) or map_fault(d2t, t2d, made_of["draft_vocab_size"], vocab_size)
    if fault:
        raise ValueError(
            f"{path}: not the vocabulary map of this verifier, data and size: {fault}. {again}"
        )
    return d2t, t2d
