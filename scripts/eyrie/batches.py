"""What a training step sees: rows of hidden shards, packed, for each process and micro-batch."""

import numpy as np
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import BaseDataset, CollateFn
from torch.utils.data import DataLoader, Sampler

from eyrie.hidden import HiddenStates


def cut_at_turn(mask: torch.Tensor, length: int) -> int:
    """How much of a row longer than `length` to keep: up to the end of the last answer that
    fits whole, or, if the first does not, `length` tokens. mask bool [n]."""
    ends = (mask[:-1] & ~mask[1:]).nonzero().flatten() + 1
    fitting = ends[ends <= length]
    return int(fitting[-1]) if len(fitting) else length


class HiddenRows(BaseDataset):
    """speculators' dataset over rows of hidden shards; a row's states are read when asked for.

    rows: (shard, row) pairs. A row longer than `total_seq_len` is cut at a turn, and one in which
    nothing would be supervised is left out: `cut` and `left_out` count them.

    While `supervise_all`, every token is a target, the prompts' too: what the verifier would
    write after any of them is known as well as after its own.
    """

    supervise_all = False

    def __init__(self, states: HiddenStates, rows: list[tuple[int, int]], total_seq_len: int):
        self.states = states
        first = np.cumsum([0, *map(len, states.rows)])
        places = [first[shard] + index for shard, index in rows]
        keep = np.concatenate([np.diff(shard.row_offsets.numpy()) for shard in states.rows])[places]
        targets = np.concatenate([supervised_targets(shard) for shard in states.rows])[places]
        # The shift by one token (below) makes room for one more.
        long = keep > total_seq_len + 1
        for place in long.nonzero()[0]:
            shard, index = rows[place]
            mask = states.rows[shard].mask(index)
            keep[place] = cut_at_turn(mask, total_seq_len + 1)
            targets[place] = mask[1 : keep[place]].sum()
        wanted = targets > 0
        self.row_list = [rows[place] for place in wanted.nonzero()[0]]
        self.kept = keep[wanted]
        self.cut, self.left_out = int((long & wanted).sum()), int((~wanted).sum())
        super().__init__(total_seq_len)

    def __len__(self) -> int:
        return len(self.row_list)

    def name(self, index: int) -> str:
        """The conversation's id and where it lies."""
        shard, row = self.row_list[index]
        row_id = self.states.rows[shard].row_ids[row].numpy().tobytes().hex()
        return f"{row_id} (row {row} of {self.states.paths[shard]})"

    def _compute_approx_lengths(self) -> np.ndarray:
        # shift_batch drops one token of each row.
        return self.kept - 1

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        row = self.states.row(*self.row_list[index])
        keep = int(self.kept[index])
        states = row["hidden_states"][:keep]
        mask = row["loss_mask"][:keep].long()
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": row["input_ids"][:keep].long(),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.ones_like(mask) if self.supervise_all else mask,
        }


def supervised_targets(shard) -> np.ndarray:
    """The supervised tokens of each row, its first left out: nothing comes before it that it
    could be drafted from. int64 [rows]."""
    offsets = shard.row_offsets.numpy()
    before = np.zeros(offsets[-1] + 1, np.int64)
    np.cumsum(shard.loss_mask.numpy(), out=before[1:])
    return before[offsets[1:]] - before[np.minimum(offsets[:-1] + 1, offsets[1:])]


class StepBatches(Sampler):
    """Batches of whole rows of at most `total_seq_len` tokens, in an order that seed and epoch
    decide, dealt out to optimizer steps.

    A step is of `ranks` x `accumulate` batches, whichever process computes which, so that two
    processes and one that accumulates two batches take the same steps. The last step of an epoch
    may have fewer; a process without one computes the step's first again, and `weight` says that
    it counts nothing.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        total_seq_len: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        accumulate: int = 1,
    ):
        self.lengths, self.total_seq_len, self.seed = lengths, total_seq_len, seed
        self.rank, self.ranks, self.accumulate = rank, ranks, accumulate
        self.set_epoch(0)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Begin `epoch` after its first `done` steps."""
        self.batches, self.done = self.batches_of(epoch), done

    def batches_of(self, epoch: int) -> list[np.ndarray]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths))
        ends = np.cumsum(self.lengths[order])
        batches, start = [], 0
        while start < len(order):
            filled = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, filled + self.total_seq_len, "right"))
            batches.append(order[start:stop])
            start = stop
        return batches

    def steps_of(self, epoch: int) -> int:
        return self.steps_in(self.batches_of(epoch))

    def steps_in(self, batches: list) -> int:
        return -(-len(batches) // (self.ranks * self.accumulate))

    @property
    def steps(self) -> int:
        """Of the epoch begun, those already done included."""
        return self.steps_in(self.batches)

    def batch(self, step: int, micro: int) -> np.ndarray:
        """The rows of this process's micro-batch."""
        first, number = self.place(step, micro)
        return self.batches[number if number < len(self.batches) else first]

    def weight(self, step: int, micro: int) -> float:
        """What the micro-batch's loss counts in the mean over the step's batches."""
        first, number = self.place(step, micro)
        size = min(self.ranks * self.accumulate, len(self.batches) - first)
        return 1 / size if number < len(self.batches) else 0.0

    def place(self, step: int, micro: int) -> tuple[int, int]:
        first = step * self.ranks * self.accumulate
        return first, first + micro * self.ranks + self.rank

    def __len__(self) -> int:
        return (self.steps - self.done) * self.accumulate

    def __iter__(self):
        for step in range(self.done, self.steps):
            for micro in range(self.accumulate):
                yield self.batch(step, micro).tolist()


def make_loader(dataset: HiddenRows, total_seq_len: int, seed: int, **ranks: int) -> DataLoader:
    """A DataLoader of packed batches [1, total_seq_len]; `ranks` as StepBatches takes them."""
    layers, hidden = dataset.states.state_shape
    collate = CollateFn(
        total_seq_len,
        hidden,
        num_target_layers=layers - 1,
        dtype=torch.bfloat16,
        preprocess=shift_batch,
    )
    sampler = StepBatches(dataset.approx_lengths, total_seq_len, seed, **ranks)
    # A GPU is faster than one process that reads for it; on a CPU there is nothing to win.
    workers = 4 if torch.cuda.is_available() else 0
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=workers)
