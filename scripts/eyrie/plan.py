"""What a run will take before anything is spent: tokens, bytes, memory of each device, hours.

Everything follows from the config and the verifier's config.json; what is there already (weights,
counted tokens, measured speeds) replaces an estimate, and each figure names where it came from.
Sizes are in bytes, times in seconds, rates in a second; one token is one position of one row.
"""

import math
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from eyrie.bench_plan import HELD_OUT
from eyrie.bench_plan import passes as passes_of
from eyrie.config import ROOT, Config
from eyrie.files import read_json
from eyrie.memory import (
    GIB,
    PROCESS_BYTES,
    Memory,
    bound_fault,
    cache_bytes,
    disk_fault,
    extraction_memory,
    row_fault,
)
from eyrie.misfit import misfit
from eyrie.rates import device_name, gpus_here, measured, passes, read_rates
from eyrie.results import again, read_result
from eyrie.verifier import draft_size, extraction_ids, text_config, weight_bytes

# Sustained, where nothing was measured, of a GPU and of a core: floating-point operations a second
# in the engine and in training, and bytes of weights read a second. A GPU's in the engine is what
# the reference job had, Kimi-K2.5 on eight with four rows at a time; a core's are of the default
# job in float32 without AVX512-BF16.
FLOPS = {"gpu": 2.3e13, "core": 2.5e10}
TRAIN_FLOPS = {"gpu": 5e13, "core": 6e10}
READ = {"gpu": 1e12, "core": 3e9}
# A layer's kernels of one decoding step cost this much however little they compute.
LAYER_SECONDS = 2e-4
# Of the reference job: 547 GB in 22.5 minutes.
LOAD_BYTES = 4.05e8
# An engine starts for so long beside reading weights: profiling, and on a GPU compiling.
START_SECONDS = {"gpu": 60.0, "core": 10.0}
# Batches of training are filled so far: rows are packed whole.
FILLED = 0.95


@dataclass
class VerifierSizes:
    """What a plan needs of a verifier. Bytes are those of its files."""

    text: dict
    weight_bytes: float
    weight_source: str

    @property
    def hidden_size(self) -> int:
        return self.text["hidden_size"]


def experts(text: dict) -> int:
    """The routed experts of a layer; 0 where all layers are dense."""
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((text[k] for k in keys if text.get(k)), 0)


def parameters(text: dict) -> tuple[float, float]:
    """A text model's parameters, all of them and those that one token uses, embeddings not among
    these. Norms and biases are left out.

    As transformers builds Llama-like layers: attention of width heads x head_dim with fewer
    key/value heads, or MLA's low-rank projections; an MLP of three matrices, or routed experts of
    which each token takes some beside shared ones.
    """
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    if rank := text.get("kv_lora_rank"):
        nope, rope, value = (
            text[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        queries = heads * (nope + rope)
        low = text.get("q_lora_rank")
        attention = hidden * low + low * queries if low else hidden * queries
        attention += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    else:
        width = text.get("head_dim") or hidden // heads
        attention = 2 * hidden * width * (heads + (text.get("num_key_value_heads") or heads))
    dense = 3 * hidden * text["intermediate_size"]
    routed = experts(text)
    sparse = text["num_hidden_layers"] - (text.get("first_k_dense_replace") or 0) if routed else 0
    expert = 3 * hidden * (text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = text.get("n_shared_experts") or 0
    head = text["vocab_size"] * hidden
    common = text["num_hidden_layers"] * attention
    common += (text["num_hidden_layers"] - sparse) * dense + sparse * shared * expert
    embeddings = 0 if text.get("tie_word_embeddings") else head
    used = common + sparse * (text.get("num_experts_per_tok") or 0) * expert + head
    return common + sparse * routed * expert + head + embeddings, used


def bits(config: dict) -> float:
    """Bits of a weight on disk: of its quantization_config, else 16. Scales are left out.

    Raises:
        ValueError: it is not as any quantizer writes it.
    """
    quantization = config.get("quantization_config") or {}
    try:
        groups = quantization.get("config_groups") or {}
        found = [g["weights"]["num_bits"] for g in groups.values() if g.get("weights")]
        found += [quantization[k] for k in ("bits", "num_bits", "w_bit") if quantization.get(k)]
        found += [4] if quantization.get("load_in_4bit") else []
        named = quantization.get("quant_method")
        width = min(found, default={"fp8": 8, "mxfp4": 4, "bitsandbytes": 8}.get(named, 16))
        if not 0 < width <= 32:
            raise ValueError(f"{width} bits")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"quantization_config: no bits of a weight in it ({error!r})") from None
    return width


# What a plan reads of a text model's config: of every one, of one with MLA, and where it is there.
SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
}
MLA_SIZES = {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
MORE_SIZES = {"num_key_value_heads", "head_dim", "kv_lora_rank", "q_lora_rank"}
MORE_SIZES |= {"n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok"}
MORE_SIZES |= {"moe_intermediate_size", "n_shared_experts", "first_k_dense_replace"}


def wrong_sizes(text: dict) -> str | None:
    """What of a text model's sizes is no size, or None."""
    least = dict.fromkeys(SIZES, 1) | dict.fromkeys(MLA_SIZES | MORE_SIZES, 0)
    for key, minimum in sorted(least.items()):
        value = text.get(key)
        given = value is not None or key in SIZES or (key in MLA_SIZES and text.get("kv_lora_rank"))
        if given and (type(value) is not int or value < minimum):
            return f"{key} is {value!r:.40}, and a model has {minimum} or more"
    if (text.get("first_k_dense_replace") or 0) > text["num_hidden_layers"]:
        return f"first_k_dense_replace is more than the {text['num_hidden_layers']} layers"
    return None


def read_verifier(path: Path) -> VerifierSizes | None:
    """Sizes from a folder in the Hugging Face layout, of which config.json suffices, or from a
    JSON file: a config.json, or one that has it under `config` with `weight_bytes` beside it.

    Weights are counted in the folder, or taken from the index, or estimated from the config. None
    where the config leaves sizes to transformers' defaults.

    Raises:
        ValueError: it cannot be read, or is no text model's.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    config = read_json(file)
    known = config.get("weight_bytes")
    config = config.get("config", config)
    if not isinstance(config, dict) or misfit(known, (int,)) or (known or 1) < 1:
        raise ValueError(f"{file}: `config` is to be an object, `weight_bytes` a whole number")
    text = text_config(config, file)
    if (SIZES | (MLA_SIZES if text.get("kv_lora_rank") else set())) - text.keys():
        return None
    if wrong := wrong_sizes(text):
        raise ValueError(f"{file}: {wrong}")
    index = path / "model.safetensors.index.json"
    if there := weight_bytes(path):
        return VerifierSizes(text, there, "of its files")
    if index.exists():
        total = read_json(index).get("metadata", {}).get("total_size")
        if total:
            return VerifierSizes(text, total, "index")
    if known:
        return VerifierSizes(text, known, file.name)
    try:
        width = bits(text if "quantization_config" in text else config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    total = parameters(text)[0] * width / 8
    return VerifierSizes(text, total, f"estimated, {width} bits a parameter")


def known_verifier(config: Config) -> VerifierSizes | None:
    """The verifier as it is known before it is fetched: by the config.json that `plan.verifier`
    names, or in the folder that is the source, or as the project has it of this source; else None.

    Raises:
        ValueError: one of them cannot be read.
    """
    source = config.verifier.source
    if config.plan.verifier:
        path = Path(config.plan.verifier)
        return read_verifier(path if os.path.exists(path) else ROOT / path)
    folder = Path(source.removeprefix("path:"))
    if os.path.exists(folder / "config.json"):
        return read_verifier(folder)
    for path in sorted((ROOT / "configs/reference").glob("*.json")):
        known = read_json(path).get("source")
        if known and re.match(re.escape(known) + r"(@|==|$)", source):
            return read_verifier(path)
    return None


def find_verifier(config: Config) -> VerifierSizes | None:
    """The fetched verifier, or what is known of it; errors as `known_verifier`'s."""
    fetched = Path(config.results) / "verifier"
    return read_verifier(fetched) if (fetched / "config.json").exists() else known_verifier(config)


def count_tokens(config: Config, data: str) -> dict:
    """The prompt and answer tokens of a data set, and where they come from.

    In order: its states are there and counted; those of another data set of the config are, as a
    sample; its prompts or another's are counted, with the config's estimate of answers; the
    config's estimates. With `answers: dataset` the answers are part of what is counted.
    """
    rows, generated = config.data[data].conversations, config.shard.answers == "verifier"

    def found(name: str) -> tuple[Path, dict] | None:
        paths = [Path(config.results) / f"data/{d}/{name}" for d in (data, *config.data)]
        key, *more = {
            "hidden.json": ("rows", "supervised_tokens"),
            "shards.json": ("kept",),
        }[name]
        shape = {"answers": object} | dict.fromkeys((key, "tokens", *more), int)
        there = [(path, read_result(path, shape)) for path in paths if path.exists()]
        for path, counted in there:
            if counted[key] < 1 or min(counted[k] for k in ("tokens", *more)) < 0:
                raise ValueError(f"{path}: counts less than nothing, or no row: {again(path)}")
        # The answers of a verifier say nothing of the data's own.
        there = [(p, d) for p, d in there if bool(d["answers"] not in (0, "dataset")) == generated]
        own = [pair for pair in there[:1] if pair[0] == paths[0]]
        return own[0] if own else max(there, key=lambda pair: pair[1][key], default=None)

    if hidden := found("hidden.json"):
        path, counted = hidden
        share = rows / counted["rows"]
        prompt = share * (counted["tokens"] - counted["supervised_tokens"])
        answers, source = share * counted["supervised_tokens"], f"counted in {path}"
    elif shards := found("shards.json"):
        path, counted = shards
        prompt = rows / counted["kept"] * counted["tokens"]
        answers = rows * config.plan.answer_tokens if generated else 0
        source = f"prompts counted in {path}" if generated else f"counted in {path}"
    else:
        prompt, answers = rows * config.plan.prompt_tokens, rows * config.plan.answer_tokens
        source = "plan.prompt_tokens and plan.answer_tokens of the config"
    return {
        "rows": rows,
        "prompt": round(prompt),
        "answers": round(answers),
        "total": round(prompt + answers),
        "generated": round(answers) if generated else 0,
        "source": source,
    }


def state_bytes(tokens: float, layers: int, hidden: int, states: str) -> int:
    """Bytes of states on disk: 2 a number in bf16; 1 in fp8, with a float32 scale a token and
    layer."""
    return round(tokens * layers * (2 * hidden if states == "bf16" else hidden + 4))


def states_at_most(config: Config, data: str, hidden: int) -> int:
    """Bytes of a data set's states if every row is as long as it may be."""
    tokens = config.data[data].conversations * config.shard.max_length
    layers = len(config.extract.layer_ids) + 1
    return state_bytes(tokens, layers, hidden, config.extract.states)


def draft_parameters(run, text: dict, layers: int) -> tuple[int, int]:
    """(trained, all) parameters of a draft's checkpoint, norms left out: fc over the states of
    `layers` aux layers, decoder layers of which the first takes embedding and state side by side,
    and the frozen head."""
    draft, hidden = run.draft, text["hidden_size"]
    queries = draft.num_attention_heads * draft.head_dim
    keys = draft.num_key_value_heads * draft.head_dim
    qkv = hidden * (queries + 2 * keys)
    layer = qkv + queries * hidden + 3 * hidden * draft.intermediate_size
    trained = layers * hidden * hidden + qkv + draft.num_hidden_layers * layer
    return trained, trained + draft_size(run.vocab.draft_vocab_size, text["vocab_size"]) * hidden


def training_bytes(run, text: dict, layers: int) -> dict:
    """Bytes of training: `device` while it runs, in float32 weights, gradients and two moments of
    the optimizer beside frozen copies of the verifier's embeddings and head and the draft's, and
    `batch`, what all TTT steps of a batch keep for their gradients; `disk` of the epochs'
    checkpoints in bf16 and of the states kept and the one being written."""
    trained, whole = draft_parameters(run, text, layers)
    frozen = 2 * text["vocab_size"] * text["hidden_size"] + whole - trained
    # Of a token: logits over the draft's vocabulary, the draft's and the verifier's, with
    # gradients, some sixteen vectors of its width, and the MLPs' own three.
    kept = 4 * draft_size(run.vocab.draft_vocab_size, text["vocab_size"])
    kept += 16 * text["hidden_size"] + 3 * run.draft.num_hidden_layers * run.draft.intermediate_size
    batch = 4 * kept * run.train.total_seq_len * run.train.ttt_steps
    return {
        "device": 4 * (4 * trained + frozen) + batch,
        "batch": batch,
        "disk": run.train.epochs * 2 * whole + (run.train.keep + 1) * 12 * trained,
    }


def devices(config: Config) -> tuple[float | None, str]:
    """Bytes of one device that the engine may plan with, and where that comes from: of a GPU, None
    where its memory is not known; on a CPU the machine's memory."""
    if not config.extract.gpus:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory"
    if config.plan.gpu_memory_gib:
        return config.plan.gpu_memory_gib * GIB, "plan.gpu_memory_gib"
    here = gpus_here()
    return (min(size for _, size in here), "nvidia-smi") if here else (None, "not known")


def loaded_bytes(config: Config, sizes: VerifierSizes) -> float:
    """Of the verifier's weights: on a CPU they are held in the type that it computes in."""
    return sizes.weight_bytes * (1 if config.extract.gpus else element_bytes(config) / 2)


def extraction_fit(config: Config, sizes: VerifierSizes) -> Memory:
    """`extraction_memory` of a config."""
    return extraction_memory(
        sizes.text,
        loaded_bytes(config, sizes),
        element_bytes(config),
        len(config.extract.layer_ids) + 1,
        config.extract.gpus,
        config.extract.max_num_batched_tokens,
    )


def element_bytes(config: Config) -> int:
    """Of a number in the engine. `auto` is bfloat16, but on a CPU that does not multiply it."""
    if config.verifier.dtype != "auto" or config.extract.gpus:
        return 4 if config.verifier.dtype == "float32" else 2
    return 2 if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else 4


def bench_methods(bench) -> list[str]:
    """The kinds of a benchmark's methods, one each; suffix is counted where it is installed."""
    untrained = [
        name for name in bench.methods if name != "suffix" or find_spec("arctic_inference")
    ]
    drafts = 1 + len(bench.drafts) + len(bench.epochs)
    return ["baseline", *untrained, *["eagle3"] * drafts]


def held_out_tokens(config: Config, bench) -> int:
    """Tokens of each held-out answer that is served: as many as the verifier's answers trained on
    have, for of later ones more is accepted and the two could not be compared."""
    answered = config.shard.answers == "verifier"
    return config.shard.max_new_tokens if answered else bench.max_new_tokens


def benchmark(bench, held_out_rows: int, held_out_tokens: int) -> tuple[int, int]:
    """(tokens that a benchmark writes at most, engines that it loads)."""
    kinds = bench_methods(bench)
    sets = {
        name: [{"later": [None] * (bench.turns - 1)}] * bench.prompts
        for name in ["", *bench.prompt_files]
    } | {HELD_OUT: [{"later": []}] * min(bench.held_out_prompts, held_out_rows)}
    tokens = 0
    for one in passes_of(bench, sets):
        held_out = one["set"] == HELD_OUT
        turns, each = (1, held_out_tokens) if held_out else (bench.turns, bench.max_new_tokens)
        methods = [kind for kind in kinds if kind in one["kinds"]]
        others = (len(one["draft_tokens"]) - 1) * sum(kind != "baseline" for kind in methods)
        served = one["prompts"] * len(methods) + one["few"] * others
        tokens += one["repeats"] * turns * served * each
    # On a GPU an engine for each number of draft tokens, anew in each repetition.
    drafting = (len(kinds) - 1) * (len(bench.draft_tokens) if bench.gpus else 1)
    again = 1 if bench.interleave and not bench.gpus else bench.repeats
    return tokens, (1 + drafting) * again


def host_bytes(config: Config, run, sizes: VerifierSizes) -> dict[str, float]:
    """Memory of the host, by stage, in bytes: what a scheduler must give the job. On GPUs a
    process for each; on a CPU what the device would hold."""
    fit = extraction_fit(config, sizes)

    def engine(block) -> float:
        if block.gpus:
            return PROCESS_BYTES * (block.gpus + 1)
        return PROCESS_BYTES + fit.weights + block.kv_cache_gib * GIB + fit.activations

    # Those of all methods are in memory at once.
    at_once = len(bench_methods(run.bench)) if run.bench.interleave and not run.bench.gpus else 1
    layers = len(config.extract.layer_ids)
    training = training_bytes(run, sizes.text, layers)
    head = 2 * sizes.text["vocab_size"] * sizes.hidden_size
    # On GPUs a state to be saved passes through the host.
    state = 12 * draft_parameters(run, sizes.text, layers)[0]
    # A CPU's allocator holds what batches of other lengths have freed: the default job's training
    # held three times what one batch needs.
    on_cpu = training["device"] + 2 * training["batch"]
    train = PROCESS_BYTES * max(run.train.gpus, 1)
    return {
        "extract": engine(config.extract),
        "train": train + (state if run.train.gpus else on_cpu),
        "check": PROCESS_BYTES + 2 * (head + 2 * draft_parameters(run, sizes.text, layers)[1]),
        "bench": at_once * engine(run.bench),
    }


def default_rates(config: Config, run, sizes: VerifierSizes) -> dict[str, float]:
    """Rates where nothing was measured, by stage, from the sizes and the constants above.

    Prefill: 2 operations a parameter that a token uses. Answers: as many at a time as
    max_num_seqs, each step reading the weights once, and not faster than prefill. Serving: one
    at a time. Training: 6 operations a parameter of the draft and pass.
    """

    def of(gpus: int) -> tuple[str, int]:
        return ("gpu", gpus) if gpus else ("core", len(os.sched_getaffinity(0)))

    total, used = parameters(sizes.text)
    layers = sizes.text["num_hidden_layers"] * LAYER_SECONDS
    width = loaded_bytes(config, sizes) / total
    rates = {"load": LOAD_BYTES}
    kind, number = of(config.extract.gpus)
    rates["prefill"] = FLOPS[kind] * number / (2 * used)
    step = used * width / (READ[kind] * number) + layers
    rates["answers"] = min(config.extract.max_num_seqs / step, rates["prefill"])
    kind, number = of(run.bench.gpus)
    rates["serve"] = 1 / (used * width / (READ[kind] * number) + layers)
    kind, number = of(run.train.gpus * run.train.nodes)
    whole = draft_parameters(run, sizes.text, len(config.extract.layer_ids))[1]
    rates["train"] = TRAIN_FLOPS[kind] * number / (6 * whole)
    return rates


def times(config: Config, run, sizes: VerifierSizes, tokens: dict, lines: list[dict]) -> list[dict]:
    """Each part's amount, rate, seconds and where the rate came from: given in the config, else
    measured by an earlier run with this verifier on these devices, else a default.

    lines: of `read_rates`.
    """
    given = {
        "load": (config.plan.rates.load_gb_per_s or 0) * 1e9,
        "prefill": config.plan.rates.prefill_tokens_per_s,
        "answers": config.plan.rates.answer_tokens_per_s,
        "train": (config.plan.rates.train_tokens_per_s or 0) * passes(run.train.ttt_steps),
        "serve": config.plan.rates.serve_tokens_per_s,
    }
    source = config.verifier.source
    if source.startswith("path:"):  # an identity names no folder of a machine
        source = f"path:{Path(source).name}"
    defaults = default_rates(config, run, sizes)
    train, bench = run.train, run.bench
    warm_up = min(train.ttt_warmup_epochs, train.epochs)
    trained = tokens["total"] * (1 - train.held_out)
    work = trained * (warm_up * passes(1) + (train.epochs - warm_up) * passes(train.ttt_steps))
    held_out = max(round(tokens["rows"] * train.held_out), 1)
    served, engines = benchmark(bench, held_out, held_out_tokens(config, bench))
    batches = max(train.gpus, 1) * train.nodes * train.gradient_accumulation
    steps = train.epochs * math.ceil(trained / (FILLED * train.total_seq_len * batches))
    generated = tokens["generated"]
    # Each node of extraction has an engine of its own; those of training work as one.
    gpus, nodes = config.extract.gpus, config.nodes_of(run.data)
    parts = [
        ("load", "load", gpus, nodes, nodes * sizes.weight_bytes, "bytes"),
        ("extract", "answers", gpus, nodes, generated, "tokens")
        if generated
        else ("extract", "prefill", gpus, nodes, tokens["total"], "tokens"),
        ("train", "train", train.gpus * train.nodes, 1, work, "tokens"),
        ("bench", "serve", bench.gpus, 1, served, "tokens"),
    ]
    rows = []
    for part, stage, number, engines_at_once, amount, unit in parts:
        found = measured(lines, stage, source, number, device_name(number))
        seconds = 0.0
        if given[stage]:
            rate, origin = given[stage], "given as plan.rates"
        elif found:
            rate, origin = found
        else:
            rate, origin = defaults[stage], "default"
            seconds = START_SECONDS["gpu" if number else "core"] if part == "load" else 0.0
        seconds += amount / rate / engines_at_once
        row = {"part": part, "gpus": number * engines_at_once}
        row |= {"amount": round(amount), "unit": unit, "rate": rate}
        if part == "train":
            # Told in tokens that look all TTT steps ahead.
            row |= {"amount": round(trained * train.epochs), "steps": steps}
            row["rate"] = rate / passes(train.ttt_steps)
        rows.append(row | {"seconds": round(seconds, 1), "source": origin})
    loads = {**rows[0], "part": "bench loads", "gpus": bench.gpus}
    loads["amount"] = round(engines * sizes.weight_bytes, 1)
    loads["seconds"] = round(engines * rows[0]["seconds"], 1)
    return [*rows, loads]


def make_plan(
    config: Config, name: str, free_bytes: float | None = None, verifier: Path | None = None
) -> dict:
    """The plan of a run, as plan_{run}.json holds it.

    free_bytes: of the disk; None leaves its check out. verifier: as `read_verifier` takes it; None
    finds it.

    Raises:
        ValueError: no such run, or its verifier's config is not to be found; or what earlier
            stages have left is damaged.
    """
    if name not in config.runs:
        raise ValueError(f"run {name!r} is not defined: the config has {', '.join(config.runs)}")
    run = config.runs[name]
    sizes = read_verifier(verifier) if verifier else find_verifier(config)
    if sizes is None:
        raise ValueError(
            f"the sizes of the verifier {config.verifier.source} are not known; name a whole "
            f"config.json as plan.verifier, or fetch it: snakemake {config.results}/verifier"
        )
    extraction_ids(config.extract.layer_ids, sizes.text["num_hidden_layers"])
    lines = read_rates(Path(config.results) / ".state/rates.jsonl")
    tokens = count_tokens(config, run.data)
    layers = len(config.extract.layer_ids) + 1
    fit = extraction_fit(config, sizes)
    device, device_source = devices(config)
    cache = None if config.extract.gpus else config.extract.kv_cache_gib * GIB
    usable = (device or 0) * (config.extract.gpu_memory_utilization if config.extract.gpus else 1)
    known = device is not None
    free_cache = cache_bytes(fit, usable, cache)[0] if known else None
    mean = tokens["total"] / tokens["rows"]
    training = training_bytes(run, sizes.text, layers - 1)
    host = host_bytes(config, run, sizes)
    at_most = states_at_most(config, run.data, sizes.hidden_size)
    made = (Path(config.results) / f"data/{run.data}/hidden.json").exists()
    spent = times(config, run, sizes, tokens, lines)
    plan = {
        "run": name,
        "data": run.data,
        "verifier": config.verifier.source,
        "heads": sizes.text["num_attention_heads"],
        "parameters": {"verifier": round(parameters(sizes.text)[0])}
        | {"draft": draft_parameters(run, sizes.text, layers - 1)[1]},
        "tokens": tokens | {"a_row": round(mean, 1), "longest_row": config.shard.max_length},
        "states": {
            "layers": layers,
            "hidden_size": sizes.hidden_size,
            "bytes_a_token": 2 * layers * sizes.hidden_size,
            "kept_as": config.extract.states,
        }
        | {
            f"{kind}_bytes": state_bytes(tokens["total"], layers, sizes.hidden_size, kind)
            for kind in ("bf16", "fp8")
        },
        "memory": {
            "devices": config.extract.gpus or 1,
            "device_bytes": device,
            "device_source": device_source,
            "usable_bytes": usable if known else None,
            "attention": "MLA" if sizes.text.get("kv_lora_rank") else "GQA",
            "weights_bytes": fit.weights,
            "weights_source": sizes.weight_source,
            "activations_bytes": fit.activations,
            "kv_bytes_a_token": fit.kv,
            "states_bytes_a_token": fit.states,
            "cache_bytes": free_cache,
            "max_num_seqs": config.extract.max_num_seqs,
            "max_num_batched_tokens": config.extract.max_num_batched_tokens,
            "mean_rows_at_once": fit.sequences(free_cache, mean) if known else None,
            "longest_rows_at_once": fit.sequences(free_cache, config.shard.max_length)
            if known
            else None,
            "training_bytes": training["device"],
            "host_bytes": host,
        },
        "disk": {
            "states_at_most": 0 if made else at_most,
            "training": training["disk"],
            "free": free_bytes,
        },
        "times": spent,
        # Then rates may be the run's own.
        "trained": (Path(config.results) / f"ckpt_{name}/manifest.json").exists(),
        "seconds": round(sum(row["seconds"] for row in spent), 1),
        "gpu_hours": round(sum(row["seconds"] * row["gpus"] for row in spent) / 3600, 3),
    }
    return plan | {"faults": faults(config, plan)}


def faults(config: Config, plan: dict) -> list[str]:
    """What does not fit in a plan, each with its arithmetic and the way out; empty if nothing.

    Memory is judged where the device's is known: one row of the longest, the rows at once, training
    on a GPU of the same kind, and on a CPU the whole machine. Disk is judged where `free` is known.
    """
    memory, disk = plan["memory"], plan["disk"]
    bench = config.runs[plan["run"]].bench
    found = [
        f"{key}.gpus: vLLM divides the verifier's {plan['heads']} attention heads among GPUs, and "
        f"{gpus} does not divide them; take a number that does"
        for key, gpus in {"extract": config.extract.gpus, "bench": bench.gpus}.items()
        if gpus and plan["heads"] % gpus
    ]
    if memory["device_bytes"] is not None:
        found += device_faults(config, plan)
    if disk["free"] is not None:
        needed = disk["states_at_most"] + disk["training"]
        found.append(disk_fault(config.results, needed, disk["free"]))
    return [fault for fault in found if fault]


def device_faults(config: Config, plan: dict) -> list[str | None]:
    """As `faults`, of the devices' memory; None where there is none."""
    memory, longest = plan["memory"], config.shard.max_length
    device, on_gpu = memory["device_bytes"], config.extract.gpus > 0
    fit = Memory(
        weights=memory["weights_bytes"],
        kv=memory["kv_bytes_a_token"],
        states=memory["states_bytes_a_token"],
        activations=memory["activations_bytes"],
    )
    room = (memory["usable_bytes"], None if on_gpu else config.extract.kv_cache_gib * GIB)
    mean, rows = plan["tokens"]["a_row"], plan["tokens"]["rows"]
    found = [
        row_fault(fit, *room, longest)
        or bound_fault(fit, *room, config.extract.max_num_seqs, rows, mean, longest)
    ]
    if on_gpu and config.runs[plan["run"]].train.gpus and memory["training_bytes"] > device:
        found.append(
            f"training needs {memory['training_bytes'] / GIB:,.1f} GiB of a GPU, which has "
            f"{device / GIB:,.1f}: float32 weights, gradients and optimizer of a draft of "
            f"{plan['parameters']['draft']:,} parameters, and a batch's logits; lower "
            "train.total_seq_len or vocab.draft_vocab_size"
        )
    for stage, needed in memory["host_bytes"].items():
        if not on_gpu and needed > device:
            found.append(
                f"{stage} needs {needed / GIB:,.1f} GiB of memory, the machine has "
                f"{device / GIB:,.1f}; take a smaller kv_cache_gib, or another machine"
            )
    return found
