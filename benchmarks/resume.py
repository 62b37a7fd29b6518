"""Seconds that extraction takes to see that nothing is missing, with 128 shards in the store.

    python benchmarks/resume.py [--shards 128]

The shards are made first, by a tiny random verifier. One line for the decision (from the command
line to the outputs' being there) and one for the whole process, imports included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import tiny  # noqa: E402

from eyrie.shards import Rows, write_tokens  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="a shard")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.make_verifier(folder / "verifier")
        (folder / "identity.json").write_text('{"source": "", "files": {}}')
        shards = []
        for number in range(args.shards):
            ids = torch.randint(256, (args.rows, 64)).tolist()
            row_ids = [(number * args.rows + i).to_bytes(16, "little") for i in range(len(ids))]
            shards.append(folder / f"{number:05d}.safetensors")
            write_tokens(shards[-1], Rows.pack(ids, [[True] * 64] * len(ids), row_ids, {}))
        command = [sys.executable, ROOT / "scripts/extract.py", "--shards", *shards]
        command += ["--out", *(folder / "out" / path.name for path in shards)]
        command += ["--store", folder / "store", "--verifier", folder / "verifier"]
        command += ["--identity", folder / "identity.json", "--summary", folder / "hidden.json"]
        command += ["--log", folder / "log.jsonl", "--answers", "dataset", "--layer-ids", 1, 2, 3]
        command += ["--dtype", "float32", "--max-model-len", 128]
        for what in ("making them", "nothing missing"):
            started = time.time()
            subprocess.run([str(p) for p in command], check=True, capture_output=True)
            whole = time.time() - started
            found = json.loads((folder / "hidden.json").read_text())
            print(
                f"{what}: {found['made']} of {found['shards']} shards made, decision and links "
                f"{found['seconds']:.2f} s, the whole process {whole:.2f} s"
            )


if __name__ == "__main__":
    main()
