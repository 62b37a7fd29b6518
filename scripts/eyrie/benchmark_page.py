"""What the report tells of the benchmark: its verdict and notes.

All of it comes from the benchmark's summary and from the rows of its CSV.
"""

import math

import pandas as pd

from eyrie import figures
from eyrie.page import fixed

# A gap between the acceptance length that training estimated and the one served that is no noise
# where there are drafts enough to tell: by so many standard errors of the one served.
GAP, ERRORS = 0.1, 3


def times(speedup: float) -> str:
    return f"{speedup:.2f} times as fast"


def verdict(bench: dict) -> dict:
    """Return the sentence that the report opens with, about the run's draft at the main setting,
    and `notes` of things that a reader must know beside it: where the draft is slower, outputs that
    differ, drafting without training that is as fast, what was left out or failed."""
    methods, cells = bench["methods"], bench["cells"]
    baseline = next(m for m in methods if m["method"] == "baseline")
    draft = next(m for m in methods if m["method"] == "eagle3")
    speedup = draft["speedup"]
    low, high = draft["spread"] or (speedup, speedup)
    if f"{speedup:.2f}" == "1.00":
        claim = "Serving is no faster with the draft"
    elif low < 1 < high:
        claim = (
            f"Serving with the draft cannot be told from serving without: {times(speedup)}, where "
            f"nine in ten lie from {low:.2f} to {high:.2f}"
        )
    elif speedup < 1:
        claim = f"Serving is slower with the draft, {times(speedup)}"
    else:
        claim = f"Serving is {times(speedup)} with the draft"
    sentence = (
        f"{claim}: {fixed(draft['tokens_per_s'], 1)} tokens/s against "
        f"{fixed(baseline['tokens_per_s'], 1)}, at an acceptance length of "
        f"{fixed(draft['acceptance_length'])} with {draft['draft_tokens']} draft tokens."
    )
    notes = []
    for cell in cells:
        elsewhere = cell["concurrency"] != draft["concurrency"] and cell["set"] == draft["set"]
        same = cell["method"] == "eagle3" and cell["draft_tokens"] == draft["draft_tokens"]
        if elsewhere and same and round(cell["speedup"], 2) < 1:
            notes.append(
                f"At concurrency {cell['concurrency']} it is slower, {times(cell['speedup'])}."
            )
    notes += lossless_notes([c for c in cells if c["method"] != "baseline"])
    for other in methods:
        if other["method"] in ("ngram", "suffix") and other["speedup"] >= speedup:
            name = {"ngram": "n-gram"}.get(other["method"], other["method"])
            notes.append(f"{name} drafting, which needs no training, is {times(other['speedup'])}.")
    notes += [
        f"{s['method']} at temperature 1: the tokens are not distributed as the baseline's "
        f"(p = {s['p']:.2g})."
        for s in bench["sampling"]
        if s["differs"]
    ]
    if bad := sum(cell["failed"] for cell in cells):
        notes.append(f"{bad:,} requests failed; no figure counts them.")
    if beyond := max((cell["beyond"] for cell in cells), default=0):
        notes.append(
            f"{beyond:,} requests reach beyond the draft's longest context, where nothing is "
            "drafted: they count for speed and not for acceptance."
        )
    if seen := bench["trained_on"]:
        notes.append(f"The draft was trained on {len(seen):,} of the prompts: {', '.join(seen)}.")
    return {"sentence": sentence, "notes": notes, "draft": draft}


def lossless_notes(cells: list[dict]) -> list[str]:
    """Return what is to be said of outputs that are not the baseline's."""
    compared = sum(cell["compared"] for cell in cells)
    level, faults = (sum(cell[name] for cell in cells) for name in ("rounding", "faults"))
    notes = []
    if faults:
        notes.append(
            f"{faults:,} of {compared:,} outputs part from the baseline's where no rounding "
            "explains it: speculation must not change an output. See below."
        )
    if level:
        notes.append(
            f"{level:,} of {compared:,} outputs part from the baseline's where its two likeliest "
            "tokens are level but for rounding."
        )
    return notes


def categories(bench: dict, measurements: pd.DataFrame) -> list[dict]:
    """Return a dict a category of the main set, at the main setting."""
    draft = next(m for m in bench["methods"] if m["method"] == "eagle3")
    main = measurements[
        (measurements["set"] == draft["set"])
        & (measurements["concurrency"] == draft["concurrency"])
        & measurements["draft_tokens"].isin([0, draft["draft_tokens"]])
    ]
    return figures.by_category(main.to_dict("records"))


def standard_error(held_out: dict) -> float:
    """Of the acceptance length served, each draft being taken for one observation: of its accepted
    tokens X, E[X] = sum p_k and E[X^2] = sum (2k - 1) p_k, p_k being the share of drafts of which
    k or more are accepted."""
    shares = held_out["acceptance_per_position"]
    square = sum((2 * k - 1) * share for k, share in enumerate(shares, 1))
    return math.sqrt(max(square - sum(shares) ** 2, 0) / max(held_out["drafts"], 1))


def benchmark(bench: dict, measurements: pd.DataFrame, supervised_tokens: int) -> dict:
    """Return what templates/benchmark.html shows; `supervised_tokens` are those trained on."""
    held_out = bench["held_out"]
    gap = held_out and held_out["acceptance_length"] - held_out["estimated_acceptance_length"]
    return {
        "verdict": verdict(bench),
        "categories": categories(bench, measurements),
        "gap": gap,
        "apart": held_out is not None and abs(gap) > max(GAP, ERRORS * standard_error(held_out)),
        "supervised_tokens": supervised_tokens,
    }
