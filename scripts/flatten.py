"""Convert a draft between speculators' nested form, those of SpecForge and SafeAILab, and the flat
one that vLLM and SGLang load.

Weights are only renamed and cast to bfloat16. What a source leaves to a default is written out. Of
the verifier config.json and, where the draft has embeddings, those are read.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

from eyrie.checkpoint import expected_tensors, flat_name, is_nested, read_config, read_header
from eyrie.checks import check_light, tell
from eyrie.draft import flat_config, write_flat
from eyrie.errors import in_one_line
from eyrie.layouts import write_layout
from eyrie.reference import draft_fields
from eyrie.shape import DraftShape
from eyrie.verifier import VerifierConfig, load_tensor, load_verifier_config

# Names that a trainer's wrapper puts before a draft's own.
PREFIXES = ("draft_model.", "model.")
# The verifier's, which speculators keeps beside its own.
FOREIGN = ("verifier_lm_head.", "verifier_norm.")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """A draft's weights under the flat layout's names, in bf16; d2t int64 and t2d bool.

    Raises:
        ValueError: there are none in safetensors files, or one is cut off.
    """
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        read_header(path)
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor, plain = file.get_tensor(name), name
                for prefix in PREFIXES:
                    plain = plain.removeprefix(prefix)
                if tensor.is_floating_point():
                    tensor = tensor.to(torch.bfloat16)
                if not plain.startswith(FOREIGN):
                    tensors[flat_name(plain)] = tensor
    if not tensors:
        raise ValueError(
            f"{folder}: no .safetensors files. Weights in other files are pickled and may run code "
            "when they are read, so they are not: save them by safetensors.torch.save_file"
        )
    return tensors


def vllm_ids(config: dict, ids_are: str | None, layers: int) -> list[int]:
    """A draft's aux layer ids as vLLM's.

    ids_are: `entered` or `left`, which layers the config's ids tell of; None: nested ones and those
    of this workflow are entered, others as SGLang tells them apart, by whether they begin with 1.
    """
    inner = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or inner.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if not ids:  # of vLLM's default
        return [2, layers // 2, layers - 3]
    entered = is_nested(config) or "layer_ids" in inner
    if ids_are == "left" or (ids_are is None and not entered and ids[0] == 1):
        return [k + 1 for k in ids]
    return ids


def flat_draft(
    folder: Path, verifier: VerifierConfig, verifier_dir: Path, ids_are: str | None = None
) -> tuple[dict, dict[str, torch.Tensor]]:
    """A draft of any of the forms as a flat one: its config and weights.

    Embeddings that are the verifier's are left out. Without t2d it is made of d2t.

    Raises:
        ValueError: it is no Llama draft, or its weights are not those of its config.
    """
    found, tensors = read_config(folder), read_weights(folder)
    size = found.get("draft_vocab_size")
    shape = DraftShape(**draft_fields(folder / "config.json"))
    if shape.num_hidden_layers > len(tensors):
        raise ValueError(
            f"{folder}: {len(tensors)} tensors are not {shape.num_hidden_layers:,} layers"
        )
    config = flat_config(
        shape, verifier, vllm_ids(found, ids_are, verifier.num_hidden_layers), size
    )
    if "d2t" in tensors and size != verifier.vocab_size:
        d2t = tensors["d2t"] = tensors["d2t"].to(torch.int64)
        ids = torch.arange(len(d2t)) + d2t
        if not 0 <= int(ids.min()) <= int(ids.max()) < verifier.vocab_size:
            raise ValueError(
                f"{folder}: d2t holds no offsets: i + d2t[i] is from {int(ids.min())} to "
                f"{int(ids.max())}, and the verifier has {verifier.vocab_size} tokens"
            )
        t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        tensors["t2d"] = tensors.get("t2d", t2d).to(torch.bool)
    else:
        tensors.pop("d2t", None), tensors.pop("t2d", None)
    own = tensors.get("embed_tokens.weight")
    if own is not None:
        theirs = load_tensor(verifier_dir, "embed_tokens.weight")
        if torch.equal(own, theirs.to(torch.bfloat16)):
            del tensors["embed_tokens.weight"]
    wanted = {name: shape for name, (_, shape) in expected_tensors(config).items()}
    have = {name: list(t.shape) for name, t in tensors.items() if name != "embed_tokens.weight"}
    faults = [
        f"{name}: {have.get(name, 'none')}, by the config {wanted.get(name, 'none')}"
        for name in sorted(have.keys() | wanted.keys())
        if have.get(name) != wanted.get(name)
    ]
    if faults:
        raise ValueError(
            f"{folder}: its weights are not those of its config and of this verifier:\n  "
            + "\n  ".join(faults)
        )
    return config, {name: tensor.contiguous() for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path, help="a folder: config.json and .safetensors")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--to", choices=["flat", "sglang", "speculators"], default="flat")
    parser.add_argument(
        "--ids", choices=["entered", "left"], help="which layers the draft's ids tell of, counted "
        "from 0; as SGLang guesses if not given"
    )  # fmt: skip
    parser.add_argument("--verifier-name", help="its name on the Hub, for --to speculators")
    parser.add_argument("--draft-tokens", type=int, default=3, help="a step, for --to speculators")
    args = parser.parse_args()
    try:
        if args.out.exists():
            raise ValueError(f"{args.out} is there already; name another folder, or delete it")
        verifier = load_verifier_config(args.verifier, args.trust_remote_code)
        config, tensors = flat_draft(args.draft, verifier, args.verifier, args.ids)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.out.parent) as work:
            flat, out = Path(work) / "flat", Path(work) / "out"
            write_flat(flat, config, tensors)
            write_layout(
                flat,
                out,
                args.to,
                config,
                args.draft_tokens,
                args.verifier_name,
                lambda: load_tensor(args.verifier, "embed_tokens.weight"),
            )
            shutil.move(out, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"flatten: {error}")
    print(f"flatten: {args.out}, layers {config['eagle_aux_hidden_state_layer_ids']}")
    checks, _ = check_light(args.out, verifier.text, layout=args.to)
    tell({"": [check for check in checks if not check["ok"]]}, {})


if __name__ == "__main__":
    with in_one_line("flatten"):
        main()
