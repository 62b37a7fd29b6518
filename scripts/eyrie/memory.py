"""What extraction needs of each device's memory, from the verifier's config alone.

With tensor parallelism weights and key/value heads are divided among the GPUs; the latent of
MLA and the hidden states are on each of them whole.
"""

from dataclasses import dataclass

from eyrie.verifier import VerifierConfig

GIB = 2**30


@dataclass
class Memory:
    """Bytes on one device. `kv` and `states` are of one token in the engine's cache."""

    weights: float
    kv: float
    states: float
    activations: float

    def sequences(self, free: float, length: int) -> int:
        """How many sequences of `length` tokens the cache holds in `free` bytes."""
        return int(free // ((self.kv + self.states) * length))


def extraction_memory(
    verifier: VerifierConfig,
    weight_bytes: int,
    element_bytes: int,
    layers: int,
    gpus: int,
    max_num_batched_tokens: int,
) -> Memory:
    """weight_bytes: of the verifier's files; element_bytes: 2 for bfloat16, 4 for float32;
    layers: of which states are kept, the last included; gpus: 0 is a CPU."""
    text, devices = verifier.text, max(gpus, 1)
    if text.get("kv_lora_rank") and gpus:
        per_layer = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        if text.get("kv_lora_rank"):  # on a CPU MLA runs as plain attention
            heads = text["num_attention_heads"]
            width = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        # Fewer heads than GPUs are held more than once.
        per_layer = 2 * width * -(-heads // devices)
    # A step holds some ten vectors of each token's width (residual, norms, attention, both halves
    # of the MLP), and the states.
    widths = 10 * verifier.hidden_size + layers * verifier.hidden_size
    return Memory(
        weights=weight_bytes / devices,
        kv=per_layer * verifier.num_hidden_layers * element_bytes,
        states=layers * verifier.hidden_size * element_bytes,
        activations=max_num_batched_tokens * widths * element_bytes,
    )


def require_memory(
    memory: Memory, device_bytes: float, cache_bytes: float | None, length: int
) -> int:
    """How many rows of `length` tokens the engine's cache holds at once; it queues the others.

    cache_bytes: of the cache, or None: what weights and activations leave of device_bytes.

    Raises:
        ValueError: not one; with the arithmetic.
    """
    free, given = cache_bytes, "the cache has"
    if free is None:
        free = device_bytes - memory.weights - memory.activations
        given = (
            f"{device_bytes / GIB:,.1f} GiB of a device, less {memory.weights / GIB:,.1f} of "
            f"weights and {memory.activations / GIB:,.1f} of activations, leave"
        )
    fit = memory.sequences(free, length)
    if fit < 1:
        raise ValueError(
            f"a row of {length:,} tokens needs {length * (memory.kv + memory.states) / GIB:,.2f} "
            f"GiB ({memory.kv:,.0f} bytes of keys and values and {memory.states:,.0f} of states a "
            f"token), {given} {free / GIB:,.2f} GiB; take more GPUs, a larger extract.kv_cache_gib "
            "or extract.gpu_memory_utilization, a smaller extract.max_num_batched_tokens, or "
            "shorter rows"
        )
    return fit
