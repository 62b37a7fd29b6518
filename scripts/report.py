"""Write the report of a run: one HTML file that says how much faster serving became, and why.

Made from saved files and a template alone, so that a new template gives a new report in seconds.
The page loads nothing, runs no script, and the same files give the same bytes.
"""

import argparse
import json
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eyrie.benchmark_page import benchmark
from eyrie.files import atomic
from eyrie.markdown import to_markdown
from eyrie.page import (
    COLOURS,
    SERIES,
    canvas,
    duration,
    fill,
    fixed,
    svg,
    write_figures,
    write_page,
)

# A curve of training steps has this many points, each the mean of as many steps as that takes.
CURVE_POINTS = 100


def plot_training(metrics: pd.DataFrame, column: str, label: str, chosen: int) -> Markup:
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
    return svg(figure, f"{label} of each draft position over the training steps")


def plot_acceptance_length(metrics: pd.DataFrame, chosen: int, served: dict) -> Markup:
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
    return svg(figure, "Acceptance length: estimated on held-out rows each epoch, and served")


def plot_vocabulary(vocab: dict) -> Markup:
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
    return svg(figure, "Coverage of supervised tokens over the size of the draft vocabulary")


def plot_norms(hidden: dict) -> Markup:
    """Draw the mean norm of each layer's stored states."""
    figure, axes = canvas(2.6)
    layers = [str(layer) for layer in hidden["layer_ids"]]
    bars = axes.bar(layers, hidden["layer_norms"], color=COLOURS["accent"], width=0.55)
    axes.bar_label(bars, [fixed(n, 1) for n in hidden["layer_norms"]], padding=3)
    axes.margins(y=0.14)
    axes.set_xlabel("layer that the state enters; the last is the final norm")
    axes.set_ylabel("mean norm")
    axes.grid(axis="y")
    return svg(figure, "Mean norm of the hidden states of each layer")


def positions(metrics: pd.DataFrame) -> int:
    return sum(column.startswith("full_acc_") for column in metrics)


def smoothing(steps: pd.DataFrame) -> int:
    """Return how many training steps one point of a curve is the mean of."""
    return -(-len(steps) // CURVE_POINTS)


def stages(data: dict, checkpoint: Path) -> list[dict]:
    """Return a dict a stage, in the order they ran: seconds, peak memory, bytes made, a note."""
    hidden, manifest, bench = data["hidden"], data["manifest"], data["bench"]
    # An epoch and the chosen one of the same content are one file on disk.
    files = {sha: (checkpoint / n).stat().st_size for n, sha in manifest["files"].items()}
    rows = [
        (f"fetch {name}", identity, identity["bytes"], "")
        for name, identity in data["identities"].items()
    ]
    rows += [
        ("shard", data["shards"], None, ""),
        (
            "extract",
            hidden,
            hidden["bytes"],
            f"{hidden['made']:,} of {hidden['shards']:,} shards made, the rest from the store; "
            f"{duration(hidden['load_seconds'])} to load the verifier, "
            f"{duration(hidden['engine_seconds'])} in the engine",
        ),
        ("vocab", data["vocab"], None, ""),
        (
            "train",
            manifest | {"seconds": manifest["wall_seconds"]},
            sum(files.values()),
            f"{duration(manifest['seconds'])} in training steps",
        ),
        ("check", data["check"], None, ""),
        (
            "bench",
            {
                "seconds": bench["seconds"],
                "peak_rss_bytes": max(m["peak_rss_bytes"] for m in bench["methods"]),
            },
            None,
            f"{duration(sum(m['load_seconds'] for m in bench['methods']))} to load, "
            f"{duration(sum(m['seconds'] for m in bench['methods']))} measured",
        ),
    ]
    return [
        {
            "stage": stage,
            "seconds": of["seconds"],
            "peak": of.get("peak_rss_bytes"),
            "bytes": made,
            "note": note,
        }
        for stage, of, made, note in rows
    ]


def planned(data: dict) -> list[dict]:
    """Return a dict a figure of the plan beside what it came to: name, unit, planned, measured,
    and where the plan had it from. Of what was not made in this run, the states of an earlier one
    say, there is nothing to compare."""
    plan, hidden, bench = data["plan"], data["hidden"], data["bench"]
    loads = sum(method["load_seconds"] for method in bench["methods"])
    measured = {
        "load": hidden["load_seconds"],
        "extract": hidden["engine_seconds"] if hidden["made"] == hidden["shards"] else None,
        "train": data["manifest"]["seconds"],
        "bench": bench["seconds"] - loads,
        "bench loads": loads,
    }
    tokens, source = plan["tokens"], plan["tokens"]["source"]
    kept = plan["states"][f"{plan['states']['kept_as']}_bytes"]
    rows = [
        ("tokens", "tokens", tokens["total"], hidden["tokens"], source),
        ("states", "bytes", kept, hidden["bytes"], source),
    ]
    if plan["memory"]["device_source"] == "this machine's memory":
        host, peak = plan["memory"]["host_bytes"]["extract"], hidden["peak_rss_bytes"]
        rows.append(("memory of extract", "bytes", host, peak, "the config"))
    rows += [
        (row["part"], "seconds", row["seconds"], measured[row["part"]] or None, row["source"])
        for row in plan["times"]
    ]
    names = ("name", "unit", "planned", "measured", "source")
    return [dict(zip(names, row, strict=True)) for row in rows]


def serve_command(verifier: Path, checkpoint: Path, draft_tokens: int) -> str:
    """Return the command for a shell, of two lines."""
    config = {
        "method": "eagle3",
        "model": str(checkpoint),
        "num_speculative_tokens": draft_tokens,
    }
    quoted = shlex.quote(json.dumps(config))
    return f"vllm serve {shlex.quote(str(verifier))} \\\n  --speculative-config {quoted}"


def sglang_command(verifier: Path, checkpoint: Path, draft_tokens: int) -> str:
    """As `serve_command`, for SGLang: a chain of drafts, which the verifier's token is added to."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(str(verifier))} \\\n"
        "  --speculative-algorithm EAGLE3 \\\n"
        f"  --speculative-draft-model-path {shlex.quote(str(checkpoint))} \\\n"
        f"  --speculative-num-steps {draft_tokens} --speculative-eagle-topk 1 \\\n"
        f"  --speculative-num-draft-tokens {draft_tokens + 1}"
    )


def render(template: Path, run: str, verifier: Path, checkpoint: Path, data: dict) -> str:
    """Return the page. `data` holds the loaded files by their option's name, and `manifest` and
    `metrics` of the checkpoint.

    Raises:
        KeyError, TypeError, jinja2.UndefinedError: a file lacks something that the page shows.
    """
    metrics = data["metrics"]
    shown = benchmark(data["bench"], data["measurements"], data["vocab"]["supervised_tokens"])
    draft = shown["verdict"]["draft"]
    chosen = data["manifest"]["chosen_epoch"]
    epochs = metrics[metrics["kind"] == "epoch"].to_dict("records")
    names = range(positions(metrics))
    best = next(epoch for epoch in epochs if epoch["epoch"] == chosen)
    return fill(
        template,
        **data,
        run=run,
        benchmark=shown,
        chosen=chosen,
        epochs=epochs,
        positions=names,
        estimated=best["acceptance_length"],
        smoothing=smoothing(metrics[metrics["kind"] == "step"]),
        stages=stages(data, checkpoint),
        planned=planned(data),
        serve=serve_command(verifier, checkpoint, draft["draft_tokens"]),
        sglang=sglang_command(verifier, checkpoint, draft["draft_tokens"]),
        plots={
            "loss": plot_training(metrics, "loss", "loss", chosen),
            "accuracy": plot_training(metrics, "full_acc", "accuracy, cumulative", chosen),
            "length": plot_acceptance_length(metrics, chosen, draft),
            "vocabulary": plot_vocabulary(data["vocab"]),
            "norms": plot_norms(data["hidden"]) if "layer_norms" in data["hidden"] else None,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True, help="shards.json")
    parser.add_argument("--hidden", type=Path, required=True, help="hidden.json")
    parser.add_argument("--plan", type=Path, required=True, help="plan_RUN.json")
    parser.add_argument("--vocab", type=Path, required=True, help="vocab_RUN.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--check", type=Path, required=True, help="check_RUN.json")
    parser.add_argument("--bench", type=Path, required=True, help="bench_RUN.json")
    parser.add_argument("--measurements", type=Path, required=True, help="bench_RUN.csv")
    parser.add_argument("--identities", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--markdown", type=Path, help="the same in Markdown; needs --figures")
    parser.add_argument("--figures", type=Path, help="folder of the figures as SVG and PNG")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    data = {
        name: json.loads(getattr(args, name).read_text())
        for name in ("shards", "hidden", "plan", "vocab", "check", "bench")
    }
    data["manifest"] = json.loads((args.checkpoint / "manifest.json").read_text())
    data["metrics"] = pd.read_parquet(args.checkpoint / "metrics.parquet")
    data["measurements"] = pd.read_csv(args.measurements, converters={"category": str})
    data["identities"] = {
        # Of several sources of conversations each has a number.
        f"conversations {path.stem}" if path.stem.isdecimal() else path.stem: json.loads(
            path.read_text()
        )
        for path in args.identities
    }
    # A verifier's identity lies beside its folder, under the same name.
    verifier = next(p for p in args.identities if p.stem == "verifier").with_suffix("")
    page = render(args.template, args.run, verifier, args.checkpoint, data)
    if args.figures:
        figures = write_figures(args.figures)
        with atomic(args.markdown) as partial:
            partial.write_text(to_markdown(page, figures))
    write_page(args.out, page, args.log)
    print(f"report: {args.out}")


if __name__ == "__main__":
    main()
