"""Serve the benchmark's prompts by every method, and compare speed and output.

Baseline, n-gram, suffix and any number of drafts serve the same prompts with the same engine
settings and limits at temperature 0. They take turns, prompt by prompt, so that a slower minute of
the machine is everybody's. The second turn of a prompt is asked after the baseline's own first
answer, so that all methods answer the same tokens.

The first number of draft tokens and the first concurrency are the main setting; the others are
measured on fewer prompts. Then the draft serves the prompts of conversations that training held
out: what it accepts there must be what training said it would.

Every group of requests that was served is a line of results/.state/bench/...: a run that was
killed goes on there. All figures are computed from these rows (eyrie.figures).
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

from eyrie import engine
from eyrie.bench_plan import HELD_OUT, key_of, plan
from eyrie.bench_prompts import (
    BenchError,
    Prompts,
    held_out_prompts,
    read_shards,
    trained_on,
)
from eyrie.engines import Engines, State
from eyrie.errors import in_one_line
from eyrie.files import atomic, log_line, read_json, read_table, sha256_file, write_json
from eyrie.gpus import hold_gpus
from eyrie.identity import read_identity
from eyrie.provenance import code_hash, versions
from eyrie.rates import record_rate
from eyrie.sources import DataError

# Prompts whose answers the report shows.
SAMPLES = 4
# Prefixes whose next token is sampled.
PREFIXES = 4


def check_tokenizer(manifest: dict, identity: dict, name: str) -> None:
    """Raises BenchError where a draft was trained with another tokenizer than is served."""
    trained, served = manifest["verifier"]["files"], identity["files"]
    for file in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json"):
        if trained.get(file) != served.get(file):
            raise BenchError(
                f"{name} was trained with another {file} than the verifier has now: it drafts "
                "tokens of another vocabulary. Train it on this verifier"
            )


def methods_of(args) -> tuple[list[dict], dict[str, str]]:
    """The methods {name, kind, model}, the baseline first, and why others are left out."""
    methods, left_out = [{"name": "baseline", "kind": "baseline"}], {}
    for name in args.methods:
        if name == "suffix" and importlib.util.find_spec("arctic_inference") is None:
            left_out[name] = "arctic-inference is not installed"
            continue
        methods.append({"name": name, "kind": name})
    drafts = {"eagle3": args.checkpoint}
    drafts |= {f"eagle3, epoch {n}": args.checkpoint / str(n) for n in args.epochs}
    drafts |= {f"eagle3, {name}": Path(folder) for name, folder in args.draft}
    for name, folder in drafts.items():
        if not (folder / "config.json").exists():
            raise BenchError(f"{folder}: no draft is there ({name})")
        methods.append({"name": name, "kind": "eagle3", "model": str(folder)})
    return methods, left_out


def serve(item: dict, prompts: Prompts, engines: Engines, args) -> list[dict]:
    """The rows of a group of requests to one method."""
    of, method = prompts.sets[item["set"]], item["method"]
    asked = [(of[place], turn) for place, turn in item["asked"]]
    asked = [(prompt, turn) for prompt, turn in asked if turn < len(prompt["ids"])]
    if not asked:
        return []
    ids = [prompt["ids"][turn] for prompt, turn in asked]
    draft_tokens = 0 if method["kind"] == "baseline" else item["draft_tokens"]
    tokens = args.held_out_tokens if item["set"] == HELD_OUT else args.max_new_tokens
    settings = (item["concurrency"], draft_tokens, tokens)
    records = engines.ask(method, item["draft_tokens"], "serve", ids, *settings)
    return [
        {
            "set": item["set"],
            "prompt": prompt["id"],
            "turn": turn + 1,
            "category": prompt["category"],
            "method": method["name"],
            "kind": method["kind"],
            "draft_tokens": draft_tokens,
            "concurrency": item["concurrency"],
            "repeat": item["repeat"],
            "group": item["group"],
            **record,
            "prompt_ids": prompt["ids"][turn],
        }
        for (prompt, turn), record in zip(asked, records, strict=True)
    ]


def measure(items: list[dict], prompts: Prompts, engines: Engines, state: State, args) -> list:
    """The rows of all groups, from the state or measured now."""
    missing = [item for item in items if json.dumps(key_of(item)) not in state.done]
    if len(missing) < len(items):
        print(f"bench: {len(items) - len(missing)} of {len(items)} groups were measured before")
    if args.interleave:
        engines.start_all([(item["method"], item["draft_tokens"]) for item in missing])
    rows, begun, new = [], time.time(), 0
    total = sum(len(item["asked"]) for item in missing)
    main = (args.draft_tokens[0], args.concurrency[0], 0)
    for item in items:
        served = state.get(key_of(item), lambda item=item: serve(item, prompts, engines, args))
        rows += served
        setting = (item["draft_tokens"], item["concurrency"], item["repeat"])
        if item["method"]["kind"] == "baseline" and item["set"] != HELD_OUT and setting == main:
            for (place, _), row in zip(item["asked"], served, strict=False):
                prompts.answered(item["set"], prompts.sets[item["set"]][place], row["tokens"])
        if missing and item is missing[0]:
            missing.pop(0)
            before, new = new, new + len(item["asked"])
            if before // 20 != new // 20 or not missing:
                spent = time.time() - begun
                left = spent / new * (total - new)
                print(f"bench: {new}/{total} requests served, ETA {left:.0f} s", flush=True)
    return rows


def with_gaps(parted: list[dict], rows: list[dict], prompts: Prompts, engines, state) -> list:
    """Each parting with the baseline's `top_two` tokens there and the `gap` of their logits."""
    baseline = {"name": "baseline", "kind": "baseline"}
    by_id = {(name, p["id"]): p for name, of in prompts.sets.items() for p in of}
    tokens = {
        (r["set"], r["prompt"], r["turn"], r["concurrency"], r["repeat"]): r["tokens"]
        for r in rows
        if r["kind"] == "baseline"
    }
    found = []
    for p in parted:
        common = tokens[p["set"], p["prompt"], p["turn"], p["concurrency"], p["repeat"]][: p["at"]]
        ids = by_id[p["set"], p["prompt"]]["ids"][p["turn"] - 1] + common

        def look(ids=ids):
            return engines.ask(baseline, 0, "top_two", [ids])[0]

        there = state.get(["top two", p["set"], p["prompt"], p["turn"], *common], look)
        found.append(p | {"top_two": there["tokens"], "gap": there["gap"]})
    return found


def sampled(methods: list[dict], prompts: Prompts, engines, state, args) -> list[dict]:
    """Whether each method's tokens at temperature 1 are distributed as the baseline's."""
    from eyrie.figures import P_VALUE, two_sample

    if not args.samples:
        return []
    first = next(iter(prompts.sets.values()))
    prefixes = [prompt["ids"][0] for prompt in first[:PREFIXES]]
    draft_tokens, of = args.draft_tokens[0], {}
    for number, method in enumerate(methods):
        # Seeds of its own for each method, or equal draws would hide a difference; torch takes 32
        # bits of them on a CPU.
        seed = number * PREFIXES * args.samples
        settings = (args.samples, seed, args.max_num_seqs, draft_tokens)
        of[method["name"]] = state.get(
            ["samples", method["name"]],
            lambda method=method, s=settings: engines.ask(
                method, draft_tokens, "sample", prefixes, *s
            ),
        )
    result = []
    for method in methods[1:]:
        test = two_sample(of[method["name"]], of["baseline"])
        result.append(
            {"method": method["name"], "prefixes": len(prefixes), "samples": args.samples}
            | test
            | {"differs": test["p"] < P_VALUE}
        )
    return result


def pieces(row: dict, decode) -> list[list]:
    """An output as [text, draft position] of each token: 0 is the verifier's own, k was proposed
    at position k and accepted."""
    positions = [0]
    for _, accepted in row["steps"]:
        positions += [*range(1, accepted + 1), 0]
    result, shown = [], ""
    for number in range(len(row["tokens"])):
        text = decode(row["tokens"][: number + 1])
        # A character whose bytes are not all there yet waits for them.
        whole = text.rstrip("\ufffd")
        result.append([whole[len(shown) :], positions[number]])
        shown = max(shown, whole, key=len)
    return result


def samples(rows: list[dict], prompts: Prompts) -> list[dict]:
    """The run's own draft at work: first turns of a few prompts of as many categories."""
    name = next(iter(prompts.sets))
    asked = {prompt["id"]: prompt["asked"][0] for prompt in prompts.sets[name]}
    found: dict[str, dict] = {}
    for row in rows:
        ours = row["method"] == "eagle3" and row["set"] == name and row["turn"] == 1
        if ours and not row["beyond"] and row["drafts"]:
            found.setdefault(row["category"], row)
    return [
        {
            "prompt": row["prompt"],
            "category": category,
            "asked": asked[row["prompt"]],
            "pieces": pieces(row, prompts.tokenizer.decode),
        }
        for category, row in list(found.items())[:SAMPLES]
    ]


def estimated(args) -> list[float]:
    """The accuracy of each draft position on held-out rows after the chosen epoch, where serving
    would draft, of as many positions as training looked ahead."""
    manifest = read_json(args.checkpoint / "manifest.json")
    history = read_table(args.checkpoint / "metrics.parquet")
    (chosen,) = history[
        (history.kind == "epoch") & (history.epoch == manifest["chosen_epoch"])
    ].to_dict("records")
    return [chosen[f"served_acc_{k}"] for k in range(manifest["config"]["ttt_steps"])]


def machine() -> dict:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    found = {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return found | ({"gpus": gpus} if gpus else {})


def fingerprint(methods: list[dict], prompts: Prompts, identity: dict, args) -> dict:
    """All that decides a measurement: engine, models, prompts, machine and code."""
    from eyrie.shards import token_hash

    settings = ("dtype", "gpus", "draft_gpus", "compile", "gpu_memory_percent", "kv_cache_gib",
                "max_model_len", "max_num_seqs", "max_num_batched_tokens", "turns", "repeats",
                "interleave", "max_new_tokens", "samples", "draft_tokens", "concurrency",
                "every_pair", "prompts_elsewhere", "held_out_tokens", "held_out_methods",
                "profile")  # fmt: skip
    return {
        "settings": {name: getattr(args, name) for name in settings},
        "verifier": identity["files"],
        "drafts": {
            m["name"]: sha256_file(Path(m["model"]) / "model.safetensors")
            for m in methods
            if "model" in m
        },
        "methods": [m["name"] for m in methods],
        # The tokens of the first turns, and the texts of the later ones.
        "prompts": {
            name: [
                token_hash([token for prompt in of for token in prompt["ids"][0]]),
                [later for prompt in of for later in prompt["later"]],
            ]
            for name, of in prompts.sets.items()
        },
        "machine": machine(),
        "versions": versions(),
        "code": code_hash(Path(__file__)),
    }


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="the run's name, for the summary")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, nargs="*", default=[], help="of it, beside its own")
    parser.add_argument(
        "--draft", type=pair, nargs="*", default=[], help="NAME=FOLDER, more drafts"
    )
    parser.add_argument("--methods", nargs="*", default=["ngram"], help="without a draft model")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompts-name", default="prompts", help="for the summary")
    parser.add_argument("--prompt-file", type=pair, nargs="*", default=[], help="NAME=FILE, more")
    parser.add_argument("--num-prompts", type=int, required=True)
    parser.add_argument("--prompts-elsewhere", type=int, default=2, help="beside the main setting")
    parser.add_argument("--turns", type=int, default=1, help="asked of each prompt")
    parser.add_argument("--hidden", type=Path, nargs="+", required=True, help="hidden shards")
    parser.add_argument("--held-out", type=float, required=True, help="fraction, as in training")
    parser.add_argument("--num-held-out", type=int, required=True, help="answers of it")
    parser.add_argument("--held-out-tokens", type=int, default=128, help="of each of them")
    parser.add_argument("--held-out-methods", choices=["drafts", "all"], default="drafts")
    parser.add_argument("--system-turns", choices=["merge", "drop", "reject"], default="merge")
    parser.add_argument("--date", default="2026-01-01", help="today, to the chat template")
    parser.add_argument("--template-options", default="{}", help="JSON, for the chat template")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--draft-tokens", type=int, nargs="+", required=True, help="main one first")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1], help="main one first")
    parser.add_argument("--every-pair", action="store_true", help="of the two, not each with main")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--interleave", action="store_true", help="hold all engines at once")
    parser.add_argument("--samples", type=int, default=0, help="of each prefix at temperature 1")
    parser.add_argument("--profile", action="store_true", help="tell where the time goes")
    parser.add_argument("--draft-gpus", type=int, default=0, help="1, or as many as --gpus")
    parser.add_argument("--state", type=Path, required=True, help="folder, for a killed run")
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--measurements", type=Path, required=True, help="CSV to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line a method")
    parser.add_argument("--rates", type=Path, help="gets what a plan goes by; see eyrie.rates")
    engine.add_arguments(parser)
    args = parser.parse_args()

    # vLLM's n-gram search is numba's, whose OpenMP threads would leave its engine one thread for
    # all else: it served at 0.69 of the baseline's speed, with as good as no drafts.
    os.environ["NUMBA_THREADING_LAYER"] = "workqueue"
    engine.prepare(args.gpus, in_process=False, compiled=args.compile)
    started = time.time()
    # It imports while the prompts are made here.
    forkserver.set_forkserver_preload([*engine.PRELOAD, "eyrie.serving"])
    forkserver.ensure_running()
    try:
        summary, rows = compare(args)
    except (BenchError, DataError, ValueError) as error:
        sys.exit(f"bench: {error}")

    import pandas as pd

    from eyrie.figures import cell_of

    with atomic(args.rows) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = [
        {k: v for k, v in row.items() if k not in ("prompt_ids", "tokens", "steps")} for row in rows
    ]
    with atomic(args.measurements) as partial:
        # Whole numbers stay whole beside the empty cells of other numbers of draft tokens.
        pd.DataFrame(plain).convert_dtypes().to_csv(partial, index=False)
    # Of all that was served, many at a time too; a plan counts the same.
    groups = {(cell_of(row), row["repeat"], row["group"]): row["group_seconds"] for row in rows}
    served, seconds = sum(row["new_tokens"] for row in rows), sum(groups.values())
    verifier = summary["verifier"]
    record_rate(args.rates, "serve", verifier, args.gpus, served, seconds, f"run {args.run}")
    took = {
        "seconds": round(time.time() - started, 2),
        "peak_rss_bytes": max(m["peak_rss_bytes"] for m in summary["methods"]),
    }
    write_json(args.summary, summary | took)
    for line in summary["methods"]:
        log_line(args.log, **line)
    shutil.rmtree(args.state)


def compare(args) -> tuple[dict, list[dict]]:
    """(summary, rows); the state keeps what was measured until they are written."""
    from eyrie import figures

    identity = read_identity(args.identity)
    methods, left_out = methods_of(args)
    for method in methods:
        manifest = Path(method.get("model", "")) / "manifest.json"
        if "model" in method and manifest.exists():
            check_tokenizer(read_json(manifest), identity, method["name"])
    shards = read_shards(args.hidden)
    prompts = Prompts(args, held_out_prompts(shards, args))
    first = next(iter(prompts.sets))
    made_of = fingerprint(methods, prompts, identity, args)
    made_of["digest"] = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    folder = args.state / made_of["digest"][:16]
    state = State(folder)
    args.traces = str(folder / "traces") if args.profile else None
    seen = trained_on(prompts, shards)
    items = plan(args, prompts.sets, methods)
    _lock = hold_gpus(args.gpus)
    engines = Engines([p["ids"][0] for p in prompts.sets[first]], state, args)
    try:
        rows = measure(items, prompts, engines, state, args)
        parted = with_gaps(figures.partings(rows), rows, prompts, engines, state)
        sampling = sampled(methods, prompts, engines, state, args)
        profiles = profiled(methods, prompts, engines, state, args)
        engines.stop()
    finally:
        engines.kill()

    about = {m["name"]: state.done[json.dumps(["about", m["name"]])] for m in methods}
    threads = {name: of["threads"] for name, of in about.items()}
    if len(set(threads.values())) > 1:
        raise BenchError(f"the engines do not compute with as many threads each: {threads}")
    dtype = about["baseline"].pop("dtype")
    for line in parted:
        line["rounding"] = figures.is_rounding(line, dtype)
    with_base = {(figures.request_of(r), r["repeat"]) for r in rows if r["kind"] == "baseline"}
    differing = {(*figures.cell_of(p), figures.request_of(p), p["repeat"]) for p in parted}
    for row in rows:
        key = figures.request_of(row), row["repeat"]
        apart = (*figures.cell_of(row), *key) in differing
        row["identical"] = not apart if key in with_base else None
    cells = figures.cells(rows, parted, dtype)
    main = (first, args.concurrency[0])
    order = [m["name"] for m in methods]
    of_main = sorted(
        (
            cell | {k: v for k, v in about[cell["method"]].items() if k != "dtype"}
            for cell in cells
            if (cell["set"], cell["concurrency"]) == main
            and cell["draft_tokens"] in (0, args.draft_tokens[0])
        ),
        key=lambda cell: order.index(cell["method"]),
    )
    held_out = [r for r in rows if r["set"] == HELD_OUT and r["method"] == "eagle3"]
    return {
        "run": args.run,
        "verifier": identity["source"],
        "prompt_set": {
            "name": args.prompts_name,
            "prompts": args.num_prompts,
            "turns": args.turns,
            "max_new_tokens": args.max_new_tokens,
            "concurrency": args.concurrency[0],
        },
        # At the main setting; all of them are in `cells`.
        "methods": of_main,
        "left_out": left_out,
        "cells": cells,
        "partings": parted,
        "sampling": sampling,
        "profiles": profiles,
        "held_out": figures.trained_and_served(held_out, estimated(args)) if held_out else None,
        "trained_on": seen,
        "prompts_left_out": prompts.left_out,
        "samples": samples(rows, prompts),
        "settings": {
            "dtype": dtype,
            "temperature": 0.0,
            "gpus": args.gpus,
            "compile": args.compile,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
        },
        "versions": made_of["versions"],
        "fingerprint": made_of,
    }, rows


def profiled(methods: list[dict], prompts: Prompts, engines, state, args) -> dict[str, dict]:
    """{method: {kind of work: share of the time}} of a short run of the baseline and the draft."""
    if not args.profile:
        return {}
    first = next(iter(prompts.sets.values()))
    ids, draft_tokens = [first[0]["ids"][0]], args.draft_tokens[0]
    return {
        method["name"]: state.get(
            ["profile", method["name"]],
            lambda m=method: engines.ask(m, draft_tokens, "profiled", ids, 1, draft_tokens),
        )
        for method in methods
        if method["name"] in ("baseline", "eagle3")
    }


if __name__ == "__main__":
    with in_one_line("bench"):
        main()
