"""Proof that stored states are the verifier's own: from them its head must say what it said.

A wrong layer, a wrong final norm and the states of another row all train without a complaint,
and serve badly.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from eyrie.shards import Rows, ShardError
from eyrie.verifier import VerifierConfig, load_tensor

# Positions looked at in a shard: enough to tell 90% from less, and no load beside extraction.
SAMPLE = 128
# Right states stored in bf16 lose one or two near ties in a hundred; wrong ones agree nowhere.
BOUND = 0.9
# Rows of the head at a time: that of a large vocabulary takes gigabytes in float32.
CHUNK = 16_384


class Teacher:
    """The verifier's final norm and head."""

    def __init__(self, folder: Path, config: VerifierConfig):
        self.norm = load_tensor(folder, "model.norm.weight").float()
        head = load_tensor(folder, "lm_head.weight")
        # Tied: the embeddings are the head.
        self.head = load_tensor(folder, "embed_tokens.weight") if head is None else head
        self.eps = config.rms_norm_eps

    def next_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """States before the final norm [n, H] -> the most likely next tokens, int64 [n]."""
        states = states.float()
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)
        states = states * self.norm
        best = torch.full((len(states),), float("-inf"))
        tokens = torch.zeros(len(states), dtype=torch.int64)
        for start in range(0, len(self.head), CHUNK):
            top, index = (states @ self.head[start : start + CHUNK].float().T).max(-1)
            tokens = torch.where(top > best, index + start, tokens)
            best = torch.maximum(top, best)
        return tokens

    def check(self, path: Path, rows: Rows) -> float:
        """The share of sampled tokens of greedy answers that their states give back.

        Raises:
            ShardError: it is below BOUND.
        """
        written = rows.loss_mask.clone()
        written[rows.row_offsets[:-1]] = False
        places = written.nonzero().flatten()
        places = places[torch.linspace(0, len(places) - 1, min(SAMPLE, len(places))).long()]
        with safe_open(path, "pt") as file:
            states = file.get_slice("hidden_states")
            before = torch.cat([states[p - 1 : p, -1] for p in places.tolist()])
        right = float((self.next_tokens(before) == rows.input_ids[places]).float().mean())
        if right < BOUND:
            raise ShardError(
                f"{path}: of {len(places)} tokens that the verifier wrote, its head gives back "
                f"{right:.0%} from the stored states, at least {BOUND:.0%} is right. They are of a "
                "wrong layer, norm or row; nothing trained on them would serve"
            )
        return right
