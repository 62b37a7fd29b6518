"""What hidden states cost beside what the engine does anyway, and beside transformers.

    python benchmarks/extract_rate.py --verifier results/verifier \
        --shards results/data/1k/shards/00000.safetensors [--rows 64] [--rounds 3]

One line a figure, each a ratio of medians over some rounds, in which the runs of the same rows take
turns, since a machine's speed drifts:
prefill-only extraction against the engine's plain prefill, and against a loop of transformers with
output_hidden_states that saves each row; answers with their states against plain answers, and
against answers first and states after; bytes on disk against tokens x layers x hidden x 2.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from eyrie import engine  # noqa: E402
from eyrie.shards import Rows, read_rows, write_tokens  # noqa: E402


def plain(args, rows: list[list[int]], new_tokens: int) -> None:
    """Print the seconds that the engine takes for `rows` without states, as JSON."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine.engine_arguments(args))
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, detokenize=False)
    started = time.time()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in rows], sampling, use_tqdm=False)
    seconds = time.time() - started
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    print("\n" + json.dumps({"seconds": seconds, "answers": answers}))


def with_transformers(args, rows: list[list[int]]) -> None:
    """As scripts of the field do: the whole model on each row, and a file a row."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.verifier, dtype=dtype)
    layers = [2, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 3]
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for number, ids in enumerate(rows):
            with torch.inference_mode():
                states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            kept = torch.stack([states[k][0] for k in (*layers, -1)], 1).bfloat16()
            save_file({"hidden_states": kept}, f"{folder}/{number}.safetensors")
    print("\n" + json.dumps({"seconds": time.time() - started}))


def in_process(args, what: str, shard: Path) -> dict:
    """Run one of the two above in a process of its own, as every extraction has one."""
    command = [sys.executable, __file__, "--only", what, "--shards", shard, *shared(args)]
    command += ["--rows", args.rows]
    done = subprocess.run([str(p) for p in command], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def extraction(args, folder: Path, shard: Path, answers: str) -> dict:
    """Run scripts/extract.py on one shard; its summary."""
    (folder / "identity.json").write_text('{"source": "", "files": {}}')
    command = [sys.executable, SCRIPTS / "extract.py", "--shards", shard]
    command += ["--out", folder / "out" / shard.name, "--store", folder / f"store-{answers}"]
    command += ["--identity", folder / "identity.json", "--summary", folder / "hidden.json"]
    command += ["--log", folder / "log.jsonl", "--answers", answers, *shared(args)]
    command += ["--layer-ids", *args.layer_ids, "--max-new-tokens", args.max_new_tokens]
    subprocess.run([str(p) for p in command], check=True, capture_output=True)
    return json.loads((folder / "hidden.json").read_text())


def shared(args) -> list:
    names = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_gib")
    options = [("verifier", args.verifier), *((n, getattr(args, n)) for n in names)]
    return [p for name, value in options for p in (f"--{name.replace('_', '-')}", value)]


def one_round(args, folder: Path, ids: list[list[int]]) -> tuple[dict[str, float], dict]:
    """Seconds of each way to read or answer the rows once, and the summary of their states."""

    def written(name: str, ids: list[list[int]], supervised: bool) -> Path:
        masks = [[supervised] * len(row) for row in ids]
        row_ids = [i.to_bytes(16, "little") for i in range(len(ids))]
        write_tokens(folder / name, Rows.pack(ids, masks, row_ids, {"chat": {}}))
        return folder / name

    prompts = written("prompts", ids, False)
    answered = in_process(args, "answers", prompts)
    one_pass = extraction(args, folder, prompts, "verifier")
    # The same tokens, answers included, as rows to prefill.
    whole = [row + answer for row, answer in zip(ids, answered["answers"], strict=True)]
    full = written("full", whole, True)
    prefill = in_process(args, "prefill", full)
    states = extraction(args, folder, full, "dataset")
    loop = in_process(args, "transformers", full)
    seconds = {
        "plain prefill": prefill["seconds"],
        "prefill with states": states["engine_seconds"],
        "transformers loop": loop["seconds"],
        "plain answers": answered["seconds"],
        "answers with states": one_pass["engine_seconds"],
    }
    return seconds, states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True, help="a token shard of prompts")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layer-ids", type=int, nargs="+", default=[2, 15, 27])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", choices=["prefill", "answers", "transformers"])
    engine.add_arguments(parser)
    args = parser.parse_args()
    rows = read_rows(args.shards)
    ids = [rows.row(i).tolist() for i in range(min(args.rows, len(rows)))]
    if args.only:
        engine.prepare(args.gpus, in_process=True)
    args.dtype = engine.resolve_dtype(args.dtype)
    if args.only == "transformers":
        with_transformers(args, ids)
        return
    if args.only:
        plain(args, ids, 1 if args.only == "prefill" else args.max_new_tokens)
        return

    taken: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            seconds, states = one_round(args, Path(name), ids)
        for what, value in seconds.items():
            taken.setdefault(what, []).append(value)
    median = {what: statistics.median(values) for what, values in taken.items()}
    tokens = states["tokens"]
    for what, values in taken.items():
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"{what:<22}{tokens / median[what]:8.0f} tokens/s, in {each} s")
    prefill, states_too, loop, answers, one_pass = median.values()
    size = tokens * len(states["layer_ids"]) * states["hidden_size"] * 2
    for name, ratio in {
        "states / plain prefill": prefill / states_too,
        "states / transformers": loop / states_too,
        "one pass / plain answers": answers / one_pass,
        "one pass / two passes": (answers + states_too) / one_pass,
        "bytes / the states' own": states["bytes"] / size,
    }.items():
        print(f"{name:<26}{ratio:6.3f}")


if __name__ == "__main__":
    main()
