"""Extract the verifier's hidden states, and its answers, in one pass of one engine.

A conversation of one user turn is answered and its states taken by the same request. Of several
user turns each is answered with the earlier answers as its history, and a last request takes the
states of the whole; answers whose thinking the chat template drops from the history get a row of
their own.

Finished shards live in a store under their fingerprint and the outputs are hard links to them.
The engine is loaded once, and only if the store lacks a shard; a killed run loses the shards
that were being written and no other.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from eyrie import engine, store
from eyrie.chat import Chat, Row, load_tokenizer
from eyrie.conversations import Reject
from eyrie.errors import in_one_line
from eyrie.files import link_or_copy, log_line, sha256_file, write_json
from eyrie.gpus import hold_gpus
from eyrie.identity import read_identity
from eyrie.memory import extraction_memory, require_memory
from eyrie.provenance import peak_rss_bytes
from eyrie.rates import record_rate
from eyrie.shards import (
    HEADER_BYTES,
    STATES_DTYPES,
    HiddenShardWriter,
    Rows,
    ShardError,
    check_hidden,
    read_rows,
    token_hash,
)
from eyrie.teacher import Teacher
from eyrie.verifier import (
    VerifierConfig,
    extraction_ids,
    load_verifier_config,
    text_sizes,
    weight_bytes,
)


def fingerprint(token_shard: Path, verifier: str, args) -> str:
    """What decides a hidden shard's numbers; memory tuning is left out because it does not."""
    parts = {
        "tokens": sha256_file(token_shard),
        "verifier": verifier,
        "layer_ids": args.layer_ids,
        "dtype": args.dtype,
        "states": args.states,
        "answers": args.answers,
        "max_model_len": args.max_model_len,
    }
    if args.answers == "verifier":
        parts |= {"max_new_tokens": args.max_new_tokens, "max_length": args.max_length}
        if args.temperature:
            parts |= {k: getattr(args, k) for k in ("temperature", "top_p", "seed")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Talk:
    """A conversation whose user turns the verifier answers one after the other."""

    def __init__(self, chat, turns: dict, max_prompt: int):
        self.chat, self.tools, self.max_prompt = chat, turns["tools"], max_prompt
        messages = turns["messages"]
        first = next(i for i, m in enumerate(messages) if m["role"] == "user")
        self.messages, self.later = messages[: first + 1], messages[first + 1 :]
        self.prompt = chat.prompt(self.messages, self.tools).ids
        # Of each answer, the tokens it was asked with and those that were written.
        self.written: list[tuple[list[int], list[int]]] = []

    def answered(self, token_ids: list[int], cut: bool) -> list[int] | None:
        """Take an answer. Returns the next turn's prompt, or None after the last that fits."""
        self.written.append((self.prompt, token_ids))
        special = self.chat.special
        while token_ids and token_ids[-1] in special:
            token_ids = token_ids[:-1]
        # A limit may cut a character, too.
        text = self.chat.tokenizer.decode(token_ids).rstrip("\ufffd" if cut else "")
        self.messages.append({"role": "assistant", "content": text, "cut": cut})
        if not self.later:
            return None
        try:
            self.prompt = self.chat.prompt([*self.messages, self.later[0]], self.tools).ids
        except Reject:  # the template cannot render what was answered
            return None
        if len(self.prompt) > self.max_prompt:
            return None
        self.messages.append(self.later.pop(0))
        return self.prompt

    def rows(self) -> list[Row]:
        """The conversation as answered, if it can be rendered, and one row for each answer that is
        not repeated in it."""
        try:
            whole = self.chat.answers(self.messages, self.tools)
            rows, lost = [whole], whole.lost
        except Reject:  # the template repeats no answer as it was written
            rows, lost = [], range(len(self.written))
        for prompt, written in (self.written[number] for number in lost):
            mask = [False] * len(prompt) + [True] * len(written)
            rows.append(Row(prompt + written, mask))
        return rows


# Rows of a shard, and tokens of each, whose log-probabilities are asked of the engine too, where
# its answers are not the most likely tokens: a second prefill, and enough to tell a wrong layer.
PROBES, PROBE_TOKENS = 4, 16
# The engine's bounds are not halved below so many tokens a step.
LEAST_TOKENS = 16


class Shard:
    """One hidden shard on its way: its prompts, what has come back, and what was written."""

    def __init__(
        self,
        prompts: Rows,
        path: Path,
        number: int,
        layer_ids: list[int],
        hidden: int,
        states: str,
    ):
        self.prompts = prompts
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.number = number
        self.layer_ids, self.state_shape = layer_ids, (len(layer_ids), hidden)
        self.dtype = STATES_DTYPES[states]
        self.unanswered = set(range(len(prompts)))
        self.talks: dict[int, Talk] = {}
        # Of each row whose states were asked for, by the number given to the connector.
        self.rows: dict[int, tuple[list[int], list[bool], bytes]] = {}
        # Of some of these rows, the engine's own log-probabilities of tokens 1, 2, ...; None while
        # they are awaited.
        self.log_probs: dict[int, list[float] | None] = {}
        self.asked = self.answers = self.cut_answers = 0
        for leftover in (self.partial, *self.beside):
            leftover.unlink(missing_ok=True)

    @property
    def beside(self) -> list[Path]:
        return [Path(f"{self.partial}.{name}") for name in ("rows", "scales")]

    def row_id(self, row: int) -> bytes:
        return self.prompts.row_ids[row].numpy().tobytes()

    def is_written(self) -> bool:
        awaited = self.unanswered or None in self.log_probs.values()
        return not awaited and len(self.records()) == self.asked

    def records(self) -> list[dict]:
        from eyrie.connector import read_records

        return read_records(str(self.partial))

    def finish(self, teacher: Teacher, greedy: bool) -> dict:
        """Check what was written against what was asked for, then give the shard its name.

        greedy: its answers are the verifier's most likely tokens.

        Raises:
            ShardError: states of other tokens, of another length, or not usable.
        """
        records = sorted(self.records(), key=lambda record: record["offset"])
        ids, masks, row_ids, end = [], [], [], 0
        for record in records:
            row = record["row"]
            tokens, mask, row_id = self.rows[row]
            if record["ids"] != token_hash(tokens) or record["tokens"] != len(tokens):
                raise ShardError(
                    f"{self.path}: row {row} got the states of other tokens than its own "
                    f"({record['tokens']} states for {len(tokens)} tokens)"
                )
            if record["offset"] != end:
                raise ShardError(
                    f"{self.path}: row {row} is at token {record['offset']}, not {end}"
                )
            end += len(tokens)
            ids.append(tokens)
            masks.append(mask)
            row_ids.append(row_id)
        metadata = {
            "fingerprint": self.path.stem,
            "layer_ids": self.layer_ids,
            "answers": self.answers,
            "cut_answers": self.cut_answers,
        }
        rows = Rows.pack(ids, masks, row_ids, metadata)
        HiddenShardWriter.finish(self.partial, rows, self.state_shape, self.dtype)
        report = {
            "layer_norms": [
                round(norm, 3) for norm in check_hidden(self.partial, rows, *self.state_shape)
            ]
        }
        if greedy:
            report["given_back"] = round(teacher.check(self.partial, rows), 4)
        elif self.log_probs:
            places = {record["row"]: place for place, record in enumerate(records)}
            probes = {places[row]: probs for row, probs in self.log_probs.items()}
            report["log_prob_error"] = round(teacher.compare(self.partial, rows, probes), 4)
        if self.dtype != STATES_DTYPES["bf16"]:
            lost, squares = (
                np.sum([record[name] for record in records], 0) for name in ("lost", "squares")
            )
            report["round_trip_error"] = np.sqrt(lost / squares).round(5).tolist()
        store.seal(self.partial, self.path, **report)
        for leftover in self.beside:
            leftover.unlink(missing_ok=True)
        return report


class Sealing:
    """Finishes shards whose rows are all written, one after the other.

    beside: while the engine goes on, as is right where it computes on GPUs: to check a large
    verifier's states and hash them takes a fifth of the time that it takes to make them. On a CPU
    the two would share the cores, and each wait for the other's threads.
    """

    def __init__(self, beside: bool):
        self.thread = ThreadPoolExecutor(1) if beside else None
        self.under_way: list[tuple[Shard, Future]] = []

    def begin(self, shard: Shard, teacher: Teacher, greedy: bool) -> None:
        if self.thread:
            future = self.thread.submit(shard.finish, teacher, greedy)
        else:
            future = Future()
            future.set_result(shard.finish(teacher, greedy))
        self.under_way.append((shard, future))

    def ended(self, wait: bool = False) -> Iterator[tuple[Shard, dict]]:
        """The shards that are sealed by now, each with what was found of it; all, if `wait`.

        Raises:
            ShardError: one is not what was asked for.
        """
        while self.under_way and (wait or self.under_way[0][1].done()):
            shard, future = self.under_way.pop(0)
            yield shard, future.result()


@dataclass
class Request:
    """What the engine was asked: to answer `ids`, to hand over their states as row `number` of
    the shard, both, or to tell the log-probabilities of that row's first tokens."""

    shard: Shard
    row: int | None
    ids: list[int]
    generate: bool = False
    number: int | None = None
    probe: bool = False


def is_out_of_memory(error: Exception) -> bool:
    """Whether an engine's step failed for want of memory; a worker process tells it in words."""
    return "out of memory" in str(error).lower() or "can't allocate memory" in str(error)


class Extraction:
    """Makes the missing shards with one engine, one after the other without a pause between
    them: while the last rows of one finish, the first of the next are already running."""

    def __init__(self, args, missing: list[Shard], config: VerifierConfig):
        engine.require_states(args)
        self.args, self.missing = args, missing
        self.answering = args.answers == "verifier"
        # Several answers are read back from text, so a token may differ.
        turns = any(shard.prompts.turns for shard in missing)
        self.greedy = self.answering and not args.temperature and not turns
        self.teacher = Teacher(args.verifier, config, args.dtype)
        self.llm = engine.load(
            args, **engine.extraction_arguments(args.layer_ids, args.gpus, args.states)
        )
        self.loaded = self.opened = time.time()
        self.sealing = Sealing(beside=args.gpus > 0)
        self.running: dict[str, Request] = {}
        self.tokens = self.sent = 0
        self.halvings: list[dict] = []
        self.chats: dict[str, Chat] = {}
        total = sum(len(shard.prompts) for shard in missing)
        self.progress = tqdm(total=total, unit=" rows", desc="extract", mininterval=5)

    def chat_of(self, shard: Shard) -> Chat:
        """The chat template as the shard's prompts were made with it."""
        settings = shard.prompts.metadata["chat"]
        key = json.dumps(settings)
        if key not in self.chats:
            tokenizer = load_tokenizer(self.args.verifier, self.args.trust_remote_code)
            self.chats[key] = Chat(tokenizer, **settings)
        return self.chats[key]

    def send(self, request: Request) -> None:
        from vllm import SamplingParams

        args, shard, number = self.args, request.shard, request.number
        extra = None
        if number is not None and not request.probe:
            # Prompts alone have their place from the start; all else is appended as it finishes.
            offset = None if self.answering else int(shard.prompts.row_offsets[number])
            target = {"shard": str(shard.partial), "row": number, "offset": offset}
            extra = {"kv_transfer_params": target | {"include_output_tokens": request.generate}}
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        if request.generate:
            sampling = SamplingParams(
                max_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                seed=row_seed(shard.row_id(request.row), len(request.ids), args.seed),
            )
        sampling.detokenize, sampling.extra_args = False, extra
        sampling.prompt_logprobs = 0 if request.probe else None
        name = str(self.sent)
        self.sent += 1
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": request.ids}, sampling)
        self.running[name] = request

    def submit(self, shard: Shard, row: int, ids: list[int], generate: bool, states: bool) -> int:
        """Ask for an answer, or states, or both; returns the number of the row of states."""
        number = None
        if states:
            number, shard.asked = shard.asked, shard.asked + 1
        self.send(Request(shard, row, ids, generate, number))
        return number

    def submit_states(self, shard: Shard, row: int, ids: list[int], mask: list[bool]) -> None:
        number = self.submit(shard, row, ids, generate=False, states=True)
        self.take(shard, row, number, ids, mask)

    def take(self, shard: Shard, row: int, number: int, ids: list[int], mask: list[bool]) -> None:
        """Note a row's tokens, now that they are known, and have some looked at twice."""
        shard.rows[number] = (ids, mask, shard.row_id(row))
        if not self.greedy and len(shard.log_probs) < PROBES and len(ids) > 1:
            shard.log_probs[number] = None
            self.send(Request(shard, None, ids[:PROBE_TOKENS], number=number, probe=True))

    def begin(self, shard: Shard, row: int) -> None:
        prompts = shard.prompts
        ids = prompts.row(row).tolist()
        turns = prompts.turns[row] if prompts.turns else None
        if turns:
            room = self.args.max_length - self.args.max_new_tokens
            shard.talks[row] = Talk(self.chat_of(shard), turns, room)
        if self.answering:
            self.submit(shard, row, ids, generate=True, states=not turns)
        else:
            self.submit_states(shard, row, ids, prompts.mask(row).tolist())

    def finished(self, request: Request, output) -> None:
        shard, row, ids = request.shard, request.row, request.ids
        written = list(output.outputs[0].token_ids)
        self.tokens += len(ids) + len(written)
        if request.generate:
            cut = output.outputs[0].finish_reason == "length"
            shard.answers, shard.cut_answers = shard.answers + 1, shard.cut_answers + cut
        if request.probe:
            probabilities = output.prompt_logprobs[1:]
            shard.log_probs[request.number] = [
                position[token].logprob
                for position, token in zip(probabilities, ids[1:], strict=True)
            ]
        elif request.generate and request.number is None:
            talk = shard.talks[row]
            prompt = talk.answered(written, cut)
            if prompt:
                self.submit(shard, row, prompt, generate=True, states=False)
                return
            for part in shard.talks.pop(row).rows():
                self.submit_states(shard, row, part.ids, part.mask)
        elif request.generate:
            # No forward pass has seen the last token, so it has no state.
            tokens = ids + written[:-1]
            mask = [False] * len(ids) + [True] * (len(tokens) - len(ids))
            self.take(shard, row, request.number, tokens, mask)
        if row in shard.unanswered:
            shard.unanswered.remove(row)
            self.progress.update()
            rate = self.tokens / (time.time() - self.loaded)
            self.progress.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)

    def ask_again(self, error: Exception) -> None:
        """After an out-of-memory error: halve what the engine does at once, and ask again for all
        that it had not handed over.

        Raises:
            ValueError: there is nothing left to halve.
        """
        llm = self.llm.llm_engine
        scheduler = llm.engine_core.engine_core.scheduler
        bounds = {
            "max_num_seqs": max(scheduler.max_num_active_reqs // 2, 1),
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens // 2,
        }
        if bounds["max_num_batched_tokens"] < LEAST_TOKENS:
            raise ValueError(f"out of memory, even with {bounds} ({error})") from error
        scheduler.max_num_active_reqs = bounds["max_num_seqs"]
        scheduler.max_num_scheduled_tokens = bounds["max_num_batched_tokens"]
        self.halvings.append(bounds)
        log_line(self.args.log, out_of_memory=str(error).splitlines()[0], **bounds)
        shown = ", ".join(f"{name} {value:,}" for name, value in bounds.items())
        print(f"\nextract: out of memory; goes on with {shown}", flush=True)

        running, self.running = self.running, {}
        llm.abort_request(list(running))
        # What had ended waits for a step that failed; its blocks may hold half of a state.
        for request in [r for r in scheduler.requests.values() if r.is_finished()]:
            scheduler._free_blocks(request)
        if not llm.reset_prefix_cache():
            raise ValueError(f"out of memory, and the engine cannot go on ({error})") from error
        for request in running.values():
            self.send(request)
        underway = {(r.shard, r.number) for r in running.values() if not r.probe}
        for shard in self.missing:
            written = {record["row"] for record in shard.records()}
            for number, (ids, _, _) in shard.rows.items():
                if number not in written and (shard, number) not in underway:
                    self.send(Request(shard, None, ids, number=number))

    def close_written(self, wait: bool = False) -> None:
        for shard in [shard for shard in self.missing if shard.is_written()]:
            self.missing.remove(shard)
            self.sealing.begin(shard, self.teacher, self.greedy)
        for shard, report in self.sealing.ended(wait):
            line = {
                "shard": shard.number,
                "rows": len(shard.rows),
                "tokens": sum(len(tokens) for tokens, _, _ in shard.rows.values()),
                "prompt_tokens": len(shard.prompts.input_ids),
                "answers": shard.answers,
                "cut_answers": shard.cut_answers,
                "bytes": shard.path.stat().st_size,
                "seconds": round(time.time() - self.opened, 2),
                **report,
            }
            self.opened = time.time()
            log_line(self.args.log, **line)

    def run(self) -> None:
        todo = [(shard, row) for shard in self.missing for row in range(len(shard.prompts))]
        waiting = iter(todo)
        while True:
            # Enough requests queued to keep the engine full, not the whole data set.
            while len(self.running) < 2 * self.args.max_num_seqs and (item := next(waiting, None)):
                self.begin(*item)
            if not self.running:
                break
            try:
                outputs = self.llm.llm_engine.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                outputs = []
                self.ask_again(error)
            for output in outputs:
                if output.finished:
                    self.finished(self.running.pop(output.request_id), output)
            self.close_written()
        # The states of the last rows are handed over by the step after their last token.
        deadline = time.time() + 60
        while self.missing and time.time() < deadline:
            self.llm.llm_engine.step()
            time.sleep(0.01)
            self.close_written()
        self.close_written(wait=True)
        self.progress.close()
        if self.missing:
            raise ShardError(
                f"{self.missing[0].path}: the engine has ended but not all states were written"
            )


def row_seed(row_id: bytes, turn: int, seed: int) -> int:
    """A seed of a row's own, the same wherever and whenever the row is answered."""
    text = row_id + f"{turn} {seed}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def bytes_at_most(args, missing: list[Shard]) -> int:
    """The bytes that the missing shards can come to, every answer being as long as allowed."""
    tokens = 0
    for shard in missing:
        rows, prompts = len(shard.prompts), len(shard.prompts.input_ids)
        answers = rows * args.max_new_tokens if args.answers == "verifier" else 0
        tokens += rows * args.max_length if shard.prompts.turns else prompts + answers
    layers, hidden = missing[0].state_shape
    # A scale is a float32.
    scales = 0 if missing[0].dtype == STATES_DTYPES["bf16"] else 4
    return tokens * layers * (hidden * missing[0].dtype.itemsize + scales)


def require_length(args, path: Path, prompts: Rows) -> None:
    """Raise ShardError where a row does not fit into the engine, which writes a token after it."""
    for row, length in enumerate(prompts.lengths):
        if length >= args.max_model_len:
            raise ShardError(
                f"{path}: row {row} has {length:,} tokens, the engine takes "
                f"{args.max_model_len - 1:,}; raise extract.max_model_len to {length + 1} or more"
            )


def rows_at_once(args, missing: list[Shard], config: VerifierConfig) -> int:
    """How many of the longest rows the engine's cache holds. Raises ValueError if none."""
    from vllm.platforms import current_platform

    longest = max(max(shard.prompts.lengths) for shard in missing)
    longest += args.max_new_tokens if args.answers == "verifier" else 1
    if any(shard.prompts.turns for shard in missing):
        longest = args.max_length
    memory = extraction_memory(
        config.text,
        weight_bytes(args.verifier),
        4 if args.dtype == "float32" else 2,
        len(args.layer_ids),
        args.gpus,
        args.max_num_batched_tokens,
    )
    device, cache = 0.0, args.kv_cache_gib * 2.0**30
    if args.gpus:
        share = args.gpu_memory_percent / 100
        device, cache = current_platform.get_device_total_memory() * share, None
    return require_memory(memory, device, cache, longest)


def run_engine(args, missing: list[Shard], config: VerifierConfig) -> dict:
    started = time.time()
    extraction = Extraction(args, missing, config)
    extraction.run()
    loaded = extraction.loaded
    return {
        "load_seconds": round(loaded - started, 2),
        "engine_seconds": round(time.time() - loaded, 2),
        "halvings": extraction.halvings,
    }


def record_rates(args, verifier: str, made: list[Rows], timings: dict) -> None:
    """Tell the next plan how fast the verifier was loaded, and read rows or answered them."""
    answering = args.answers == "verifier"
    tokens = sum(int(r.loss_mask.sum()) if answering else len(r.input_ids) for r in made)
    for stage, amount, seconds in (
        ("load", weight_bytes(args.verifier), timings["load_seconds"]),
        ("answers" if answering else "prefill", tokens, timings["engine_seconds"]),
    ):
        of = f"data {args.summary.parent.name}"
        record_rate(args.rates, stage, verifier, args.gpus, amount, seconds, of)


def checks(seals: list[dict]) -> dict:
    """The worst that was found of any shard; a key only where it was looked for."""
    found = {name: [seal[name] for seal in seals if name in seal] for name in CHECKS}
    return {name: CHECKS[name](values) for name, values in found.items() if values}


# What `Shard.finish` reports, and how the worst of it is told.
CHECKS = {
    "given_back": min,
    "log_prob_error": max,
    "round_trip_error": lambda shards: np.max(shards, 0).tolist(),
    "layer_norms": lambda shards: np.mean(shards, 0).round(3).tolist(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="a path for each")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, required=True, help="gets a JSON line a shard")
    parser.add_argument("--rates", type=Path, help="gets what a plan goes by; see eyrie.rates")
    parser.add_argument("--layer-ids", type=int, nargs="+", required=True, help="vLLM's ids")
    parser.add_argument("--answers", choices=["verifier", "dataset"], required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=256, help="of a row, all turns included")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", choices=["bf16", "fp8"], default="bf16", help="on disk")
    engine.add_arguments(parser)
    args = parser.parse_args()
    engine.prepare(args.gpus, in_process=True)
    args.dtype = engine.resolve_dtype(args.dtype)

    started = time.time()
    try:
        text = text_sizes(args.verifier, args.trust_remote_code)
        args.layer_ids = extraction_ids(args.layer_ids, text["num_hidden_layers"])
        # The folder's own record of how long it took to fetch decides no number.
        verifier = read_identity(args.identity)
        identity = json.dumps([verifier["source"], verifier["files"]])
        args.store.mkdir(parents=True, exist_ok=True)
        stored, missing = [], []
        for number, path in enumerate(args.shards):
            stored.append(args.store / f"{fingerprint(path, identity, args)}.safetensors")
            if stored[-1].exists() and (fault := store.fault(stored[-1])):
                aside = store.set_aside(stored[-1])
                print(f"extract: {stored[-1]} is made again, {fault}; the old one is {aside.name}")
            if not stored[-1].exists() and stored[-1] not in [s.path for s in missing]:
                prompts = read_rows(path)
                require_length(args, path, prompts)
                missing.append(
                    Shard(
                        prompts,
                        stored[-1],
                        number,
                        args.layer_ids,
                        text["hidden_size"],
                        args.states,
                    )
                )
        made = len(missing)
        timings = {"load_seconds": 0.0, "engine_seconds": 0.0, "halvings": []}
        print(f"extract: {len(stored)} shards, {len(stored) - made} in the store, {made} to make")
        if missing:
            config = load_verifier_config(args.verifier, args.trust_remote_code)
            store.require_space(args.store, bytes_at_most(args, missing))
            _lock = hold_gpus(args.gpus)
            fit = rows_at_once(args, missing, config)
            if fit < args.max_num_seqs:
                print(f"extract: the engine's cache holds {fit:,} of the longest rows at once")
            paths = [shard.path for shard in missing]
            timings = run_engine(args, missing, config)
            record_rates(args, verifier["source"], [read_rows(path) for path in paths], timings)
        linked = [link_or_copy(*pair) for pair in zip(stored, args.out, strict=True)]
    except (ShardError, ValueError, OSError) as error:
        sys.exit(f"extract: {error}")
    if not all(linked):
        print("extract: no hard links on this file system; the states were copied")
    rows = [read_rows(path) for path in args.out]
    write_json(
        args.summary,
        {
            "shards": len(stored),
            "made": made,
            "rows": sum(map(len, rows)),
            "tokens": sum(len(r.input_ids) for r in rows),
            "supervised_tokens": sum(int(r.loss_mask.sum()) for r in rows),
            "bytes": sum(path.stat().st_size for path in args.out),
            **{k: sum(r.metadata[k] for r in rows) for k in ("answers", "cut_answers")},
            "header_bytes": HEADER_BYTES * len(rows),
            "states": args.states,
            **checks([store.read_seal(path) for path in stored]),
            "layer_ids": args.layer_ids,
            "hidden_size": text["hidden_size"],
            "seconds": round(time.time() - started, 2),
            "peak_rss_bytes": peak_rss_bytes(),
            **timings,
        },
    )


if __name__ == "__main__":
    with in_one_line("extract"):
        main()
