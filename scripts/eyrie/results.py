"""What the stages tell of their results in JSON, and how later ones read it: a file that lacks
something, or is of another draft, is named before anything is made of it."""

from pathlib import Path

from eyrie.checkpoint import WEIGHTS
from eyrie.files import read_json, read_table
from eyrie.identity import VERIFIER
from eyrie.misfit import misfit

# Shapes, as `misfit` takes them. What only one stage adds for people to read is not in them.
CELL = {
    "set": str,
    "method": str,
    "draft_tokens": int,
    "concurrency": int,
    "prompts": int,
    "repeats": int,
    "failed": int,
    "beyond": int,
    "tokens_per_s": float,
    "speedup": float | None,
    "spread": ([float],),
    "acceptance_length": float | None,
    "acceptance_per_position": ([float],),
    "drafts": int,
    "identical": int | None,
    "compared": int,
    "rounding": int,
    "faults": int,
    "first_token_seconds": float | None,
    "token_seconds": float | None,
    "draft_share": float,
}
# Beside the baseline's own requests, so that it has all figures.
METHOD = CELL | {
    "speedup": float,
    "identical": int,
    "seconds": float,
    "load_seconds": float,
    "peak_rss_bytes": int,
}
PARTING = {
    "set": str,
    "prompt": object,
    "turn": int,
    "method": str,
    "draft_tokens": int,
    "concurrency": int,
    "at": int,
    "baseline_token": int | None,
    "token": int | None,
    "gap": float | None,
    "rounding": bool,
}
BENCH = {
    "run": str,
    "verifier": str,
    "prompt_set": {
        "name": str,
        "prompts": int,
        "turns": int,
        "max_new_tokens": int,
        "concurrency": int,
    },
    "methods": [METHOD],
    "cells": [CELL],
    "left_out": {str: str},
    "partings": [PARTING],
    "sampling": [
        {
            "method": str,
            "prefixes": int,
            "samples": int,
            "chi_squared": float,
            "degrees": int,
            "p": float,
            "differs": bool,
        }
    ],
    "profiles": {str: {"of": str, str: object}},
    "held_out": (
        {
            "prompts": int,
            "drafts": int,
            "estimated_per_position": [float],
            "acceptance_per_position": [float],
            "estimated_acceptance_length": float,
            "acceptance_length": float,
        },
    ),
    "trained_on": [str],
    "prompts_left_out": [str],
    "samples": [{"category": str, "asked": str, "pieces": [[object]]}],
    "settings": {"dtype": str, "temperature": float, "gpus": int, "compile": bool},
    "versions": {str: str},
    "fingerprint": {"drafts": {"eagle3": str}},
    "seconds": float,
}
# Of a sweep's summary, too, whose methods are the drafts of its runs.
TABLE = {
    "methods": [
        {
            "method": str,
            "draft_tokens": int,
            "acceptance_length": float | None,
            "tokens_per_s": float,
            "speedup": float,
            "identical": int,
            "compared": int,
        }
    ]
}
CHECKS = [{"check": str, "ok": bool, "found": str, "expected": str, "effect": str}]
CHECK = {
    "ok": bool,
    "epochs": {"chosen": CHECKS, str: CHECKS},
    "seconds": float,
    "peak_rss_bytes": int,
}
VOCAB = {
    "draft_vocab_size": int,
    "verifier_vocab_size": int,
    "coverage": float,
    "held_out_coverage": float,
    "prompts_coverage": float,
    "distinct": int,
    "supervised_tokens": int,
    "special_tokens": int,
    "coverage_by_size": {str: float},
    "seconds": float,
    "peak_rss_bytes": int,
}
ROWS = {"read": int, "kept": int, "rejected": int}
SHARDS = ROWS | {
    "reasons": {str: int},
    "sources": {str: ROWS},
    "bad_files": [{"file": str, "why": str, "rows": int}],
    "answers": str,
    "leading_answers_dropped": int,
    "truncated": int,
    "control_tokens_in_text": int,
    "rows_split_off": int,
    "answers_not_supervised": int,
    "shards": int,
    "tokens": int,
    "supervised_tokens": int,
    "length_percentiles": {str: float},
    "tokenizer": str,
    "seconds": float,
    "peak_rss_bytes": int,
}
HIDDEN = {
    "shards": int,
    "made": int,
    "rows": int,
    "tokens": int,
    "supervised_tokens": int,
    "bytes": int,
    "answers": int,
    "cut_answers": int,
    "header_bytes": int,
    "states": str,
    "layer_ids": [int],
    "hidden_size": int,
    "halvings": [{"max_num_seqs": int, "max_num_batched_tokens": int}],
    "seconds": float,
    "peak_rss_bytes": int,
    "load_seconds": float,
    "engine_seconds": float,
}
PARTS = {"load", "extract", "train", "bench", "bench loads"}
PLAN = {
    "run": str,
    "trained": bool,
    "tokens": {"total": float, "source": str},
    "states": {"kept_as": {"bf16", "fp8"}, "bf16_bytes": float, "fp8_bytes": float},
    "memory": {"device_source": str, "host_bytes": {"extract": float}},
    "times": [{"part": PARTS, "seconds": float, "source": str}],
}
IDENTITY = {"source": str, "bytes": int, "seconds": float}
MANIFEST = {
    "verifier": VERIFIER,
    "data": [str],
    "rows": {"training": int, "held_out": int, "cut": int, "left_out": int},
    "config": {
        "norms": str,
        "layer_ids": [int],
        "epochs": int,
        "ttt_steps": int,
        "held_out": float,
    },
    "versions": {str: str},
    "seconds": float,
    "wall_seconds": float,
    "peak_rss_bytes": int,
    "chosen_epoch": int,
    "files": {WEIGHTS: str, str: str},
}


def again(path: Path) -> str:
    """What to do about a result that is not what its stage writes."""
    # Of a checkpoint and of the figures, which are made with their folder.
    inside = path.suffix == ".svg" or path.name in (
        "manifest.json",
        "metrics.parquet",
        "config.json",
    )
    what = "its folder" if inside else "it"
    return f"damaged, or of another version; delete {what}, and the next run makes it again"


def read_result(path: Path, shape: dict) -> dict:
    """The object of a JSON file that a stage wrote.

    Raises:
        ValueError: naming the file, and what of it is not of the shape.
    """
    value = read_json(path)
    if fault := misfit(value, shape):
        raise ValueError(f"{path}: {fault}: {again(path)}")
    return value


def read_bench(path: Path, manifest: dict | None = None, run: str | None = None) -> dict:
    """bench_RUN.json.

    manifest: of the checkpoint that it must be of. run: whose it must be.

    Raises:
        ValueError: naming the file, which is not what bench.py writes or of something else.
    """
    bench = read_result(path, BENCH)
    if not {"baseline", "eagle3"} <= {method["method"] for method in bench["methods"]}:
        raise ValueError(f"{path}: has no figures of both baseline and eagle3: {again(path)}")
    if run and bench["run"] != run:
        raise ValueError(f"{path}: is of run {bench['run']}, not of {run}")
    if manifest is None:
        return bench
    if bench["verifier"] != manifest["verifier"]["source"]:
        raise ValueError(
            f"{path}: was measured with {bench['verifier']}, and the checkpoint is for "
            f"{manifest['verifier']['source']}: give the files of one run"
        )
    if bench["fingerprint"]["drafts"]["eagle3"] != manifest["files"][WEIGHTS]:
        raise ValueError(
            f"{path}: was measured with other weights than the checkpoint's: give the files of "
            "one run, or delete it, and the next run makes it again"
        )
    return bench


def read_training(checkpoint: Path):
    """(manifest, metrics as a pandas.DataFrame) of a checkpoint's folder.

    Raises:
        ValueError: naming the file that is not what training writes.
    """
    manifest = read_result(checkpoint / "manifest.json", MANIFEST)
    path = checkpoint / "metrics.parquet"
    metrics = read_table(path)
    columns = ["kind", "epoch", "step", "tokens", "seconds", "loss", "acceptance_length"]
    columns += ["loss_0", "full_acc_0"]
    if missing := [name for name in columns if name not in metrics]:
        raise ValueError(f"{path}: has no column {missing[0]}: {again(path)}")
    epochs = metrics["epoch"][metrics["kind"] == "epoch"]
    if manifest["chosen_epoch"] not in set(epochs):
        raise ValueError(
            f"{path}: has no epoch {manifest['chosen_epoch']}, which manifest.json says was "
            f"chosen: {again(path)}"
        )
    return manifest, metrics


def row_counts(draft_tokens: int) -> list[str]:
    """The names of what a request's row counts of drafts, in all and at each position."""
    positions = range(1, draft_tokens + 1)
    names = ("proposed", "accepted")
    return ["drafts", *names, *(f"{name}_{k}" for name in names for k in positions)]


def read_measurements(path: Path, bench: dict):
    """The pandas.DataFrame of bench_RUN.csv, a row a request.

    Raises:
        ValueError: naming the file, which is not the one that the figures of `bench` are of.
    """
    rows = read_table(path, converters={"category": str})
    named = ["set", "method", "draft_tokens", "concurrency"]
    columns = [*named, "prompt", "turn", "category", "repeat", "group", "group_seconds"]
    columns += ["new_tokens", "beyond"]
    columns += row_counts(max(cell["draft_tokens"] for cell in bench["cells"]))
    if missing := [name for name in columns if name not in rows]:
        raise ValueError(f"{path}: has no column {missing[0]}: {again(path)}")
    found = rows.groupby(named).size().to_dict()
    for cell in bench["cells"]:
        # Of a request that failed in one of several repetitions only `compared` knows.
        served = cell["compared"] or cell["prompts"] * cell["repeats"]
        key = tuple(cell[name] for name in named)
        count = found.get(key, 0)
        if count != served + cell["failed"] and (cell["compared"] or not cell["failed"]):
            raise ValueError(
                f"{path}: has {count:,} rows of {cell['method']} on {cell['set']} at concurrency "
                f"{cell['concurrency']} with {cell['draft_tokens']} draft tokens, and the figures "
                f"are of {served + cell['failed']:,}: {again(path)}"
            )
    return rows
