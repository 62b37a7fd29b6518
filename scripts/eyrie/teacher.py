"""Proof that stored states are the verifier's own: from them its head must say what it said.

A wrong layer, a wrong final norm and the states of another row all train without a complaint,
and serve badly.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from eyrie.shards import Rows, ShardError, read_states
from eyrie.verifier import VerifierConfig, load_head, load_tensor

# Positions of greedy answers looked at in a shard: enough to tell 90% from less, and no load beside
# extraction.
SAMPLE = 128
# Right states stored in bf16 lose one or two near ties in a hundred; wrong ones agree nowhere.
BOUND = 0.9
# Nats between mean log-probabilities. Rounding moves them by a hundredth, a wrong layer by several.
LOG_PROB_BOUND = 0.2
# Rows of the head at a time: that of a large vocabulary takes gigabytes in float32.
CHUNK = 16_384


class Teacher:
    """The verifier's final norm and head; dtype is the engine's."""

    def __init__(self, folder: Path, config: VerifierConfig, dtype: str):
        self.norm = load_tensor(folder, "model.norm.weight").float()
        self.head = load_head(folder)
        self.eps = config.rms_norm_eps
        # As the engine multiplies, so that near ties fall the same way; and in a quarter of the
        # time, where the CPU has bfloat16 in hardware.
        rough = dtype == "bfloat16" and torch.cpu._is_avx512_bf16_supported()
        self.dtype = torch.bfloat16 if rough else torch.float32

    def logits(self, states: torch.Tensor):
        """States before the final norm [n, H] -> (first token, logits [n, CHUNK]), part by part."""
        states = states.float()
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)
        states = (states * self.norm).to(self.dtype)
        for start in range(0, len(self.head), CHUNK):
            head = self.head[start : start + CHUNK].to(self.dtype)
            yield start, (states @ head.T).float()

    def next_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """States before the final norm [n, H] -> the most likely next tokens, int64 [n]."""
        best = torch.full((len(states),), float("-inf"))
        tokens = torch.zeros(len(states), dtype=torch.int64)
        for start, logits in self.logits(states):
            top, index = logits.max(-1)
            tokens = torch.where(top > best, index + start, tokens)
            best = torch.maximum(top, best)
        return tokens

    def log_probs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States before the final norm [n, H], the tokens that follow [n] -> their
        log-probabilities [n]."""
        total = torch.full((len(states),), float("-inf"))
        own = torch.zeros(len(states))
        for start, logits in self.logits(states):
            total = torch.logaddexp(total, logits.logsumexp(-1))
            here = ((tokens >= start) & (tokens < start + logits.shape[1])).nonzero().flatten()
            own[here] = logits[here, tokens[here].long() - start]
        return own - total

    def check(self, path: Path, rows: Rows) -> float:
        """The share of sampled tokens of greedy answers that their states give back.

        Raises:
            ShardError: it is below BOUND.
        """
        written = rows.loss_mask.clone()
        written[rows.row_offsets[:-1]] = False
        places = written.nonzero().flatten()
        if not len(places):  # each answer ended with its first token
            return 1.0
        places = places[torch.linspace(0, len(places) - 1, min(SAMPLE, len(places))).long()]
        with safe_open(path, "pt") as file:
            before = torch.cat([read_states(file, p - 1, p)[:, -1] for p in places.tolist()])
        right = float((self.next_tokens(before) == rows.input_ids[places]).float().mean())
        if right < BOUND:
            raise ShardError(
                f"{path}: of {len(places)} tokens that the verifier wrote, its head gives back "
                f"{right:.0%} from the stored states, at least {BOUND:.0%} is right. They are of a "
                "wrong layer, norm or row; nothing trained on them would serve"
            )
        return right

    def compare(self, path: Path, rows: Rows, told: dict[int, list[float]]) -> float:
        """How far the mean log-probability that stored states give lies from the engine's own.

        told: of some rows, by number, what the engine told of tokens 1, 2, ... of the row.

        Raises:
            ShardError: it is above LOG_PROB_BOUND nats in a row.
        """
        states, tokens = [], []
        with safe_open(path, "pt") as file:
            for row, expected in told.items():
                start = int(rows.row_offsets[row])
                states.append(read_states(file, start, start + len(expected))[:, -1])
                tokens.append(rows.row(row)[1 : 1 + len(expected)])
        # Together, since the head is the larger factor.
        found = self.log_probs(torch.cat(states), torch.cat(tokens))
        worst = 0.0
        for own, (row, expected) in zip(
            found.split(list(map(len, tokens))), told.items(), strict=True
        ):
            own, engine = float(own.mean()), sum(expected) / len(expected)
            error = abs(own - engine)
            worst = max(worst, error)
            if not error <= LOG_PROB_BOUND:
                raise ShardError(
                    f"{path}: row {row}, its head gives the tokens a mean log-probability of "
                    f"{own:.2f} from the stored states, the engine {engine:.2f}; at most "
                    f"{LOG_PROB_BOUND} apart is right. They are of a wrong layer, norm or row; "
                    "nothing trained on them would serve"
                )
        return worst
