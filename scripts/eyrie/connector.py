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
`shard`.rows; `ids` is `token_hash` of the tokens that the engine held for those states. The
line works the same in process, from a worker process, and on rank 0 of a tensor-parallel group.
"""

import contextlib
import json
import os
import threading
from collections import deque
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

from eyrie.shards import STATES_DTYPE, HiddenShardWriter, token_hash


@dataclass
class Save:
    """One finished request, on its way from the scheduler to the worker."""

    request_id: str
    target: dict
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class Saves(KVConnectorMetadata):
    saves: list[Save] = field(default_factory=list)


class Writer:
    """Writes rows in a thread; `put` waits while `limit` bytes are queued or being written."""

    def __init__(self, limit: int):
        self.limit = limit
        self.pending = 0
        self.queue: deque = deque()
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self.next_offset: dict[str, int] = {}
        threading.Thread(target=self._run, name="eyrie-states", daemon=True).start()

    def put(self, save: Save, states: torch.Tensor) -> None:
        size = states.numel() * states.element_size()
        with self.changed:
            # A row larger than the limit goes alone.
            while self.pending and self.pending + size > self.limit and self.error is None:
                self.changed.wait()
            if self.error is not None:
                raise RuntimeError(f"{save.target['shard']}: states not written") from self.error
            self.pending += size
            self.queue.append((save, states, size))
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                save, states, size = self.queue.popleft()
            try:
                self._write(save, states)
            except Exception as error:
                self.error = error
            with self.changed:
                self.pending -= size
                self.changed.notify_all()

    def _write(self, save: Save, states: torch.Tensor) -> None:
        shard, offset = save.target["shard"], save.target["offset"]
        if offset is None:
            offset = self.next_offset.get(shard, 0)
            self.next_offset[shard] = offset + len(states)
        descriptor = os.open(shard, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            HiddenShardWriter.write_states(descriptor, offset, states)
        finally:
            os.close(descriptor)
        record = {
            "row": save.target["row"],
            "offset": offset,
            "tokens": len(states),
            "ids": token_hash(save.token_ids),
        }
        with open(shard + ".rows", "a") as file:
            file.write(json.dumps(record) + "\n")


class EyrieConnector(ExampleHiddenStatesConnector):
    """See the module. extra config: `queue_bytes`, the most that may wait to be written."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._saves: list[Save] = []
        self._queue_bytes = self._kv_transfer_config.get_from_extra_config("queue_bytes", 1 << 28)
        self._writer: Writer | None = None

    # Scheduler side: note what has finished, hold its blocks until the worker has read them.

    def build_connector_meta(self, scheduler_output) -> Saves:
        saves, self._saves = self._saves, []
        return Saves(saves)

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, dict | None]:
        target = request.kv_transfer_params or {}
        # A request aborted before it ran, or one that asks for no states, has nothing to save.
        if "shard" not in target or not block_ids:
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
            self._writer.put(save, self._gather(save))
        return {save.request_id for save in saves} or None, None

    def _gather(self, save: Save) -> torch.Tensor:
        """[tokens, layers, hidden] on the CPU, of one request's blocks."""
        offsets = torch.arange(self._block_size)
        slots = (offsets + torch.tensor(save.block_ids)[:, None] * self._block_size).flatten()
        slots = slots[: len(save.token_ids)].to(self._kv_cache.device)
        states = extract_from_kv_cache(self._kv_cache, slots, len(save.token_ids))
        return states.to(STATES_DTYPE).cpu()


def read_records(shard: str) -> list[dict]:
    """The rows written so far into `shard`, a path; a line still being written is left out."""
    with contextlib.suppress(FileNotFoundError), open(shard + ".rows") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
    return []
