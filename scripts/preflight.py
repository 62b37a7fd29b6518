"""What would make a run fail after its expensive steps, looked for before them, without a GPU.

An untrained draft of the run's exact config is made and put through every check of a trained one;
the verifier, its tokenizer, the first shard, disk and memory are looked at. Of the verifier's
weights only the headers are read, so its size does not matter.
"""

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from eyrie import engine
from eyrie.bench_prompts import BenchError, pick_prompts
from eyrie.checkpoint import WEIGHTS
from eyrie.checks import check_head, check_light, check_values, passed, result, tell
from eyrie.errors import in_one_line
from eyrie.files import log_line, sha256_file, write_json
from eyrie.identity import read_identity
from eyrie.loads import check_loads, import_vllm
from eyrie.provenance import code_hash, peak_rss_bytes
from eyrie.shape import add_shape_arguments, shape_of
from eyrie.sources import DataError


def write_untrained(args, draft, verifier, folder: Path) -> None:
    """Write a draft of the run's shape in its layout, with speculators' names and shapes.

    Its weights are of no use, but no fault either: ones, and a vocabulary of the first tokens.
    """
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel

    from eyrie.draft import flat_config, flat_state, speculator_config, write_flat
    from eyrie.layouts import write_layout
    from eyrie.verifier import draft_size

    shape, size = shape_of(draft), draft_size(draft.draft_vocab_size, verifier.vocab_size)
    verifier.extraction_ids(args.layer_ids)
    with torch.device("meta"):
        model = Eagle3DraftModel(
            speculator_config(shape, verifier, args.layer_ids, draft.ttt_steps, size)
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

    def embeddings() -> torch.Tensor:
        return torch.ones(verifier.vocab_size, verifier.hidden_size).cumsum(0)

    tokens = draft.ttt_steps
    write_layout(folder / "flat", folder / "draft", draft.layout, config, tokens, None, embeddings)


def check_draft(args, draft, verifier, beside) -> list[dict]:
    """Every check of a checkpoint, on an untrained draft of a run's config."""
    with tempfile.TemporaryDirectory(dir=args.state) as folder:
        try:
            write_untrained(args, draft, verifier, Path(folder))
        except ValueError as error:
            effect = "no such draft can be trained or served"
            return [result("an untrained draft", False, error, "one", effect)]
        path = Path(folder) / "draft"
        checks, config = check_light(path, verifier.text, args.max_model_len, draft.layout)
        if passed(checks):
            options = (path, config, args.verifier, args.trust_remote_code)
            loading = beside.apply_async(check_loads, options)
            checks += check_values(path / WEIGHTS, config, None)
            checks += loading.get()
    return checks


def check_size(draft, verifier, always: list[int]) -> dict:
    """A draft's vocabulary has room for the tokens that are always in."""
    from eyrie.verifier import draft_size
    from eyrie.vocab import require_room

    effect = "some text could not be written, or not be ended"
    try:
        size = draft_size(draft.draft_vocab_size, verifier.vocab_size)
        require_room(size, always)
    except ValueError as error:
        return result("draft vocabulary", False, error, "room for those always in", effect)
    found = f"{size:,} tokens, {len(always):,} of them always in"
    return result("draft vocabulary", True, found, "room for those always in", effect)


def check_tokens(verifier, rows, tokenizer) -> list[dict]:
    """The tokenizer, the shard and the config agree on the vocabulary."""
    largest = {
        "the tokenizer's last token": max(tokenizer.get_vocab().values()),
        "the last end of a turn": max(verifier.eos_token_ids, default=0),
        "the shard's last token": int(rows.input_ids.max()),
    }
    effect = "tokens that the verifier has no embedding of"
    return [
        result(
            name,
            found < verifier.vocab_size,
            f"{found:,}",
            f"below vocab_size, {verifier.vocab_size:,}",
            effect,
        )
        for name, found in largest.items()
    ]


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


def check_prompts(asked: dict[str, int]) -> list[dict]:
    """The files of prompts hold as many as the benchmark asks for."""
    checks = []
    for path, count in asked.items():
        effect = "the benchmark would end after all else is made"
        try:
            pick_prompts(Path(path), count)
            ok, found = True, f"{path} has them"
        except (BenchError, DataError) as error:
            ok, found = False, error
        checks.append(result("benchmark prompts", ok, found, f"{count:,} prompts", effect))
    return checks


def check_room(args, verifier) -> list[dict]:
    """Disk for the states that are not there yet, and memory for a row."""
    import torch

    from eyrie import store
    from eyrie.memory import GIB, extraction_memory, require_memory
    from eyrie.verifier import weight_bytes

    checks = []
    longest = args.max_length + 1
    memory = extraction_memory(
        verifier.text,
        weight_bytes(args.verifier),
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
        folder = args.state / "store"
        stored = len(list(folder.glob("*.safetensors")))
        missing = max(len(args.shards) - stored, 0)
        needed = missing * args.states_mb * 10**6 // len(args.shards)
        store.require_space(args.state, needed)
        checks.append(result("disk", True, f"{needed / 1e9:,.2f} GB needed", "free", "no space"))
    except OSError as error:
        checks.append(result("disk", False, error, "free", "the disk is full half-way"))
    return checks


def look(args, drafts: dict, verifier, beside) -> dict[str, list[dict]]:
    """All checks of each draft; those of the verifier and the data are every draft's.

    Raises ValueError where the verifier has no chat template, or the shard is none.
    """
    from eyrie.chat import load_tokenizer
    from eyrie.shards import ShardError, read_rows
    from eyrie.vocab import pinned

    try:
        rows = read_rows(args.shards[0])
    except ShardError as error:
        raise ValueError(error) from None
    tokenizer = load_tokenizer(args.verifier, args.trust_remote_code)
    always = pinned(tokenizer, verifier.eos_token_ids, verifier.vocab_size)
    of_all = [
        *check_head(args.verifier, verifier.vocab_size, verifier.hidden_size),
        *check_tokens(verifier, rows, tokenizer),
        *check_masks(args, rows, tokenizer),
        *check_prompts(args.prompts),
        *check_room(args, verifier),
    ]
    return {
        run: [
            *of_all,
            check_size(draft, verifier, always),
            check_nodes(draft),
            *check_draft(args, draft, verifier, beside),
        ]
        for run, draft in drafts.items()
    }


def check_nodes(draft) -> dict:
    """Several machines, of which SLURM starts the training of one."""
    alone = draft.nodes > 1 and "SLURM_JOB_ID" not in os.environ
    found = f"{draft.nodes} and no SLURM job" if alone else draft.nodes
    effect = "training does not start; take --workflow-profile profiles/slurm, or train.nodes 1"
    return result("train.nodes", not alone, found, "1, or a job of SLURM", effect)


def digest(args, options: list[str]) -> str:
    """All that decides what is found of a draft, but for disk and memory."""
    parts = [
        options,
        read_identity(args.identity)["files"],
        sha256_file(args.shards[0]),
        [args.layer_ids, args.answers, args.max_length, args.max_model_len, args.prompts],
        code_hash(Path(__file__)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def draft_parser() -> argparse.ArgumentParser:
    """Of the options of one draft, in --drafts."""
    parser = argparse.ArgumentParser(prog="preflight.py --drafts")
    add_shape_arguments(parser)
    parser.add_argument("--draft-vocab-size", required=True)
    parser.add_argument("--ttt-steps", type=int, required=True)
    parser.add_argument("--layout", choices=["flat", "sglang", "speculators"], default="flat")
    parser.add_argument("--nodes", type=int, default=1)
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=json.loads, required=True, help="JSON: {RUN: [OPTION]}")
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the verifier's identity")
    parser.add_argument("--state", type=Path, required=True, help="folder of states to be kept")
    parser.add_argument("--layer-ids", type=int, nargs="+", required=True, help="vLLM's ids")
    parser.add_argument("--answers", choices=["verifier", "dataset"], required=True)
    parser.add_argument("--max-length", type=int, required=True, help="tokens of a row")
    parser.add_argument("--states-mb", type=int, default=0, help="disk that all states may take")
    parser.add_argument(
        "--prompts",
        type=json.loads,
        default={},
        help="JSON: {FILE: how many of it the benchmark asks}",
    )
    engine.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()
    # vLLM and transformers would ask the Hub about a folder's name.
    os.environ["HF_HUB_OFFLINE"] = "1"

    started = time.time()
    kept = args.state / "preflight"
    kept.mkdir(parents=True, exist_ok=True)
    # A run's own job and that of its data set look at the same draft: the second waits and reads.
    lock = os.open(kept / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        paths = {run: kept / f"{digest(args, args.drafts[run])}.json" for run in args.drafts}
    except (OSError, ValueError) as error:
        sys.exit(f"preflight: {error}")
    found = {run: json.loads(path.read_text()) for run, path in paths.items() if path.exists()}
    parser = draft_parser()
    new = {run: parser.parse_args(args.drafts[run]) for run in paths if run not in found}
    peak = peak_rss_bytes()
    if new:
        try:
            from eyrie.verifier import load_verifier_config

            verifier = load_verifier_config(args.verifier, args.trust_remote_code)
            # vLLM's import takes as long as the rest, so it goes beside it.
            with multiprocessing.get_context("fork").Pool(1) as beside:
                beside.apply_async(import_vllm)
                looked = look(args, new, verifier, beside)
                peak = max(peak_rss_bytes(), beside.apply(peak_rss_bytes))
        except (OSError, ValueError) as error:
            sys.exit(f"preflight: {error}")
        tell(looked, {})
        for run, checks in looked.items():
            if passed(checks):
                write_json(paths[run], checks)
        found |= looked
    failed = [run for run, checks in found.items() if not passed(checks)]
    for run, checks in found.items():
        log_line(args.log, run=run, checks=len(checks), failed=sum(not c["ok"] for c in checks))
    write_json(
        args.out,
        {
            "ok": not failed,
            "runs": found,
            "seconds": round(time.time() - started, 2),
            "peak_rss_bytes": peak,
        },
    )
    if failed:
        sys.exit(f"preflight: {', '.join(failed)} would not be served; see FAIL above")
    print(f"preflight: {', '.join(found) or 'no run is asked for'}: nothing is in the way")


if __name__ == "__main__":
    with in_one_line("preflight"):
        main()
