"""Turn raw conversations into token shards: stream, check, render, tokenise, account.

With `--answers verifier` a row is a prompt: the conversation's first user turn (and a system
turn before it), which the verifier answers while its states are extracted. With
`--answers dataset` a row is the whole conversation and its own answers are supervised.
Assistant turns before the first user turn (ShareGPT splits long talks) are dropped and counted.

Every row read is kept or rejected with a reason; shards.json holds the account and
rejects.jsonl a line for each row rejected.
"""

import argparse
import gzip
import hashlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ijson
from tqdm import tqdm

from eyrie.chat import (
    Reject,
    answer_mask,
    conversation_id,
    load_tokenizer,
    messages_of,
    prompt_ids,
)
from eyrie.files import atomic, log_line, write_json
from eyrie.shards import Rows, write_tokens


class DataError(Exception):
    """Input that stops the job; the message names the file and the way out."""


def read_conversations(path: Path) -> Iterator[dict]:
    """Stream the rows of a JSON array or of JSON lines, whatever the file is called.

    Raises:
        DataError: the file is not JSON, or is cut off; names the rows read before.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    count = 0
    with opener(path, "rb") as file:
        head = file.read(4096).lstrip(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        array = head.startswith(b"[")
        # JSON lines are a stream of values to ijson; floats and ints as Python's own.
        rows = ijson.items(file, "item" if array else "", use_float=True, multiple_values=True)
        try:
            for row in rows:
                count += 1
                yield row
        except ijson.JSONError as error:
            raise DataError(
                f"{path}: broken JSON near byte {file.tell():,} after {count:,} whole rows "
                f"({error}). Repair the file, or ask for no more rows than it holds"
            ) from error


def normal(text: str) -> str:
    return " ".join(text.lower().split())


def read_prompts(path: Path) -> set[str]:
    """The texts of a benchmark's prompts (JSON lines with `turns` or `prompt`), normalised."""
    texts = set()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        texts.update(normal(turn) for turn in row.get("turns") or [row["prompt"]])
    return texts


def without_leading_answers(messages: list[dict]) -> list[dict]:
    """A conversation from its first user turn on, with the system turns before it."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    return [m for i, m in enumerate(messages) if i >= first or m["role"] == "system"]


def tokenise(tokenizer, messages: list[dict], args) -> tuple[list[int], list[bool]]:
    """One row's tokens and loss mask. Raises Reject."""
    special = [t for t in tokenizer.all_special_tokens if len(t) > 1]
    if any(token in m["content"] for m in messages for token in special):
        # It would become the control token itself and forge a turn.
        raise Reject("control token in the text")
    if args.answers == "verifier":
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            raise Reject("no user turn")
        ids = prompt_ids(tokenizer, messages[: users[0] + 1])
        if len(ids) + args.max_new_tokens > args.max_length:
            raise Reject("prompt too long")
        return ids, [False] * len(ids)
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    while messages:
        ids, mask = answer_mask(tokenizer, messages)
        if len(ids) <= args.max_length:
            break
        messages = messages[:-2]
    if not messages or sum(mask) < args.min_supervised_tokens:
        raise Reject("too few supervised tokens")
    return ids, mask


def tokenizer_identity(tokenizer) -> str:
    """A hash of what turns text into ids: the vocabulary and the chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([vocabulary, tokenizer.chat_template])
    return hashlib.sha256(text.encode()).hexdigest()


def make_shards(args) -> dict:
    """Write the shards and rejects.jsonl; return the account."""
    tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
    benchmark = set().union(*map(read_prompts, args.benchmark)) if args.benchmark else set()
    metadata = {"answers": args.answers, "tokenizer": tokenizer_identity(tokenizer)}
    reasons: Counter = Counter()
    seen: set[bytes] = set()
    ids, masks, row_ids, lengths = [], [], [], []
    shards = read = supervised = beheaded = 0
    (args.out / "shards").mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        nonlocal shards
        name = args.out / "shards" / f"{shards:05d}.safetensors"
        write_tokens(name, Rows.pack(ids, masks, row_ids, metadata))
        log_line(args.log, shard=shards, rows=len(ids), tokens=sum(map(len, ids)))
        shards += 1
        for part in (ids, masks, row_ids):
            part.clear()

    progress = tqdm(total=args.limit, unit=" rows", desc="shard", mininterval=5)
    with atomic(args.out / "rejects.jsonl") as partial, open(partial, "w") as rejects:
        for path in args.conversations:
            for number, row in enumerate(read_conversations(path)):
                if len(lengths) == args.limit:
                    break
                read += 1
                try:
                    whole = messages_of(row)
                    messages = without_leading_answers(whole)
                    row_id = conversation_id(messages)
                    if row_id in seen:
                        raise Reject("duplicate")
                    if any(normal(m["content"]) in benchmark for m in messages):
                        raise Reject("benchmark prompt")
                    row_tokens, mask = tokenise(tokenizer, messages, args)
                except Reject as reject:
                    reasons[str(reject)] += 1
                    name = row.get("id") if isinstance(row, dict) else None
                    line = {"source": args.source_name or path.name, "row": number}
                    line |= {"id": name, "reason": str(reject)}
                    rejects.write(json.dumps(line, default=str) + "\n")
                    continue
                seen.add(row_id)
                beheaded += len(messages) < len(whole)
                ids.append(row_tokens)
                masks.append(mask)
                row_ids.append(row_id)
                lengths.append(len(row_tokens))
                supervised += sum(mask)
                progress.update()
                if len(ids) == args.shard_size:
                    flush()
    progress.close()
    if ids:
        flush()
    lengths.sort()
    account = {
        "read": read,
        "kept": len(lengths),
        "rejected": sum(reasons.values()),
        "reasons": dict(reasons.most_common()),
        "leading_answers_dropped": beheaded,
        "shards": shards,
        "tokens": sum(lengths),
        "supervised_tokens": supervised,
        "length_percentiles": {
            str(p): lengths[min(len(lengths) - 1, len(lengths) * p // 100)] if lengths else 0
            for p in (0, 25, 50, 75, 95, 100)
        },
        **metadata,
    }
    if len(lengths) < args.limit:
        table = "\n".join(f"  {count:8,}  {reason}" for reason, count in reasons.most_common())
        raise DataError(
            f"{args.limit:,} usable conversations asked for, {len(lengths):,} found among "
            f"{read:,} read. Rejected:\n{table}\nAsk for fewer, or add conversations"
        )
    return account


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=Path, nargs="+", required=True)
    parser.add_argument("--source-name", default="", help="the file's name in rejects.jsonl")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the verifier's folder")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--benchmark", type=Path, nargs="*", help="prompts never to train on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard-size", type=int, default=100, help="rows a shard")
    parser.add_argument("--limit", type=int, required=True, help="rows to keep")
    parser.add_argument("--max-length", type=int, default=512, help="tokens a row, answer included")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="kept free for the answer")
    parser.add_argument("--min-supervised-tokens", type=int, default=4)
    parser.add_argument("--answers", choices=["verifier", "dataset"], default="verifier")
    parser.add_argument("--log", type=Path, help="gets a JSON line a shard")
    args = parser.parse_args()

    started = time.time()
    try:
        account = make_shards(args)
    except (DataError, ValueError, OSError) as error:
        sys.exit(f"shard: {error}")
    account["seconds"] = round(time.time() - started, 2)
    account["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write_json(args.out / "shards.json", account)
    print(
        f"shard: {account['read']:,} read = {account['kept']:,} kept + "
        f"{account['rejected']:,} rejected"
    )


if __name__ == "__main__":
    main()
