"""A draft's checkpoint as it lies on disk: its config, the header of its weights, and what the
weights must be by the config. Light on imports, so that a wrong config is told at once.

Flat is what vLLM and SGLang load: one Llama config with EAGLE-3's fields beside it, and the first
layer's weights under `midlayer.`. Nested is speculators' own: the Llama config in
`transformer_layer_config`, and the first layer under `layers.0.`.
"""

import json
from pathlib import Path

from eyrie.files import read_json
from eyrie.misfit import misfit

# What vLLM's Eagle3LlamaForCausalLM is called in a flat config.
ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = "model.safetensors"
# The header of a safetensors file has at most so many bytes, by its own reader.
HEADER_BYTES = 100_000_000
# What of a config holds more fields, as `misfit` takes it. What is in them is checked, or not used.
PARTS = {
    "transformer_layer_config": {},
    "speculators_config": ({},),
    "eagle_config": ({},),
    "eagle_aux_hidden_state_layer_ids": ([object],),
}


def read_config(folder: Path) -> dict:
    """Raises ValueError where there is no JSON object, or none where one must be in it."""
    config = read_json(folder / "config.json")
    if fault := misfit(config, {key: PARTS[key] for key in PARTS if key in config}):
        raise ValueError(f"{folder / 'config.json'}: {fault}")
    return config


def read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape) of a safetensors file's tensors, from its first bytes alone.

    Raises:
        ValueError: the file is cut off, or is no safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, HEADER_BYTES):
            raise ValueError(f"{path}: cut off, or no safetensors file ({size:,} bytes)")
        text = file.read(length)
    try:
        header = {k: v for k, v in json.loads(text).items() if k != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        found = {n: (str(e["dtype"]), [int(k) for k in e["shape"]]) for n, e in header.items()}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise ValueError(f"{path}: its header is not that of a safetensors file") from None
    if size != 8 + length + end:
        raise ValueError(f"{path}: {size:,} bytes, its header tells of {8 + length + end:,}")
    return found


def is_nested(config: dict) -> bool:
    return "transformer_layer_config" in config


def flat_name(name: str) -> str:
    """What a weight of a speculators draft is called in a flat checkpoint."""
    return name.replace("layers.0.", "midlayer.")


def nested_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def as_flat(config: dict) -> dict:
    """A nested config's fields where a flat one has them, read as vLLM reads the nested one."""
    layer = dict(config["transformer_layer_config"])
    rope = layer.pop("rope_parameters", None)
    if rope is not None and not isinstance(rope, dict):
        layer["rope_parameters"] = rope  # which no check passes
    elif rope is not None:
        rope = dict(rope)
        layer["rope_theta"] = rope.pop("rope_theta", None)
        layer["rope_scaling"] = None if rope.get("rope_type") in (None, "default") else rope
    ids = config.get("eagle_aux_hidden_state_layer_ids") or []
    flags = {
        # speculators' own default is false, vLLM takes true.
        "norm_before_residual": config.get("norm_before_residual", True),
        **{key: config.get(key, False) for key in ("norm_before_fc", "fc_norm", "norm_output")},
    }
    return {
        **layer,
        "architectures": [ARCHITECTURE],
        "dtype": config.get("dtype", layer.get("dtype")),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": config.get("target_hidden_size") or layer.get("hidden_size"),
        **flags,
        **layer_id_fields(ids, flags["norm_before_fc"]),
    }


def layer_id_fields(ids: list[int], norm_before_fc: bool, layout: str | None = None) -> dict:
    """vLLM's two model runners read the aux layer ids from different places, its loader counts
    them in a third, and SGLang in a fourth: all are written.

    SGLang of before May 2026 takes any ids for layers left, later ones only ids that begin with
    1. Ids that enter layers 2, ... are therefore told as 1, ... where SGLang alone reads them.
    """
    left = layout == "sglang" and ids[:1] == [2]
    return {
        "num_aux_hidden_states": len(ids),
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids] if left else ids,
            "layer_ids": ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": norm_before_fc,
        },
    }


def expected_tensors(config: dict) -> dict[str, tuple[str, list[int]]]:
    """Name -> (safetensors dtype, shape) of every tensor of a flat checkpoint, from its config."""
    hidden, draft_vocab = config["hidden_size"], config["draft_vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    middle = config["intermediate_size"]
    states = config["num_aux_hidden_states"]
    aux = states * config["target_hidden_size"]
    tensors = {
        "fc.weight": [hidden, aux],
        "norm.weight": [hidden],
        "lm_head.weight": [draft_vocab, hidden],
    }
    if config["norm_before_fc"]:
        tensors["input_norm.weight"] = [aux]
    if config["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": [config["target_hidden_size"]] for i in range(states)}
    for layer in range(config["num_hidden_layers"]):
        prefix, width = ("midlayer", 2 * hidden) if layer == 0 else (f"layers.{layer}", hidden)
        tensors |= {
            f"{prefix}.input_layernorm.weight": [hidden],
            f"{prefix}.post_attention_layernorm.weight": [hidden],
            f"{prefix}.self_attn.q_proj.weight": [queries, width],
            f"{prefix}.self_attn.k_proj.weight": [keys, width],
            f"{prefix}.self_attn.v_proj.weight": [keys, width],
            f"{prefix}.self_attn.o_proj.weight": [hidden, queries],
            f"{prefix}.mlp.gate_proj.weight": [middle, hidden],
            f"{prefix}.mlp.up_proj.weight": [middle, hidden],
            f"{prefix}.mlp.down_proj.weight": [hidden, middle],
        }
        if layer == 0:
            tensors[f"{prefix}.hidden_norm.weight"] = [hidden]
    typed = {name: ("BF16", shape) for name, shape in tensors.items()}
    if draft_vocab != config["vocab_size"]:
        typed |= {"d2t": ("I64", [draft_vocab]), "t2d": ("BOOL", [config["vocab_size"]])}
    return typed


def sglang_faults(config: dict) -> list[str]:
    """Why SGLang would not serve a flat draft as it was trained, a line a reason; [] if it would.

    Read in its llama_eagle3.py and in the pull requests that changed it, not run.
    """
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    wanted = config.get("eagle_aux_hidden_state_layer_ids")
    faults = []
    # Since #25454 ids that begin with 1 are taken for layers left, any others for layers entered.
    taken = [k + 1 for k in ids] if ids[:1] == [1] else ids
    if taken != wanted:
        faults.append(f"it would take the states of layers {taken}, not {wanted}")
    if config.get("norm_before_residual"):
        faults.append("it has no norm_before_residual")
    return faults


def sglang_since(config: dict) -> str | None:
    """What a draft needs of SGLang beyond its first EAGLE-3, and since when it is there."""
    needs = {
        "norm_before_fc": ("norm_before_fc", "July 2026"),
        "norm_output": ("norm_output", "May 2026"),
        "fc_norm": ("fc_norm", "May 2026"),
    }
    found = [needs[key] for key in needs if config[key]]
    found += [("several layers", "May 2026")] if config["num_hidden_layers"] > 1 else []
    found += [("other than 3 states", "May 2026")] if config["num_aux_hidden_states"] != 3 else []
    if not found:
        return None
    return ", ".join(f"{name} (SGLang of {since} or later)" for name, since in found)
