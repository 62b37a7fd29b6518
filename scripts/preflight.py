"""What would make a run fail after its expensive steps, looked for before them, without a GPU.

An untrained draft of the run's exact config is made and put through every check of a trained one;
the verifier, its tokenizer, the first shard, disk and memory are looked at. Of the verifier's
weights only the headers are read, so its size does not matter.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from eyrie import engine
from eyrie.checkpoint import WEIGHTS
from eyrie.checks import check_head, check_light, check_values, passed, result, tell
from eyrie.files import log_line, write_json
from eyrie.provenance import peak_rss_bytes
from eyrie.shape import add_shape_arguments, shape_of


def loads(folder: Path, config: dict, verifier: Path, trust_remote_code: bool) -> list[dict]:
    from eyrie.loads import check_loads

    return check_loads(folder, config, False, verifier, trust_remote_code)


def import_vllm() -> None:
    from eyrie import loads

    loads.import_vllm()


def write_untrained(args, verifier, folder: Path) -> list[dict]:
    """Write a draft of the run's shape in its layout, with speculators' names and shapes.

    Its weights are of no use, but no fault either: ones, and a vocabulary of the first tokens.
    """
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel

    from eyrie.draft import flat_config, flat_state, speculator_config, write_flat
    from eyrie.layouts import write_layout
    from eyrie.verifier import draft_size

    shape, size = shape_of(args), draft_size(args.draft_vocab_size, verifier.vocab_size)
    verifier.extraction_ids(args.layer_ids)
    with torch.device("meta"):
        model = Eagle3DraftModel(
            speculator_config(shape, verifier, args.layer_ids, args.ttt_steps, size)
        )
    tensors = {}
    for name, meta in flat_state(model).items():
        tensors[name] = torch.ones(meta.shape, dtype=meta.dtype)
        tensors[name].view(-1)[0] = 0
    if "d2t" in tensors:
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
        tensors["t2d"] = torch.arange(verifier.vocab_size) < size
    config = flat_config(shape, verifier, args.layer_ids, size)
    write_flat(folder / "flat", config, tensors)
    write_layout(folder / "flat", folder / "draft", args.layout, config, args.ttt_steps, None)


def check_draft(args, verifier, pool: ProcessPoolExecutor) -> list[dict]:
    """Every check of a checkpoint, on an untrained draft of the run's config."""
    args.store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.store.parent) as folder:
        folder = Path(folder)
        effect = "no such draft can be trained or served"
        try:
            write_untrained(args, verifier, folder)
        except ValueError as error:
            return [result("an untrained draft", False, error, "one", effect)]
        draft = folder / "draft"
        checks, config = check_light(draft, verifier.text, args.max_model_len, args.layout)
        if passed(checks):
            loading = pool.submit(loads, draft, config, args.verifier, args.trust_remote_code)
            checks += check_values(draft / WEIGHTS, config, None)
            checks += loading.result()
    return checks


def check_tokens(args, verifier, rows, tokenizer) -> list[dict]:
    """The tokenizer and the config agree on the vocabulary, and the draft's has room for the
    tokens that are always in."""
    from eyrie.verifier import draft_size
    from eyrie.vocab import pinned, require_room

    size = draft_size(args.draft_vocab_size, verifier.vocab_size)
    always = pinned(tokenizer, verifier.eos_token_ids, verifier.vocab_size)
    try:
        require_room(size, always)
        found = f"{size:,} tokens for {len(always):,}"
        ok = True
    except ValueError as error:
        found, ok = str(error), False
    effect = "some text could not be written, or not be ended"
    checks = [result("draft vocabulary", ok, found, "room for those always in", effect)]
    largest = {
        "the tokenizer's last token": max(tokenizer.get_vocab().values()),
        "the last end of a turn": max(verifier.eos_token_ids, default=0),
        "the shard's last token": int(rows.input_ids.max()),
    }
    effect = "tokens that the verifier has no embedding of"
    for name, found in largest.items():
        expected = f"below vocab_size, {verifier.vocab_size:,}"
        checks.append(result(name, found < verifier.vocab_size, f"{found:,}", expected, effect))
    return checks


def check_masks(args, rows, tokenizer) -> list[dict]:
    """The first shard is of this tokenizer, and what is supervised in it is text that the
    assistant wrote; of rows that the verifier is to answer, that they end where it begins."""
    from eyrie.chat import Chat

    settings, identity = rows.metadata["chat"], rows.metadata["tokenizer"]
    chat = Chat(tokenizer, **settings)
    effect = "tokens of another tokenizer or template: states of text that nobody writes"
    made = chat.identity()
    checks = [result("the shard's tokenizer", made == identity, identity, made, effect)]
    # What opens an answer, whatever was asked.
    asked = (chat.prompt([{"role": "user", "content": text}]).ids for text in ("owl", "17 mice?"))
    one, other = (list(reversed(ids)) for ids in asked)
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    opening = list(reversed(one[:shared]))
    effect = "the loss is of what the assistant did not write"
    count = len(rows)
    if args.answers == "verifier":
        ending = sum(rows.row(i).tolist()[-1:] == opening[-1:] for i in range(count))
        text = tokenizer.decode(opening)
        found = f"{ending} of {count} rows open an answer as {text!r}"
        return [*checks, result("prompts", ending == count, found, "all", effect)]
    faults, shown = [], ""
    for index in range(count):
        ids, mask = rows.row(index), rows.mask(index)
        if mask.all() or not mask.any():
            faults.append(f"row {index} is supervised {'whole' if mask.all() else 'nowhere'}")
            continue
        written = tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True).strip()
        shown = shown or written
        if not written:
            faults.append(f"row {index} supervises no text")
        # The tokens that open an answer are never the assistant's own.
        inside = f" {' '.join(map(str, ids[mask].tolist()))} "
        if set(opening) & chat.special and f" {' '.join(map(str, opening))} " in inside:
            faults.append(f"row {index} supervises what opens an answer")
    found = "; ".join(faults[:3]) or repr(shown[:60])
    return [*checks, result("masks", not faults, found, "text that was answered", effect)]


def check_room(args, verifier) -> list[dict]:
    """Disk for the states that are not there yet, and memory for a row."""
    import torch

    from eyrie import store
    from eyrie.memory import GIB, extraction_memory, require_memory

    checks = []
    longest = args.max_length + 1
    memory = extraction_memory(
        verifier,
        sum(path.stat().st_size for path in args.verifier.glob("*.safetensors")),
        4 if args.dtype == "float32" else 2,
        len(args.layer_ids) + 1,
        args.gpus,
        args.max_num_batched_tokens,
    )
    device, cache = 0.0, args.kv_cache_gib * GIB
    if args.gpus:
        cache = None
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            device = total * args.gpu_memory_percent / 100
    effect = "the engine ends when it is loaded"
    try:
        # Where no GPU is at hand its memory is not known; extraction asks again on its own.
        known = device or cache
        fit = require_memory(memory, device, cache, longest) if known else "no GPU here to ask"
        checks.append(result("memory", True, f"rows at once: {fit}", "1 or more", effect))
    except ValueError as error:
        checks.append(result("memory", False, error, "1 row or more at once", effect))
    try:
        stored = len(list(args.store.glob("*.safetensors")))
        missing = max(len(args.shards) - stored, 0)
        needed = missing * args.states_mb * 10**6 // len(args.shards)
        args.store.mkdir(parents=True, exist_ok=True)
        store.require_space(args.store, needed)
        checks.append(result("disk", True, f"{needed / 1e9:,.2f} GB needed", "free", "no space"))
    except OSError as error:
        checks.append(result("disk", False, error, "free", "the disk is full half-way"))
    return checks


def flown(args, pool: ProcessPoolExecutor) -> list[dict]:
    """All checks. Raises ValueError where the verifier is not supported or has no chat template."""
    from eyrie.chat import load_tokenizer
    from eyrie.shards import ShardError, read_rows
    from eyrie.verifier import draft_size, load_verifier_config

    verifier = load_verifier_config(args.verifier, args.trust_remote_code)
    draft_size(args.draft_vocab_size, verifier.vocab_size)
    try:
        rows = read_rows(args.shards[0])
    except ShardError as error:
        raise ValueError(error) from None
    tokenizer = load_tokenizer(args.verifier, args.trust_remote_code)
    return [
        *check_head(args.verifier, verifier.vocab_size, verifier.hidden_size),
        *check_tokens(args, verifier, rows, tokenizer),
        *check_masks(args, rows, tokenizer),
        *check_room(args, verifier),
        *check_draft(args, verifier, pool),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="where states are to lie")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    parser.add_argument("--layer-ids", type=int, nargs="+", required=True, help="vLLM's ids")
    parser.add_argument("--draft-vocab-size", required=True)
    parser.add_argument("--ttt-steps", type=int, required=True)
    parser.add_argument("--layout", choices=["flat", "sglang", "speculators"], default="flat")
    parser.add_argument("--answers", choices=["verifier", "dataset"], required=True)
    parser.add_argument("--max-length", type=int, required=True, help="tokens of a row")
    parser.add_argument("--states-mb", type=int, default=0, help="disk that all states may take")
    add_shape_arguments(parser)
    engine.add_arguments(parser)
    args = parser.parse_args()
    # vLLM and transformers would ask the Hub about a folder's name.
    os.environ["HF_HUB_OFFLINE"] = "1"

    started = time.time()
    # Forked before this process has imported anything with threads: vLLM's import takes as long as
    # the others together.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(import_vllm)
        try:
            checks = flown(args, pool)
        except (OSError, ValueError) as error:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit(f"preflight: {error}")
        peak = max(peak_rss_bytes(), pool.submit(peak_rss_bytes).result())
    tell({"": checks}, {})
    failed = sum(not c["ok"] for c in checks)
    log_line(args.log, checks=len(checks), failed=failed)
    write_json(
        args.out,
        {
            "ok": not failed,
            "checks": checks,
            "seconds": round(time.time() - started, 2),
            "peak_rss_bytes": peak,
        },
    )
    if failed:
        sys.exit(f"preflight: {failed} of {len(checks)} checks failed, see above; nothing is spent")


if __name__ == "__main__":
    main()
