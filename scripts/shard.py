"""Turn raw conversations into token shards: stream, check, render, tokenise, account.

With `--answers verifier` a row is a prompt: the conversation's first user turn (and a system
turn before it), which the verifier answers while its states are extracted; with `--max-turns`
the later user turns go along, each to be answered with the earlier answers as its history. With
`--answers dataset` a row is the whole conversation and its own answers are supervised; answers that
the chat template renders otherwise once others follow (it drops their thinking) get rows of their
own, with their conversation's id.
Assistant turns before the first user turn (ShareGPT splits long talks) are dropped and counted.

Every row read is kept or rejected with a reason: shards.json holds the account, and
rejects.jsonl a line for each row rejected. The same input gives the same bytes, whatever the
number of processes.
"""

import argparse
import collections
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from eyrie.chat import Chat, Row, load_tokenizer
from eyrie.conversations import Conversation, Reject, name_of, read_conversation
from eyrie.errors import in_one_line
from eyrie.files import atomic, log_line, write_json
from eyrie.prompts import read_prompts
from eyrie.provenance import peak_rss_bytes
from eyrie.shards import Rows, write_tokens
from eyrie.shards import read_rows as read_shard
from eyrie.sources import BrokenFile, DataError, expand, read_rows

# Rows handed to a process at once.
BATCH = 16


def normal(text: str) -> str:
    return " ".join(text.lower().split())


def without_leading_answers(messages: list[dict]) -> list[dict]:
    """A conversation from its first user turn on, with the system turns before it."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    return [m for i, m in enumerate(messages) if i >= first or m["role"] == "system"]


@dataclass
class Outcome:
    """What became of a conversation: its rows of tokens, or the reason why it has none."""

    id: bytes | None = None
    name: str | None = None
    rows: list[Row] = field(default_factory=list)
    reason: str = ""
    turns: int = 0
    beheaded: bool = False


class Sharder:
    """Turns rows into tokens; one in each process."""

    def __init__(self, chat: Chat, benchmark: set[str], args):
        self.chat, self.benchmark, self.args = chat, benchmark, args
        self.vocab_size = len(chat.tokenizer)

    def __call__(self, raw) -> Outcome:
        outcome = Outcome(name=name_of(raw))
        try:
            conversation = read_conversation(raw)
            whole = conversation.messages
            conversation.messages = without_leading_answers(whole)
            outcome.beheaded = len(conversation.messages) < len(whole)
            outcome.turns = len(conversation.messages)
            outcome.id = conversation.id
            if any(normal(m["content"]) in self.benchmark for m in conversation.messages):
                raise Reject("benchmark prompt")
            outcome.rows = self.tokens(conversation)
        except Reject as reject:
            outcome.reason = str(reject)
        return outcome

    def tokens(self, conversation: Conversation) -> list[Row]:
        args, messages = self.args, conversation.messages
        if conversation.tokens:
            rows = [self.tokenised(*conversation.tokens)]
        elif args.answers == "verifier":
            users = [i for i, m in enumerate(messages) if m["role"] == "user"]
            if not users:
                raise Reject("no user turn")
            prompt = messages[: users[0] + 1]
            if sum(len(m["content"]) for m in prompt) > args.max_length * self.chat.longest:
                raise Reject("prompt too long")
            row = self.chat.prompt(prompt, conversation.tools)
            if len(row.ids) + args.max_new_tokens > args.max_length:
                raise Reject("prompt too long")
            # What follows a tool's result cannot be asked again without the tool.
            tool = next((i for i, m in enumerate(messages) if m["role"] == "tool"), len(messages))
            asked = [messages[i] for i in users if i < tool][: args.max_turns or None]
            if len(asked) > 1:
                before = messages[: users[0]]
                row.turns = {"messages": before + asked, "tools": conversation.tools}
            return [row]
        else:
            rows = self.chat.rows(messages, conversation.tools, args.max_length)
        if sum(sum(row.mask) for row in rows) < args.min_supervised_tokens:
            raise Reject("too few supervised tokens")
        return rows

    def tokenised(self, ids: list[int], mask: list[bool]) -> Row:
        if self.args.answers == "verifier":
            raise Reject("tokenised row, to which the verifier cannot add")
        if max(ids) >= self.vocab_size:
            raise Reject("token id beyond the tokenizer's vocabulary")
        length = self.args.max_length
        return Row(ids[:length], mask[:length], truncated=len(ids) > length)


def start(sharder: Sharder) -> None:
    """Give a process its sharder; forked, so that the tokenizer is loaded once. Ctrl-C is for the
    parent, which ends its processes; where the parent is killed, they end by themselves."""
    global in_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    in_process = sharder


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def work(batch: list) -> list[Outcome]:
    return [in_process(raw) for raw in batch]


def outcomes(rows: Iterator, sharder: Sharder, processes: int) -> Iterator[tuple[tuple, Outcome]]:
    """Yield (row, its outcome) in the rows' order; the raw row is the last item of each of `rows`.

    Only a few batches are read ahead, so memory does not grow with the file.
    """
    if processes == 1:
        for row in rows:
            yield row, sharder(row[-1])
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), start, (sharder,))
    # The first batch forks the processes, so it comes before any file is open.
    waiting = collections.deque([([], pool.submit(work, []))])
    try:
        while True:
            batch = list(islice(rows, BATCH))
            if batch:
                waiting.append((batch, pool.submit(work, [row[-1] for row in batch])))
            if waiting and (not batch or len(waiting) > 4 * processes):
                done, result = waiting.popleft()
                yield from zip(done, result.result(), strict=True)
            if not batch and not waiting:
                return
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process was killed, by the system if memory ran out (dmesg tells). Run "
            "again, with fewer --processes (Snakemake's --cores) or more memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class Account:
    """How many rows were read and what became of them, in all and for each source."""

    def __init__(self):
        self.read: Counter = Counter()
        self.kept: Counter = Counter()
        self.reasons: dict[str, Counter] = {}
        self.counts: Counter = Counter(dict.fromkeys(COUNTED, 0))
        self.lengths: list[int] = []
        self.turns: list[int] = []
        self.bad_files: list[dict] = []

    def reject(self, source: str, reason: str) -> None:
        self.reasons.setdefault(source, Counter())[reason] += 1

    @property
    def all_reasons(self) -> Counter:
        return sum(self.reasons.values(), Counter())

    def table(self) -> str:
        lines = (f"  {count:8,}  {reason}" for reason, count in self.all_reasons.most_common())
        return "\n".join(lines)

    def summary(self) -> dict:
        sources = {
            name: {
                "read": read,
                "kept": self.kept[name],
                "rejected": self.reasons.get(name, Counter()).total(),
                "reasons": dict(self.reasons.get(name, Counter()).most_common()),
            }
            for name, read in self.read.items()
        }
        return {
            "read": self.read.total(),
            "kept": self.kept.total(),
            "rejected": self.all_reasons.total(),
            "reasons": dict(self.all_reasons.most_common()),
            "sources": sources,
            "bad_files": self.bad_files,
            "duplicates": self.all_reasons["duplicate"],
            **{name: self.counts[name] for name in COUNTED},
            "tokens": sum(self.lengths),
            "length_percentiles": percentiles(self.lengths),
            "turns_percentiles": percentiles(self.turns),
            "turns": sum(self.turns),
        }


# What else is counted of the conversations kept: those cut to max_length, those with control
# tokens in a message's text (they stay text), those that began with answers; answers that the chat
# template does not repeat as they were written, and the rows beside a conversation's first in which
# these are supervised; and those of them that are in no such row, as it would be too long.
COUNTED = (
    "supervised_tokens",
    "rows_split_off",
    "truncated",
    "control_tokens_in_text",
    "leading_answers_dropped",
    "answers_not_supervised",
)


def percentiles(values: list[int]) -> dict[str, int]:
    ranked = sorted(values)
    last = len(ranked) - 1
    return {
        str(p): ranked[min(last, len(ranked) * p // 100)] if ranked else 0
        for p in (0, 25, 50, 75, 95, 100)
    }


def sources_of(args) -> list[tuple[str, Path]]:
    """(name, file) of every file of every source.

    Raises:
        DataError: a source has none.
    """
    names = args.source_name or [str(path) for path in args.conversations]
    return [
        (name, path)
        for name, source in zip(names, args.conversations, strict=True)
        for path in expand(source)
    ]


def numbered_rows(sources: list[tuple[str, Path]]) -> Iterator[tuple]:
    """Every row of `sources_of`: (fault, source, file, row number, byte offset, raw row).

    Rows are read ahead, so a file's fault has its place among them: what follows the file's last
    whole row, a BrokenFile. It is None of a row."""
    for name, path in sources:
        try:
            for number, (offset, raw) in enumerate(read_rows(path)):
                yield None, name, str(path), number, offset, raw
        except BrokenFile as broken:
            yield broken, name, str(path), broken.rows, broken.offset, None


def sharder_of(args) -> Sharder:
    """What the tokenizer's folder, the template's options and the benchmark's prompts decide.

    Raises:
        DataError, ValueError: one of them cannot be read.
    """
    options = json.loads(args.template_options)
    if not isinstance(options, dict):
        raise ValueError(f"--template-options: {args.template_options} is no JSON object")
    tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
    chat = Chat(tokenizer, args.date, args.system_turns, options)
    prompts = [prompt for path in args.benchmark or () for prompt in read_prompts(path)]
    benchmark = {normal(text) for prompt in prompts for text in prompt["asked"]}
    return Sharder(chat, benchmark, args)


def make_shards(args, sharder: Sharder, sources: list[tuple[str, Path]]) -> dict:
    """Write the shards and rejects.jsonl; return the account.

    Raises:
        DataError: a broken file, too few rows, a reason that rejects too many.
    """
    chat = sharder.chat
    metadata = {"answers": args.answers, "tokenizer": chat.identity(), "chat": chat.settings()}
    account = Account()
    seen: set[bytes] = set()
    ids, masks, row_ids, turns = [], [], [], []
    shards = 0
    limit = args.limit or float("inf")
    (args.out / "shards").mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        nonlocal shards
        if not shards:
            print(
                f"shard: the first row, its answers between » and «:\n{chat.show(ids[0], masks[0])}"
            )
        name = args.out / "shards" / f"{shards:05d}.safetensors"
        write_tokens(name, Rows.pack(ids, masks, row_ids, metadata, turns))
        log_line(args.log, shard=shards, rows=len(ids), tokens=sum(map(len, ids)))
        shards += 1
        for part in (ids, masks, row_ids, turns):
            part.clear()

    progress = tqdm(total=args.limit, unit=" rows", desc="shard", mininterval=5)
    found = outcomes(numbered_rows(sources), sharder, args.processes)
    with (
        closing(found) as results,
        atomic(args.out / "rejects.jsonl") as partial,
        open(partial, "w") as rejects,
    ):
        for (fault, source, file, number, offset, _), outcome in results:
            if fault:
                if args.on_bad_file != "keep":
                    raise fault
                bad = {"source": source, "file": file, "rows": number, "offset": offset}
                account.bad_files.append(bad | {"why": fault.why})
                print(f"shard: {fault}; its first {number:,} rows are used", file=sys.stderr)
                continue
            account.read[source] += 1
            reason = "duplicate" if outcome.id in seen else outcome.reason
            if reason:
                account.reject(source, reason)
                line = {"source": source, "file": file, "row": number, "offset": offset}
                line |= {"id": outcome.name, "reason": reason}
                rejects.write(json.dumps(line) + "\n")
                continue
            seen.add(outcome.id)
            account.kept[source] += 1
            account.turns.append(outcome.turns)
            whole = outcome.rows[0]
            account.counts.update(
                rows_split_off=len(outcome.rows) - 1,
                truncated=whole.truncated,
                control_tokens_in_text=whole.control,
                leading_answers_dropped=outcome.beheaded,
                answers_not_supervised=len(whole.lost),
            )
            for row in outcome.rows:
                account.lengths.append(len(row.ids))
                account.counts.update(supervised_tokens=sum(row.mask))
                ids.append(row.ids)
                masks.append(row.mask)
                row_ids.append(outcome.id)
                turns.append(row.turns)
            progress.update()
            if account.kept.total() % args.shard_size == 0:
                flush()
            if account.kept.total() == limit:
                break
    progress.close()
    if ids:
        flush()
    summary = account.summary()
    found = (
        f"{summary['kept']:,} found among {summary['read']:,} read. Rejected:\n{account.table()}"
    )
    if not summary["kept"] or summary["kept"] < (args.limit or 0):
        raise DataError(
            f"{args.limit or 1:,} usable conversations asked for, {found}\n"
            "Ask for fewer, or add conversations"
        )
    for reason, count in summary["reasons"].items():
        if count > args.max_reject_fraction * summary["read"]:
            raise DataError(
                f"{count:,} rows were rejected for one reason ({reason}); {found}\n"
                "Mend the data, or raise shard.max_reject_fraction to go on without them"
            )
    return summary | {"shards": shards, **metadata}


def remove_shards(out: Path) -> None:
    """Leave nothing of an earlier run, which may have had more shards, or of one that failed."""
    for path in [out / "shards.json", *(out / "shards").glob("[0-9]*.safetensors")]:
        path.unlink(missing_ok=True)


def show(args) -> None:
    """Print row `args.show` of the shards in args.out, its supervised tokens marked."""
    chat = Chat(load_tokenizer(args.tokenizer, args.trust_remote_code))
    number = args.show
    for path in sorted((args.out / "shards").glob("*.safetensors")):
        rows = read_shard(path)
        if number < len(rows):
            print(chat.show(rows.row(number).tolist(), rows.mask(number).tolist()))
            return
        number -= len(rows)
    raise DataError(f"{args.out}: its shards hold {args.show - number:,} rows, numbered from 0")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--conversations", nargs="+", default=[], help="files, folders or glob patterns"
    )
    parser.add_argument("--source-name", nargs="*", help="a name for each of these, in the account")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the verifier's folder")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--benchmark", type=Path, nargs="*", help="prompts never to train on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard-size", type=positive, default=100, help="conversations a shard")
    parser.add_argument("--limit", type=positive, help="conversations to keep; all if not given")
    parser.add_argument(
        "--max-length", type=positive, default=512, help="tokens a row, answer included"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="kept free for the answer")
    parser.add_argument("--max-turns", type=int, default=1, help="that are answered; 0 is all")
    parser.add_argument("--min-supervised-tokens", type=int, default=4)
    parser.add_argument("--answers", choices=["verifier", "dataset"], default="verifier")
    parser.add_argument("--on-bad-file", choices=["stop", "keep"], default="stop")
    parser.add_argument("--max-reject-fraction", type=float, default=0.5, help="for one reason")
    parser.add_argument("--system-turns", choices=["merge", "drop", "reject"], default="merge")
    parser.add_argument("--date", default="2026-01-01", help="today, to the chat template")
    parser.add_argument("--template-options", default="{}", help="JSON, for the chat template")
    parser.add_argument("--processes", type=positive, default=1)
    parser.add_argument("--log", type=Path, help="gets a JSON line a shard")
    parser.add_argument("--show", type=int, metavar="N", help="print row N of --out, and end")
    args = parser.parse_args()

    started = time.time()
    try:
        if args.show is not None:
            show(args)
            return
        if not args.conversations:
            raise DataError("give --conversations")
        if args.source_name and len(args.source_name) != len(args.conversations):
            raise DataError(
                f"{len(args.source_name)} --source-name for {len(args.conversations)} "
                "--conversations; give one for each, or none"
            )
        # Good shards stay where an argument is wrong.
        sources, sharder = sources_of(args), sharder_of(args)
        remove_shards(args.out)
        try:
            account = make_shards(args, sharder, sources)
        except BaseException:
            remove_shards(args.out)
            raise
    except (DataError, ValueError, OSError) as error:
        sys.exit(f"shard: {error}")
    account["seconds"] = round(time.time() - started, 2)
    account["peak_rss_bytes"] = peak_rss_bytes()
    write_json(args.out / "shards.json", account)
    print(
        f"shard: {account['read']:,} read = {account['kept']:,} kept + "
        f"{account['rejected']:,} rejected"
    )


if __name__ == "__main__":
    with in_one_line("shard"):
        main()
