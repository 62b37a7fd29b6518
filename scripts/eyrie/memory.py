"""What extraction and training need of each device's memory, and what is too much for it: the
one place of that arithmetic, for the plan, for the gate before a run and for extraction itself.

Everything comes from the verifier's config.json. With tensor parallelism weights and key/value
heads are divided among the GPUs; the latent of MLA and the hidden states are on each of them whole.
"""

from dataclasses import dataclass

GIB = 2**30
# Of a process that has imported torch and vLLM, and works: measured on the default job.
PROCESS_BYTES = 2.5 * GIB


@dataclass
class Memory:
    """Bytes on one device. `kv` and `states` are of one token in the engine's cache."""

    weights: float
    kv: float
    states: float
    activations: float

    @property
    def token(self) -> float:
        """Bytes of one token in the engine's cache."""
        return self.kv + self.states

    def sequences(self, free: float, length: float) -> int:
        """How many sequences of `length` tokens the cache holds in `free` bytes."""
        return max(int(free // (self.token * length)), 0)


def extraction_memory(
    text: dict,
    weight_bytes: float,
    element_bytes: int,
    layers: int,
    gpus: int,
    max_num_batched_tokens: int,
) -> Memory:
    """The memory of the engine that extracts.

    text: the text model's config; weight_bytes: of the verifier's weights as they are loaded;
    element_bytes: 2 for bfloat16, 4 for float32; layers: of which states are kept, the last
    included; gpus: 0 is a CPU. vLLM keeps, per token and layer, keys and values of each head, or
    of MLA the one latent (kv_lora_rank + qk_rope_head_dim), and the states in a layer of their own.
    """
    devices, hidden = max(gpus, 1), text["hidden_size"]
    if text.get("kv_lora_rank") and gpus:
        per_layer = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        width = text.get("head_dim") or hidden // text["num_attention_heads"]
        if text.get("kv_lora_rank"):  # on a CPU MLA runs as plain attention
            heads = text["num_attention_heads"]
            width = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        # Fewer heads than GPUs are held more than once.
        per_layer = 2 * width * -(-heads // devices)
    # A step holds some ten vectors of each token's width (residual, norms, attention, both halves
    # of the MLP), and the states.
    return Memory(
        weights=weight_bytes / devices,
        kv=per_layer * text["num_hidden_layers"] * element_bytes,
        states=layers * hidden * element_bytes,
        activations=max_num_batched_tokens * (10 + layers) * hidden * element_bytes,
    )


def cache_bytes(memory: Memory, device: float, cache: float | None) -> tuple[float, str]:
    """What the engine's cache has, in bytes, and the arithmetic in words.

    device: bytes of the device that the engine may use; cache: of the cache where it is set (on a
    CPU), or None: what weights and activations leave of the device.
    """
    if cache is not None:
        return cache, f"the cache has {cache / GIB:,.2f} GiB"
    left = device - memory.weights - memory.activations
    return left, (
        f"{device / GIB:,.1f} GiB of a device, less {memory.weights / GIB:,.1f} of weights and "
        f"{memory.activations / GIB:,.1f} of activations, leave {left / GIB:,.2f} GiB"
    )


WAY_OUT = (
    "take more GPUs, a larger extract.kv_cache_gib or extract.gpu_memory_utilization, a smaller "
    "extract.max_num_batched_tokens, or shorter rows"
)


def row_fault(memory: Memory, device: float, cache: float | None, length: int) -> str | None:
    """Why not one row of `length` tokens fits into the engine's cache, or None if it does."""
    free, given = cache_bytes(memory, device, cache)
    if memory.sequences(free, length):
        return None
    return (
        f"a row of {length:,} tokens needs {length * memory.token / GIB:,.2f} GiB "
        f"({memory.kv:,.0f} bytes of keys and values and {memory.states:,.0f} of states a token), "
        f"{given}; {WAY_OUT}"
    )


def bound_fault(
    memory: Memory,
    device: float,
    cache: float | None,
    max_num_seqs: int,
    rows: int,
    mean: float,
    longest: int,
) -> str | None:
    """Why `max_num_seqs` rows of the `mean` length, of no more than there are, do not fit into the
    engine's cache together, or None if they do. More than fit are begun and thrown out again, and
    their states in flight run a device out of memory, so the bound must mean something."""
    free, given = cache_bytes(memory, device, cache)
    if min(max_num_seqs, rows) <= memory.sequences(free, mean):
        return None
    return (
        f"extract.max_num_seqs {max_num_seqs:,} x {mean:,.0f} tokens a row x {memory.token:,.0f} "
        f"bytes ({memory.kv:,.0f} of keys and values, {memory.states:,.0f} of states) = "
        f"{max_num_seqs * mean * memory.token / GIB:,.1f} GiB on each device; {given}, which "
        f"hold {memory.sequences(free, mean):,} such rows, or {memory.sequences(free, longest):,} "
        f"of the longest, {longest:,} tokens: lower extract.max_num_seqs to that"
    )


def disk_fault(folder, needed: float, free: float) -> str | None:
    """Why the disk has no room for `needed` bytes beside what is there, or None if it has."""
    if needed <= free:
        return None
    return (
        f"{folder}: {needed / 1e9:,.2f} GB may be needed, {free / 1e9:,.2f} GB are free; make "
        "room, name another `results:`, or take fewer conversations or shorter rows"
    )


def require_memory(memory: Memory, device: float, cache: float | None, length: int) -> int:
    """How many rows of `length` tokens the engine's cache holds at once; it queues the others.

    device, cache: as for `cache_bytes`.

    Raises:
        ValueError: not one; with the arithmetic.
    """
    if fault := row_fault(memory, device, cache, length):
        raise ValueError(fault)
    return memory.sequences(cache_bytes(memory, device, cache)[0], length)
