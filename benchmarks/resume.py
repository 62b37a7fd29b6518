"""Seconds that extraction takes to see that nothing is missing, with 128 shards in the store.

    python benchmarks/resume.py [--shards 128]

The shards are made first, by a tiny random verifier. One line for the decision (from the command
line to the outputs' being there) and one for the whole process, imports included.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import tiny  # noqa: E402
from extracting import extraction, write_shards  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="a shard")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.make_verifier(folder / "verifier")
        ids = torch.randint(256, (args.shards * args.rows, 64)).tolist()
        shards = write_shards(folder, ids, args.rows)
        for what in ("making them", "nothing missing"):
            started = time.time()
            found = extraction(folder, shards, "store", "--max-model-len", 128)
            whole = time.time() - started
            print(
                f"{what}: {found['made']} of {found['shards']} shards made, decision and links "
                f"{found['seconds']:.2f} s, the whole process {whole:.2f} s"
            )


if __name__ == "__main__":
    main()
