"""Choose the draft's vocabulary: the tokens that the verifier writes most, and every special one.

d2t holds offsets: draft token i is verifier token i + d2t[i], as vLLM and SGLang read it.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyrie.chat import load_tokenizer
from eyrie.files import atomic, log_line, write_json
from eyrie.hidden import split
from eyrie.provenance import peak_rss_bytes
from eyrie.shards import ShardError, read_rows
from eyrie.verifier import load_verifier_config


def choose(counts: torch.Tensor, always: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick `size` of the verifier's tokens: `always`, then by count, ties by id.

    counts int64 [V] -> d2t int64 [size], t2d bool [V].

    Raises:
        ValueError: a size that the vocabulary or the tokens that must be in cannot fill.
    """
    if not len(always) <= size <= len(counts):
        raise ValueError(
            f"draft_vocab_size {size:,}: must be between {len(always):,}, the special tokens that "
            f"are always in, and {len(counts):,}, the verifier's vocabulary"
        )
    rank = counts.clone()
    rank[always] = counts.max() + 1
    order = torch.argsort(rank, descending=True, stable=True)
    chosen = order[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=Path, nargs="+", required=True, help="hidden shards")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--held-out", type=float, required=True, help="fraction left out")
    parser.add_argument("--min-coverage", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    started = time.time()
    try:
        verifier = load_verifier_config(args.verifier, args.trust_remote_code)
        tokenizer = load_tokenizer(args.verifier, args.trust_remote_code)
        shards = [read_rows(path) for path in args.hidden]
        training, _ = split(shards, args.held_out)
        counts = torch.zeros(verifier.vocab_size, dtype=torch.int64)
        for shard, index in training:
            written = shards[shard].row(index)[shards[shard].mask(index)]
            counts += torch.bincount(written.long(), minlength=verifier.vocab_size)
        always = sorted({*tokenizer.all_special_ids, *verifier.eos_token_ids})
        d2t, t2d = choose(counts, always, args.size)
    except (ValueError, ShardError) as error:
        sys.exit(f"vocab: {error}")
    coverage = float(counts[t2d].sum() / counts.sum().clamp(min=1))
    if coverage < args.min_coverage:
        sys.exit(
            f"vocab: {args.size:,} tokens cover {coverage:.1%} of the supervised ones, "
            f"vocab.min_coverage asks for {args.min_coverage:.1%}: raise vocab.draft_vocab_size"
        )
    # How much smaller or larger vocabularies would cover, for the report's curve.
    ranked = counts.sort(descending=True).values.cumsum(0) / counts.sum().clamp(min=1)
    sizes = [2**n for n in range(8, 20) if 2**n <= len(counts)]
    summary = {
        "draft_vocab_size": args.size,
        "verifier_vocab_size": verifier.vocab_size,
        "coverage": round(coverage, 6),
        "distinct": int((counts > 0).sum()),
        "supervised_tokens": int(counts.sum()),
        "special_tokens": len(always),
        "coverage_by_size": {str(n): round(float(ranked[n - 1]), 6) for n in sizes},
    }
    with atomic(args.out) as partial:
        identity = {key: str(summary[key]) for key in ("coverage", "supervised_tokens")}
        save_file({"d2t": d2t, "t2d": t2d}, partial, identity)
    summary["seconds"] = round(time.time() - started, 2)
    summary["peak_rss_bytes"] = peak_rss_bytes()
    write_json(args.summary, summary)
    log_line(args.log, size=args.size, coverage=summary["coverage"])
    print(f"vocab: {args.size:,} tokens cover {coverage:.2%} of the supervised ones")


if __name__ == "__main__":
    main()
