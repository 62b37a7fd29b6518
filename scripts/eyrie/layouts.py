"""A checkpoint in another layout than vLLM's flat one: its config.json and its files."""

from pathlib import Path

from eyrie.checkpoint import WEIGHTS, layer_id_fields, nested_name, sglang_faults
from eyrie.files import atomic, link_or_copy, write_json

# Fields of a flat config that a nested one has at its top, and those that it has not at all.
TOP = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)
FLAT_ONLY = ("architectures", "dtype", "torch_dtype", "num_aux_hidden_states", "eagle_config")


def as_nested(config: dict, speculative_tokens: int, verifier: str | None) -> dict:
    """A flat config in the form that speculators reads and writes.

    verifier: its name on the Hub, which `vllm serve DRAFT` looks for; None where it has none.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "dtype": config["dtype"],
        **{key: config[key] for key in TOP},
        # vLLM reads this part without a class's defaults, so nothing is left out of it.
        "transformer_layer_config": {
            key: value for key, value in config.items() if key not in (*TOP, *FLAT_ONLY)
        },
    }


def as_sglang(config: dict) -> dict:
    """A flat config with the layer ids as every version of SGLang takes them; vLLM's runners read
    their own first.

    Raises:
        ValueError: SGLang could not serve the draft as it was trained.
    """
    ids = layer_id_fields(
        config["eagle_aux_hidden_state_layer_ids"], config["norm_before_fc"], "sglang"
    )
    config = {**config, **ids, "torch_dtype": config["dtype"]}
    if faults := sglang_faults(config):
        raise ValueError(
            f"train.layout: SGLang cannot serve this draft: {'; '.join(faults)}. Take other "
            "extract.layer_ids or draft settings, or layout: flat"
        )
    return config


def write_layout(
    source: Path,
    folder: Path,
    layout: str,
    config: dict,
    tokens: int,
    verifier: str | None,
    embeddings,
) -> None:
    """Write the flat checkpoint of `source`, whose config is `config`, to `folder`.

    Weights that stay as they are become a hard link. tokens, verifier: as in `as_nested`.
    embeddings: returns the verifier's, [vocab, hidden], which speculators does not share: where
    they are missing it leaves them as memory was.
    """
    if layout == "speculators":
        import torch
        from safetensors.torch import load_file, save_file

        tensors = {nested_name(n): t for n, t in load_file(source / WEIGHTS).items()}
        tensors.setdefault("embed_tokens.weight", embeddings().to(torch.bfloat16))
        with atomic(folder / WEIGHTS) as partial:
            save_file(tensors, partial, {"format": "pt"})
        config = as_nested(config, tokens, verifier)
    else:
        link_or_copy(source / WEIGHTS, folder / WEIGHTS)
        config = as_sglang(config) if layout == "sglang" else config
    write_json(folder / "config.json", config)


def hub_name(source: str) -> str | None:
    """ORG/NAME of a source hf:ORG/NAME@REVISION; None of another."""
    return source[3:].split("@")[0] if source.startswith("hf:") else None
