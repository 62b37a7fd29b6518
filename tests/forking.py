"""Scripts run in processes that are forked from one that has imported what they need, which saves
each the seconds that the imports take."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from eyrie import engine

PRELOAD = ["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama", "eyrie.connector"]
PRELOAD += ["eyrie.trainer", "eyrie.draft_model", "bench", "extract", "shard", "train"]

# The engine's own OpenMP; with it preloaded the scripts need not start themselves again.
OPENMP = str(Path(sys.prefix) / "lib" / "libiomp5.so")


def run(command: list[str], output: Path, code: str) -> None:
    script, *options = command
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    exec(code, {})
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


def start(command: list[str], folder: Path, code: str = "") -> multiprocessing.Process:
    """Start a script with its options, after `code`; what it prints is folder/output."""
    # For the process from which all are forked, as it starts.
    os.environ["LD_PRELOAD"] = OPENMP
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*engine.PRELOAD, *PRELOAD])
    folder.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=run, args=(command, folder / "output", code))
    process.start()
    del os.environ["LD_PRELOAD"], os.environ["VLLM_LOGGING_LEVEL"]
    return process


def run_to_end(command: list[str], folder: Path, code: str = "") -> tuple[int, str]:
    """(exit code, output)"""
    process = start(command, folder, code)
    process.join()
    return process.exitcode, (folder / "output").read_text()
