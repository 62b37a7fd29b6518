"""vLLM's hidden states, taken from the engine straight into the shard being written.

vLLM's own ExampleHiddenStatesConnector writes one file a request, only on CUDA, through an
unbounded queue. This one runs on CUDA and on a CPU, for GQA and MLA verifiers, and writes each
state once, to its final place in the shard, with a bounded queue behind the engine.

A request says where its states go, in SamplingParams(extra_args={"kv_transfer_params": ...}):

    shard                  path of the shard file to write into
    row                    the row's number, given back in the record
    offset                 token offset in the shard, or None to append
    include_output_tokens  also the states of the generated tokens but the last, which no
                           forward pass has seen

When a row's states are written, one JSON line {row, offset, tokens, ids} goes to
`shard`.rows; `ids` is `token_hash` of the tokens that the engine held for those states. For fp8
states `lost` and `squares` are each layer's sums of squares of what rounding took, and of the
states. The line works the same in process, from a worker process, and on rank 0 of a
tensor-parallel group.
"""

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.v1.request import RequestStatus

from eyrie.shards import STATES_DTYPES, HiddenShardWriter, from_fp8, to_fp8, token_hash


@dataclass
class Save:
    """One finished request, on its way from the scheduler to the worker."""

    request_id: str
    target: dict
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class States:
    """A row's states on the CPU: [tokens, layers, hidden] in the shard's dtype; fp8 has `scales`
    [tokens, layers], and `record` says what rounding took."""

    states: torch.Tensor
    scales: torch.Tensor | None = None
    record: dict = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.states.numel() * self.states.element_size()


@dataclass
class Saves(KVConnectorMetadata):
    saves: list[Save] = field(default_factory=list)


class Writer:
    """Writes rows in a thread; `put` waits while `limit` bytes are queued or being written.

    A row is written once, however often it is put: after an out-of-memory error the engine is
    asked again for what may have been on its way.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.pending = 0
        self.queue: deque = deque()
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self.next_offset: dict[str, int] = {}
        self.known: set[tuple[str, int]] = set()
        threading.Thread(target=self._run, name="eyrie-states", daemon=True).start()

    def put(self, save: Save, states: States) -> None:
        size = states.bytes
        with self.changed:
            # A row larger than the limit goes alone.
            while self.pending and self.pending + size > self.limit and self.error is None:
                self.changed.wait()
            if self.error is not None:
                raise RuntimeError(f"{save.target['shard']}: states not written") from self.error
            self.pending += size
            self.queue.append((save, states))
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                save, states = self.queue.popleft()
            try:
                self._write(save, states)
            except Exception as error:
                self.error = error
            with self.changed:
                self.pending -= states.bytes
                self.changed.notify_all()

    def _write(self, save: Save, found: States) -> None:
        shard, offset, tokens = save.target["shard"], save.target["offset"], len(found.states)
        if offset is None:
            offset = self.next_offset.get(shard, 0)
            self.next_offset[shard] = offset + tokens
        HiddenShardWriter.write_states(Path(shard), offset, found.states, found.scales)
        record = {
            "row": save.target["row"],
            "offset": offset,
            "tokens": tokens,
            "ids": token_hash(save.token_ids),
            **found.record,
        }
        with open(shard + ".rows", "a") as file:
            file.write(json.dumps(record) + "\n")


class EyrieConnector(ExampleHiddenStatesConnector):
    """See the module. extra config: `queue_bytes`, the most that may wait to be written, and
    `states`, bf16 or fp8."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._saves: list[Save] = []
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._queue_bytes, self._fp8 = extra["queue_bytes"], extra["states"] == "fp8"
        self._writer: Writer | None = None

    # Scheduler side: note what has finished, hold its blocks until the worker has read them.

    def build_connector_meta(self, scheduler_output) -> Saves:
        saves, self._saves = self._saves, []
        return Saves(saves)

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, dict | None]:
        target = request.kv_transfer_params or {}
        # A request that was aborted, or asks for no states, has nothing to save.
        if "shard" not in target or request.status == RequestStatus.FINISHED_ABORTED:
            return False, None
        if target["include_output_tokens"]:
            token_ids = list(request.all_token_ids)[:-1]
        else:
            token_ids = list(request.prompt_token_ids)
        self._saves.append(Save(request.request_id, dict(target), token_ids, list(block_ids)))
        return True, None

    # Worker side.

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        if not self._is_tp_rank_zero or not self.has_connector_metadata():
            return None, None
        saves = self._get_connector_metadata().saves
        if saves and self._writer is None:
            self._writer = Writer(self._queue_bytes)
        if self._writer is not None and self._writer.error is not None:
            raise RuntimeError("states were not written") from self._writer.error
        for save in saves:
            key = save.target["shard"], save.target["row"]
            if key not in self._writer.known:
                self._writer.known.add(key)
                self._writer.put(save, self._gather(save))
        return {save.request_id for save in saves} or None, None

    def _gather(self, save: Save) -> States:
        """One request's states, from its blocks."""
        offsets = torch.arange(self._block_size)
        slots = (offsets + torch.tensor(save.block_ids)[:, None] * self._block_size).flatten()
        slots = slots[: len(save.token_ids)].to(self._kv_cache.device)
        states = extract_from_kv_cache(self._kv_cache, slots, len(save.token_ids))
        if not self._fp8:
            return States(states.to(STATES_DTYPES["bf16"]).cpu())
        stored, scales = to_fp8(states)
        lost = from_fp8(stored, scales) - states.float()
        squares = {"lost": lost.square(), "squares": states.float().square()}
        record = {name: values.sum((0, 2)).tolist() for name, values in squares.items()}
        return States(stored.cpu(), scales.cpu(), record)


def read_records(shard: str) -> list[dict]:
    """The rows written so far into `shard`, a path; a line still being written is left out."""
    with contextlib.suppress(FileNotFoundError), open(shard + ".rows") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
    return []
