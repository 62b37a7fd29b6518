"""Tokens a second of a training step, beside the stock Eagle3DraftModel on the same batches.

    python benchmarks/train_rate.py --verifier results/verifier \\
        --vocab results/vocab_1k.safetensors --hidden results/data/1k/hidden/*.safetensors

Forward and backward only, the default draft, sdpa and eager losses for the stock model. The two
take turns on each batch; one line of each, their ratio, and the largest difference of a loss.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel

from eyrie.batches import HiddenRows, make_loader
from eyrie.draft import DraftShape, build_model
from eyrie.draft_model import CPUEagle3DraftModel
from eyrie.hidden import HiddenStates, split
from eyrie.verifier import load_verifier_config

LAYER_IDS, TTT_STEPS = [2, 15, 27], 3
SHAPE = DraftShape(1, 9, 3, 64, 1536, 1e5, 8192, 1e-5, "eagle3.1", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--hidden", type=Path, nargs="+", required=True)
    parser.add_argument("--total-seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    states = HiddenStates(args.hidden)
    training, _ = split(states.rows, 0.05)
    rows = HiddenRows(states, training, args.total_seq_len)
    vocab = load_file(args.vocab)
    models = {}
    for cls in (Eagle3DraftModel, CPUEagle3DraftModel):
        torch.manual_seed(0)
        models[cls] = build_model(
            cls,
            SHAPE,
            load_verifier_config(args.verifier),
            args.verifier,
            LAYER_IDS,
            TTT_STEPS,
            len(vocab["d2t"]),
            vocab["d2t"],
            vocab["t2d"],
        ).float()
    call = {"ttt_steps": TTT_STEPS, "loss_config": resolve_loss_config("kl_div", "eager")}
    seconds = dict.fromkeys(models, 0.0)
    tokens, worst = 0, 0.0
    batches = make_loader(rows, args.total_seq_len, seed=0)
    for step, batch in zip(range(-1, args.steps), batches, strict=False):
        batch = {k: v for k, v in batch.items() if torch.is_tensor(v)}
        for name in ("hidden_states", "verifier_last_hidden_states"):
            batch[name] = batch[name].float()
        losses = []
        for cls, model in models.items():
            started = time.time()
            model.zero_grad()
            _, loss, _ = model(**batch, **call)
            loss.backward()
            losses.append(loss.item())
            # The first batch warms both up.
            seconds[cls] += (time.time() - started) * (step >= 0)
        tokens += int((batch["document_ids"] >= 0).sum()) * (step >= 0)
        worst = max(worst, abs(losses[0] - losses[1]) / losses[0])
    for cls in models:
        print(f"{cls.__name__:<22}{tokens / seconds[cls]:8,.0f} tokens/s")
    stock, own = seconds.values()
    print(f"ratio {stock / own:.2f}, losses within {worst:.1e}")


if __name__ == "__main__":
    main()
