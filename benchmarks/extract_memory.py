"""Peak memory of extraction with 4 and with 2,000 sequences at once, on the same long data.

    python benchmarks/extract_memory.py [--rows 2000] [--length 256]

The verifier is random and small, so that its states, not its weights, fill the memory: all of
them together are several times what either run may hold. The second line may exceed the first by
what waits for the disk (engine.QUEUE_BYTES), a step's activations and the prompts themselves.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from eyrie import engine  # noqa: E402
from eyrie.shards import Rows, write_tokens  # noqa: E402

HIDDEN, LAYERS, VOCABULARY = 1024, 4, 1024


def make_verifier(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def extraction(args, folder: Path, shards: list[Path], sequences: int) -> dict:
    (folder / "identity.json").write_text('{"source": "", "files": {}}')
    command = [sys.executable, SCRIPTS / "extract.py", "--shards", *shards]
    command += ["--out", *(folder / f"out-{sequences}" / path.name for path in shards)]
    command += ["--store", folder / f"store-{sequences}", "--verifier", folder / "verifier"]
    command += ["--identity", folder / "identity.json", "--summary", folder / "hidden.json"]
    command += ["--log", folder / "log.jsonl", "--answers", "dataset", "--layer-ids", 1, 2, 3]
    command += ["--dtype", "float32", "--max-model-len", args.length + 16, "--kv-cache-gib", 1]
    command += ["--max-num-seqs", sequences, "--max-num-batched-tokens", 2048]
    subprocess.run([str(p) for p in command], check=True, capture_output=True)
    return json.loads((folder / "hidden.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_verifier(folder / "verifier")
        tokens = torch.randint(VOCABULARY, (args.rows, args.length)).tolist()
        shards = []
        for start in range(0, args.rows, 500):
            ids = tokens[start : start + 500]
            row_ids = [(start + i).to_bytes(16, "little") for i in range(len(ids))]
            shards.append(folder / f"{start:05d}.safetensors")
            write_tokens(shards[-1], Rows.pack(ids, [[True] * len(i) for i in ids], row_ids, {}))
        for sequences in (4, args.rows):
            found = extraction(args, folder, shards, sequences)
            print(
                f"{sequences:>6,} sequences at once: peak {found['peak_rss_bytes'] / 1e9:.2f} GB, "
                f"{found['tokens']:,} tokens, {found['bytes'] / 1e9:.2f} GB of states"
            )
    print(f"may wait for the disk: {engine.QUEUE_BYTES / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
