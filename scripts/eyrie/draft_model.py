"""EAGLE-3's training step on a CPU: the stock losses, computed only where they count.

speculators' Eagle3DraftModel runs every position of a packed batch through every TTT step, with
dense attention over the whole pack. On a GPU, compiled and with flex attention, that is what one
wants. On a CPU most of it is waste, and three facts remove it without changing a loss:

- A position is needed at a step only if a supervised token is drafted from it. Prompts give keys
  and values at step 0 and nothing else.
- A query sees the step-0 keys of its own row up to itself, and its own key of each later step.
- The draft's lm_head is a frozen copy of the verifier's rows, so its loss needs the gradient of
  its input alone, which is at hand while the logits are.
"""

import itertools

import torch
import torch.nn.functional as F
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

# Rows of logits at a time: 1,024 x 8,192 in fp32 are 32 MiB, about the size of a large cache.
CHUNK = 1024


class FrozenHeadKL(torch.autograd.Function):
    """Sum over positions of -sum(target * log softmax(hidden @ head.T)), head being constant: the
    KL divergence from the target but for the target's entropy, which no weight changes."""

    @staticmethod
    def forward(ctx, hidden, head, target, target_ids):
        """hidden [n, H]; head [V, H]; target [n, V] probabilities; target_ids [n], their argmax.

        Returns the sum (scalar, fp32) and, for accuracy, whether each position's most likely
        token is the target's, bool [n].
        """
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden, dtype=torch.float32)
        correct = torch.empty(len(hidden), dtype=torch.bool)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            logits = (hidden[part] @ head.T).float()
            expected = target[part]
            log_z = logits.logsumexp(-1, keepdim=True)
            correct[part] = logits.argmax(-1) == target_ids[part]
            total += log_z.sum() - torch.dot(expected.flatten(), logits.flatten())
            difference = logits.sub_(log_z).exp_().sub_(expected)
            gradient[part] = (difference.to(head.dtype) @ head).float()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx, grad_total, _grad_correct):
        (gradient,) = ctx.saved_tensors
        return grad_total * gradient, None, None, None


def row_bounds(document_ids: torch.Tensor) -> list[tuple[int, int]]:
    """[n] document ids, ascending -> (start, end) of each row."""
    edges = (document_ids.diff() != 0).nonzero().flatten() + 1
    edges = [0, *edges.tolist(), len(document_ids)]
    return list(itertools.pairwise(edges))


class RowAttention:
    """Attention of the active positions of a packed batch, each within its own row.

    `active` [n] are positions of the pack, ascending; the keys of step 0 cover the whole pack.
    """

    def __init__(self, active: torch.Tensor, document_ids: torch.Tensor):
        self.rows = []
        for start, end in row_bounds(document_ids):
            first, last = torch.searchsorted(active, torch.tensor([start, end])).tolist()
            if last > first:
                causal = torch.arange(start, end) <= active[first:last, None]
                self.rows.append((start, end, first, last, causal))

    def __call__(self, query, keys, values, scaling):
        """query [heads, n, d]; keys and values, step by step, [kv_heads, T or n, d] -> [n, H].

        The first of them are of every position of the pack, the others of the active ones.
        """
        heads, count, dim = query.shape
        kv_heads = keys[0].shape[0]
        grouped = query.view(kv_heads, heads // kv_heads, count, dim)
        own = [(grouped * k.unsqueeze(1)).sum(-1, keepdim=True) for k in keys[1:]]
        parts = []
        for start, end, first, last, causal in self.rows:
            scores = grouped[:, :, first:last] @ keys[0][:, None, start:end].transpose(-1, -2)
            scores = scores.masked_fill(~causal, float("-inf"))
            scores = torch.cat([scores, *(o[:, :, first:last] for o in own)], -1)
            weights = F.softmax(scores * scaling, -1, dtype=torch.float32).to(query.dtype)
            length = end - start
            context = weights[..., :length] @ values[0][:, None, start:end]
            for step, value in enumerate(values[1:]):
                weight = weights[..., length + step, None]
                context = context + weight * value[:, None, first:last]
            parts.append(context)
        return torch.cat(parts, 2).reshape(heads, count, dim).transpose(0, 1).reshape(count, -1)


class CPUEagle3DraftModel(Eagle3DraftModel):
    """Eagle3DraftModel with the forward of this module; one layer with full attention."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, n_aux * H]
        input_ids: torch.Tensor,  # [1, T]
        document_ids: torch.Tensor,  # [1, T], -1 is padding
        loss_mask: torch.Tensor,  # [1, T]
        position_ids: torch.Tensor,  # [1, T]
        verifier_last_hidden_states: torch.Tensor,  # [1, T, H]
        ttt_steps: int = 3,
        ttt_step_loss_decay: float = 1.0,
        **_,
    ):
        """Returns (draft tokens, loss, metrics) as the stock forward does. Of the draft tokens, a
        step's [1, T] in the draft's own ids, only those are given that are the verifier's own
        choice; the others are -1."""
        length = int((document_ids[0] >= 0).sum())
        ids, positions = input_ids[0, :length], position_ids[0, :length]
        supervised = loss_mask[0, :length].bool()
        # A step drafts token p + step from position p.
        ahead = F.pad(supervised, (0, ttt_steps))
        active = torch.stack([ahead[s : s + length] for s in range(ttt_steps)]).any(0)
        active = active.nonzero().flatten()
        if not len(active):
            return [], self.fc.weight.sum() * 0, {}
        dtype = self.fc.weight.dtype
        layer, attention = self.layers[0], self.layers[0].self_attn
        attend = RowAttention(active, document_ids[0, :length])

        with torch.no_grad():
            last = verifier_last_hidden_states[0, :length][supervised].to(dtype)
            target = F.softmax(
                self.verifier_lm_head(self.verifier_norm(last)), -1, dtype=torch.float32
            )
            target_ids = target.argmax(-1)
            # -sum t log t of each target, with 0 log 0 = 0
            entropy = -torch.special.xlogy(target, target).sum(-1)
        target_row = supervised.cumsum(0) - 1

        hidden = hidden_states[0, :length].to(dtype)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            chunks = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)], -1)
        hidden = self.fc(hidden)

        drafting = supervised[active]
        loss = hidden.new_zeros((), dtype=torch.float32)
        metrics: dict[str, torch.Tensor] = {}
        keys, values, draft_tokens = [], [], []

        def heads_of(x):
            return x.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)

        for step in range(ttt_steps):
            here = ids if step == 0 else ids[(active + step).clamp(max=length - 1)]
            place = (positions if step == 0 else positions[active]) + step
            normed = layer.hidden_norm(hidden)
            residual = normed if layer.norm_before_residual else hidden
            both = torch.cat([layer.input_layernorm(self.embed_tokens(here)), normed], -1)
            if step == 0:
                asking, residual, ask_place = both[active], residual[active], place[active]
            else:
                asking, ask_place = both, place
            rotate = self.rotary_emb(both, place[None])
            ask = self.rotary_emb(asking, ask_place[None])
            key = heads_of(attention.k_proj(both))
            query = heads_of(attention.q_proj(asking))
            keys.append(apply_rotary_pos_emb(key[None], key[None], *rotate)[0][0])
            values.append(heads_of(attention.v_proj(both)))
            query = apply_rotary_pos_emb(query[None], query[None], *ask)[0][0]

            mixed = attend(query, keys, values, attention.scaling)
            hidden = residual + attention.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            output = self.norm(hidden)
            if self.config.norm_output:
                hidden = output

            drafted = ahead[active + step]
            rows = target_row[(active + step).clamp(max=length - 1)[drafted]]
            count = len(rows)
            # Nearly always every target, in order: then a view, not a copy.
            wanted = (
                (target, target_ids) if count == len(target) else (target[rows], target_ids[rows])
            )
            total, correct = FrozenHeadKL.apply(
                output[drafted].to(self.lm_head.weight.dtype), self.lm_head.weight, *wanted
            )
            total = total - entropy[rows].sum()
            # As stock: the mean over supervised positions, and their sum over steps.
            step_loss = total / (count + 1e-5) * ttt_step_loss_decay**step
            loss = loss + step_loss
            still = torch.zeros_like(drafting)
            still[drafted] = correct
            drafting = drafting & still
            draft_tokens.append(torch.full_like(input_ids, -1))
            draft_tokens[-1][0, active[drafted][correct]] = wanted[1][correct]
            metrics |= {
                f"loss_{step}_sum": step_loss.detach(),
                f"loss_{step}_total": torch.tensor(1.0),
                f"full_acc_{step}_sum": drafting.sum().float(),
                f"full_acc_{step}_total": torch.tensor(float(count)),
            }
        metrics |= {"loss_sum": loss.detach(), "loss_total": torch.tensor(1.0)}
        return draft_tokens, loss, metrics
