"""Write the report of a run: one HTML file that says how much faster serving became, and why.

Made from saved files and a template alone, so that a new template gives a new report in seconds.
The page loads nothing, runs no script, and the same files give the same bytes.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from eyrie.benchmark_page import benchmark
from eyrie.checkpoint import WEIGHTS, read_header
from eyrie.errors import in_one_line
from eyrie.files import atomic
from eyrie.markdown import to_markdown
from eyrie.page import duration, fill, inline, positions, smoothing, write_page
from eyrie.results import (
    CHECK,
    HIDDEN,
    IDENTITY,
    PLAN,
    SHARDS,
    VOCAB,
    again,
    read_bench,
    read_measurements,
    read_result,
    read_training,
)

# What draw.py draws for every run.
FIGURES = {"loss", "accuracy", "acceptance_length", "vocabulary", "positions", "speed"}


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


def read_figures(folder: Path) -> dict:
    """The figures of draw.py as elements of a page, by their names.

    Raises:
        ValueError: naming the figure that is not there, or none of draw.py's.
    """
    names = {path.stem for path in folder.glob("*.svg")}
    found = {}
    for name in sorted(names | FIGURES):
        path = folder / f"{name}.svg"
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({error}): {again(path)}") from None
        if "<svg" not in text or text.count('aria-label="') != 1:
            raise ValueError(f"{path}: is no figure with a label: {again(path)}")
        found[name] = inline(text)
    return found


def render(template: Path, run: str, verifier: Path, checkpoint: Path, data: dict) -> str:
    """Return the page. `data` holds the loaded files by their option's name, `manifest` and
    `metrics` of the checkpoint, and the figures as `plots`.

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
    parser.add_argument("--figures", type=Path, required=True, help="the folder of draw.py")
    parser.add_argument("--identities", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--markdown", type=Path, help="the same in Markdown")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    try:
        manifest, metrics = read_training(args.checkpoint)
        for name in manifest["files"]:
            if name.endswith(WEIGHTS):
                read_header(args.checkpoint / name)  # whole
        bench = read_bench(args.bench, manifest, args.run)
        data = {
            "manifest": manifest,
            "metrics": metrics,
            "bench": bench,
            "measurements": read_measurements(args.measurements, bench),
            "shards": read_result(args.shards, SHARDS),
            "hidden": read_result(args.hidden, HIDDEN),
            "plan": read_result(args.plan, PLAN),
            "vocab": read_result(args.vocab, VOCAB),
            "check": read_result(args.check, CHECK),
            "plots": read_figures(args.figures),
        }
        if data["plan"]["run"] != args.run:
            raise ValueError(f"{args.plan}: is of run {data['plan']['run']}, not of {args.run}")
        identities = [read_result(path, IDENTITY) for path in args.identities]
        of_verifier = next((p for p in args.identities if p.stem == "verifier"), None)
        if not of_verifier:
            raise ValueError("--identities: verifier.json is not among them; name it, too")
    except (OSError, ValueError) as error:
        sys.exit(f"report: {error}")
    data["identities"] = {
        # Of several sources of conversations each has a number.
        f"conversations {path.stem}" if path.stem.isdecimal() else path.stem: identity
        for path, identity in zip(args.identities, identities, strict=True)
    }
    # A verifier's identity lies beside its folder, under the same name.
    verifier = of_verifier.with_suffix("")
    page = render(args.template, args.run, verifier, args.checkpoint, data)
    if args.markdown:
        with atomic(args.markdown) as partial:
            partial.write_text(to_markdown(page, args.figures))
    write_page(args.out, page, args.log)
    print(f"report: {args.out}")


if __name__ == "__main__":
    with in_one_line("report"):
        main()
