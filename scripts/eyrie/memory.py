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
    if text.get("kv_lora_rank"):
        per_layer = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
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
    memory: Memory, device_bytes: float, cache_bytes: float | None, sequences: int, length: int
) -> None:
    """Raise ValueError, with the arithmetic, where `sequences` rows of `length` tokens do not fit.

    cache_bytes: what the engine's cache has, or None: what weights and activations leave of
    device_bytes.
    """
    free = cache_bytes
    if free is None:
        free = device_bytes - memory.weights - memory.activations
    fit = memory.sequences(free, length)
    if fit >= sequences:
        return
    per_token = memory.kv + memory.states
    given = f"{free / GIB:,.1f} GiB"
    if cache_bytes is None:
        given = (
            f"{device_bytes / GIB:,.1f} GiB of a device, less {memory.weights / GIB:,.1f} of "
            f"weights and {memory.activations / GIB:,.1f} of activations, leave {given}"
        )
    way_out = (
        f"set extract.max_num_seqs to {fit} or less"
        if fit > 0
        else "take more GPUs, shorter rows or a smaller extract.max_num_batched_tokens"
    )
    raise ValueError(
        f"extract.max_num_seqs: {sequences:,} rows of up to {length:,} tokens need "
        f"{sequences * length * per_token / GIB:,.1f} GiB ({memory.kv:,.0f} bytes of keys and "
        f"values and {memory.states:,.0f} of states a token); {given}, enough for "
        f"{max(fit, 0):,}: {way_out}"
    )
