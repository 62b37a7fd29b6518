"""The config's schema: every key, its type and bounds. config.yaml explains them to users."""

import datetime
import difflib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    WrapValidator,
)

from eyrie.reference import draft_fields, rope_problems

ROOT = Path(__file__).parents[2]
# Of files that targets are: report_RUN.html would be that of a run, and the Markdown of another;
# and of folders that are not whole yet, which whoever makes the folder deletes.
ENDINGS = {".html", ".md", ".json", ".jsonl", ".csv", ".safetensors", ".partial"}

# Shards are numbered in five digits, and read in the order of their names.
MOST_SHARDS = 10**5


def from_command_line(value):
    """`--config train={epochs: 3}` hands numbers and switches over as text."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def no_switch(value):
    """pydantic takes true for 1.0."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, and no switch")
    return value


def from_yaml(value):
    return yaml.safe_load(value) if isinstance(value, str) else value


def from_iso(value) -> datetime.date:
    """A date as YAML or the command line has it; pydantic takes numbers for seconds since 1970."""
    return datetime.date.fromisoformat(str(value))


# 4.0, 32k and true are mistakes where a count is meant; more is no tensor's size.
Whole = Annotated[int, BeforeValidator(from_command_line), Field(strict=True, lt=2**63)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(gt=0)]
# YAML reads 1e-4 as a string; it is taken as the number that it looks like.
Number = Annotated[float, BeforeValidator(no_switch)]
Real = Annotated[Number, Field(ge=0)]
PositiveReal = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Flag = Annotated[bool, BeforeValidator(from_command_line), Field(strict=True)]
Source = Annotated[str, StringConstraints(pattern=r"^(pypi|hf|path):.+")]
# A digest left unquoted may look like a number to YAML, so only strings are taken.
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SourceBlock(Block):
    source: Source
    sha256: Sha256 | None = None


class Verifier(SourceBlock):
    chat_template: str | None
    trust_remote_code: Flag
    dtype: Literal["auto", "bfloat16", "float16", "float32"]


class Prompts(SourceBlock):
    name: str


class Data(Block):
    conversations: Positive


class Shard(Block):
    shard_size: Positive
    max_length: Positive
    min_supervised_tokens: Positive
    answers: Literal["verifier", "dataset"]
    max_new_tokens: Positive
    max_turns: Count
    temperature: Real
    top_p: Annotated[Number, Field(gt=0, le=1)]
    seed: Count
    on_bad_file: Literal["stop", "keep"]
    max_reject_fraction: Fraction
    system_turns: Literal["merge", "drop", "reject"]
    date: Annotated[datetime.date, BeforeValidator(from_iso)]
    template_options: dict[str, JsonValue]


class Engine(Block):
    gpus: Count
    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1)]
    kv_cache_gib: PositiveReal
    max_model_len: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive


def from_after(value):
    """{after: [k, ...]}, the states after layers k counted from 0, as vLLM's ids, k + 1."""
    if isinstance(value, dict) and list(value) == ["after"] and isinstance(value["after"], list):
        return [k + 1 if type(k) is int else k for k in value["after"]]
    return value


class Extract(Engine):
    layer_ids: Annotated[list[Positive], BeforeValidator(from_after), Field(min_length=1)]
    states: Literal["bf16", "fp8"]
    nodes: Positive
    runtime: Positive


def or_full(value, number):
    return value if value == "full" else number(value)


class Vocab(Block):
    draft_vocab_size: Annotated[Positive, WrapValidator(or_full)]
    min_coverage: Fraction


class Draft(Block):
    reference: str | None
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    rope_theta: PositiveReal
    # Numbers of the command line are text here, too.
    rope_scaling: dict[str, Annotated[JsonValue, BeforeValidator(from_yaml)]] | None
    max_position_embeddings: Positive
    rms_norm_eps: PositiveReal
    sliding_window: Positive | None
    norms: Literal["eagle3", "eagle3.1"]
    norm_before_residual: Flag


class Train(Block):
    gpus: Count
    nodes: Positive
    init_from: str | None
    dtype: Literal["auto", "bfloat16", "float32"]
    held_out: Annotated[Number, Field(gt=0, lt=1)]
    epochs: Positive
    total_seq_len: Positive
    optimizer: Literal["muon", "adamw"]
    lr: Real
    muon_lr: Real
    weight_decay: Real
    scheduler: Literal["linear", "cosine", "none"]
    warmup_ratio: Fraction
    ttt_steps: Positive
    ttt_decay: Real
    ttt_warmup_epochs: Count
    noise: Real
    seed: Count
    gradient_accumulation: Positive
    patience: Count
    layout: Literal["flat", "sglang", "speculators"]
    checkpoint_every: Positive
    keep: Positive
    runtime: Positive


# The name of a data set or a run, with room for what a file's name has around it.
NAME = re.compile(r"[\w.][\w.-]{,47}")
# A part of a file's name, and of an option that names one.
Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
# The first is the main setting; each is measured once.
Settings = Annotated[list[Positive], Field(min_length=1)]


class Bench(Engine):
    draft_gpus: Positive | None
    compile: Flag
    methods: list[Literal["ngram", "suffix"]]
    epochs: list[Count]
    drafts: dict[Name, str]
    prompts: Positive
    turns: Positive
    prompt_files: dict[Name, str]
    held_out_prompts: Count
    held_out_methods: Literal["drafts", "all"]
    max_new_tokens: Positive
    draft_tokens: Settings
    concurrency: Settings
    every_pair: Flag
    prompts_elsewhere: Positive
    repeats: Positive
    interleave: Flag
    samples: Count
    profile: Flag
    runtime: Positive


class Rates(Block):
    load_gb_per_s: PositiveReal | None = None
    prefill_tokens_per_s: PositiveReal | None = None
    answer_tokens_per_s: PositiveReal | None = None
    train_tokens_per_s: PositiveReal | None = None
    serve_tokens_per_s: PositiveReal | None = None


class Plan(Block):
    verifier: str | None
    prompt_tokens: PositiveReal
    answer_tokens: PositiveReal
    gpu_memory_gib: PositiveReal | None
    rates: Rates


class Card(Block):
    license: str | None
    license_name: str | None
    license_link: str | None
    base_model: str | None


class Run(Block):
    """Its blocks are the config's own with what the run says over them."""

    data: str
    vocab: Vocab
    draft: Draft
    train: Train
    bench: Bench


class Config(Block):
    # A rule makes results/x, and not results//x.
    results: Annotated[str, AfterValidator(lambda path: path and os.path.normpath(path))]
    verifier: Verifier
    # One source may stand without a list.
    conversations: Annotated[
        list[SourceBlock],
        BeforeValidator(lambda value: [value] if isinstance(value, dict) else value),
        Field(min_length=1),
    ]
    prompts: Prompts
    data: dict[str, Data]
    shard: Shard
    extract: Extract
    vocab: Vocab
    draft: Draft
    train: Train
    bench: Bench
    plan: Plan
    card: Card
    runs: dict[str, Run]
    sweep: list[str]

    def shards_of(self, data: str) -> int:
        """How many shards a data set is cut into."""
        return -(-self.data[data].conversations // self.shard.shard_size)

    def most_gpus(self) -> int:
        """The GPUs of the job that needs the most, on all of its machines; 1 where none does."""
        runs = self.runs.values()
        trained = [run.train.gpus * run.train.nodes for run in runs]
        return max(1, self.extract.gpus, *trained, *(run.bench.gpus for run in runs))

    def nodes_of(self, data: str) -> int:
        """How many jobs extract a data set: one without a shard would load the verifier for
        nothing."""
        return min(self.extract.nodes, self.shards_of(data))


class ConfigError(Exception):
    """What is wrong in the config, key by key, and what to write instead."""


def _known_keys(path: tuple) -> list[str]:
    """The keys that the block at `path` may hold."""
    model = Config
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if annotation is None:
            continue
        if getattr(annotation, "__origin__", None) in (dict, list):
            annotation = annotation.__args__[-1]
        model = annotation
    return list(model.model_fields)


# What others call a key.
USUAL = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "max_seq_len": "total_seq_len",
    "vocab_size": "draft_vocab_size",
    "num_speculative_tokens": "draft_tokens",
    "tensor_parallel_size": "gpus",
    "gpu": "gpus",
}


def _explain(error: dict) -> str:
    *block, key = error["loc"]
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = {k: k for k in _known_keys(tuple(block))}
        # One that stands in no block may be of any.
        for other in () if block else ("train", "draft", "vocab", "extract", "shard", "bench"):
            known = {k: f"{other}.{k}" for k in _known_keys((other,))} | known
        known = {theirs: known[ours] for theirs, ours in USUAL.items() if ours in known} | known
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
        hint = f"; did you mean {known[near[0]]}?" if near else ""
        return f"{name}: there is no such key{hint}"
    if error["type"] == "missing":
        return f"{name}: missing"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}, found {error['input']!r}"


def with_reference(values: dict) -> dict:
    """One layer of the config, a file or the command line, with what its `draft` block leaves
    out taken from the draft.reference that it names. Layers below it are then no matter.

    Raises:
        ConfigError: the reference is not there, or no draft's config.
    """
    draft = values.get("draft")
    if not isinstance(draft, dict) or not isinstance(draft.get("reference"), str):
        return values
    # One that comes with the workflow is found from any working directory.
    path = Path(draft["reference"])
    path = path if os.path.exists(path) else ROOT / path
    try:
        return {**values, "draft": draft_fields(path) | draft}
    except ValueError as error:
        raise ConfigError(f"config: draft.reference: {error}") from None


def _with_defaults(run, values: dict):
    """A run with the config's vocab, draft, train and bench under its own keys."""
    if not isinstance(run, dict):
        return run
    run = dict(with_reference(run))
    if isinstance(run.get("data"), int):
        run["data"] = str(run["data"])
    for block in ("vocab", "draft", "train", "bench"):
        over = run.get(block, {})
        if isinstance(over, dict) and isinstance(values.get(block), dict):
            run[block] = values[block] | over
    return run


def _shape_problems(draft: Draft) -> list[str]:
    problems = []
    if draft.num_attention_heads % draft.num_key_value_heads:
        problems.append(
            f"num_attention_heads: {draft.num_attention_heads} is no multiple of "
            f"num_key_value_heads, {draft.num_key_value_heads}"
        )
    problems += [f"rope_scaling: {problem}" for problem in rope_problems(draft.rope_scaling)]
    return problems


def _bench_problems(bench: Bench, epochs: int) -> list[str]:
    """epochs: that the run trains."""
    problems = []
    for key in ("draft_tokens", "concurrency", "epochs"):
        if len(set(getattr(bench, key))) < len(getattr(bench, key)):
            problems.append(f"{key}: a number is listed twice")
    if max(bench.concurrency) > bench.max_num_seqs:
        problems.append(
            f"concurrency: {max(bench.concurrency)} is more than max_num_seqs, "
            f"{bench.max_num_seqs}, which vLLM serves at once"
        )
    if max(bench.epochs, default=0) >= epochs:
        problems.append(
            f"epochs: there is no epoch {max(bench.epochs)}; of {epochs} the last is {epochs - 1}"
        )
    if bench.max_new_tokens >= bench.max_model_len:
        problems.append(
            f"max_new_tokens: {bench.max_new_tokens} leaves no room for a prompt in "
            f"max_model_len, {bench.max_model_len}"
        )
    if bench.draft_gpus not in (None, 1, bench.gpus):
        problems.append(f"draft_gpus: vLLM takes 1 or as many as gpus, {bench.gpus}")
    return problems


def _name_problems(config: Config) -> list[str]:
    """Of names that files and folders get: what would be another's, or nobody's."""
    problems = []
    for block in ("data", "runs"):
        for name in getattr(config, block):
            if not NAME.fullmatch(name) or name in (".", ".."):
                problems.append(
                    f"{block}.{name}: the name is part of a file's and of a rule's: take at most "
                    "48 letters, digits, _, . and -, the last not in front"
                )
            if Path(name).suffix in ENDINGS:
                problems.append(
                    f"{block}.{name}: {Path(name).suffix} is the ending of files made for a run"
                )
    for name in config.data:
        whole = re.sub(r"_node\d+$", "", name)
        if config.extract.nodes > 1 and whole != name and whole in config.data:
            problems.append(
                f"data.{name}: extract.nodes gives a part of data set {whole} this name; call one "
                "otherwise"
            )
    if "sweep" in config.runs:
        problems.append("runs.sweep: report_sweep.html compares runs; give this one another name")
    for run in dict.fromkeys(config.sweep):
        if run not in config.runs:
            problems.append(
                f"sweep: run {run!r} is not defined: the config has {', '.join(config.runs)}"
            )
        if config.sweep.count(run) > 1:
            problems.append(f"sweep: run {run!r} is listed twice")
    if not config.results or config.results.startswith("~"):
        problems.append(f"results: {config.results!r} is no folder's name; write it out")
    return problems


def _text_problems(value, path: str = "") -> list[str]:
    """Texts and names with a word in braces, which Snakemake would take for a wildcard, or with a
    null byte, which no file's name and no option can have."""
    if isinstance(value, dict):
        found = [_text_problems(v, f"{path}.{k}") for k, v in value.items()]
        return [*_text_problems(" ".join(map(str, value)), path), *itertools.chain(*found)]
    if isinstance(value, list):
        found = [_text_problems(v, f"{path}.{i}") for i, v in enumerate(value)]
        return list(itertools.chain(*found))
    problems = []
    if isinstance(value, str):
        if braces := re.search(r"\{\s*\w[^{}]*\}", value):
            problems.append(
                f"{path[1:]}: {braces[0]} would be a wildcard to Snakemake; name it without braces"
            )
        if "\0" in value:
            problems.append(f"{path[1:]}: {value!r} holds a null byte; leave it out")
    return problems


def _results_problems(config: Config) -> list[str]:
    """Of the results' folder as it is: none can be made there, it may not be written to, or a
    source lies in it."""
    results = Path(config.results)
    place = next(p for p in (results, *results.parents) if os.path.lexists(p))
    problems = [] if os.path.isdir(place) else [f"results: {place} is in the way, and no folder"]
    problems += [
        f"results: {path} may not be written to; change its mode, or name another folder"
        for path in (place, *(results / name for name in ("logs", ".state", "data")))
        if os.path.isdir(path) and not os.access(path, os.W_OK)
    ]
    sources = {f"conversations.{i}": block for i, block in enumerate(config.conversations)}
    sources = {"verifier": config.verifier, "prompts": config.prompts} | sources
    for name, block in sources.items():
        kind, _, spec = block.source.partition(":")
        path = Path(os.path.realpath(os.path.expanduser(spec)))
        if kind == "path" and path.is_relative_to(os.path.realpath(results)):
            problems.append(
                f"{name}.source: {spec} lies in the results, {results}, where what is made anew is "
                "deleted first: move it, or name another folder for `results`"
            )
    return problems


def missing_files(config: Config) -> list[str]:
    """Files and folders that the config names and that are not there, with their keys; and what is
    wrong with the results' folder. Snakemake would leave out the job that reads them where its
    output is there already. What lies in the results a rule may be about to make."""
    named = {"verifier.chat_template": config.verifier.chat_template}
    for name, run in config.runs.items():
        files = {"train.init_from": run.train.init_from}
        files |= {f"bench.drafts.{draft}": path for draft, path in run.bench.drafts.items()}
        files |= {f"bench.prompt_files.{n}": path for n, path in run.bench.prompt_files.items()}
        for key, path in files.items():
            # What is missing for every run is told once.
            if path not in named.values():
                named[f"runs.{name}.{key}"] = path
    made = os.path.realpath(config.results)
    return _results_problems(config) + [
        f"{key}: {path}: no such file or folder"
        for key, path in named.items()
        if path
        # Neither is a pipe, which would be waited for, nor a name that no file can have.
        and not (os.path.isfile(path) or os.path.isdir(path))
        and not Path(os.path.realpath(path)).is_relative_to(made)
    ]


class OnceLoader(yaml.CSafeLoader):
    """YAML in which a key that is given twice, as a text or a number, is an error: the last would
    silently replace the others."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else id(key)
            if text in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{text} is given twice; write all of it once", key.start_mark
                )
            seen.add(text)
        return super().construct_mapping(node, deep)


def read_config_file(path: str | Path) -> dict:
    """The keys of a YAML file, unchecked but for being there once.

    Raises:
        ConfigError: naming the file, and the line where there is one.
    """
    try:
        keys = yaml.load(Path(path).read_text(), OnceLoader)
        json.dumps(keys, default=str, skipkeys=True)  # raises where it holds itself
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from None
    if not isinstance(keys or {}, dict):
        raise ConfigError(f"{path}: holds no keys but {str(keys)[:60]}")
    return keys or {}


def load_config(values: dict) -> Config:
    """Check a config read from YAML.

    Raises:
        ConfigError: all that is wrong with it, one line a key.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"config: holds no keys but {str(values)[:60]}")
    values = with_reference(values)
    # A run or data set named 10 is a number to YAML and a name to everybody else.
    values = dict(values)
    for block in ("data", "runs"):
        if isinstance(values.get(block), dict):
            values[block] = {str(k): v for k, v in values[block].items()}
    if isinstance(values.get("sweep"), list):
        values["sweep"] = [str(run) for run in values["sweep"]]
    texts = _text_problems(values)
    if isinstance(values.get("runs"), dict):
        values["runs"] = {k: _with_defaults(run, values) for k, run in values["runs"].items()}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        errors = {error["loc"]: error for error in error.errors()}
        # What is wrong for every run is told once.
        own = [e for loc, e in errors.items() if loc[0] != "runs" or loc[2:] not in errors]
        lines = sorted({_explain(e) for e in own})
        raise ConfigError("config: " + "\n        ".join(lines)) from None
    problems = [
        f"runs.{name}.data: there is no data set {run.data!r}; there are {', '.join(config.data)}"
        for name, run in config.runs.items()
        if run.data not in config.data
    ]
    problems += _name_problems(config) + texts
    named = {f"conversations.{i}": block for i, block in enumerate(config.conversations)}
    for name, block in {"verifier": config.verifier, "prompts": config.prompts, **named}.items():
        kind = block.source.split(":")[0]
        if kind == "pypi" and not block.sha256:
            problems.append(f"{name}.sha256: give the wheel's sha256 with a pypi: source")
        if kind == "hf" and block.sha256:
            problems.append(f"{name}.sha256: a Hub source is fixed by its revision; set it to null")
    for name, data in config.data.items():
        if (shards := config.shards_of(name)) > MOST_SHARDS:
            problems.append(
                f"data.{name}.conversations: {data.conversations:,} make {shards:,} shards, and "
                f"{MOST_SHARDS:,} have names; raise shard.shard_size, or ask for fewer"
            )
    room = config.shard.max_new_tokens if config.shard.answers == "verifier" else 0
    if config.shard.max_length <= room:
        problems.append(
            f"shard.max_length: {config.shard.max_length} leaves no room for a prompt beside "
            f"shard.max_new_tokens, {room}"
        )
    # The engine writes a token after the row to hand over its states.
    if config.shard.max_length >= config.extract.max_model_len:
        problems.append(
            f"shard.max_length: {config.shard.max_length} must be less than "
            f"extract.max_model_len, {config.extract.max_model_len}"
        )
    for name, run in config.runs.items():
        if run.train.ttt_warmup_epochs >= run.train.epochs and run.train.ttt_steps > 1:
            problems.append(
                f"runs.{name}.train.ttt_warmup_epochs: {run.train.ttt_warmup_epochs} of "
                f"{run.train.epochs} epochs leave none that looks ttt_steps ahead"
            )
        problems += [f"runs.{name}.draft.{problem}" for problem in _shape_problems(run.draft)]
        problems += [
            f"runs.{name}.bench.{problem}"
            for problem in _bench_problems(run.bench, run.train.epochs)
        ]
    if problems:
        raise ConfigError("config: " + "\n        ".join(problems))
    return config
