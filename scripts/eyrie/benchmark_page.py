"""What the report tells of the benchmark: its verdict, notes and figures.

All of it comes from the benchmark's summary and from the rows of its CSV.
"""

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from eyrie import figures
from eyrie.page import COLOURS, SERIES, canvas, fixed, plot_positions, svg

# A gap between the acceptance length that training estimated and the one served that is no noise.
GAP = 0.1


def colour(method: str) -> str:
    known = {
        "baseline": COLOURS["plain"],
        "ngram": COLOURS["series-2"],
        "suffix": COLOURS["series-3"],
        "eagle3": COLOURS["accent"],
    }
    # Further drafts, by their names, as the same one has one colour on all figures.
    return known.get(method, SERIES[3 + sum(method.encode()) % 2])


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
    if f"{speedup:.2f}" == "1.00":
        claim = "Serving is no faster with the draft"
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


def plot_speed(methods: list[dict]) -> Markup:
    """Draw tokens/s of each method as a bar."""
    figure, axes = canvas(2.8)
    bars = axes.barh(
        [m["method"] for m in methods],
        [m["tokens_per_s"] for m in methods],
        color=[colour(m["method"]) for m in methods],
        height=0.55,
    )
    axes.bar_label(bars, [fixed(m["tokens_per_s"], 1) for m in methods], padding=4)
    axes.margins(x=0.14)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(axis="x")
    return svg(figure, "Tokens per second of each method")


def plot_acceptance(methods: list[dict], held_out: dict | None) -> Markup:
    """Draw how often each draft position was accepted when served, and the held-out estimate."""
    series = [
        (f"{m['method']}, served", m["acceptance_per_position"], {"color": colour(m["method"])})
        for m in methods
        if m["acceptance_per_position"]
    ]
    if held_out:
        hollow = {"facecolor": "none", "edgecolor": COLOURS["accent"], "linewidth": 1.2}
        series.append(("eagle3, held out", held_out["estimated_per_position"], hollow))
    return plot_positions(series)


def plot_speedups(cells: list[dict], over: str, label: str) -> Markup:
    """Draw the speed-up of each drafting method, its spread as a bar, over a key of the cells."""
    figure, axes = canvas(2.8)
    axes.axhline(1, color=COLOURS["plain"], linewidth=1.2, label="baseline")
    for method in dict.fromkeys(c["method"] for c in cells if c["method"] != "baseline"):
        mine = sorted((c for c in cells if c["method"] == method), key=lambda c: c[over])
        x, y = ([cell[name] for cell in mine] for name in (over, "speedup"))
        low, high = np.array([cell["spread"] or [cell["speedup"]] * 2 for cell in mine]).T
        # The median of resamples may lie a little off the figure itself.
        errors = [np.maximum(y - low, 0), np.maximum(high - y, 0)]
        axes.errorbar(
            x, y, errors, fmt="o-", color=colour(method), capsize=3, elinewidth=0.9, label=method
        )
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up")
    axes.set_ylim(0)
    axes.margins(x=0.1, y=0.12)
    if over == "concurrency":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.set_xticks(sorted({cell[over] for cell in cells}))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    return svg(figure, f"Speed-up of each method over {label}")


def benchmark(bench: dict, measurements: pd.DataFrame, supervised_tokens: int) -> dict:
    """Return what templates/benchmark.html shows; `supervised_tokens` are those trained on."""
    opening = verdict(bench)
    draft, held_out = opening["draft"], bench["held_out"]
    main = [cell for cell in bench["cells"] if cell["set"] == draft["set"]]
    over_concurrency = [c for c in main if c["draft_tokens"] in (0, draft["draft_tokens"])]
    over_tokens = [
        c for c in main if c["concurrency"] == draft["concurrency"] and c["draft_tokens"]
    ]
    plots = {"positions": plot_acceptance(bench["methods"], held_out)}
    if len({cell["concurrency"] for cell in main}) > 1:
        plots["speed"] = plot_speedups(over_concurrency, "concurrency", "requests at once")
    else:
        plots["speed"] = plot_speed(bench["methods"])
    if len({cell["draft_tokens"] for cell in over_tokens}) > 1:
        plots["tokens"] = plot_speedups(over_tokens, "draft_tokens", "draft tokens")
    gap = held_out and held_out["acceptance_length"] - held_out["estimated_acceptance_length"]
    return {
        "verdict": opening,
        "plots": plots,
        "categories": categories(bench, measurements),
        "gap": gap,
        "apart": held_out is not None and abs(gap) > GAP,
        "supervised_tokens": supervised_tokens,
    }
