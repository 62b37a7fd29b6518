"""A draft's shape from the config of a model that there is: another draft, or the verifier.

Light on imports: the workflow reads a reference whenever it is planned.
"""

from pathlib import Path

from eyrie.files import read_json

# What every draft here has. A reference with anything else is another model.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "fc_norm": False}
# What training and vLLM compute alike, and the keys that each needs beside rope_type. Others
# depend on the length of what is served.
ROPE_TYPES = {
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
}
# Fields that may be null.
OPTIONAL = ("rope_scaling", "sliding_window")


def rope_problems(scaling) -> list[str]:
    """What is wrong with a rope_scaling, a line each."""
    if not scaling:
        return []
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else scaling
    if not isinstance(scaling, dict) or kind not in list(ROPE_TYPES):
        return [f"its rope_type must be one of {', '.join(ROPE_TYPES)}, found {kind!r}"]
    missing = ROPE_TYPES[kind] - scaling.keys()
    if missing:
        return [f"{kind} needs {', '.join(sorted(missing))}, too"]
    return [
        f"{key} must be a number above 0, found {scaling[key]!r}"
        for key in sorted(ROPE_TYPES[kind])
        if type(scaling[key]) not in (int, float) or not scaling[key] > 0
    ]


def layer_fields(config: dict) -> dict:
    """The keys of the config's `draft` block that a decoder's config gives, read as
    transformers' LlamaConfig reads it; None where it gives none."""
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (heads and config["hidden_size"] // heads)
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = {"rope_type": rope.pop("type", "default"), **rope}
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    sliding = "sliding_attention" in (config.get("layer_types") or [])
    return {
        "num_hidden_layers": config.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": config.get("intermediate_size"),
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rms_norm_eps": config.get("rms_norm_eps"),
        "sliding_window": config.get("sliding_window") if sliding else None,
    }


def draft_fields(path: Path) -> dict:
    """The config's `draft` block from an existing draft's config.json: flat, as vLLM loads it,
    or nested, as speculators writes it; or from a JSON file that has one of them under `config`.
    Norms that it does not tell are as vLLM takes them.

    Raises:
        ValueError: there is no such file, or it is not of a Llama draft as they are made here.
    """
    config = read_json(path)
    config = config.get("config", config)
    nested = "transformer_layer_config" in config
    layer = config.get("transformer_layer_config", config)
    kind = layer.get("model_type") if nested else str(config.get("architectures"))
    others = [f"{k} {v}" for k in FIXED if (v := (config | layer).get(k, FIXED[k])) != FIXED[k]]
    if "llama" not in str(kind).lower():
        others.append(f"architecture {kind}")
    if others:
        raise ValueError(f"{path}: {', '.join(others)}: not a Llama draft as they are made here")
    fields = layer_fields(layer)
    missing = [name for name in fields if fields[name] is None and name not in OPTIONAL]
    missing += [] if "draft_vocab_size" in config else ["draft_vocab_size"]
    if missing:
        raise ValueError(f"{path}: has no {', '.join(missing)}, so it is no draft's config")
    if len({*(layer.get("layer_types") or [None])}) > 1:
        raise ValueError(f"{path}: its layers differ in their attention, {layer['layer_types']}")
    inner = config.get("eagle_config") or {}
    before_fc = inner.get("norm_before_fc", config.get("norm_before_fc", False))
    output = config.get("norm_output", False)
    if before_fc != output:
        raise ValueError(
            f"{path}: norm_before_fc is {before_fc} and norm_output is {output}, neither eagle3 "
            "(both false) nor eagle3.1 (both true)"
        )
    return fields | {
        "norms": "eagle3.1" if output else "eagle3",
        "norm_before_residual": config.get("norm_before_residual", nested),
    }
