"""Choose the draft's vocabulary: the tokens that the verifier writes most, and those without which
some text could not be written or ended.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from eyrie.chat import load_tokenizer
from eyrie.errors import in_one_line
from eyrie.files import log_line, write_json
from eyrie.hidden import read_hidden_rows, split
from eyrie.identity import read_identity
from eyrie.prompts import read_prompts
from eyrie.provenance import peak_rss_bytes
from eyrie.shards import Rows, ShardError
from eyrie.sources import DataError
from eyrie.verifier import draft_size, load_verifier_config
from eyrie.vocab import made_of, pinned, require_room, save_map


def choose(
    counts: torch.Tensor, always: list[int], size: int, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick `size` of the verifier's tokens: `always`, then by count, then `real` ones before the
    padding of its embeddings, then by id.

    counts int64 [V], real bool [V] -> d2t int64 [size], t2d bool [V].

    Raises:
        ValueError: there is no room for `always`.
    """
    require_room(size, always)
    rank = 2 * counts + real
    rank[always] = rank.max() + 1
    order = torch.argsort(rank, descending=True, stable=True)
    chosen = order[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d


def count(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Token ids [n] -> how often each of the verifier's occurs, int64 [vocab_size]."""
    return torch.bincount(ids.long(), minlength=vocab_size)[:vocab_size]


def read_shards(paths: list[Path], vocab_size: int) -> list[Rows]:
    """The rows of hidden shards, of which every token can be counted, and once.

    Raises:
        ShardError: one is no hidden shard, of another verifier, or there twice.
    """
    shards = read_hidden_rows(paths)
    seen: dict[str, Path] = {}
    for path, rows in zip(paths, shards, strict=True):
        low, high = (int(end) for end in rows.input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ShardError(
                f"{path}: holds tokens {low:,} to {high:,}, and the verifier has {vocab_size:,}: "
                "it is of another verifier; extract this one's"
            )
        first = seen.setdefault(rows.metadata["fingerprint"], path)
        if first is not path:
            raise ShardError(f"{path}: the same shard as {first}; give each once")
    return shards


def supervised(shards: list[Rows], rows: list[tuple[int, int]]) -> torch.Tensor:
    """The tokens of some rows that are trained on, int32 [n]."""
    return torch.cat([shards[s].row(i)[shards[s].mask(i)] for s, i in rows])


def covered(counts: torch.Tensor, t2d: torch.Tensor) -> float:
    return round(float(counts[t2d].sum() / counts.sum().clamp(min=1)), 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=Path, nargs="+", required=True, help="hidden shards")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--prompts", type=Path, required=True, help="the benchmark's")
    parser.add_argument("--size", required=True, help="tokens, or full: the verifier's")
    parser.add_argument("--held-out", type=float, required=True, help="fraction left out")
    parser.add_argument("--min-coverage", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    started = time.time()
    try:
        identity = read_identity(args.identity)
        verifier = load_verifier_config(args.verifier, args.trust_remote_code)
        size = draft_size(args.size, verifier.vocab_size)
        tokenizer = load_tokenizer(args.verifier, args.trust_remote_code)
        shards = read_shards(args.hidden, verifier.vocab_size)
        counts, held_out = (
            count(supervised(shards, rows), verifier.vocab_size)
            for rows in split(shards, args.held_out)
        )
        texts = [text for prompt in read_prompts(args.prompts) for text in prompt["asked"]]
        asked = [i for text in texts for i in tokenizer(text, add_special_tokens=False).input_ids]
        prompts = count(torch.tensor(asked), verifier.vocab_size)
        always = pinned(tokenizer, verifier.eos_token_ids, verifier.vocab_size)
        real = count(torch.tensor([*tokenizer.get_vocab().values()]), verifier.vocab_size) > 0
        d2t, t2d = choose(counts, always, size, real)
    except (OSError, ValueError, ShardError, DataError) as error:
        sys.exit(f"vocab: {error}")
    coverage = covered(counts, t2d)
    if coverage < args.min_coverage:
        sys.exit(
            f"vocab: {size:,} tokens cover {coverage:.1%} of the supervised ones, "
            f"vocab.min_coverage asks for {args.min_coverage:.1%}: raise vocab.draft_vocab_size"
        )
    # How much smaller or larger vocabularies would cover, for the report's curve.
    ranked = counts.sort(descending=True).values.cumsum(0) / counts.sum().clamp(min=1)
    sizes = [2**n for n in range(8, 20) if 2**n <= len(counts)]
    summary = {
        "draft_vocab_size": size,
        "verifier_vocab_size": verifier.vocab_size,
        "coverage": coverage,
        "held_out_coverage": covered(held_out, t2d),
        "prompts_coverage": covered(prompts, t2d),
        "distinct": int((counts > 0).sum()),
        "supervised_tokens": int(counts.sum()),
        "held_out_tokens": int(held_out.sum()),
        "prompts_tokens": int(prompts.sum()),
        "special_tokens": len(always),
        "coverage_by_size": {str(n): round(float(ranked[n - 1]), 6) for n in sizes},
    }
    save_map(args.out, d2t, t2d, made_of(identity, shards, args.held_out, size))
    summary["seconds"] = round(time.time() - started, 2)
    summary["peak_rss_bytes"] = peak_rss_bytes()
    write_json(args.summary, summary)
    shares = {key: value for key, value in summary.items() if key.endswith("coverage")}
    log_line(args.log, size=size, **shares)
    print(
        f"vocab: {size:,} tokens cover {coverage:.1%} of the supervised ones, "
        f"{shares['held_out_coverage']:.1%} of those held out and "
        f"{shares['prompts_coverage']:.1%} of the benchmark's prompts"
    )


if __name__ == "__main__":
    with in_one_line("vocab"):
        main()
