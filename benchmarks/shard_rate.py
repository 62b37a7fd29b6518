"""Rows per second of scripts/shard.py, beside `datasets` with `apply_chat_template`, same rows.

    python benchmarks/shard_rate.py --conversations results/conversations/0 \
        --tokenizer results/verifier [--rows 10000] [--processes 2]

Both read whole conversations, render and tokenise them, and mark the assistant's tokens: Eyrie by
its own rule, datasets by none (apply_chat_template's mask needs tags that the template lacks). One
line each, and the ratio of the two rates.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from eyrie.conversations import Reject, read_conversation  # noqa: E402
from eyrie.sources import BrokenFile, expand, read_rows  # noqa: E402


def eyrie(args, folder: Path) -> tuple[float, dict]:
    command = [sys.executable, SCRIPTS / "shard.py", "--conversations", args.conversations]
    command += ["--tokenizer", args.tokenizer, "--out", folder, "--limit", str(args.rows)]
    command += ["--answers", "dataset", "--max-length", str(args.max_length)]
    command += ["--shard-size", "1000", "--processes", str(args.processes)]
    started = time.time()
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    return time.time() - started, json.loads((folder / "shards.json").read_text())


def rows_read(source: str, count: int) -> list[dict]:
    """The first `count` rows that are conversations, as messages."""
    found = []
    for path in expand(source):
        try:
            for _, raw in read_rows(path):
                try:
                    found.append({"messages": read_conversation(raw).messages})
                except Reject:
                    continue
                if len(found) == count:
                    return found
        except BrokenFile:
            continue
    return found


def with_datasets(args, folder: Path) -> float:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows_read(args.conversations, args.rows)))
    started = time.time()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def tokens(row: dict) -> dict:
        ids = tokenizer.apply_chat_template(
            row["messages"], truncation=True, max_length=args.max_length, return_dict=True
        )["input_ids"]
        return {"input_ids": ids}

    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder))
    rows.map(tokens, num_proc=args.processes, remove_columns=["messages"])
    return time.time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, account = eyrie(args, Path(folder) / "eyrie")
        theirs = with_datasets(args, Path(folder))
    peak = account["peak_rss_bytes"] / 1e6
    print(f"eyrie     {account['kept'] / ours:7.0f} rows/s  ({ours:.1f} s, peak {peak:.0f} MB)")
    print(f"datasets  {args.rows / theirs:7.0f} rows/s  ({theirs:.1f} s)")
    print(f"ratio     {account['kept'] / ours / (args.rows / theirs):7.2f}")


if __name__ == "__main__":
    main()
