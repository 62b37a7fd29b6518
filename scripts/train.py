"""Train an EAGLE-3 draft on hidden shards and publish every epoch as a checkpoint for vLLM.

speculators' Eagle3DraftModel and Trainer do the training. Its state (weights, fp32 optimizer,
scheduler, place in the epoch) lives in a folder of its own, named by a digest of all that
decides the weights, and the checkpoint's files are hard links into it: a killed run goes on
from the last state, and other data or settings never continue it.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from eyrie.batches import HiddenRows, make_loader
from eyrie.checkpoint import WEIGHTS, read_config
from eyrie.draft import (
    build_model,
    differences,
    flat_config,
    flat_tensors,
    write_flat,
)
from eyrie.engine import resolve_dtype
from eyrie.errors import in_one_line
from eyrie.files import (
    link_or_copy,
    log_line,
    require_own,
    sha256_file,
    write_json,
)
from eyrie.gpus import hold_gpus
from eyrie.hidden import HiddenStates, split
from eyrie.identity import read_identity
from eyrie.layouts import hub_name, write_layout
from eyrie.provenance import peak_rss_bytes, versions
from eyrie.rates import passes, record_rate
from eyrie.shape import DraftShape, add_shape_arguments, shape_of
from eyrie.shards import ShardError
from eyrie.trainer import DraftTrainer, Interrupted, join_processes
from eyrie.verifier import draft_size, load_tensor, load_verifier_config
from eyrie.vocab import load_map, made_of
from eyrie.warm_start import content, warm_start


def digest(args, shape: DraftShape, states: HiddenStates, ranks: int) -> str:
    """Everything that decides the weights."""
    parts = {
        # What its history tells of an epoch, which a state of before does not: served_acc_k.
        "history": 2,
        "hidden": [path.stat().st_size for path in args.hidden],
        "fingerprints": [rows.metadata for rows in states.rows],
        "vocab": sha256_file(args.vocab),
        "shape": asdict(shape),
        "layer_ids": args.layer_ids,
        "batches_a_step": ranks * args.gradient_accumulation,
        "init_from": content(args.init_from) if args.init_from else None,
        "settings": {
            k: v
            for k, v in sorted(vars(args).items())
            if k
            in (
                "epochs",
                "optimizer",
                "lr",
                "muon_lr",
                "weight_decay",
                "ttt_steps",
                "ttt_decay",
                "ttt_warmup_epochs",
                "noise",
                "total_seq_len",
                "warmup_ratio",
                "scheduler",
                "seed",
                "held_out",
                "dtype",
            )
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


# What a checkpoint's folder holds; README.md is its card.
OWN = ("[0-9]*", "config.json", WEIGHTS, "metrics.parquet", "manifest.json", "README.md")


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def publish(args, state: Path, history: list[dict], manifest: dict) -> dict:
    """Make the checkpoint folder of links into `state`; it appears whole or not at all."""
    epochs = [row for row in history if row["kind"] == "epoch"]
    best = max(epochs, key=lambda row: row["acceptance_length"])["epoch"]
    partial = partial_of(args.out)
    shutil.rmtree(partial, ignore_errors=True)
    verifier = hub_name(manifest["verifier"]["source"])

    def embeddings() -> torch.Tensor:
        return load_tensor(args.verifier, "embed_tokens.weight")

    for epoch in (row["epoch"] for row in epochs):
        source, folder = state / "epochs" / str(epoch), partial / str(epoch)
        config = read_config(source)
        write_layout(source, folder, args.layout, config, args.ttt_steps, verifier, embeddings)
    for name in ("config.json", WEIGHTS):
        link_or_copy(partial / str(best) / name, partial / name)
    pd.DataFrame(history).to_parquet(partial / "metrics.parquet")
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    manifest |= {
        "chosen_epoch": best,
        "files": {str(p.relative_to(partial)): sha256_file(p) for p in files},
    }
    write_json(partial / "manifest.json", manifest)
    shutil.rmtree(args.out, ignore_errors=True)
    os.rename(partial, args.out)
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=Path, nargs="+", required=True, help="hidden shards")
    parser.add_argument("--vocab", type=Path, required=True, help="the map")
    parser.add_argument("--draft-vocab-size", required=True, help="the map's, or full")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--state", type=Path, required=True, help="folder of training states")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--layer-ids", type=int, nargs="+", required=True)
    add_shape_arguments(parser)
    parser.add_argument("--init-from", type=Path, help="folder of a draft to start from")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--optimizer", choices=["muon", "adamw"], required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--muon-lr", type=float, required=True)
    parser.add_argument("--weight-decay", type=float, required=True)
    parser.add_argument("--scheduler", choices=["linear", "cosine", "none"], required=True)
    parser.add_argument("--warmup-ratio", type=float, required=True)
    parser.add_argument("--ttt-steps", type=int, required=True)
    parser.add_argument("--ttt-decay", type=float, required=True)
    parser.add_argument("--ttt-warmup-epochs", type=int, default=0, help="of one TTT step")
    parser.add_argument("--noise", type=float, default=0.0, help="on states, of their RMS")
    parser.add_argument("--total-seq-len", type=int, required=True)
    parser.add_argument("--held-out", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--gpus", type=int, default=0, help="more than one: start by torchrun")
    parser.add_argument("--nodes", type=int, default=1, help="machines of so many GPUs")
    parser.add_argument("--gradient-accumulation", type=int, default=1, help="batches a step")
    parser.add_argument("--patience", type=int, default=0, help="epochs; 0 trains them all")
    parser.add_argument("--layout", choices=["flat", "sglang", "speculators"], default="flat")
    parser.add_argument("--checkpoint-every", type=int, required=True, help="steps")
    parser.add_argument("--keep", type=int, default=2, help="of the states saved")
    parser.add_argument("--log", type=Path, help="gets a JSON line an epoch")
    parser.add_argument("--rates", type=Path, help="gets what a plan goes by; see eyrie.rates")
    parser.add_argument("--tensorboard", type=Path, help="folder of the curves")
    args = parser.parse_args()

    if not args.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    args.dtype = resolve_dtype(args.dtype)
    try:
        train(args)
    except Interrupted as stop:
        sys.exit(f"train: stopped by {stop}; the state is saved, run again to go on")
    except (ShardError, ValueError) as error:
        sys.exit(f"train: {error}")


def train(args) -> None:
    for folder in (args.out, partial_of(args.out)):
        require_own(folder, *OWN)
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.trainer import TrainerConfig

    from eyrie.draft_model import CPUEagle3DraftModel

    started = time.time()
    # Of the processes that torchrun starts the first holds the GPUs for all.
    _lock = hold_gpus(args.gpus) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    rank, ranks = join_processes()
    if args.gpus and ranks != args.gpus * args.nodes:
        raise ValueError(
            f"--gpus {args.gpus} of {args.nodes} nodes, and {ranks} processes: start it by python "
            f"-m torch.distributed.run --nproc-per-node {args.gpus} --nnodes {args.nodes}"
        )
    shape = shape_of(args)
    verifier = load_verifier_config(args.verifier, args.trust_remote_code)
    states = HiddenStates(args.hidden)
    states.require_layers(verifier.extraction_ids(args.layer_ids))
    size = draft_size(args.draft_vocab_size, verifier.vocab_size)
    identity = read_identity(args.identity)
    map_of = made_of(identity, states.rows, args.held_out, size)
    d2t, t2d = load_map(args.vocab, map_of, verifier.vocab_size)
    state = args.state / digest(args, shape, states, ranks)
    state.mkdir(parents=True, exist_ok=True)
    training, held_out = (
        HiddenRows(states, rows, args.total_seq_len) for rows in split(states.rows, args.held_out)
    )
    for name, dataset in (("training", training), ("held-out", held_out)):
        if not len(dataset):
            raise ValueError(f"0 {name} rows have a supervised token; {dataset.left_out} have none")
    rows = {
        "training": len(training),
        "held_out": len(held_out),
        "cut": training.cut + held_out.cut,
        "left_out": training.left_out + held_out.left_out,
    }
    if not rank:
        print(
            "train: {training:,} rows to train on, {held_out:,} held out; {cut:,} cut at a turn, "
            "{left_out:,} left out, which have no supervised token".format(**rows),
            flush=True,
        )

    torch.manual_seed(args.seed)
    cpu = not args.gpus
    plain = shape.num_hidden_layers == 1 and not shape.sliding_window
    cls = CPUEagle3DraftModel if cpu and plain else Eagle3DraftModel
    model = build_model(
        cls,
        shape,
        verifier,
        args.verifier,
        args.layer_ids,
        args.ttt_steps,
        size,
        d2t,
        t2d,
    ).float()
    told = [f"the draft is not as the verifier: {line}" for line in differences(shape, verifier)]
    if args.init_from:
        found = warm_start(model, shape, args.init_from)
        told += [f"starts from {args.init_from}", *(f"but for {line}" for line in found)]
    if not rank:
        print("".join(f"train: {line}\n" for line in told), end="", flush=True)
    call = {"ttt_steps": args.ttt_steps, "ttt_step_loss_decay": args.ttt_decay}
    if cpu:
        # The stock model's fused losses need Triton.
        call["loss_config"] = resolve_loss_config("kl_div", "eager")
    config = flat_config(shape, verifier, args.layer_ids, size)

    def on_epoch(epoch: int, metrics: dict) -> None:
        write_flat(state / "epochs" / str(epoch), config, flat_tensors(model))
        log_line(args.log, epoch=epoch, step=trainer.global_step, **metrics)
        accuracy = ", ".join(f"{v:.3f}" for k, v in metrics.items() if k.startswith("full_acc"))
        print(
            f"train: epoch {epoch}, held out: loss {metrics['loss']:.3f}, accuracy {accuracy}, "
            f"acceptance length {metrics['acceptance_length']:.3f}",
            flush=True,
        )

    trainer = DraftTrainer(
        model,
        TrainerConfig(
            lr=args.lr,
            num_epochs=args.epochs,
            save_path=str(state / "unused"),
            train_call_kwargs=call,
            val_call_kwargs=call,
            optimizer=args.optimizer,
            weight_decay=args.weight_decay,
            muon_lr=args.muon_lr,
            muon_weight_decay=args.weight_decay,
            scheduler_type=args.scheduler,
            scheduler_warmup_ratio=args.warmup_ratio,
            hidden_states_dtype=getattr(torch, args.dtype),
        ),
        make_loader(
            training,
            args.total_seq_len,
            args.seed,
            rank=rank,
            ranks=ranks,
            accumulate=args.gradient_accumulation,
        ),
        make_loader(held_out, args.total_seq_len, args.seed),
        state=state,
        keep=args.keep,
        checkpoint_every=args.checkpoint_every,
        ttt_warmup_epochs=args.ttt_warmup_epochs,
        noise=args.noise,
        seed=args.seed,
        patience=args.patience,
        on_epoch=on_epoch,
        tensorboard=args.tensorboard,
    )

    def stop(number, _frame) -> None:
        trainer.stop_signal = signal.Signals(number).name

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    trainer.run()
    if rank:
        return
    manifest = publish(
        args,
        state,
        trainer.history,
        {
            "verifier": {k: identity[k] for k in ("source", "files")},
            "data": [rows.metadata["fingerprint"] for rows in states.rows],
            "rows": rows,
            "config": {k: v for k, v in vars(args).items() if not isinstance(v, (Path, list))}
            | {"layer_ids": args.layer_ids, "draft_vocab_size": size}
            | ({"init_from": str(args.init_from)} if args.init_from else {}),
            "versions": versions(),
            "seconds": round(sum(r.get("seconds", 0) for r in trainer.history), 2),
            "wall_seconds": round(time.time() - started, 2),
            "peak_rss_bytes": peak_rss_bytes(),
        },
    )
    work = sum(
        row["tokens"] * passes(1 if row["epoch"] < args.ttt_warmup_epochs else args.ttt_steps)
        for row in trainer.history
        if row["kind"] == "step"
    )
    of, gpus = f"run {args.state.name}", args.gpus * args.nodes
    record_rate(args.rates, "train", identity["source"], gpus, work, manifest["seconds"], of)
    print(f"train: chose epoch {manifest['chosen_epoch']}; {args.out}")


if __name__ == "__main__":
    with in_one_line("train"):
        main()
