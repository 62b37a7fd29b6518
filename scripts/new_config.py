"""Write a config for a verifier: layer ids, the draft's shape, the vocabulary and the bounds of
memory, each with why it is so. What it does not name stays as config.yaml has it.

VERIFIER is a folder in the Hugging Face layout, a config.json, or a file of configs/reference/.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from eyrie.config import ConfigError
from eyrie.errors import in_one_line
from eyrie.files import atomic, read_json
from eyrie.memory import GIB, extraction_memory, require_memory, row_fault
from eyrie.plan import VerifierSizes, element_bytes, experts, make_plan, read_verifier
from eyrie.rates import gpus_here
from eyrie.reference import ROPE_TYPES, layer_fields
from eyrie.verifier import refuse_unsupported
from plan import read_config, summary

MAX_LENGTH, MAX_NEW_TOKENS = 2048, 512
# More sequences or tokens a step than these gain nothing on the largest of GPUs.
MOST_SEQUENCES, MOST_TOKENS = 256, 8192
MOST_GPUS = 16
# A step's activations may take this much of a GPU's memory.
ACTIVATIONS = 0.05


def default_layers(layers: int) -> list[int]:
    """vLLM's (2, n // 2, n - 3), as far as these ids ascend and are not past the last layer."""
    ids = [2, layers // 2, layers - 3]
    if ids != sorted(set(ids)):
        ids = sorted({max(1, layers // 4), layers // 2, layers - 1} - {0})
    return ids


def draft_shape(text: dict) -> dict:
    """One decoder layer of the verifier's own shape as the config's `draft` block.

    MLA has no heads that a Llama layer could take: the draft gets as many, of the width of its
    values. A rope scaling that training and vLLM would not compute alike is left out.
    """
    shape = layer_fields(text) | {"num_hidden_layers": 1, "sliding_window": None}
    if text.get("kv_lora_rank"):
        shape["head_dim"] = text["v_head_dim"]
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    scaling = shape["rope_scaling"] or {}
    known = ROPE_TYPES.get(scaling.get("rope_type"), set())
    plain = not known or not known <= scaling.keys() or "mscale" in scaling
    return shape | {"rope_scaling": None if plain else scaling}


def sequences(rows: int) -> int:
    """The largest power of two of no more than `rows`."""
    return min(MOST_SEQUENCES, 2 ** (rows.bit_length() - 1))


def bounds(text: dict, weights: float, layers: int, gpus: int, memory: float, length: int) -> dict:
    """The largest bounds of prefill that a GPU of `memory` bytes takes, by powers of two: a step's
    activations in a small part of it, and rows of `length` tokens in what the weights leave.

    Raises:
        ValueError: not one row fits; with the arithmetic.
    """
    tokens = MOST_TOKENS
    fit = extraction_memory(text, weights, 2, layers, gpus, tokens)
    while fit.activations > ACTIVATIONS * memory and tokens > 512:
        tokens //= 2
        fit = extraction_memory(text, weights, 2, layers, gpus, tokens)
    usable = 0.9 * memory
    if fault := row_fault(fit, usable, None, length):
        raise ValueError(fault)
    rows = fit.sequences(usable - fit.weights - fit.activations, length)
    return {"max_num_seqs": sequences(rows), "max_num_batched_tokens": tokens}


def cpu_sequences(text: dict, layers: int, length: int) -> tuple[int, float]:
    """How many rows of `length` tokens the cache of config.yaml takes on a CPU, and its GiB.

    Raises:
        ValueError: not one; with the arithmetic.
    """
    config = read_config([])
    tokens, cache = config.extract.max_num_batched_tokens, config.extract.kv_cache_gib
    fit = extraction_memory(text, 0, element_bytes(config), layers, 0, tokens)
    return sequences(require_memory(fit, 0, cache * GIB, length)), cache


def fewest_gpus(text: dict, weights: float, layers: int, memory: float, length: int) -> int:
    """The fewest GPUs, 1, 2, 4, ..., that hold the weights and a row.

    Raises:
        ValueError: 16 do not; with their arithmetic.
    """
    for gpus in (1, 2, 4, 8, 16):
        try:
            bounds(text, weights, layers, gpus, memory, length)
            return gpus
        except ValueError as fault:
            last = fault
    raise last


def new_config(
    sizes: VerifierSizes, source: str, results: str, gpus: int | None, memory: float | None
) -> str:
    """The config as YAML.

    source: of the verifier, as the config names it; gpus: None takes the fewest that do, 0 is a
    CPU; memory: of each GPU, in GiB.

    Raises:
        ValueError: the verifier does not fit, or has too few layers.
    """
    text = sizes.text
    refuse_unsupported(text)
    number = text["num_hidden_layers"]
    if number < 4:
        raise ValueError(f"the verifier has {number} layers; three of them are to be told apart")
    ids = default_layers(number)
    told_ids = f"vLLM's default of {number} layers: 2, n // 2, n - 3."
    if ids[0] != 2 or ids[-1] != number - 3:
        told_ids = f"Early, middle and late: vLLM's default does not ascend with {number} layers."
    # Prompts, answers and the token that hands over the states, within what the verifier takes.
    length = min(MAX_LENGTH, text["max_position_embeddings"] // 2)
    new_tokens = min(MAX_NEW_TOKENS, length // 4)
    if gpus is None:
        fit = (text, sizes.weight_bytes, len(ids) + 1)
        gpus = fewest_gpus(*fit, memory * GIB, length) if memory else 0
    vocabulary = text["vocab_size"]
    draft_vocabulary = "full" if vocabulary <= 16_000 else min(32_000, vocabulary // 4)
    draft = draft_shape(text)
    heads = text["num_attention_heads"]
    width = text["hidden_size"] / heads
    told = "the verifier's" + (
        "" if draft["head_dim"] == width else f"; not hidden / heads, {width:g}"
    )
    routed = experts(text)
    dense = text.get("first_k_dense_replace") or not routed
    told_scaling = "the verifier's" if draft["rope_scaling"] else "the verifier has none"
    if layer_fields(text)["rope_scaling"] and not draft["rope_scaling"]:
        told_scaling = "the verifier's own is left out: training and vLLM do not compute it alike"
    why = {
        "num_attention_heads": "the verifier's",
        "num_key_value_heads": "the verifier's; of MLA as many as heads"
        if text.get("kv_lora_rank")
        else "the verifier's",
        "head_dim": "the width of its values in MLA" if text.get("kv_lora_rank") else told,
        "intermediate_size": "of the verifier's dense layers"
        if dense
        else f"of one of the verifier's {routed} experts; it has no dense layers",
        "rope_theta": "the verifier's",
        "rope_scaling": told_scaling,
        "max_position_embeddings": "the verifier's",
        "rms_norm_eps": "the verifier's",
    }
    shape = "\n".join(f"  {key}: {json.dumps(draft[key])}  # {why[key]}" for key in why)
    if gpus:
        if not memory:
            raise ValueError("give --gpu-memory: there is no GPU here to be asked")
        bound = bounds(text, sizes.weight_bytes, len(ids) + 1, gpus, memory * GIB, length)
        engine = f"""\
  gpus: {gpus}  # hold the weights, {sizes.weight_bytes / 1e9:,.1f} GB, with room for states
  # Powers of two: so many rows of {length:,} tokens fit beside the weights in {memory:g} GiB a GPU,
  # and a step of so many tokens takes at most {ACTIVATIONS:.0%} of it.
  max_num_seqs: {bound["max_num_seqs"]}
  max_num_batched_tokens: {bound["max_num_batched_tokens"]}
  runtime: 120  # minutes; see `make plan`"""
        train = "  gpus: 1  # a draft is small\n  dtype: bfloat16\n  runtime: 240\n"
        bench = f"  gpus: {gpus}\n  repeats: 1  # each would load the engines anew\n"
        bench += "  runtime: 240  # a load for each method and draft tokens\n"
        known = f"  gpu_memory_gib: {memory:g}\n"
    else:
        rows, cache = cpu_sequences(text, len(ids) + 1, length)
        engine = f"""\
  gpus: 0  # the CPU
  # A power of two: so many rows of {length:,} tokens fit into kv_cache_gib, {cache:g} GiB.
  max_num_seqs: {rows}"""
        train = bench = known = ""
    return f"""\
results: {json.dumps(results)}

verifier:
  source: {json.dumps(source)}
  sha256: null

shard:
  max_length: {length}  # tokens a row: at most half of what the verifier takes, and {MAX_LENGTH:,}
  max_new_tokens: {new_tokens}  # a quarter of that for the answer

extract:
  # {told_ids}
  layer_ids: {json.dumps(ids)}
  max_model_len: {2 * length}
{engine}

vocab:
  # Of {vocabulary:,}: 32,000 cover nearly all that a verifier writes; of a small vocabulary a
  # quarter, of a tiny one all.
  draft_vocab_size: {draft_vocabulary}

# One layer of the verifier's own shape.
draft:
{shape}

train:
  total_seq_len: {max(length, 512)}  # at least a row
{train}
bench:
  max_model_len: {2 * length}
  max_new_tokens: {min(256, new_tokens)}
{bench}
plan:
  prompt_tokens: {length // 8}  # a guess; counted once the data is there
  answer_tokens: {new_tokens // 2}
{known}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verifier", type=Path)
    parser.add_argument("--source", help="the verifier's, where it is not the folder given")
    parser.add_argument("--gpu-memory", type=float, help="GiB of each GPU; nvidia-smi's by default")
    parser.add_argument("--gpus", type=int, help="the fewest that do, by default; 0 is a CPU")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    try:
        if args.gpus is not None and not 0 <= args.gpus <= MOST_GPUS:
            raise ValueError(f"--gpus: {args.gpus} is no number of GPUs of one machine")
        if args.out.exists():
            raise ValueError(f"{args.out} exists; name another file")
        sizes = read_verifier(args.verifier)
        if sizes is None:
            raise ValueError(f"{args.verifier}: its config leaves out sizes; give a whole one")
        source, known = args.source, ""
        if source is None and args.verifier.is_dir():
            source = f"path:{args.verifier}"
        elif source is None:
            named = read_json(args.verifier).get("source")
            if not named:
                raise ValueError(f"give --source: {args.verifier} does not name the verifier's")
            source = f"{named}@main"
        else:
            known = f"  verifier: {json.dumps(str(args.verifier))}\n"
        here = [size / GIB for _, size in gpus_here()]
        memory = min(here, default=None) if args.gpu_memory is None else args.gpu_memory
        if memory is not None and not 0 < memory < math.inf:
            raise ValueError(f"--gpu-memory: {memory:g} is not the GiB of a GPU")
        results = f"results/{args.out.stem}"
        text = new_config(sizes, source, results, args.gpus, memory) + known
        with atomic(args.out) as partial:
            partial.write_text(text)
            config = read_config([partial])
            plan = make_plan(config, "1k")
            faults = plan["faults"]
            if faults and memory is None:
                faults += ["no GPU is here; for those of another machine give --gpu-memory GIB"]
            if faults:
                raise ValueError("\n  ".join(faults))
            head = f"# Written by scripts/new_config.py for {source}; goes over config.yaml.\n"
            partial.write_text(head + summary(plan) + text)
    except (ConfigError, OSError, ValueError, KeyError) as error:
        sys.exit(f"new_config: {error}")
    print(f"new_config: {args.out}")


if __name__ == "__main__":
    with in_one_line("new_config"):
        main()
