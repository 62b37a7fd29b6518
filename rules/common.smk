"""The checked config, and what several rules ask of it."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

SCRIPTS = Path(workflow.basedir) / "scripts"
sys.path.insert(0, str(SCRIPTS))

from snakemake.logging import logger
from snakemake.resources import Resource
from snakemake.utils import update_config

from eyrie import provenance
from eyrie.config import (
    ConfigError,
    load_config,
    missing_files,
    read_config_file,
    with_reference,
)
from eyrie.files import sha256_file
from eyrie.jobs import runs_here
from eyrie.local import local_content
from eyrie.plan import (
    find_verifier,
    held_out_tokens,
    host_bytes,
    known_verifier,
    states_at_most,
    training_bytes,
)
from eyrie.sources import DataError
from eyrie.totals import Totals
from eyrie.verifier import draft_size, extraction_ids

try:
    # Snakemake takes the last of what is given twice. A pod has no such file, and what has sent it
    # there has looked.
    for file in [] if workflow.remote_exec else workflow.configfiles:
        read_config_file(file)
    # A reference that a file or the command line names goes over config.yaml's own shape.
    update_config(config, with_reference(workflow.config_settings.overwrite_config))
    C = load_config(config)
    R = C.results
    # A pod has none of these, either.
    if not workflow.remote_exec and (missing := missing_files(C)):
        raise ConfigError("config: " + "\n        ".join(missing))
    REPORT = f"{R}/report_1k.html"
    VERIFIER = find_verifier(C)
    if VERIFIER:
        extraction_ids(C.extract.layer_ids, VERIFIER.text["num_hidden_layers"])
        for settings in (C, *C.runs.values()):
            draft_size(settings.vocab.draft_vocab_size, VERIFIER.text["vocab_size"])
except (ConfigError, OSError, ValueError) as error:
    # Of an exception Snakemake would show where in this file it was raised, too.
    sys.exit(str(error))

# Rules run `python "$SCRIPTS/stage.py"`: this interpreter, and this checkout wherever it lies. In
# params these paths would rerun everything once the checkout has moved. Beside each job runs what
# ends its processes with it and with Snakemake. speculators tells by loguru of each weight it looks
# for. Huge pages make a CPU's products 5 to 8% faster.
KILLED = (
    "killed by signal 9, most often for want of memory: lower extract.max_num_seqs or kv_cache_gib"
)
shell.prefix(
    # Snakemake's own, which a prefix replaces.
    "set -euo pipefail; "
    f"trap '[ $? != 137 ] || echo {KILLED} >&2' EXIT; "
    f"{shlex.quote(sys.executable)} -SE {shlex.quote(str(SCRIPTS / 'eyrie/jobs.py'))} $$ $PPID & "
    f"export SCRIPTS={shlex.quote(str(SCRIPTS))} EYRIE_JOB=$$:$PPID LOGURU_LEVEL=ERROR "
    "GLIBC_TUNABLES=${{GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}} "
    f"PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; "
)
ENV = "../envs/cuda.yaml" if C.extract.gpus or C.train.gpus else "../envs/cpu.yaml"

# What decides whether extraction has the memory, and how long what is served may be.
PREFLIGHT_ENGINE = shlex.join(
    [
        f"--dtype={C.verifier.dtype}",
        f"--max-model-len={C.bench.max_model_len}",
        f"--gpus={C.extract.gpus}",
        f"--gpu-memory-percent={round(100 * C.extract.gpu_memory_utilization)}",
        f"--kv-cache-gib={C.extract.kv_cache_gib}",
        f"--max-num-batched-tokens={C.extract.max_num_batched_tokens}",
    ]
)

# A limit set here survives `--resources other=1`, which replaces the profile's: without one,
# Snakemake ignores the resource and two GPU jobs overlap. To a job that needs more than the limit it
# would give fewer without a word. `nodes` is the number of jobs on a cluster, which has its own queue.
GPUS = max(
    C.extract.gpus,
    1,
    *(g for r in C.runs.values() for g in (r.train.gpus * r.train.nodes, r.bench.gpus)),
)
if "gpu" in workflow.global_resources:
    if workflow.global_resources["gpu"].value < GPUS:
        sys.exit(
            f"a job needs {GPUS} GPUs, and Snakemake may give {workflow.global_resources['gpu'].value}"
            f" (`resources: gpu` of the profile). With that many on this machine, add --resources "
            f"gpu={GPUS}; on a cluster take --workflow-profile, which replaces profiles/default"
        )
elif workflow.resource_settings.nodes is None and not workflow.remote_exec:
    workflow.global_resources["gpu"] = Resource("gpu", GPUS)

# Snakemake's S3 plugin remembers of a folder that it was not there, and misses what a pod uploads.
if workflow.storage_settings.default_storage_provider == "s3":
    bucket = workflow.storage_registry.default_storage_provider
    bucket.get_storage_object_cls().is_dir = lambda folder: any(folder.get_subkeys())

# Snakemake says that its lock can be removed, but not with which command, nor when.
locked = any(Path(".snakemake/locks").glob("*")) and not workflow.remote_exec
if locked and "--unlock" not in sys.argv and not runs_here():
    print(
        "A run that was killed, or one on another machine, has locked this folder. To go on after a "
        f"kill, unlock it and run again:\n    {shlex.join([*sys.argv, '--unlock'])}",
        file=sys.stderr,
    )

# Memory of a stage that holds no weights, and of one whose verifier's sizes are not known yet.
SMALL_MB, UNKNOWN_MB = 4_000, 32_000

# What stages measure, for the next plan.
RATES = f"{R}/.state/rates.jsonl"

# A dry run ends with the sum of what its jobs need.
logger.addHandler(Totals(workflow))


wildcard_constraints:
    run="[^/]+",


def code_hash(name):
    """The hash of scripts/NAME.py and of the project modules it imports."""
    return provenance.code_hash(SCRIPTS / f"{name}.py")


def template_hash(name):
    """A page's template and the templates that it imports, by content: as inputs, their paths would
    change with the checkout's place."""
    text = (SCRIPTS.parent / f"templates/{name}.html").read_text()
    imported = re.findall(r'{% from "(\w+).html"', text)
    return [sha256_file(SCRIPTS.parent / f"templates/{file}.html") for file in (name, *imported)]


def of_sweep(file):
    """A file of each run that the config's `sweep` names."""

    def files(wildcards):
        if not C.sweep:
            sys.exit("sweep: no run is named; list the runs to compare")
        return expand(file, run=C.sweep)

    return files


def shard_names(data):
    """The numbers of a data set's shards, known from the config alone."""
    return [f"{i:05d}" for i in range(C.shards_of(data))]


def asked_for(data):
    """Those runs of a data set that the targets name."""
    names = set()
    for target in workflow.dag_settings.targets or [REPORT]:
        for part in Path(target).parts:
            _, _, name = part.partition("_")
            names |= {name, Path(name).stem}
    names |= set(C.sweep) if "sweep" in names else set()
    return [run for run in C.runs if run in names and C.runs[run].data == data]


def token_shards(data, names=None):
    """The token shards of a data set, or those of these numbers."""
    names = shard_names(data) if names is None else names
    return expand(f"{R}/data/{data}/shards/{{shard}}.safetensors", shard=names)


def data_of(wildcards):
    """The data set of a run; an error that names the runs there are."""
    if wildcards.run not in C.runs:
        sys.exit(
            f"run {wildcards.run!r} is not defined: the config has {', '.join(C.runs)}. "
            "Ask for one of these, or add it under `runs:`"
        )
    return C.runs[wildcards.run].data


def of_run(block, key):
    """The value of a key of vocab, draft, train or bench, for the run that a job is of."""
    return lambda wildcards: getattr(getattr(C.runs[wildcards.run], block), key)


def draft_shape(run):
    """The `draft` block of a run as options of scripts."""
    options = []
    for key, value in C.runs[run].draft:
        name = key.replace("_", "-")
        if isinstance(value, bool):
            options += flag(name, value)
        elif key != "reference":
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            options += [f"--{name}", text]
    return options


def drafts(runs):
    """What scripts/preflight.py is told of some runs' drafts."""
    options = {}
    for run in runs:
        size, train = C.runs[run].vocab.draft_vocab_size, C.runs[run].train
        options[run] = [*draft_shape(run), "--draft-vocab-size", str(size)]
        options[run] += ["--ttt-steps", str(train.ttt_steps), "--layout", train.layout]
    return json.dumps(options)


def prompts_asked(runs):
    """How many prompts of each file the benchmarks of some runs ask for, as JSON."""
    counts = {f"{R}/prompts": 0}
    for bench in (C.runs[run].bench for run in runs):
        for path in counts.keys() | {local(file) for file in bench.prompt_files.values()}:
            counts[path] = max(counts.get(path, 0), bench.prompts)
    return json.dumps(counts, sort_keys=True)


def hidden_of(wildcards):
    """The hidden shards that a run trains on."""
    data = data_of(wildcards)
    return [f"{R}/data/{data}/hidden/{name}.safetensors" for name in shard_names(data)]


def extractions(data):
    """The extractions of a data set, each as its rule's name, its shards, its folder and what it
    waits for: one for each node, and one that links what these have put into the store."""
    names, folder = shard_names(data), f"{R}/data/{data}"
    gate, nodes = f"{folder}/preflights.json", C.nodes_of(data)
    if nodes == 1:
        return [(data, names, folder, [gate])]
    # As even as shards allow, and in one piece each, so that a node reads few files.
    ends = [len(names) * node // nodes for node in range(nodes + 1)]
    parts = [
        (f"{data}_node{i}", names[ends[i] : ends[i + 1]], f"{folder}/nodes/{data}-{i}", [gate])
        for i in range(nodes)
    ]
    return [*parts, (data, names, folder, [gate, *(f"{of}/hidden.json" for _, _, of, _ in parts)])]


def states_mb(data):
    """The disk that a data set's states may take: every row as long as it may be."""
    # Until the verifier is known, the draft's heads tell its size closely enough.
    guess = C.draft.num_attention_heads * C.draft.head_dim
    return states_at_most(C, data, VERIFIER.hidden_size if VERIFIER else guess) // 10**6


def copied_mb(data=None):
    """The disk of a job's own copies, which it gets where results are in a bucket: of the verifier,
    and of a data set's states."""
    if workflow.storage_settings.default_storage_provider is None:
        return 0
    verifier = round(VERIFIER.weight_bytes / 10**6) if VERIFIER else UNKNOWN_MB
    return verifier + (states_mb(data) if data else 0)


def memory_mb(stage):
    """The host's memory that extract, train, check or bench needs, for the run that a job is of."""

    def megabytes(wildcards):
        run = C.runs[wildcards.run] if "run" in wildcards.keys() else next(iter(C.runs.values()))
        return round(host_bytes(C, run, VERIFIER)[stage] / 10**6) if VERIFIER else UNKNOWN_MB

    return megabytes


def sizes_from(wildcards):
    """The verifier itself, where a plan can know its sizes from nothing else."""
    return [] if known_verifier(C) else [f"{R}/verifier"]


def verifier_mb(wildcards):
    """The disk that the verifier takes here: a local one is linked to."""
    known = VERIFIER and not C.verifier.source.startswith("path:")
    return round(VERIFIER.weight_bytes / 10**6) if known else 0


def training_mb(wildcards):
    """The disk that a run's checkpoints and training states take."""
    run, layers = C.runs[wildcards.run], len(C.extract.layer_ids)
    own = training_bytes(run, VERIFIER.text, layers)["disk"] // 10**6 if VERIFIER else UNKNOWN_MB
    return own + copied_mb(run.data)


def halved(bound):
    """A bound of memory; each further attempt of a job, as `retries` allow them, takes half."""
    return lambda wildcards, attempt: max(1, bound >> (attempt - 1))


def all_gpus(wildcards):
    """The GPUs of a run's training, on all of its machines."""
    train = C.runs[wildcards.run].train
    return train.gpus * train.nodes


def if_several(value):
    """A resource that only training on several machines has: `value` of their number."""

    def resource(wildcards):
        nodes = C.runs[wildcards.run].train.nodes
        return value(nodes) if nodes > 1 else None

    return resource


def launch(wildcards):
    """What starts training: torchrun where there is more than one process, on each of several
    machines that SLURM has given the job. They meet at the first, where the job's shell runs, at a
    port that two jobs of one machine hardly share. After `--`, since torchrun would take the
    script's --log for an abbreviation of its own options."""
    train = C.runs[wildcards.run].train
    torchrun = f"python -m torch.distributed.run --nproc-per-node {max(train.gpus, 1)}"
    if train.nodes > 1:
        return (
            f"srun --kill-on-bad-exit --nodes {train.nodes} --ntasks-per-node 1 --cpu-bind=none "
            f"{torchrun} --nnodes {train.nodes} --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID "
            "--rdzv-endpoint $(hostname):$((29400 + SLURM_JOB_ID % 1000)) --"
        )
    if train.gpus > 1:
        return f"{torchrun} --standalone --"
    # On a CPU nothing is compiled, and to load the compiler takes a second.
    return "python" if train.gpus else "TORCHDYNAMO_DISABLE=1 python"


def init_from(wildcards):
    """The draft to start from, if there is one."""
    folder = C.runs[wildcards.run].train.init_from
    return [local(folder)] if folder else []


def prompt_files():
    """Every file of prompts that a run is benchmarked on, beside the fetched one."""
    files = {file for run in C.runs.values() for file in run.bench.prompt_files.values()}
    return [local(file) for file in sorted(files)]


def bench_of(wildcards):
    """What a run's benchmark reads of other drafts and prompts."""
    bench = C.runs[wildcards.run].bench
    return [local(path) for path in (*bench.drafts.values(), *bench.prompt_files.values())]


def named(block, key):
    """A mapping of a run as NAME=VALUE, one option each."""
    return lambda wildcards: [f"{k}={v}" for k, v in of_run(block, key)(wildcards).items()]


def run_flag(block, key):
    """A run's switch: the option itself, or nothing."""
    return lambda wildcards: flag(key.replace("_", "-"), of_run(block, key)(wildcards))


def source_options(block):
    """A source of the config as options of scripts/fetch.py."""
    return ["--source", block.source, *(["--sha256", block.sha256] if block.sha256 else [])]


def content(block, identity, verifier=False):
    """A parameter that changes with what a local source holds, and not with its files' times."""
    try:
        return json.dumps(local_content(block.source, Path(identity), verifier))
    except DataError as error:
        sys.exit(str(error))


def flag(name, value):
    """A switch: the option itself, or nothing."""
    return [f"--{name}"] if value else []
