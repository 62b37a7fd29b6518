"""Print a benchmark, or the drafts of a sweep, as a plain table, and where its report is."""

import argparse
import sys
from pathlib import Path

from eyrie.errors import in_one_line
from eyrie.results import TABLE, again, read_result

HEAD = ("draft tokens", "acceptance length", "tokens/s", "speed-up", "identical")


def cells(method: dict) -> tuple[str, ...]:
    """Return the cells of a method's line; the baseline has no draft and equals itself."""
    drafting = method["method"] != "baseline"
    length = method["acceptance_length"]
    return (
        method.get("run", method["method"]),
        str(method["draft_tokens"]) if drafting else "-",
        "-" if length is None else f"{length:.2f}",
        f"{method['tokens_per_s']:,.1f}",
        f"{method['speedup']:.2f}x",
        f"{method['identical']:,} of {method['compared']:,}" if drafting else "-",
    )


def table(methods: list[dict]) -> str:
    """Return the lines of the table, each column as wide as its widest cell. Of a sweep each line
    is the draft of a run."""
    first = "run" if "run" in methods[0] else "method"
    rows = [(first, *HEAD), *map(cells, methods)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", type=Path, help="bench_RUN.json, or report_sweep.json")
    parser.add_argument("--report", type=Path, required=True, help="report_RUN.html")
    args = parser.parse_args()
    try:
        methods = read_result(args.bench, TABLE)["methods"]
        if not methods:
            raise ValueError(f"{args.bench}: has no methods: {again(args.bench)}")
    except ValueError as error:
        sys.exit(f"table: {error}")
    print(table(methods))
    print(f"\nreport: {args.report}")


if __name__ == "__main__":
    with in_one_line("table"):
        main()
