"""The training loop: speculators' Trainer with a state that resumes bit for bit, on any device."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import Trainer
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import get_scheduler

from eyrie.draft import FROZEN
from eyrie.files import atomic
from eyrie.muon import Float32Muon


class Interrupted(Exception):
    """SIGTERM or Ctrl-C: the state has been saved and the job must not count as done."""


def join_processes() -> tuple[int, int]:
    """(rank, ranks); under torchrun the processes meet first, by NCCL on GPUs and gloo on CPUs."""
    if "LOCAL_RANK" not in os.environ:
        return 0, 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def with_noise(states: torch.Tensor, layers: int, noise: float, seed: int) -> torch.Tensor:
    """Add normal noise to states [1, T, layers * H], of `noise` times each state's own RMS."""
    generator = torch.Generator(states.device).manual_seed(seed)
    split = states.float().unflatten(-1, (layers, -1))
    size = noise * split.square().mean(-1, keepdim=True).sqrt()
    shape, device = split.shape, states.device
    return split.addcmul(size, torch.randn(shape, generator=generator, device=device)).flatten(-2)


def ratios(metrics: dict[str, float]) -> dict[str, float]:
    """{x_sum, x_total} -> {x}, and the acceptance length that the accuracies amount to: one
    token of the verifier, and each draft position that is right with all before it."""
    values = {
        name[:-4]: metrics[name] / max(metrics[f"{name[:-4]}_total"], 1e-9)
        for name in metrics
        if name.endswith("_sum")
    }
    accuracies = [v for k, v in values.items() if k.startswith("full_acc_")]
    return {k: round(v, 6) for k, v in values.items()} | {
        "acceptance_length": round(1 + sum(accuracies), 6)
    }


def walk(
    draft_tokens: list[torch.Tensor], target_ids: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, float]:
    """The accuracies of draft positions, cumulative, as a server would find them on these rows.

    draft_tokens: of each step s those [1, T] drafted from position p for p + s; target_ids [1, T]
    the verifier's choice, in the draft's ids; loss_mask [1, T].

    A server drafts at an answer's beginning and then where its own token follows the accepted ones.
    Those are the harder positions: of a run of easy ones it sees the first alone. Returns
    {served_acc_k_sum, served_acc_k_total}.
    """
    mask = loss_mask[0].bool()
    accepted, right = torch.zeros_like(target_ids[0]), mask
    for step, tokens in enumerate(draft_tokens):
        wanted = F.pad(target_ids[0, step:], (0, step), value=-2)
        right = right & F.pad(mask[step:], (0, step)) & (tokens[0] == wanted)
        accepted += right
    lengths, place = [], 0
    mask, accepted = mask.tolist(), accepted.tolist()
    while place < len(mask):
        if mask[place]:
            lengths.append(accepted[place])
            place += accepted[place]
        place += 1
    metrics = {}
    for step in range(len(draft_tokens)):
        metrics[f"served_acc_{step}_sum"] = float(sum(length > step for length in lengths))
        metrics[f"served_acc_{step}_total"] = float(len(lengths))
    return metrics


class DraftTrainer(Trainer):
    """speculators' Trainer, with per-step metrics in `history` and a progress bar.

    state: folder of the state, of which the newest `keep` are kept. on_epoch(epoch, metrics)
    exports an epoch. The first `ttt_warmup_epochs` look one draft token ahead, from every token.
    noise: of the states in training, see `with_noise`. patience: epochs without a better
    held-out acceptance length after which training ends; 0 trains them all. tensorboard: folder
    of the curves, or None.

    Under torchrun each process has a trainer; the first one saves and exports.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config,
        train_loader,
        val_loader,
        *,
        state: Path,
        keep: int,
        checkpoint_every: int,
        ttt_warmup_epochs: int,
        noise: float,
        seed: int,
        patience: int,
        on_epoch: Callable[[int, dict], None],
        tensorboard: Path | None,
    ):
        self.state, self.keep, self.checkpoint_every = state, keep, checkpoint_every
        self.ttt_warmup_epochs, self.noise, self.seed = ttt_warmup_epochs, noise, seed
        self.patience, self.on_epoch = patience, on_epoch
        self.history: list[dict] = []
        self.stop_signal: str | None = None
        super().__init__(model, config, train_loader, val_loader)
        self.load_state()
        self.forward = DistributedDataParallel(model) if dist.is_initialized() else model
        self.writer = None
        if tensorboard and not self.rank:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(tensorboard, purge_step=self.global_step + 1)

    def setup_trainer(self) -> None:
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(self.device_type)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.current_epoch = self.global_step = self.done = 0

    def setup_model(self) -> None:
        self.model.to(self.device)

    def setup_optimizer(self) -> None:
        """As stock, but with a Muon that this device can compute, steps counted over all epochs,
        and before any resume."""
        self.optimizers = build_optimizers(self.model, self.config)
        if self.config.hidden_states_dtype == torch.float32:
            self.optimizers = [
                Float32Muon(o.param_groups, **o.defaults) if isinstance(o, torch.optim.Muon) else o
                for o in self.optimizers
            ]
        sampler = self.train_loader.batch_sampler
        self.total_steps = sum(map(sampler.steps_of, range(self.config.num_epochs)))
        warm_up = round(self.total_steps * self.config.scheduler_warmup_ratio)
        kind = self.config.scheduler_type
        kind = "constant_with_warmup" if kind == "none" else kind
        self.schedulers = [
            get_scheduler(kind, optimizer, warm_up, self.total_steps)
            for optimizer in self.optimizers
        ]

    def save_state(self, epoch: int, done: int) -> None:
        """Save everything that the step after the first `done` of `epoch` depends on, atomically,
        as safetensors."""
        if self.rank:
            return
        tensors, groups = {}, []
        for name, tensor in self.model.state_dict().items():
            if not name.startswith(FROZEN):
                tensors[f"model.{name}"] = tensor
        for number, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            groups.append(state["param_groups"])
            for parameter, values in state["state"].items():
                for name, value in values.items():
                    tensors[f"optimizer.{number}.{parameter}.{name}"] = torch.as_tensor(value)
        progress = {
            "epoch": epoch,
            "done": done,
            "global_step": self.global_step,
            "groups": groups,
            "schedulers": [
                {k: v for k, v in s.state_dict().items() if k != "lr_lambdas"}
                for s in self.schedulers
            ],
            "history": self.history,
        }
        with atomic(self.state / f"state-{self.global_step:08d}-{epoch}.safetensors") as partial:
            contiguous = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
            save_file(contiguous, partial, {"progress": json.dumps(progress)})
        for path in self.saved()[: -self.keep]:
            path.unlink()

    def saved(self) -> list[Path]:
        """The saved states, oldest first."""
        return sorted(self.state.glob("state-*.safetensors"))

    def load_state(self) -> None:
        """Go on from the newest state that is whole; a damaged one is told of."""
        for path in reversed(self.saved()):
            try:
                with safe_open(path, "pt") as file:
                    progress = json.loads(file.metadata()["progress"])
                tensors = load_file(path)
            except Exception as error:  # safetensors raises its own SafetensorError, and OSError
                if not self.rank:
                    print(f"train: {path} is damaged and not used ({error})", flush=True)
                continue
            self.apply_state(tensors, progress)
            if not self.rank:
                print(
                    f"train: goes on at epoch {self.current_epoch}, step {self.global_step}",
                    flush=True,
                )
            return

    def apply_state(self, tensors: dict[str, torch.Tensor], progress: dict) -> None:
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
        self.current_epoch, self.done = progress["epoch"], progress["done"]
        self.global_step, self.history = progress["global_step"], progress["history"]

    def autocast(self):
        dtype = self.config.hidden_states_dtype
        return torch.autocast(self.device_type, dtype, enabled=dtype != torch.float32)

    def to_device(self, batch: dict) -> dict[str, torch.Tensor]:
        return {k: v.to(self.device) for k, v in batch.items() if torch.is_tensor(v)}

    def train_epoch(self, epoch: int) -> None:
        self.model.train()
        sampler = self.train_loader.batch_sampler
        sampler.set_epoch(epoch, self.done)
        call = dict(self.config.train_call_kwargs)
        warming_up = epoch < self.ttt_warmup_epochs
        if warming_up:
            call["ttt_steps"] = 1
        self.train_loader.dataset.supervise_all = warming_up
        batches = iter(self.train_loader)
        progress = tqdm(
            total=self.total_steps,
            initial=self.global_step,
            unit=" steps",
            desc=f"train epoch {epoch}",
            mininterval=5,
            disable=bool(self.rank),
        )
        for step in range(self.done, sampler.steps):
            row, stopped = self.train_step(epoch, step, batches, call)
            self.record(row)
            progress.update()
            speed = row["tokens"] / row["seconds"]
            shown = f"{speed:,.0f} tokens/s, loss {row['loss']:.3f}"
            progress.set_postfix_str(shown, refresh=False)
            if self.global_step % self.checkpoint_every == 0 or stopped:
                self.save_state(epoch, step + 1)
                if stopped:
                    raise Interrupted(self.stop_signal or "a signal to another process")
        progress.close()
        self.done = 0

    def train_step(self, epoch: int, step: int, batches, call: dict) -> tuple[dict, bool]:
        """One optimizer step; its row of the history, and whether a process was told to stop.

        Raises:
            ValueError: a loss or a gradient that is no number, or a batch without a supervised
                token, naming the rows. The weights are those of the step before.
        """
        started = time.time()
        sampler = self.train_loader.batch_sampler
        where = f"epoch {epoch}, step {step + 1}"
        rate = self.optimizers[0].param_groups[0]["lr"]
        self._optimizers_zero_grad()
        sums: dict[str, torch.Tensor] = {}
        tokens = supervised = 0
        for micro in range(sampler.accumulate):
            batch = next(batches)
            weight = sampler.weight(step, micro)
            if not batch["loss_mask"].any():
                raise ValueError(f"{where}: no supervised token in {self.rows(step, micro)}")
            if weight:
                tokens += int((batch["document_ids"] >= 0).sum())
                supervised += int(batch["loss_mask"].sum())
            batch = self.to_device(batch)
            if self.noise:
                # A batch's noise is a matter of its place, so a resumed run has the same.
                number = epoch << 32 | sampler.place(step, micro)[1]
                layers = batch["hidden_states"].shape[-1] // self.model.hidden_size
                batch["hidden_states"] = with_noise(
                    batch["hidden_states"], layers, self.noise, self.seed << 48 | number
                )
            last = micro + 1 == sampler.accumulate
            wait = self.ranks > 1 and not last
            with self.forward.no_sync() if wait else contextlib.nullcontext():
                with self.autocast():
                    _, loss, metrics = self.forward(**batch, **call)
                if not loss.isfinite():
                    raise ValueError(
                        f"{where}: the loss is {loss.item()} on {self.rows(step, micro)}"
                    )
                # The processes' gradients are averaged, and the weights of a step sum to one.
                (loss * (weight * self.ranks)).backward()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0) + value.detach() * (weight > 0)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        counts = [tokens, supervised, self.stop_signal is not None]
        counts = torch.tensor(counts, dtype=torch.float64, device=self.device)
        total = torch.cat([torch.stack(list(sums.values())).double().flatten(), counts])
        if self.ranks > 1:
            dist.all_reduce(total)
        *values, tokens, supervised, stopped = total.tolist()
        if not norm.isfinite():
            rows = ", ".join(self.rows(step, micro) for micro in range(sampler.accumulate))
            raise ValueError(f"{where}: the gradient's norm is {norm.item()} on {rows}")
        self._optimizers_step()
        self._schedulers_step()
        self.global_step += 1
        row = {
            "kind": "step",
            "split": "train",
            "epoch": epoch,
            "step": self.global_step,
            "lr": rate,
            "grad_norm": float(norm),
            "tokens": int(tokens),
            "supervised_tokens": int(supervised),
            "seconds": round(time.time() - started, 4),
            **ratios(dict(zip(sums, values, strict=True))),
        }
        return row, stopped > 0

    def rows(self, step: int, micro: int) -> str:
        """The rows of a micro-batch, for a message."""
        dataset = self.train_loader.dataset
        indices = self.train_loader.batch_sampler.batch(step, micro)
        return ", ".join(dataset.name(index) for index in indices)

    def record(self, row: dict) -> None:
        self.history.append(row)
        if self.writer:
            for name, value in row.items():
                if name not in ("kind", "split", "step"):
                    self.writer.add_scalar(f"{row['split']}/{name}", value, row["step"])

    @torch.no_grad()
    def val_epoch(self, epoch: int) -> dict[str, float]:
        """Held-out metrics, each a ratio of sums over all batches. Each process takes them all:
        they are few, and nobody waits for another."""
        self.model.eval()
        sums: dict[str, float] = {}
        for batch in self.val_loader:
            batch = self.to_device(batch)
            with self.autocast():
                drafted, _, metrics = self.model(**batch, **self.config.val_call_kwargs)
                last = batch["verifier_last_hidden_states"].to(self.model.fc.weight.dtype)
                target = self.model.verifier_lm_head(self.model.verifier_norm(last))
            metrics |= walk(drafted, target.argmax(-1), batch["loss_mask"])
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return ratios(sums)

    def out_of_patience(self) -> bool:
        lengths = [r["acceptance_length"] for r in self.history if r["kind"] == "epoch"]
        if not self.patience or not lengths:
            return False
        return len(lengths) - 1 - lengths.index(max(lengths)) >= self.patience

    def run(self) -> None:
        for epoch in range(self.current_epoch, self.config.num_epochs):
            if self.out_of_patience():
                if not self.rank:
                    print(f"train: {self.patience} epochs without a better one; it ends here")
                break
            self.train_epoch(epoch)
            metrics = self.val_epoch(epoch)
            place = {"epoch": epoch, "step": self.global_step}
            self.record({"kind": "epoch", "split": "held_out", **place, **metrics})
            if not self.rank:
                self.on_epoch(epoch, metrics)
            self.save_state(epoch + 1, 0)
        if self.writer:
            self.writer.close()
