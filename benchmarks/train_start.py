"""Seconds from the start of scripts/train.py to its first step, on a great many hidden states.

    python benchmarks/train_start.py --verifier results/verifier [--gigabytes 100]

The shards are sparse: rows of tokens as ever, and holes of so many bytes for states of the default
job's size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from eyrie.shards import HiddenShardWriter, Rows  # noqa: E402
from eyrie.verifier import load_verifier_config  # noqa: E402
from eyrie.vocab import made_of, save_map  # noqa: E402

LAYER_IDS, LENGTH, ROWS, DRAFT_VOCAB = [2, 15, 27], 160, 1000, 4096


def sparse_shards(folder: Path, size: float, verifier) -> tuple[list[Path], list[Rows]]:
    """Hidden shards of `size` bytes in all."""
    layers = len(LAYER_IDS) + 1
    shard_bytes = ROWS * LENGTH * layers * verifier.hidden_size * 2
    metadata = {"layer_ids": verifier.extraction_ids(LAYER_IDS)}
    paths, shards = [], []
    for number in range(round(size / shard_bytes)):
        ids = torch.randint(DRAFT_VOCAB, (ROWS, LENGTH)).tolist()
        masks = [[False] * 50 + [True] * (LENGTH - 50)] * ROWS
        row_ids = [os.urandom(16) for _ in range(ROWS)]
        rows = Rows.pack(ids, masks, row_ids, {**metadata, "fingerprint": f"{number:032d}"})
        paths.append(folder / f"{number:05d}.safetensors")
        paths[-1].touch()
        HiddenShardWriter.finish(paths[-1], rows, (layers, verifier.hidden_size), torch.bfloat16)
        shards.append(rows)
    return paths, shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=100.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        verifier = load_verifier_config(args.verifier)
        paths, shards = sparse_shards(folder, args.gigabytes * 1e9, verifier)
        identity = {"source": "", "files": {}}
        (folder / "identity.json").write_text(json.dumps(identity))
        t2d = torch.arange(verifier.vocab_size) < DRAFT_VOCAB
        of = made_of(identity, shards, 0.05, DRAFT_VOCAB)
        save_map(folder / "vocab", torch.zeros(DRAFT_VOCAB, dtype=torch.int64), t2d, of)
        command = [sys.executable, SCRIPTS / "train.py", "--hidden", *paths]
        command += ["--vocab", folder / "vocab", "--verifier", args.verifier]
        command += ["--identity", folder / "identity.json", "--state", folder / "state"]
        command += ["--out", folder / "out", "--layer-ids", *LAYER_IDS]
        command += ["--tensorboard", folder / "tensorboard"]
        options = {
            "draft-vocab-size": DRAFT_VOCAB,
            "num-hidden-layers": 1,
            "num-attention-heads": 9,
            "num-key-value-heads": 3,
            "head-dim": 64,
            "intermediate-size": 1536,
            "rope-theta": 1e5,
            "rope-scaling": "null",
            "max-position-embeddings": 8192,
            "rms-norm-eps": 1e-5,
            "sliding-window": "null",
            "norms": "eagle3.1",
            "epochs": 1,
            "optimizer": "muon",
            "lr": 0.005,
            "muon-lr": 0.01,
            "weight-decay": 1.0,
            "scheduler": "cosine",
            "warmup-ratio": 0.03,
            "ttt-steps": 3,
            "ttt-decay": 1.0,
            "total-seq-len": 2048,
            "held-out": 0.05,
            "seed": 0,
            # A state is saved after the first step.
            "checkpoint-every": 1,
        }
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "LOGURU_LEVEL": "ERROR"}
        started = time.time()
        with subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            for line in process.stdout:
                if line.startswith("train: ") and "held out" in line:
                    read = time.time() - started
                    break
            while process.poll() is None and not list(folder.glob("state/*/state-*.safetensors")):
                time.sleep(0.01)
            stepped = time.time() - started
            process.kill()
    tokens = len(paths) * ROWS * LENGTH
    print(
        f"{args.gigabytes:g} GB, {tokens:,} tokens in {len(paths)} shards: rows known after "
        f"{read:.1f} s, first step done and saved after {stepped:.1f} s"
    )


if __name__ == "__main__":
    main()
