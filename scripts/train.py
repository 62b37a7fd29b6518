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
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_scheduler

from eyrie.draft import (
    DraftShape,
    build_model,
    differences,
    flat_config,
    flat_tensors,
    write_flat,
)
from eyrie.engine import resolve_dtype
from eyrie.files import atomic, link_or_copy, log_line, sha256_file, write_json
from eyrie.gpus import hold_gpus
from eyrie.hidden import HiddenStates, split
from eyrie.muon import Float32Muon
from eyrie.provenance import peak_rss_bytes, versions
from eyrie.shards import ShardError
from eyrie.verifier import draft_size, load_verifier_config
from eyrie.vocab import load_map, made_of
from eyrie.warm_start import content, warm_start


class HiddenRows(BaseDataset):
    """speculators' dataset over rows of hidden shards; a row's states are read when asked for.

    While `supervise_all`, every token is a target, the prompts' too: what the verifier would
    write after any of them is known as well as after its own.
    """

    supervise_all = False

    def __init__(self, states: HiddenStates, rows: list[tuple[int, int]], max_len: int):
        self.states, self.row_list = states, rows
        super().__init__(max_len)

    def __len__(self) -> int:
        return len(self.row_list)

    def _compute_approx_lengths(self) -> list[int]:
        # shift_batch drops one token of each row.
        return [self.states.rows[shard].lengths[index] - 1 for shard, index in self.row_list]

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        row = self.states.row(*self.row_list[index])
        states = row["hidden_states"]
        mask = row["loss_mask"].long()
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": row["input_ids"].long(),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.ones_like(mask) if self.supervise_all else mask,
        }


def make_loader(dataset: HiddenRows, total_seq_len: int, hidden: int, aux: int, seed: int):
    """Batches of whole rows, up to `total_seq_len` tokens each, in an order that epoch and seed
    decide."""
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=total_seq_len,
        lengths=dataset.approx_lengths,
        num_replicas=1,
        rank=0,
        seed=seed,
    )
    collate = CollateFn(
        total_seq_len, hidden, num_target_layers=aux, dtype=torch.bfloat16, preprocess=shift_batch
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


class Interrupted(Exception):
    """SIGTERM or Ctrl-C: the state has been saved and the job must not count as done."""


def with_noise(states: torch.Tensor, layers: int, noise: float, seed: int) -> torch.Tensor:
    """Add normal noise to states [1, T, layers * H], of `noise` times each state's own RMS."""
    generator = torch.Generator(states.device).manual_seed(seed)
    split = states.float().unflatten(-1, (layers, -1))
    size = noise * split.square().mean(-1, keepdim=True).sqrt()
    shape, device = split.shape, states.device
    return split.addcmul(size, torch.randn(shape, generator=generator, device=device)).flatten(-2)


class DraftTrainer(Trainer):
    """speculators' Trainer on any device, with a state that resumes bit for bit, per-step
    metrics and a progress bar. Epochs are exported by `on_epoch(epoch, metrics)`.

    The first `ttt_warmup_epochs` look one draft token ahead, from every token. `add_noise(states,
    step)` changes the states of a training batch.
    """

    def __init__(
        self,
        *args,
        state: Path,
        checkpoint_every: int,
        ttt_warmup_epochs: int,
        add_noise,
        on_epoch,
        **kwargs,
    ):
        self.state, self.checkpoint_every, self.on_epoch = state, checkpoint_every, on_epoch
        self.ttt_warmup_epochs, self.add_noise = ttt_warmup_epochs, add_noise
        self.history: list[dict] = []
        self.stop_signal: str | None = None
        super().__init__(*args, **kwargs)
        self.load_state()

    def setup_trainer(self) -> None:
        if not torch.accelerator.is_available():
            self.local_rank, self.device_type = torch.device("cpu"), "cpu"
        self.current_epoch = self.global_step = 0
        self._resume_local_step = 0

    def setup_model(self) -> None:
        self.model.to(self.local_rank)

    def setup_optimizer(self) -> None:
        """As stock, but with a Muon that this device can compute, and before any resume."""
        self.optimizers = build_optimizers(self.model, self.config)
        if self.config.hidden_states_dtype == torch.float32:
            self.optimizers = [
                Float32Muon(o.param_groups, **o.defaults) if isinstance(o, torch.optim.Muon) else o
                for o in self.optimizers
            ]
        total = self.config.num_epochs * len(self.train_loader)
        warm_up = round(total * self.config.scheduler_warmup_ratio)
        kind = "constant_with_warmup" if self.config.scheduler_type == "none" else None
        self.schedulers = [
            get_scheduler(kind or self.config.scheduler_type, optimizer, warm_up, total)
            for optimizer in self.optimizers
        ]

    def save_state(self, epoch: int, local_step: int) -> None:
        """Save everything that the next step depends on, atomically, as safetensors."""
        tensors, groups = {}, []
        for name, tensor in self.model.state_dict().items():
            if not name.startswith(("embed_tokens.", "lm_head.", "verifier_")):
                tensors[f"model.{name}"] = tensor
        for number, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            groups.append(state["param_groups"])
            for parameter, values in state["state"].items():
                for name, value in values.items():
                    tensors[f"optimizer.{number}.{parameter}.{name}"] = torch.as_tensor(value)
        progress = {
            "epoch": epoch,
            "local_step": local_step,
            "global_step": self.global_step,
            "groups": groups,
            "schedulers": [
                {k: v for k, v in s.state_dict().items() if k != "lr_lambdas"}
                for s in self.schedulers
            ],
            "history": self.history,
        }
        with atomic(self.state / "state.safetensors") as partial:
            contiguous = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
            save_file(contiguous, partial, {"progress": json.dumps(progress)})

    def load_state(self) -> None:
        path = self.state / "state.safetensors"
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            progress = json.loads(file.metadata()["progress"])
        tensors = load_file(path)
        weights = {k[6:]: v for k, v in tensors.items() if k.startswith("model.")}
        self.model.load_state_dict(weights, strict=False)
        for number, optimizer in enumerate(self.optimizers):
            state: dict[int, dict] = {}
            for key, value in tensors.items():
                if key.startswith(f"optimizer.{number}."):
                    _, _, parameter, name = key.split(".", 3)
                    state.setdefault(int(parameter), {})[name] = value
            groups = progress["groups"][number]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        for scheduler, state in zip(self.schedulers, progress["schedulers"], strict=True):
            scheduler.load_state_dict({**state, "lr_lambdas": [None]})
        self.current_epoch = progress["epoch"]
        self._resume_local_step = progress["local_step"]
        self.global_step = progress["global_step"]
        self.history = progress["history"]
        print(f"train: goes on at epoch {self.current_epoch}, step {self.global_step}")

    def autocast(self):
        dtype = self.config.hidden_states_dtype
        return torch.autocast(self.device_type, dtype, enabled=dtype != torch.float32)

    def train_epoch(self, epoch: int, **_) -> None:
        self.model.train()
        self.train_loader.batch_sampler.set_epoch(epoch)
        steps = len(self.train_loader)
        call = dict(self.config.train_call_kwargs)
        warming_up = epoch < self.ttt_warmup_epochs
        if warming_up:
            call["ttt_steps"] = 1
        self.train_loader.dataset.supervise_all = warming_up
        done = self._prepare_resume_skip(epoch)
        batches = iter(self.train_loader)
        progress = tqdm(
            total=self.config.num_epochs * steps,
            initial=self.global_step,
            unit=" steps",
            desc=f"train epoch {epoch}",
            mininterval=5,
        )
        for local_step in range(done + 1, steps + 1):
            started = time.time()
            batch = next(batches)
            batch = {k: v.to(self.local_rank) for k, v in batch.items() if torch.is_tensor(v)}
            batch["hidden_states"] = self.add_noise(batch["hidden_states"], self.global_step)
            with self.autocast():
                _, loss, metrics = self.model(**batch, **call)
            if not loss.isfinite():
                raise ValueError(f"loss is {loss.item()} at epoch {epoch}, step {local_step}")
            self._optimizers_zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            rate = self.optimizers[0].param_groups[0]["lr"]
            self._optimizers_step()
            self._schedulers_step()
            self.global_step += 1
            tokens = int((batch["document_ids"] >= 0).sum())
            seconds = time.time() - started
            self.history.append(
                {
                    "kind": "step",
                    "split": "train",
                    "epoch": epoch,
                    "step": self.global_step,
                    "lr": rate,
                    "grad_norm": float(norm),
                    "tokens": tokens,
                    "supervised_tokens": int(batch["loss_mask"].sum()),
                    "seconds": round(seconds, 4),
                    **ratios(metrics),
                }
            )
            progress.update()
            shown = f"{tokens / seconds:,.0f} tokens/s, loss {loss.item():.3f}"
            progress.set_postfix_str(shown, refresh=False)
            if self.global_step % self.checkpoint_every == 0 or self.stop_signal:
                self.save_state(epoch, local_step)
                if self.stop_signal:
                    raise Interrupted(self.stop_signal)
        progress.close()

    @torch.no_grad()
    def val_epoch(self, epoch: int) -> dict[str, float]:
        """Held-out metrics, each a ratio of sums over all batches."""
        self.model.eval()
        sums: dict[str, float] = {}
        for batch in self.val_loader:
            batch = {k: v.to(self.local_rank) for k, v in batch.items() if torch.is_tensor(v)}
            with self.autocast():
                _, _, metrics = self.model(**batch, **self.config.val_call_kwargs)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return ratios(sums)

    def run(self) -> None:
        for epoch in range(self.current_epoch, self.config.num_epochs):
            self.train_epoch(epoch)
            metrics = self.val_epoch(epoch)
            self.history.append(
                {
                    "kind": "epoch",
                    "split": "held_out",
                    "epoch": epoch,
                    "step": self.global_step,
                    **metrics,
                }
            )
            self.on_epoch(epoch, metrics)
            self.save_state(epoch + 1, 0)


def ratios(metrics: dict) -> dict[str, float]:
    """{x_sum, x_total} -> {x}, and the acceptance length that the accuracies amount to: one
    token of the verifier, and each draft position that is right with all before it."""
    values = {
        name[:-4]: float(metrics[name]) / max(float(metrics[f"{name[:-4]}_total"]), 1e-9)
        for name in metrics
        if name.endswith("_sum")
    }
    accuracies = [v for k, v in values.items() if k.startswith("full_acc_")]
    return {k: round(v, 6) for k, v in values.items()} | {
        "acceptance_length": round(1 + sum(accuracies), 6)
    }


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


def digest(args, shape: DraftShape, states: HiddenStates) -> str:
    """Everything that decides the weights."""
    parts = {
        "hidden": [path.stat().st_size for path in args.hidden],
        "fingerprints": [rows.metadata for rows in states.rows],
        "vocab": sha256_file(args.vocab),
        "shape": asdict(shape),
        "layer_ids": args.layer_ids,
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


def publish(args, state: Path, history: list[dict], manifest: dict) -> dict:
    """Make the checkpoint folder of links into `state`; it appears whole or not at all."""
    epochs = [row for row in history if row["kind"] == "epoch"]
    best = max(epochs, key=lambda row: row["acceptance_length"])["epoch"]
    partial = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for folder, epoch in [(partial, best)] + [
        (partial / str(r["epoch"]), r["epoch"]) for r in epochs
    ]:
        for name in ("config.json", "model.safetensors"):
            link_or_copy(state / "epochs" / str(epoch) / name, folder / name)
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
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, required=True, help="steps")
    parser.add_argument("--log", type=Path, help="gets a JSON line an epoch")
    args = parser.parse_args()

    args.dtype = resolve_dtype(args.dtype)
    try:
        train(args)
    except Interrupted as stop:
        sys.exit(f"train: stopped by {stop}; the state is saved, run again to go on")
    except (ShardError, ValueError) as error:
        sys.exit(f"train: {error}")


def train(args) -> None:
    import signal

    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel

    from eyrie.draft_model import CPUEagle3DraftModel

    started = time.time()
    _lock = hold_gpus(args.gpus)
    shape = DraftShape(**{f.name: getattr(args, f.name) for f in fields(DraftShape)})
    verifier = load_verifier_config(args.verifier, args.trust_remote_code)
    states = HiddenStates(args.hidden)
    states.require_layers(verifier.extraction_ids(args.layer_ids))
    size = draft_size(args.draft_vocab_size, verifier.vocab_size)
    identity = json.loads(args.identity.read_text())
    map_of = made_of(identity, states.rows, args.held_out, size)
    d2t, t2d = load_map(args.vocab, map_of, verifier.vocab_size)
    state = args.state / digest(args, shape, states)
    state.mkdir(parents=True, exist_ok=True)
    training, held_out = split(states.rows, args.held_out)
    loaders = [
        make_loader(
            HiddenRows(states, rows, args.total_seq_len),
            args.total_seq_len,
            verifier.hidden_size,
            len(args.layer_ids),
            args.seed,
        )
        for rows in (training, held_out)
    ]
    if not len(loaders[0]):
        raise ValueError("0 optimizer steps: there is no training data")

    torch.manual_seed(args.seed)
    cpu = not torch.cuda.is_available()
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
    print("".join(f"train: {line}\n" for line in told), end="", flush=True)
    call = {"ttt_steps": args.ttt_steps, "ttt_step_loss_decay": args.ttt_decay}
    if cpu:
        # The stock model's fused losses need Triton.
        call["loss_config"] = resolve_loss_config("kl_div", "eager")
    config = flat_config(shape, verifier, args.layer_ids, size)

    def add_noise(hidden: torch.Tensor, step: int) -> torch.Tensor:
        if not args.noise:
            return hidden
        # A step's noise is a matter of its number, so a resumed run has the same.
        return with_noise(hidden, len(args.layer_ids), args.noise, args.seed << 32 | step)

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
        *loaders,
        state=state,
        checkpoint_every=args.checkpoint_every,
        ttt_warmup_epochs=args.ttt_warmup_epochs,
        add_noise=add_noise,
        on_epoch=on_epoch,
    )

    def stop(number, _frame) -> None:
        trainer.stop_signal = signal.Signals(number).name

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    trainer.run()
    manifest = publish(
        args,
        state,
        trainer.history,
        {
            "verifier": {k: identity[k] for k in ("source", "files")},
            "data": [rows.metadata["fingerprint"] for rows in states.rows],
            "rows": {"training": len(training), "held_out": len(held_out)},
            "config": {k: v for k, v in vars(args).items() if not isinstance(v, (Path, list))}
            | {"layer_ids": args.layer_ids, "draft_vocab_size": size}
            | ({"init_from": str(args.init_from)} if args.init_from else {}),
            "versions": versions(),
            "seconds": round(sum(r.get("seconds", 0) for r in trainer.history), 2),
            "wall_seconds": round(time.time() - started, 2),
            "peak_rss_bytes": peak_rss_bytes(),
        },
    )
    print(f"train: chose epoch {manifest['chosen_epoch']}; {args.out}")


if __name__ == "__main__":
    main()
