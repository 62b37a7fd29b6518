"""Peak memory of extraction with 4 and with 2,000 sequences at once, on the same long data.

    python benchmarks/extract_memory.py [--rows 2000] [--length 256]

The verifier is random and small, so that its states, not its weights, fill the memory: all of
them together are several times what either run may hold. The second line may exceed the first by
what waits for the disk (engine.QUEUE_BYTES), a step's activations and the prompts themselves.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from extracting import extraction, write_shards

from eyrie import engine

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_verifier(folder / "verifier")
        tokens = torch.randint(VOCABULARY, (args.rows, args.length)).tolist()
        shards = write_shards(folder, tokens, 500)
        for sequences in (4, args.rows):
            bounds = ["--max-num-seqs", sequences, "--max-num-batched-tokens", 2048]
            bounds += ["--kv-cache-gib", 1, "--max-model-len", args.length + 16]
            found = extraction(folder, shards, f"store-{sequences}", *bounds)
            print(
                f"{sequences:>6,} sequences at once: peak {found['peak_rss_bytes'] / 1e9:.2f} GB, "
                f"{found['tokens']:,} tokens, {found['bytes'] / 1e9:.2f} GB of states"
            )
    print(f"may wait for the disk: {engine.QUEUE_BYTES / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
