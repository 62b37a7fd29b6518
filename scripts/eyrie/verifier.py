"""What the pipeline needs to know of a verifier, from its config and weights' headers alone."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from eyrie.checkpoint import read_header
from eyrie.files import read_json

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

# Text models whose final norm multiplies by 1 + w. Training and `Teacher` multiply by w.
ONE_PLUS_W = {
    "gemma",
    "gemma2",
    "gemma3",
    "minimax_m3_vl",
    "nemotron",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
    "recurrent_gemma",
    "step3p5",
    "step3p7",
    "vaultgemma",
}
# Keys of models with a recurrent state in some or all layers, some of which have no layer_types.
RECURRENT = ("mamba_d_state", "ssm_state_size", "state_size")
# Keys of models that do more to the head's logits than the head does, where they are set.
SCALED = ("logits_scaling", "logit_scale", "final_logit_softcapping")


@dataclass
class VerifierConfig:
    """The text model's sizes, wherever in the config they were."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: list[int]  # the text model's own first
    text: dict

    def extraction_ids(self, layer_ids: list[int]) -> list[int]:
        """As the function of this name."""
        return extraction_ids(layer_ids, self.num_hidden_layers)


def extraction_ids(layer_ids: list[int], last: int) -> list[int]:
    """The aux layer ids and, last, the id of the state before the final norm, which is the number
    of layers.

    Raises:
        ValueError: ids that do not ascend or are not the verifier's. vLLM would sort and merge
            them in silence.
    """
    if layer_ids != sorted(set(layer_ids)) or not 0 < layer_ids[0] <= layer_ids[-1] < last:
        raise ValueError(
            f"layer_ids {layer_ids}: give ascending ids between 1 and {last - 1} (the verifier "
            f"has {last} layers; id k is the state that enters layer k)"
            + (f". vLLM's default is {[2, last // 2, last - 3]}" if last > 6 else "")
        )
    return [*layer_ids, last]


def draft_size(asked: int | str, vocab_size: int) -> int:
    """The draft's vocabulary in tokens: `full` is the verifier's.

    Raises:
        ValueError: more are asked for than the verifier has.
    """
    size = vocab_size if asked == "full" else int(asked)
    if size > vocab_size:
        raise ValueError(
            f"vocab.draft_vocab_size: {size:,} is more than the verifier's vocabulary, "
            f"{vocab_size:,}; `full` takes all of that"
        )
    return size


def read_text_config(folder: Path) -> dict:
    """The text model's config as it is in config.json, without the import of transformers, which
    takes seconds. Keys that are not written there are missing."""
    path = folder / "config.json"
    return text_config(read_json(path), path)


def text_sizes(folder: Path, trust_remote_code: bool = False) -> dict:
    """The text model's config as it is written, or as transformers reads it where that leaves a
    size to a default."""
    text = read_text_config(folder)
    sizes = {"hidden_size", "num_hidden_layers", "vocab_size"}
    return text if sizes <= text.keys() else load_verifier_config(folder, trust_remote_code).text


def text_config(config: dict, name: str | Path = "config") -> dict:
    """Descend into a multimodal config (Kimi-K2.5, Qwen-VL) until the text model is found.

    Raises:
        ValueError: there is none; told by the `name` of the config's file.
    """
    while "hidden_size" not in config:
        inner = next((config[k] for k in NESTED if isinstance(config.get(k), dict)), None)
        if inner is None:
            raise ValueError(
                f"{name}: no hidden_size in the config, nor in {', '.join(NESTED)}; its keys are "
                f"{sorted(config)}"
            )
        config = inner
    return config


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights' files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refuse_unsupported(text: dict) -> None:
    """Refuse what would be extracted or trained wrongly, from the text model's config alone.

    Raises:
        ValueError: naming the model type, what is not supported, and the way out.
    """
    kind = text["model_type"]
    if kind.removesuffix("_text") in ONE_PLUS_W:
        raise ValueError(
            f"verifier of type {kind}: its final norm multiplies by 1 + w, and training computes "
            "the verifier's answers with a norm that multiplies by w, so a draft would learn wrong "
            "ones. Take a verifier of another family, Llama or Qwen3 say"
        )
    if "rms_norm_eps" not in text:
        raise ValueError(
            f"verifier of type {kind}: its config has no rms_norm_eps, and training computes the "
            "verifier's answers with an RMS norm. Take a verifier of another family, Llama or "
            "Qwen3 say"
        )
    scaled = [key for key in SCALED if text.get(key) not in (None, 1)]
    if scaled:
        raise ValueError(
            f"verifier of type {kind}: it scales its head's logits ({', '.join(scaled)}), and "
            "training takes them as the head gives them, so a draft would learn other "
            "probabilities. Take a verifier of another family, Llama or Qwen3 say"
        )
    layers = sorted(set(text.get("layer_types") or []))
    recurrent = [key for key in RECURRENT if key in text]
    if len(layers) > 1 or "linear_attention" in layers or recurrent:
        raise ValueError(
            f"verifier of type {kind}: its layers keep caches of several kinds "
            f"({', '.join(layers or recurrent)}), and states are taken from vLLM's one cache of "
            "full attention. Take a verifier with the same attention in every layer"
        )


def end_tokens(*configs: dict) -> list[int]:
    """The eos_token_id of all of some configs, which may be one, a list or none, in their order."""
    named = [config.get("eos_token_id") for config in configs]
    lists = [eos if isinstance(eos, list) else [eos] for eos in named if eos is not None]
    return list(dict.fromkeys(itertools.chain(*lists)))


def load_verifier_config(folder: Path, trust_remote_code: bool = False) -> VerifierConfig:
    """Read a verifier's config.

    Raises:
        ValueError: it is not one of a text model, or of one that is not supported.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    read_json(path)
    try:
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of every kind, and few name the file
        raise ValueError(
            f"{path}: transformers cannot read it ({type(error).__name__}: {error})"
        ) from error
    text = text_config(loaded.to_dict(), path)
    refuse_unsupported(text)
    # Chat models name their end-of-turn token there, beside or instead of the config's.
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    return VerifierConfig(
        hidden_size=text["hidden_size"],
        num_hidden_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
        rms_norm_eps=text["rms_norm_eps"],
        max_position_embeddings=text["max_position_embeddings"],
        bos_token_id=text.get("bos_token_id"),
        eos_token_ids=end_tokens(text, loaded.to_dict(), generation),
        text=text,
    )


def find_tensor(folder: Path, suffix: str) -> tuple[Path, str] | None:
    """The file and name of the one tensor whose name ends in `suffix`, or None.

    Names differ by wrapper: model.norm.weight, language_model.model.norm.weight.

    Raises:
        ValueError: several tensors end so.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index, "weight_map")["weight_map"]
    else:
        names = {}
        for path in sorted(folder.glob("*.safetensors")):
            names |= dict.fromkeys(read_header(path), path.name)
    found = [n for n in names if n == suffix or n.endswith("." + suffix)]
    if len(found) > 1:
        raise ValueError(f"{folder}: several tensors end in {suffix}: {found}")
    return (folder / names[found[0]], found[0]) if found else None


def tensor_shape(path: Path, name: str) -> list[int]:
    """Of a tensor that `find_tensor` found."""
    return read_header(path)[name][1]


def load_tensor(folder: Path, suffix: str):
    """The tensor whose name ends in `suffix`, or None where there is none."""
    found = find_tensor(folder, suffix)
    if found is None:
        return None
    with safe_open(found[0], "pt") as file:
        return file.get_tensor(found[1])


def load_head(folder: Path):
    """The head's weight [vocab, hidden]: the embeddings, where these are all there is."""
    head = load_tensor(folder, "lm_head.weight")
    return load_tensor(folder, "embed_tokens.weight") if head is None else head
