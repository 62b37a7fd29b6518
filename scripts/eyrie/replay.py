"""What a flat checkpoint drafts when it is read as vLLM reads it, in plain torch and beside no
engine, so that one setting can be read otherwise and the two compared.

After vLLM's llama_eagle3: the state of token p and the embedding of token p + 1 draft token p + 2,
and each further step takes the state that the draft itself made.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from eyrie.checkpoint import read_config
from eyrie.reference import layer_fields


@dataclass(frozen=True)
class Reading:
    """The settings that no tensor's shape gives away: a wrong one loads and serves badly."""

    layer_ids: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    sliding_window: int | None
    draft_to_verifier: torch.Tensor  # int64 [draft_vocab_size], the verifier's token of each


def read_settings(config: dict, draft_to_verifier: torch.Tensor) -> Reading:
    """A flat config.json as vLLM reads it. Raises KeyError where a setting is missing."""
    nested = config.get("eagle_config") or {}
    layer = layer_fields(config)
    return Reading(
        layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        norm_before_residual=config["norm_before_residual"],
        norm_before_fc=nested.get("norm_before_fc", config["norm_before_fc"]),
        norm_output=config["norm_output"],
        draft_to_verifier=draft_to_verifier,
        **{
            key: layer[key]
            for key in ("rms_norm_eps", "rope_theta", "rope_scaling", "sliding_window")
        },
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@dataclass
class Passage:
    """A text of the verifier's, and the states from which its tokens are drafted.

    ids int64 [n]; answer: the first token that the verifier wrote; states: of each layer id,
    float32 [n, hidden].
    """

    ids: torch.Tensor
    answer: int
    states: dict[int, torch.Tensor]


class FlatDraft:
    """The weights of a flat checkpoint and the verifier's embeddings, in float32."""

    def __init__(self, folder: Path, embeddings: torch.Tensor):
        self.config = read_config(folder)
        tensors = load_file(folder / "model.safetensors")
        self.d2t, self.t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
        self.weights = {name: tensor.float() for name, tensor in tensors.items()}
        self.embeddings = embeddings
        ids = torch.arange(len(tensors["lm_head.weight"]))
        # What vLLM adds up, whether or not it is a token.
        self.settings = read_settings(self.config, ids if self.d2t is None else ids + self.d2t)

    def rotary(self, settings: Reading, positions: torch.Tensor):
        """cos and sin, each [n, head_dim], as transformers turns them."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = {"rope_type": "default", **(settings.rope_scaling or {})}
        config = LlamaConfig(
            hidden_size=self.config["hidden_size"],
            num_attention_heads=self.config["num_attention_heads"],
            head_dim=self.config["head_dim"],
            max_position_embeddings=self.config["max_position_embeddings"],
            rope_parameters={**rope, "rope_theta": settings.rope_theta},
        )
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
        return cos[0], sin[0]

    @torch.inference_mode()
    def drafted(self, settings: Reading, passage: Passage, steps: int) -> torch.Tensor:
        """The verifier's tokens that are drafted as the first to the last of `steps` from each
        position, as if those before were accepted; int64 [n - 1, steps]."""
        w, eps = self.weights, settings.rms_norm_eps
        heads, kv_heads, dim = (
            self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        ids, count = passage.ids, len(passage.ids) - 1
        hidden = torch.cat([passage.states[k][:-1] for k in settings.layer_ids], -1)
        if settings.norm_before_fc:
            hidden = rms_norm(hidden, w["input_norm.weight"], eps)
        hidden = hidden @ w["fc.weight"].T
        place, layers = torch.arange(count), range(self.config["num_hidden_layers"])
        keys, values = ([[] for _ in layers] for _ in "kv")
        tokens = []

        def heads_of(x, name):
            return (x @ w[name].T).view(count, -1, dim).transpose(0, 1)

        for step in range(steps):
            cos, sin = self.rotary(settings, place + step)

            def turned(x, cos=cos, sin=sin):
                half = dim // 2
                return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

            for layer in layers:
                name = f"layers.{layer}." if layer else "midlayer."
                if layer:
                    residual = hidden
                    x = rms_norm(hidden, w[name + "input_layernorm.weight"], eps)
                else:
                    normed = rms_norm(hidden, w[name + "hidden_norm.weight"], eps)
                    residual = normed if settings.norm_before_residual else hidden
                    embedded = self.embeddings[ids[(place + 1 + step).clamp(max=count)]]
                    embedded = rms_norm(embedded, w[name + "input_layernorm.weight"], eps)
                    x = torch.cat([embedded, normed], -1)
                query = turned(heads_of(x, name + "self_attn.q_proj.weight"))
                query = query.view(kv_heads, heads // kv_heads, count, dim)
                keys[layer].append(turned(heads_of(x, name + "self_attn.k_proj.weight")))
                values[layer].append(heads_of(x, name + "self_attn.v_proj.weight"))
                back = place[:, None] - place
                seen = back >= 0
                if settings.sliding_window:
                    seen &= back + step < settings.sliding_window
                # The first step's keys are those of every token up to here, those of the others
                # are of this position's own draft.
                scores = query @ keys[layer][0][:, None].transpose(-1, -2)
                scores = scores.masked_fill(~seen, float("-inf"))
                own = [(query * k[:, None]).sum(-1, keepdim=True) for k in keys[layer][1:]]
                weights = (torch.cat([scores, *own], -1) / dim**0.5).softmax(-1)
                mixed = weights[..., :count] @ values[layer][0][:, None]
                for number, value in enumerate(values[layer][1:]):
                    mixed = mixed + weights[..., count + number, None] * value[:, None]
                mixed = mixed.reshape(heads, count, dim).transpose(0, 1).reshape(count, -1)
                hidden = residual + mixed @ w[name + "self_attn.o_proj.weight"].T
                x = rms_norm(hidden, w[name + "post_attention_layernorm.weight"], eps)
                gate = F.silu(x @ w[name + "mlp.gate_proj.weight"].T)
                x = gate * (x @ w[name + "mlp.up_proj.weight"].T)
                hidden = hidden + x @ w[name + "mlp.down_proj.weight"].T
            output = rms_norm(hidden, w["norm.weight"], eps)
            hidden = output if settings.norm_output else hidden
            best = (output @ w["lm_head.weight"].T).argmax(-1)
            tokens.append(settings.draft_to_verifier[best])
        return torch.stack(tokens, 1)

    def accepted(self, settings: Reading, passage: Passage, steps: int) -> np.ndarray:
        """Whether each draft token, and all before it, is what the verifier wrote; bool
        [positions, steps], from the last prompt token on as far as all steps have an answer."""
        positions = torch.arange(passage.answer - 1, len(passage.ids) - 1 - steps)
        drafted = self.drafted(settings, passage, steps)[positions]
        wrote = passage.ids[positions[:, None] + 2 + torch.arange(steps)]
        return (drafted == wrote).cumprod(1).bool().numpy()


def acceptance_length(accepted: list[np.ndarray]) -> float:
    """1 and the draft tokens accepted, a mean over the positions of all passages."""
    return 1 + float(np.concatenate(accepted).sum(1).mean())


def gain(ours: list[np.ndarray], other: list[np.ndarray]) -> tuple[float, float]:
    """How much longer `other` accepts at the same positions, and that mean's standard error, the
    positions of a passage being taken for one observation; of a single passage each is one."""
    rows = [b.sum(1) - a.sum(1) for a, b in zip(ours, other, strict=True)]
    rows = rows if len(rows) > 1 else rows[0][:, None]
    counts = np.array([len(row) for row in rows])
    differences = np.array([row.sum() for row in rows])
    mean = differences.sum() / counts.sum()
    error = np.sqrt(np.square(differences - mean * counts).sum()) / counts.sum()
    return float(mean), float(error)
