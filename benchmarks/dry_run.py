"""CPU seconds of dry runs, beside those that Snakemake takes to tell its version.

    python benchmarks/dry_run.py

One line for a job of which nothing is there, of 10,000 conversations in 100 shards, and one for the
same where everything is there and there is nothing to be done: its files are empty, and marked as
made by `snakemake --touch`. CPU seconds, as others may use the machine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "results/report_10k.html"


def run(folder: str, *arguments: str) -> tuple[float, str]:
    """CPU seconds of Snakemake in `folder`, the system's included, and what it printed."""
    command = [Path(sys.executable).with_name("snakemake"), *arguments]
    before = os.times()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    after = os.times()
    seconds = after.children_user + after.children_system
    return seconds - before.children_user - before.children_system, done.stdout + done.stderr


def outputs(plan: str) -> list[str]:
    """The files that a dry run would make."""
    lines = [
        line.split(": ", 1)[1] for line in plan.splitlines() if line.startswith("    output: ")
    ]
    return [name for line in lines for name in line.split(", ")]


def main() -> None:
    workflow = ("-s", str(ROOT / "Snakefile"), "-j", "8")
    with tempfile.TemporaryDirectory() as folder:
        bare, _ = run(folder, "--version")
        planned, plan = run(folder, *workflow, "-n", TARGET)
        folders = ("results/ckpt_10k", "results/verifier", "results/conversations/0")
        identities = {f"{name}.json" for name in (*folders[1:], "results/prompts")}
        for name in outputs(plan):
            path = Path(folder) / name
            (path if name in folders else path.parent).mkdir(parents=True, exist_ok=True)
            path.touch()
            if name in identities:
                path.write_text('{"local": {}}')
        (Path(folder) / "results/verifier/config.json").write_text(
            '{"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30, '
            '"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}'
        )
        (Path(folder) / "results/ckpt_10k/manifest.json").write_text('{"files": {}}')
        run(folder, *workflow, "--touch", TARGET)
        idle, told = run(folder, *workflow, "-n", TARGET)
        assert "Nothing to be done" in told, told
    print(f"snakemake --version: {bare:.2f} s")
    for name, seconds in {"10k planned": planned, "10k, nothing to be done": idle}.items():
        print(f"{name}: {seconds:.2f} s, {seconds / bare:.1f} times that")


if __name__ == "__main__":
    main()
