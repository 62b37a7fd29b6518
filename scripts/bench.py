"""Serve the benchmark's prompts with and without the draft, and compare speed and output.

Baseline, n-gram and eagle3 run one after the other, each in a process of its own, with the same
engine settings, prompts and limits, one request at a time at temperature 0. Counters are read as
differences around each request; figures are computed from the rows alone.

Then the draft serves the prompts of conversations that training held out, as many at a time as the
engine takes: what it accepts there must be what training said it would.
"""

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

from eyrie import engine
from eyrie.conversations import Reject
from eyrie.files import atomic, log_line, write_json
from eyrie.gpus import hold_gpus
from eyrie.prompts import read_prompts
from eyrie.provenance import peak_rss_bytes, versions
from eyrie.rates import record_rate
from eyrie.sources import DataError

METHODS = ("baseline", "ngram", "eagle3")

# Requests served before the clock starts, of so many tokens: they fill caches and pick kernels.
WARM_UP = 2
WARM_UP_TOKENS = 8

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class BenchError(Exception):
    """Something that makes the comparison worthless; the message says what."""


def pick_prompts(path: Path, count: int) -> list[dict]:
    """The first `count` prompts, taken in turn from each category."""
    by_category: dict[str, list[dict]] = {}
    for prompt in read_prompts(path):
        by_category.setdefault(prompt["category"], []).append(prompt)
    rounds = max(map(len, by_category.values()), default=0)
    turns = [rows[i] for i in range(rounds) for rows in by_category.values() if i < len(rows)]
    if len(turns) < count:
        raise BenchError(f"{path}: {len(turns)} prompts, bench.prompts asks for {count}")
    return turns[:count]


def tokenised(args) -> list[dict]:
    """The prompts to serve, each with its `ids`, made as those of the training data are."""
    from eyrie.chat import Chat, load_tokenizer

    tokenizer = load_tokenizer(args.verifier, args.trust_remote_code)
    chat = Chat(tokenizer, args.date, args.system_turns, json.loads(args.template_options))
    prompts = pick_prompts(args.prompts, args.num_prompts)
    for prompt in prompts:
        try:
            # The template is applied once, here, and the engine is given tokens: no second BOS.
            prompt["ids"] = chat.prompt(prompt["messages"], prompt["tools"]).ids
        except Reject as reject:
            raise BenchError(f"{args.prompts}: prompt {prompt['id']}: {reject}") from None
    return prompts


def held_out_prompts(args) -> list[list[int]]:
    """The tokens before the first answer of the first held-out conversations."""
    from eyrie.hidden import split
    from eyrie.shards import ShardError, read_rows

    try:
        shards = [read_rows(path) for path in args.hidden]
    except ShardError as error:
        raise BenchError(str(error)) from None
    _, held_out = split(shards, args.held_out)
    prompts = []
    for shard, index in held_out[: args.num_held_out]:
        answer = int(shards[shard].mask(index).nonzero()[0])
        prompts.append(shards[shard].row(index)[:answer].tolist())
    return prompts


def speculation(method: str, args) -> dict:
    """vLLM's argument that makes it serve by `method`."""
    if method == "baseline":
        return {}
    if method == "ngram":
        settings = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    else:
        settings = {"method": "eagle3", "model": str(args.checkpoint)}
    return {"speculative_config": settings | {"num_speculative_tokens": args.draft_tokens}}


def read_counters(llm, draft_tokens: int) -> dict[str, int]:
    """vLLM's counters since its start; accepted_k counts drafts accepted up to position k."""
    counters = dict.fromkeys([*COUNTERS.values()], 0)
    counters |= {f"accepted_{k + 1}": 0 for k in range(draft_tokens)}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            counters[COUNTERS[metric.name]] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for position, value in enumerate(metric.values[:draft_tokens]):
                counters[f"accepted_{position + 1}"] += value
    return counters


def serve(llm, prompts: list[list[int]], sampling, draft_tokens: int) -> tuple[list, float, dict]:
    """Serve prompts of tokens, as many at a time as the engine takes.

    Returns the outputs, the seconds that they took, and by how much each counter rose.
    """
    before = read_counters(llm, draft_tokens)
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    after = read_counters(llm, draft_tokens)
    return outputs, seconds, {name: after[name] - before[name] for name in after}


def measure(method: str, prompts: list[dict], held_out: list[list[int]], args) -> dict:
    """Serve every prompt by one method. Returns its rows, each with its output tokens, and of
    eagle3 the counters of the held-out prompts."""
    started = time.time()
    from vllm import SamplingParams

    args.dtype = engine.resolve_dtype(args.dtype)
    llm = engine.load(args, **speculation(method, args), disable_log_stats=False)
    loaded = time.time()
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens, detokenize=False)
    warm_up = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, detokenize=False)
    rows = []
    for number, prompt in enumerate(prompts[:WARM_UP] + prompts):
        ids, limits = prompt["ids"], warm_up if number < WARM_UP else sampling
        (output,), seconds, counters = serve(llm, [ids], limits, args.draft_tokens)
        tokens = list(output.outputs[0].token_ids)
        if number >= WARM_UP:
            rows.append(
                {
                    "method": method,
                    "prompt": prompt["id"],
                    "category": prompt["category"],
                    "prompt_tokens": len(ids),
                    "new_tokens": len(tokens),
                    "seconds": round(seconds, 4),
                    **counters,
                    "tokens": tokens,
                }
            )
            done, total = len(rows), len(prompts)
            if done % 5 == 0 or done == total:
                spent = sum(row["seconds"] for row in rows)
                rate = sum(row["new_tokens"] for row in rows) / spent
                print(
                    f"bench {method}: {done}/{total} prompts, {rate:.1f} tokens/s, "
                    f"ETA {spent / done * (total - done):.0f} s",
                    flush=True,
                )
    there = {}
    if method == "eagle3" and held_out:
        _, _, there = serve(llm, held_out, sampling, args.draft_tokens)
    return {
        "rows": rows,
        "held_out": there,
        "dtype": args.dtype,
        "load_seconds": round(loaded - started, 2),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def figures(method: str, rows: list[dict], baseline: list[dict], draft_tokens: int) -> dict:
    """The figures of one method, from its rows and the baseline's.

    Acceptance length is 1 + accepted / drafts: the tokens that a verification yields.
    """
    total = {
        key: sum(row[key] for row in rows)
        for key in ("new_tokens", "seconds", "drafts", "proposed", "accepted")
    }
    per_position = [sum(row[f"accepted_{k + 1}"] for row in rows) for k in range(draft_tokens)]
    rate = total["new_tokens"] / total["seconds"]
    base = sum(r["new_tokens"] for r in baseline) / sum(r["seconds"] for r in baseline)
    drafts = total["drafts"]
    return {
        "method": method,
        "draft_tokens": 0 if method == "baseline" else draft_tokens,
        "prompts": len(rows),
        "new_tokens": total["new_tokens"],
        "seconds": round(total["seconds"], 3),
        "tokens_per_s": round(rate, 3),
        "speedup": round(rate / base, 4),
        "acceptance_length": round(1 + total["accepted"] / drafts, 4) if drafts else None,
        "acceptance_per_position": [round(n / drafts, 4) for n in per_position] if drafts else None,
        "drafts": int(drafts),
        "proposed": int(total["proposed"]),
        "accepted": int(total["accepted"]),
        "identical": sum(a["tokens"] == b["tokens"] for a, b in zip(rows, baseline, strict=True)),
    }


def trained_and_served(counters: dict, prompts: int, args) -> dict | None:
    """What training estimated of the held-out conversations, beside what was accepted there, of
    as many positions as training looked ahead and serving asked for."""
    if not counters.get("drafts"):
        return None
    import pandas as pd

    manifest = json.loads((args.checkpoint / "manifest.json").read_text())
    history = pd.read_parquet(args.checkpoint / "metrics.parquet")
    (chosen,) = history[
        (history.kind == "epoch") & (history.epoch == manifest["chosen_epoch"])
    ].to_dict("records")
    positions = range(min(args.draft_tokens, manifest["config"]["ttt_steps"]))
    estimated = [chosen[f"full_acc_{k}"] for k in positions]
    served = [counters[f"accepted_{k + 1}"] / counters["drafts"] for k in positions]
    return {
        "prompts": prompts,
        "drafts": int(counters["drafts"]),
        "estimated_per_position": estimated,
        "acceptance_per_position": [round(share, 4) for share in served],
        "estimated_acceptance_length": round(1 + sum(estimated), 4),
        "acceptance_length": round(1 + sum(served), 4),
    }


def measure_into(path: Path, method: str, prompts, held_out, args) -> None:
    engine.end_with_parent()
    write_json(path, measure(method, prompts, held_out, args))


def run_methods(prompts: list[dict], held_out: list[list[int]], args) -> dict[str, dict]:
    """Measure each method in a process of its own, so that none inherits another's memory.

    They are forked from a server that has imported vLLM and done nothing else.
    """
    processes = multiprocessing.get_context("forkserver")
    measured = {}
    for method in METHODS:
        out = args.summary.with_name(f"{args.summary.name}.{method}.partial")
        process = processes.Process(
            target=measure_into, args=(out, method, prompts, held_out, args)
        )
        try:
            process.start()
            process.join()
            if process.exitcode:
                raise BenchError(f"{method} ended with exit code {process.exitcode}; see above")
            measured[method] = json.loads(out.read_text())
        finally:
            process.kill()
            out.unlink(missing_ok=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="the run's name, for the summary")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompts-name", default="prompts", help="for the summary")
    parser.add_argument("--num-prompts", type=int, required=True)
    parser.add_argument("--hidden", type=Path, nargs="+", required=True, help="hidden shards")
    parser.add_argument("--held-out", type=float, required=True, help="fraction, as in training")
    parser.add_argument("--num-held-out", type=int, required=True, help="conversations of it")
    parser.add_argument("--system-turns", choices=["merge", "drop", "reject"], default="merge")
    parser.add_argument("--date", default="2026-01-01", help="today, to the chat template")
    parser.add_argument("--template-options", default="{}", help="JSON, for the chat template")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--draft-tokens", type=int, required=True)
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--measurements", type=Path, required=True, help="CSV to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line a method")
    parser.add_argument("--rates", type=Path, help="gets what a plan goes by; see eyrie.rates")
    engine.add_arguments(parser)
    args = parser.parse_args()

    engine.prepare(args.gpus, args.kv_cache_gib, in_process=False)
    started = time.time()
    # It imports while the prompts are made here.
    forkserver.set_forkserver_preload(engine.PRELOAD)
    forkserver.ensure_running()
    try:
        prompts, held_out = tokenised(args), held_out_prompts(args)
        _lock = hold_gpus(args.gpus)
        measured = run_methods(prompts, held_out, args)
    except (BenchError, DataError, ValueError) as error:
        sys.exit(f"bench: {error}")

    import pandas as pd

    baseline = measured["baseline"]["rows"]
    methods, rows = [], []
    for method, result in measured.items():
        line = figures(method, result["rows"], baseline, args.draft_tokens)
        line |= {key: result[key] for key in ("load_seconds", "peak_rss_bytes")}
        methods.append(line)
        log_line(args.log, **line)
        for row, base in zip(result["rows"], baseline, strict=True):
            row["identical"] = row["tokens"] == base["tokens"]
            rows.append({key: value for key, value in row.items() if key != "tokens"})
    with atomic(args.measurements) as partial:
        pd.DataFrame(rows).to_csv(partial, index=False)
    verifier = json.loads(args.identity.read_text())["source"]
    seconds = round(time.time() - started, 2)
    # Of all that is done beside loading: the warm-up and the held-out prompts too.
    served = sum(method["new_tokens"] for method in methods)
    serving = seconds - sum(method["load_seconds"] for method in methods)
    record_rate(args.rates, "serve", verifier, args.gpus, served, serving, f"run {args.run}")
    write_json(
        args.summary,
        {
            "run": args.run,
            "verifier": verifier,
            "prompt_set": {
                "name": args.prompts_name,
                "prompts": args.num_prompts,
                "max_new_tokens": args.max_new_tokens,
                "concurrency": 1,
            },
            "methods": methods,
            "held_out": trained_and_served(measured["eagle3"]["held_out"], len(held_out), args),
            "settings": {
                "dtype": measured["baseline"]["dtype"],
                "temperature": 0.0,
                **{
                    key: getattr(args, key)
                    for key in ("gpus", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
                },
            },
            "versions": versions(),
            "seconds": seconds,
            "peak_rss_bytes": max(result["peak_rss_bytes"] for result in measured.values()),
        },
    )


if __name__ == "__main__":
    main()
