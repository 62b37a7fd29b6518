"""Plan a run before anything is spent: tokens, bytes, memory of each device, hours, each with where
it came from; what does not fit is refused with its arithmetic.

Needs the config and the verifier's config.json alone.
"""

import argparse
import json
import shutil
import sys
import textwrap
from pathlib import Path

from eyrie.config import ROOT, ConfigError, load_config, read_config_file, with_reference
from eyrie.errors import in_one_line
from eyrie.files import log_line, write_json
from eyrie.memory import GIB
from eyrie.plan import make_plan
from eyrie.rates import gpus_here

UNITS = {"load": ("GB/s", 1e9), "bench loads": ("GB/s", 1e9)}


def read_config(files: list[Path]):
    """config.yaml with the keys of `files` over it, one after the other, as Snakemake lays them."""

    def over(below: dict, above: dict) -> dict:
        nested = {
            k: over(below[k], v)
            for k, v in above.items()
            if isinstance(v, dict) and isinstance(below.get(k), dict)
        }
        return below | above | nested

    values = read_config_file(ROOT / "config.yaml")
    for file in files:
        values = over(values, with_reference(read_config_file(file)))
    return load_config(values)


def free_bytes(config) -> int | None:
    """Of the disk that `results` is to be on; None where the run's GPUs are not, as another machine
    then does the work."""
    if config.extract.gpus and not gpus_here():
        return None
    place = Path(config.results).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def gib(size: float | None) -> str:
    return "not known" if size is None else f"{size / GIB:,.2f} GiB"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def table(plan: dict) -> str:
    """The plan for a terminal: name, figure and where it came from, a line each."""
    tokens, states, memory, disk = (plan[k] for k in ("tokens", "states", "memory", "disk"))
    kv, state = memory["kv_bytes_a_token"], memory["states_bytes_a_token"]
    bf16, fp8 = states["bf16_bytes"] / 1e9, states["fp8_bytes"] / 1e9
    kept, trained = disk["states_at_most"] / 1e9, disk["training"] / 1e9
    each = f"{memory['devices']} x {gib(memory['device_bytes'])}"
    lines = [
        (f"plan of run {plan['run']}", plan["verifier"], ""),
        ("rows", f"{tokens['rows']:,}", f"data set {plan['data']}"),
        ("tokens", f"{tokens['total']:,}", tokens["source"]),
        ("  of answers", f"{tokens['answers']:,}", f"{tokens['a_row']:,} tokens a row in all"),
        (
            "states",
            f"{bf16:,.2f} GB in bf16, {fp8:,.2f} in fp8",
            f"{states['bytes_a_token']:,} bytes a token in bf16, kept as {states['kept_as']}",
        ),
        ("devices", each, memory["device_source"]),
        ("  weights", gib(memory["weights_bytes"]), f"each; {memory['weights_source']}"),
        (
            "  activations",
            gib(memory["activations_bytes"]),
            f"max_num_batched_tokens {memory['max_num_batched_tokens']:,}",
        ),
        ("  cache", gib(memory["cache_bytes"]), f"for {memory['attention']} and states"),
        (
            "  a token",
            f"{kv + state:,.0f} bytes",
            f"{kv:,.0f} of KV, {state:,.0f} of states",
        ),
    ]
    if memory["cache_bytes"] is not None:
        lines.append(
            (
                "  rows at once",
                f"{memory['mean_rows_at_once']:,} of {tokens['a_row']:,.0f} tokens",
                f"{memory['longest_rows_at_once']:,} of {tokens['longest_row']:,}; "
                f"max_num_seqs {memory['max_num_seqs']:,}",
            )
        )
    lines.append(("training", gib(memory["training_bytes"]), "weights, gradients, optimizer"))
    free = "" if disk["free"] is None else f", {disk['free'] / 1e9:,.1f} GB free"
    lines.append(
        (
            "disk at most",
            f"{kept + trained:,.2f} GB{free}",
            f"{kept:,.2f} of states, {trained:,.2f} of training",
        )
    )
    for row in plan["times"]:
        unit, scale = UNITS.get(row["part"], ("tokens/s", 1))
        done = f"{row['amount'] / scale:,.1f} GB" if scale > 1 else f"{row['amount']:,} tokens"
        steps = f", {row['steps']:,} steps" if "steps" in row else ""
        figure = f"{duration(row['seconds'])}"
        rate = f"{done}{steps} at {number(row['rate'] / scale)} {unit}, {row['source']}"
        lines.append((row["part"], figure, rate))
    lines.append(("all", duration(plan["seconds"]), f"{plan['gpu_hours']:,.2f} GPU-hours"))
    widths = [max(len(line[i]) for line in lines[1:]) for i in range(2)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {figure.rjust(widths[1])}  {note}".rstrip()
        for name, figure, note in lines
    )


def summary(plan: dict) -> str:
    """The plan in a few lines of a config's comment; on a CPU without the times, which are another
    machine's."""
    tokens, states, memory = (plan[key] for key in ("tokens", "states", "memory"))
    kept = states[states["kept_as"] + "_bytes"] / 1e9
    a_token = memory["kv_bytes_a_token"] + memory["states_bytes_a_token"]
    rows = f"{memory['longest_rows_at_once']:,} rows of {tokens['longest_row']:,} tokens at once"
    figures = [
        f"{tokens['total']:,} tokens of {tokens['rows']:,} rows",
        f"{kept:,.3g} GB of states, {states['bytes_a_token']:,} bytes a token in bf16",
    ]
    if plan["gpu_hours"]:
        spent = {row["part"]: duration(row["seconds"]) for row in plan["times"]}
        figures += [
            f"{memory['devices']} x {memory['weights_bytes'] / GIB:,.1f} GiB of weights and "
            f"{memory['cache_bytes'] / GIB:,.1f} of cache, {rows}",
            f"{memory['training_bytes'] / GIB:,.1f} GiB to train",
            f"load {spent['load']}, extract {spent['extract']}, train {spent['train']}, "
            f"benchmark {spent['bench']} and its loads {spent['bench loads']}",
            f"{plan['gpu_hours']:,.1f} GPU-hours",
        ]
    else:
        figures.append(f"{a_token:,.0f} bytes of cache a token, {rows}")
    text = f"The plan of run {plan['run']}: {'; '.join(figures)}."
    indents = {"initial_indent": "# ", "subsequent_indent": "# "}
    return textwrap.fill(text, 100, break_on_hyphens=False, **indents) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", type=Path, nargs="*", default=[], help="files that go over config.yaml"
    )
    parser.add_argument("--settings", help="the whole config as JSON, in place of files")
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument(
        "--verifier",
        type=Path,
        nargs="*",
        default=[],
        help="its folder, where it is not in the results' own",
    )
    parser.add_argument(
        "--json", type=Path, help="file to write; plan_RUN.json in the config's results by default"
    )
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()
    try:
        config = (
            load_config(json.loads(args.settings)) if args.settings else read_config(args.config)
        )
        plan = make_plan(config, args.run, free_bytes(config), *args.verifier[:1])
        write_json(args.json or Path(config.results) / f"plan_{args.run}.json", plan)
        log_line(args.log, **{key: plan[key] for key in ("run", "seconds", "gpu_hours", "faults")})
    except (ConfigError, ValueError, OSError) as error:
        sys.exit(f"plan: {error}")
    print(table(plan))
    if plan["faults"]:
        sys.exit("plan: this does not fit\n" + "\n".join(f"  {fault}" for fault in plan["faults"]))


if __name__ == "__main__":
    with in_one_line("plan"):
        main()
