"""Extract the verifier's hidden states, and its answers, in one pass of one engine.

Finished shards live in a store under their fingerprint and the outputs are hard links to them.
The engine is loaded once, and only if the store lacks a shard; a killed run loses the shards
that were being written and no other.
"""

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path

from tqdm import tqdm

from eyrie import engine
from eyrie.files import fsync_path, link_or_copy, log_line, sha256_file, write_json
from eyrie.gpus import hold_gpus
from eyrie.shards import (
    HEADER_BYTES,
    STATES_DTYPE,
    HiddenShardWriter,
    Rows,
    ShardError,
    check_hidden,
    read_rows,
)
from eyrie.verifier import load_verifier_config


def fingerprint(token_shard: Path, verifier: str, args) -> str:
    """What decides a hidden shard's numbers; memory tuning is left out because it does not."""
    parts = {
        "tokens": sha256_file(token_shard),
        "verifier": verifier,
        "layer_ids": args.layer_ids,
        "dtype": args.dtype,
        "answers": args.answers,
        "max_new_tokens": args.max_new_tokens if args.answers == "verifier" else None,
        "max_model_len": args.max_model_len,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Shard:
    """One hidden shard on its way: its prompts, what has come back, and what was written."""

    def __init__(self, prompts: Rows, path: Path, number: int, layers: int, hidden: int):
        self.prompts = prompts
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.number = number
        self.state_shape = (layers, hidden)
        self.tokens: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, str] = {}
        for leftover in (self.partial, Path(f"{self.partial}.rows")):
            leftover.unlink(missing_ok=True)

    def request(self, row: int, answers: bool) -> dict:
        """The connector's instructions for a row. Prompts alone have their place from the
        start; with answers, rows are appended as they finish."""
        offset = None if answers else int(self.prompts.row_offsets[row])
        target = {"shard": str(self.partial), "row": row, "offset": offset}
        return {"kv_transfer_params": target | {"include_output_tokens": answers}}

    def answered(self, row: int, output, answers: bool) -> None:
        written = list(output.outputs[0].token_ids)[:-1] if answers else []
        self.tokens[row] = self.prompts.row(row).tolist() + written
        self.finish_reasons[row] = output.outputs[0].finish_reason

    def finish(self, records: list[dict], answers: bool) -> dict:
        """Check what was written against what was asked for, then give the shard its name.

        Raises:
            ShardError: states of other tokens, of another length, or not usable.
        """
        from eyrie.connector import token_hash

        records.sort(key=lambda record: record["offset"])
        ids, masks, row_ids, end = [], [], [], 0
        for record in records:
            row = record["row"]
            tokens = self.tokens[row]
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
            prompt = len(self.prompts.row(row))
            ids.append(tokens)
            if answers:
                masks.append([False] * prompt + [True] * (len(tokens) - prompt))
            else:
                start = int(self.prompts.row_offsets[row])
                masks.append(self.prompts.loss_mask[start : start + prompt].tolist())
            row_ids.append(self.prompts.row_ids[row].numpy().tobytes())
        rows = Rows.pack(ids, masks, row_ids, {"fingerprint": self.path.stem})
        HiddenShardWriter.finish(self.partial, rows, self.state_shape, STATES_DTYPE)
        norms = check_hidden(self.partial, rows, *self.state_shape)
        fsync_path(self.partial)
        os.replace(self.partial, self.path)
        fsync_path(self.path.parent)
        Path(f"{self.partial}.rows").unlink()
        return {"layer_norms": [round(norm, 3) for norm in norms]}


def run_engine(args, missing: list[Shard]) -> dict:
    """Load the engine and make the missing shards, one after the other, without a pause between
    them: while the last rows of one finish, the first of the next are already running."""
    loading = time.time()
    from vllm import LLM, SamplingParams

    from eyrie.connector import read_records

    answers = args.answers == "verifier"
    llm = LLM(
        **engine.engine_arguments(args), **engine.extraction_arguments(args.layer_ids, args.gpus)
    )
    loaded = time.time()
    todo = [(shard, row) for shard in missing for row in range(len(shard.prompts))]
    waiting = iter(todo)
    running: dict[str, tuple[Shard, int]] = {}
    progress = tqdm(total=len(todo), unit=" rows", desc="extract", mininterval=5)
    tokens, opened = 0, loaded

    def close_finished(shards: list[Shard]) -> None:
        nonlocal opened
        for shard in shards:
            records = read_records(str(shard.partial))
            if len(records) < len(shard.prompts):
                continue
            report = shard.finish(records, answers)
            missing.remove(shard)
            lengths = [len(row) for row in shard.tokens.values()]
            line = {
                "shard": shard.number,
                "rows": len(lengths),
                "tokens": sum(lengths),
                "prompt_tokens": len(shard.prompts.input_ids),
                "cut_answers": sum(r == "length" for r in shard.finish_reasons.values()),
                "bytes": shard.path.stat().st_size,
                "seconds": round(time.time() - opened, 2),
                **report,
            }
            opened = time.time()
            log_line(args.log, **line)

    def answered_in_full() -> list[Shard]:
        return [s for s in missing if len(s.tokens) == len(s.prompts)]

    while True:
        # Enough requests queued to keep the engine full, not the whole data set.
        while len(running) < 2 * args.max_num_seqs and (item := next(waiting, None)):
            shard, row = item
            name = f"{shard.number}-{row}"
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=args.max_new_tokens if answers else 1,
                detokenize=False,
                extra_args=shard.request(row, answers),
            )
            prompt = {"prompt_token_ids": shard.prompts.row(row).tolist()}
            llm.llm_engine.add_request(name, prompt, sampling)
            running[name] = item
        if not running:
            break
        for output in llm.llm_engine.step():
            if output.finished:
                shard, row = running.pop(output.request_id)
                shard.answered(row, output, answers)
                tokens += len(shard.tokens[row])
                progress.update()
                rate = f"{tokens / (time.time() - loaded):,.0f} tokens/s"
                progress.set_postfix_str(rate, refresh=False)
        close_finished(answered_in_full())
    # The states of the last rows are handed over by the step after their last token.
    deadline = time.time() + 60
    while missing and time.time() < deadline:
        if args.gpus == 0:
            llm.llm_engine.step()
        time.sleep(0.05)
        close_finished(answered_in_full())
    progress.close()
    if missing:
        raise ShardError(f"{missing[0].path}: the engine has ended but not all states were written")
    return {"load_seconds": round(loaded - loading, 2), "engine_seconds": time.time() - loaded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="a path for each")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, required=True, help="gets a JSON line a shard")
    parser.add_argument("--layer-ids", type=int, nargs="+", required=True, help="vLLM's ids")
    parser.add_argument("--answers", choices=["verifier", "dataset"], required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    engine.add_arguments(parser)
    args = parser.parse_args()
    engine.prepare(args.gpus, args.kv_cache_gib)
    args.dtype = engine.resolve_dtype(args.dtype)

    started = time.time()
    try:
        config = load_verifier_config(args.verifier, args.trust_remote_code)
        args.layer_ids = config.extraction_ids(args.layer_ids)
        # The folder's own record of how long it took to fetch decides no number.
        identity = json.loads(args.identity.read_text())
        identity = json.dumps([identity["source"], identity["files"]])
        args.store.mkdir(parents=True, exist_ok=True)
        stored, missing = [], []
        for number, path in enumerate(args.shards):
            stored.append(args.store / f"{fingerprint(path, identity, args)}.safetensors")
            if not stored[-1].exists() and stored[-1] not in [s.path for s in missing]:
                missing.append(
                    Shard(
                        read_rows(path), stored[-1], number, len(args.layer_ids), config.hidden_size
                    )
                )
        made = len(missing)
        timings = {"load_seconds": 0.0, "engine_seconds": 0.0}
        print(f"extract: {len(stored)} shards, {len(stored) - made} in the store, {made} to make")
        if missing:
            _lock = hold_gpus(args.gpus)
            timings = run_engine(args, missing)
        linked = [link_or_copy(*pair) for pair in zip(stored, args.out, strict=True)]
    except (ShardError, ValueError) as error:
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
            "header_bytes": HEADER_BYTES * len(rows),
            "layer_ids": args.layer_ids,
            "hidden_size": config.hidden_size,
            "seconds": round(time.time() - started, 2),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **{k: round(v, 2) for k, v in timings.items()},
        },
    )


if __name__ == "__main__":
    main()
