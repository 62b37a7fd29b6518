"""Start training from an existing draft: a flat checkpoint, as vLLM loads it, or speculators' own.

Embeddings and head are the verifier's rows, whichever tokens the draft's vocabulary has, so a
draft of another vocabulary is as good a start. What is copied are the weights that training
changes, by name.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from eyrie.draft import FROZEN, DraftShape, unlike
from eyrie.files import sha256_file
from eyrie.reference import draft_fields

NOT_TRAINED = (*FROZEN, "d2t", "t2d")


def weight_files(folder: Path) -> list[Path]:
    """Raises ValueError where the folder holds no draft."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise ValueError(
            f"train.init_from: {folder} is no draft: a config.json and .safetensors are wanted"
        )
    return files


def content(folder: Path) -> list[str]:
    """The sha256 of each file that a start from `folder` reads."""
    return [sha256_file(path) for path in (folder / "config.json", *weight_files(folder))]


def warm_start(model: torch.nn.Module, shape: DraftShape, folder: Path) -> list[str]:
    """Copy a draft's weights into a speculators draft model.

    Returns in what else the two differ, a line a field: no weight tells of these.

    Raises:
        ValueError: the weights are not the model's by name and shape; it lists them.
    """
    found = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if not name.startswith(NOT_TRAINED):
                    found[name.replace("midlayer.", "layers.0.")] = file.get_tensor(name)
    own = {n: p for n, p in model.named_parameters() if not n.startswith(NOT_TRAINED)}
    faults = [
        f"{name}: {shape_of(found.get(name))} there, {shape_of(own.get(name))} here"
        for name in sorted(found.keys() | own.keys())
        if shape_of(found.get(name)) != shape_of(own.get(name))
    ]
    if faults:
        raise ValueError(
            f"train.init_from: the weights of {folder} are of another shape than this draft's; "
            "give the draft block its shape (draft.reference takes it from a config.json):\n  "
            + "\n  ".join(faults)
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])
    return unlike(shape, draft_fields(folder / "config.json"), "{} there")


def shape_of(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
