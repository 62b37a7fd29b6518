"""Draw the figures of a run's report, each as SVG and as PNG.

They are files of their own, as drawing takes longer than all else of a report.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eyrie.drawing import SERIES, canvas, finish, plot_positions, svg
from eyrie.errors import in_one_line
from eyrie.files import log_line, require_own
from eyrie.page import COLOURS, fixed, positions, smoothing
from eyrie.results import HIDDEN, VOCAB, read_bench, read_result, read_training


def colour(method: str) -> str:
    known = {
        "baseline": COLOURS["plain"],
        "ngram": COLOURS["series-2"],
        "suffix": COLOURS["series-3"],
        "eagle3": COLOURS["accent"],
    }
    # Further drafts, by their names, as the same one has one colour on all figures.
    return known.get(method, SERIES[3 + sum(method.encode()) % 2])


def plot_training(metrics: pd.DataFrame, column: str, label: str, chosen: int) -> Figure:
    """Draw `column`_0, `column`_1, ... over the steps: training thin, held-out epochs as dots."""
    figure, axes = canvas()
    steps = metrics[metrics["kind"] == "step"]
    epochs = metrics[metrics["kind"] == "epoch"]
    curve = steps.groupby(np.arange(len(steps)) // smoothing(steps)).mean(numeric_only=True)
    for position in range(positions(metrics)):
        name, colour = f"{column}_{position}", SERIES[position % len(SERIES)]
        axes.plot(curve["step"], curve[name], color=colour, linewidth=1, alpha=0.55)
        axes.plot(
            epochs["step"], epochs[name], "o-", color=colour, label=f"position {position + 1}"
        )
    axes.axvline(
        epochs.set_index("epoch")["step"][chosen],
        color=COLOURS["muted"],
        linewidth=0.9,
        linestyle=(0, (4, 3)),
        zorder=0,
        label=f"epoch {chosen}, chosen",
    )
    if column == "full_acc":
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y")
    return finish(figure, f"{label} of each draft position over the training steps")


def plot_acceptance_length(metrics: pd.DataFrame, chosen: int, served: dict) -> Figure:
    """Draw the acceptance length that each epoch's held-out accuracy amounts to, and the served
    one."""
    figure, axes = canvas()
    epochs = metrics[metrics["kind"] == "epoch"].set_index("epoch")["acceptance_length"]
    axes.plot(epochs.index, epochs, "o-", color=COLOURS["accent"], label="estimated, held out")
    axes.plot(
        [chosen],
        [epochs[chosen]],
        "o",
        markersize=10,
        fillstyle="none",
        color=COLOURS["accent"],
        label=f"epoch {chosen}, chosen",
    )
    if served["acceptance_length"] is not None:
        axes.axhline(
            served["acceptance_length"],
            color=COLOURS["series-2"],
            linestyle=(0, (5, 3)),
            label=f"served: {fixed(served['acceptance_length'])}",
        )
    axes.set_ylim(1)
    axes.margins(y=0.15)
    axes.set_xlabel("epoch")
    axes.set_ylabel("acceptance length")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.grid(axis="y")
    return finish(figure, "Acceptance length: estimated on held-out rows each epoch, and served")


def plot_vocabulary(vocab: dict) -> Figure:
    """Draw the share of supervised tokens that the most frequent 256, 512, ... cover."""
    figure, axes = canvas()
    curve = {int(size): share for size, share in vocab["coverage_by_size"].items()}
    axes.plot(curve.keys(), curve.values(), "o-", color=COLOURS["accent"], label="by frequency")
    axes.plot(
        [vocab["draft_vocab_size"]],
        [vocab["coverage"]],
        "D",
        markersize=7,
        color=COLOURS["series-2"],
        label=f"this draft: {vocab['draft_vocab_size']:,}",
    )
    axes.set_xscale("log", base=2)
    shown = list(curve)[:: max(len(curve) // 4, 1)]
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.minorticks_off()
    axes.set_xlabel("draft vocabulary, tokens")
    axes.set_ylabel("supervised tokens covered")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y")
    return finish(figure, "Coverage of supervised tokens over the size of the draft vocabulary")


def plot_norms(hidden: dict) -> Figure:
    """Draw the mean norm of each layer's stored states."""
    figure, axes = canvas(2.6)
    layers = [str(layer) for layer in hidden["layer_ids"]]
    bars = axes.bar(layers, hidden["layer_norms"], color=COLOURS["accent"], width=0.55)
    axes.bar_label(bars, [fixed(n, 1) for n in hidden["layer_norms"]], padding=3)
    axes.margins(y=0.14)
    axes.set_xlabel("layer that the state enters; the last is the final norm")
    axes.set_ylabel("mean norm")
    axes.grid(axis="y")
    return finish(figure, "Mean norm of the hidden states of each layer")


def plot_speed(methods: list[dict]) -> Figure:
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
    return finish(figure, "Tokens per second of each method")


def plot_acceptance(methods: list[dict], held_out: dict | None) -> Figure:
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


def plot_speedups(cells: list[dict], over: str, label: str) -> Figure:
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
    return finish(figure, f"Speed-up of each method over {label}")


def draw(metrics: pd.DataFrame, chosen: int, vocab: dict, hidden: dict, bench: dict) -> dict:
    """Return the figures by the names that the template calls them."""
    draft = next(m for m in bench["methods"] if m["method"] == "eagle3")
    main = [cell for cell in bench["cells"] if cell["set"] == draft["set"]]
    over_concurrency = [c for c in main if c["draft_tokens"] in (0, draft["draft_tokens"])]
    over_tokens = [
        c for c in main if c["concurrency"] == draft["concurrency"] and c["draft_tokens"]
    ]
    figures = {
        "loss": plot_training(metrics, "loss", "loss", chosen),
        "accuracy": plot_training(metrics, "full_acc", "accuracy, cumulative", chosen),
        "acceptance_length": plot_acceptance_length(metrics, chosen, draft),
        "vocabulary": plot_vocabulary(vocab),
        "positions": plot_acceptance(bench["methods"], bench["held_out"]),
    }
    if "layer_norms" in hidden:
        figures["norms"] = plot_norms(hidden)
    if len({cell["concurrency"] for cell in main}) > 1:
        figures["speed"] = plot_speedups(over_concurrency, "concurrency", "requests at once")
    else:
        figures["speed"] = plot_speed(bench["methods"])
    if len({cell["draft_tokens"] for cell in over_tokens}) > 1:
        figures["draft_tokens"] = plot_speedups(over_tokens, "draft_tokens", "draft tokens")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--vocab", type=Path, required=True, help="vocab_RUN.json")
    parser.add_argument("--hidden", type=Path, required=True, help="hidden.json")
    parser.add_argument("--bench", type=Path, required=True, help="bench_RUN.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    partial = args.out.with_name(args.out.name + ".partial")
    try:
        for folder in (args.out, partial):
            require_own(folder, "*.svg", "*.png")
        manifest, metrics = read_training(args.checkpoint)
        vocab, hidden = read_result(args.vocab, VOCAB), read_result(args.hidden, HIDDEN)
        bench = read_bench(args.bench, manifest)
    except ValueError as error:
        sys.exit(f"draw: {error}")
    figures = draw(metrics, manifest["chosen_epoch"], vocab, hidden, bench)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, figure in figures.items():
        (partial / f"{name}.svg").write_text(svg(figure))
        # It is laid out; again would take as long.
        figure.set_layout_engine("none")
        # Without matplotlib's own version the same inputs give the same bytes.
        bare = {"Software": None}
        figure.savefig(partial / f"{name}.png", dpi=160, facecolor="white", metadata=bare)
    shutil.rmtree(args.out, ignore_errors=True)
    partial.rename(args.out)
    log_line(args.log, figures=len(figures))
    print(f"draw: {len(figures)} figures in {args.out}")


if __name__ == "__main__":
    with in_one_line("draw"):
        main()
