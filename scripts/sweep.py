"""Write the page of a sweep: one HTML file that says which of several drafts serves fastest.

It has a row a draft, which a small script sorts by any column. The page loads nothing, and the
same files give the same bytes.
"""

import argparse
import math
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eyrie.checkpoint import WEIGHTS, read_header
from eyrie.drawing import SERIES, canvas, finish, plot_positions, svg
from eyrie.errors import in_one_line
from eyrie.files import write_json
from eyrie.page import fill, fixed, inline, plain, write_page
from eyrie.results import CHECK, VOCAB, read_bench, read_result, read_training


def read_draft(checkpoint: Path, *files: Path) -> dict:
    """Return what the page tells of a draft. `files` are of vocab, check and bench.

    Raises:
        ValueError: naming the file that is not what its stage writes, or of another draft.
    """
    manifest, metrics = read_training(checkpoint)
    vocab, check = map(read_result, files[:2], (VOCAB, CHECK))
    bench = read_bench(files[2], manifest)
    served = next(m for m in bench["methods"] if m["method"] == "eagle3")
    steps = metrics[metrics["kind"] == "step"]
    epochs = metrics[metrics["kind"] == "epoch"].set_index("epoch", drop=False)
    epochs["minutes"] = steps.groupby("epoch")["seconds"].sum().cumsum() / 60
    weights = checkpoint / WEIGHTS
    shapes = {name: shape for name, (_, shape) in read_header(weights).items()}
    return {
        "run": bench["run"],
        "config": manifest["config"],
        "chosen": manifest["chosen_epoch"],
        "epochs": epochs,
        "held_out": bench["held_out"],
        # What must be the same for figures to compare.
        "data": [manifest["data"], manifest["config"]["held_out"]],
        "benchmark": {
            "verifier": bench["verifier"],
            **bench["prompt_set"],
            **bench["settings"],
            "draft_tokens": served["draft_tokens"],
        },
        **{key: served[key] for key in ("acceptance_length", "tokens_per_s", "speedup")},
        "per_position": served["acceptance_per_position"] or [],
        "identical": served["identical"],
        "prompts": served["compared"],
        "row": {"run": bench["run"], **served},
        "coverage": vocab["coverage"],
        "ok": check["ok"],
        "parameters": sum(math.prod(s) for n, s in shapes.items() if n not in ("d2t", "t2d")),
        "bytes": weights.stat().st_size,
        "rows": manifest["rows"]["training"],
        "tokens": int(steps["tokens"].sum()),
        "seconds": manifest["seconds"],
    }


def add_estimates(drafts: list[dict]) -> int:
    """Add the acceptance lengths on held-out rows, of as many positions as all drafts trained and
    served; returns how many."""
    positions = min(min(d["config"]["ttt_steps"], d["benchmark"]["draft_tokens"]) for d in drafts)
    for draft in drafts:
        epochs, held_out = draft["epochs"], draft["held_out"]
        epochs["estimate"] = 1 + sum(epochs[f"full_acc_{k}"] for k in range(positions))
        draft["estimated"] = float(epochs["estimate"][draft["chosen"]])
        draft["served"] = held_out and 1 + sum(held_out["acceptance_per_position"][:positions])
    return positions


def differing(settings: list[dict]) -> list[str]:
    """Return the keys that are not the same in all of `settings`."""
    keys = dict.fromkeys(key for values in settings for key in values)
    return [k for k in keys if any(v.get(k) != settings[0].get(k) for v in settings)]


def incomparable(draft: dict, first: dict) -> dict[str, str]:
    """Return which figures of a draft do not compare with those of the first, and why."""
    why = {}
    ours, theirs = draft["benchmark"], first["benchmark"]
    if keys := differing([theirs, ours]):
        found = (f"{k} {plain(ours.get(k))}, not {plain(theirs.get(k))}" for k in keys)
        why["benchmark"] = (
            f"{draft['run']} was benchmarked otherwise than {first['run']} ({'; '.join(found)}): "
            "its served figures are not comparable."
        )
    if draft["data"] != first["data"]:
        why["held-out rows"] = (
            f"{draft['run']} was trained on other data than {first['run']}: its held-out figures "
            "are not comparable."
        )
    return why


def spread(drafts: list[dict], key: str) -> str:
    """Return a figure of some drafts, from the least to the most: 1.33 to 1.47."""
    values = pd.Series([draft[key] for draft in drafts], dtype=float)
    low, high = fixed(values.min()), fixed(values.max())
    return low if low == high else f"{low} to {high}"


def verdict(drafts: list[dict]) -> dict:
    """Return the sentence that the page opens with, of drafts benchmarked alike, the names of the
    fastest, which may be as fast to two digits, and what a reader must know beside it."""
    best = max(draft["speedup"] for draft in drafts)
    lead = [d for d in drafts if fixed(d["speedup"]) == fixed(best)]
    rest = [d for d in drafts if fixed(d["speedup"]) != fixed(best)]
    names = [draft["run"] for draft in lead]
    claim = f"{' and '.join(names)} {'is' if len(lead) == 1 else 'are'}"
    times, length = f"{fixed(best)} times as fast as no draft", spread(lead, "acceptance_length")
    if rest:
        others = rest[0]["run"] if len(rest) == 1 else "the others"
        claim += " fastest:"
        times += f", against {spread(rest, 'speedup')} with {others}"
        length += f" against {spread(rest, 'acceptance_length')}"
    return {
        "sentence": f"{claim} {times}; acceptance length {length}.",
        "notes": ["No draft makes serving faster."] if round(best, 2) <= 1 else [],
        "fastest": names,
    }


def plot_estimates(drafts: list[dict], column: str, label: str) -> Figure:
    """Draw the acceptance length estimated after each epoch, one line a draft."""
    figure, axes = canvas()
    for number, draft in enumerate(drafts):
        epochs, colour = draft["epochs"], SERIES[number % len(SERIES)]
        axes.plot(epochs[column], epochs["estimate"], "o-", color=colour, label=draft["run"])
    axes.set_xlabel(label)
    axes.set_ylabel("acceptance length, held out")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=column == "epoch"))
    axes.grid(axis="y")
    return finish(figure, f"Acceptance length estimated on held-out rows over {label}")


def render(template: Path, drafts: list[dict]) -> str:
    """Return the page of the drafts, the fastest first. They are compared with the first given."""
    positions = add_estimates(drafts)
    for draft in drafts:
        draft["incomparable"] = incomparable(draft, drafts[0])
    opening = verdict([d for d in drafts if "benchmark" not in d["incomparable"]])
    notes = opening["notes"] + [n for d in drafts for n in d["incomparable"].values()]
    benchmark = drafts[0]["benchmark"]
    drafts = sorted(drafts, key=lambda draft: -draft["speedup"])
    bars = [
        (d["run"], d["per_position"], {"color": SERIES[n % len(SERIES)]})
        for n, d in enumerate(drafts)
    ]
    figures = {
        "epochs": plot_estimates(drafts, "epoch", "epoch"),
        "positions": plot_positions(bars),
        "time": plot_estimates(drafts, "minutes", "minutes of training"),
    }
    return fill(
        template,
        drafts=drafts,
        benchmark=benchmark,
        verdict=opening,
        notes=notes,
        keys=differing([draft["config"] for draft in drafts]),
        served_positions=max(len(draft["per_position"]) for draft in drafts),
        positions=positions,
        plots={name: inline(svg(figure)) for name, figure in figures.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, nargs="+", required=True, help="of each run")
    parser.add_argument("--vocab", type=Path, nargs="+", required=True, help="vocab_RUN.json")
    parser.add_argument("--check", type=Path, nargs="+", required=True, help="check_RUN.json")
    parser.add_argument("--bench", type=Path, nargs="+", required=True, help="bench_RUN.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--summary", type=Path, required=True, help="JSON: a row a draft")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    files = zip(args.checkpoint, args.vocab, args.check, args.bench, strict=True)
    try:
        drafts = [read_draft(*of_run) for of_run in files]
    except (OSError, ValueError) as error:
        sys.exit(f"sweep: {error}")
    page = render(args.template, drafts)
    write_json(args.summary, {"methods": [draft["row"] for draft in drafts]})
    write_page(args.out, page, args.log)
    print(f"sweep: {args.out}")


if __name__ == "__main__":
    with in_one_line("sweep"):
        main()
