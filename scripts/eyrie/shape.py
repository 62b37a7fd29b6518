"""The draft's shape, as the config's `draft` block and scripts' options name it."""

import argparse
import json
from dataclasses import dataclass, fields


@dataclass
class DraftShape:
    """Every choice that the draft's architecture leaves open, as the config names them."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    norms: str  # eagle3, or eagle3.1: normed before fc, and passed on normed
    norm_before_residual: bool
    rope_scaling: dict | None = None
    sliding_window: int | None = None  # tokens that each layer looks back, itself included

    @property
    def normed(self) -> bool:
        return self.norms == "eagle3.1"


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    for field in fields(DraftShape):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true")
        elif field.default is None:
            parser.add_argument(option, type=json.loads, help="JSON, null by default")
        else:
            choices = ["eagle3", "eagle3.1"] if field.name == "norms" else None
            parser.add_argument(option, type=field.type, choices=choices, required=True)


def shape_of(args) -> DraftShape:
    """From the options of `add_shape_arguments`."""
    return DraftShape(**{field.name: getattr(args, field.name) for field in fields(DraftShape)})
