"""The draft: its config, its speculators model, and the flat checkpoint that vLLM loads."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyrie.checkpoint import ARCHITECTURE, WEIGHTS, flat_name, layer_id_fields
from eyrie.files import atomic, write_json
from eyrie.reference import layer_fields
from eyrie.shape import DraftShape
from eyrie.verifier import VerifierConfig, load_head, load_tensor

# Frozen copies of the verifier's own tensors in a speculators draft; build_model makes them.
FROZEN = ("embed_tokens.", "lm_head.", "verifier_")


def differences(shape: DraftShape, verifier: VerifierConfig) -> list[str]:
    """In what the draft's layers are not the verifier's, a line a field."""
    own = layer_fields(verifier.text)
    del own["num_hidden_layers"]
    return unlike(shape, own, "the verifier's {}")


def unlike(shape: DraftShape, fields: dict, words: str) -> list[str]:
    """The fields in which a shape is not another's, a line each; `words` says whose they are."""
    return [
        f"draft.{name} {getattr(shape, name)}, {words.format(value)}"
        for name, value in fields.items()
        if not same(value, getattr(shape, name))
    ]


def same(one, other) -> bool:
    """Equal, or equal as float32: a config converted from GGUF has 1e-5 rounded."""
    return math.isclose(one, other, rel_tol=1e-6) if isinstance(one, float) else one == other


def layer_config(shape: DraftShape, verifier: VerifierConfig) -> dict:
    """The draft's decoder as a Llama config, no field left to a default.

    Raises:
        ValueError: transformers, and so vLLM, takes no such Llama.
    """
    if verifier.hidden_size % shape.num_attention_heads:
        raise ValueError(
            f"draft.num_attention_heads: {shape.num_attention_heads} does not divide the "
            f"verifier's hidden_size, {verifier.hidden_size}; such a draft cannot be loaded"
        )
    window = {}
    if shape.sliding_window:
        # vLLM and transformers look back less only where layer_types says so.
        window = {
            "sliding_window": shape.sliding_window,
            "layer_types": ["sliding_attention"] * shape.num_hidden_layers,
        }
    return {
        "model_type": "llama",
        "vocab_size": verifier.vocab_size,
        "hidden_size": verifier.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        # A copy: LlamaConfig writes into it.
        "rope_scaling": shape.rope_scaling and dict(shape.rope_scaling),
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": verifier.bos_token_id,
        "eos_token_id": verifier.eos_token_ids[0] if verifier.eos_token_ids else None,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        **window,
    }


def flat_config(
    shape: DraftShape, verifier: VerifierConfig, layer_ids: list[int], draft_vocab_size: int
) -> dict:
    """config.json of the flat checkpoint. A norm flag left out would silently drop its weights."""
    return {
        "architectures": [ARCHITECTURE],
        **layer_config(shape, verifier),
        "dtype": "bfloat16",
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": verifier.hidden_size,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.normed,
        "fc_norm": False,
        "norm_output": shape.normed,
        **layer_id_fields(layer_ids, shape.normed),
    }


def flat_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A speculators Eagle3DraftModel's weights in bf16 under the flat checkpoint's names, without
    the verifier's own, which vLLM and SGLang share. They are where the model is, on meta too."""
    return {
        flat_name(name): t.to(torch.bfloat16) if t.is_floating_point() else t
        for name, t in model.state_dict().items()
        if not name.startswith(("embed_tokens.", "verifier_"))
    }


def flat_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As `flat_state`, to be written."""
    return {name: t.detach().cpu().contiguous() for name, t in flat_state(model).items()}


def write_flat(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / WEIGHTS) as partial:
        save_file(tensors, partial, {"format": "pt"})
    write_json(folder / "config.json", config)


def speculator_config(
    shape: DraftShape,
    verifier: VerifierConfig,
    layer_ids: list[int],
    ttt_steps: int,
    draft_vocab_size: int,
):
    """The config of speculators' Eagle3DraftModel."""
    from speculators.config import SpeculatorsConfig
    from speculators.config import VerifierConfig as SpeculatorsVerifier
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = layer_config(shape, verifier)
    del layer["model_type"]
    return Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig(
            **layer,
            attn_implementation="simple_flex_attention" if torch.cuda.is_available() else "sdpa",
        ),
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.normed,
        norm_output=shape.normed,
        eagle_aux_hidden_state_layer_ids=layer_ids,
        target_hidden_size=verifier.hidden_size,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            # Its weights are read by `build_model`, wherever they lie.
            verifier=SpeculatorsVerifier(name_or_path=None, architectures=[]),
        ),
    )


def build_model(
    cls,
    shape: DraftShape,
    verifier: VerifierConfig,
    verifier_dir: Path,
    layer_ids: list[int],
    ttt_steps: int,
    draft_vocab_size: int,
    d2t: torch.Tensor,
    t2d: torch.Tensor,
):
    """A speculators draft model of class `cls` with the verifier's embeddings, head and norm.

    A map of the whole vocabulary, which changes no token, is left out.
    """
    model = cls(speculator_config(shape, verifier, layer_ids, ttt_steps, draft_vocab_size))
    model.load_vocab_mappings(t2d, d2t)
    head = load_head(verifier_dir)[t2d]
    weights = {
        "embed_tokens": load_tensor(verifier_dir, "embed_tokens.weight"),
        "lm_head": head,
        "verifier_lm_head": head,
        "verifier_norm": load_tensor(verifier_dir, "model.norm.weight"),
    }
    for name, weight in weights.items():
        model.get_submodule(name).load_state_dict({"weight": weight})
    # The verifier's answers are those of its own norm, whatever the draft's.
    model.verifier_norm.variance_epsilon = verifier.rms_norm_eps
    return model
