"""Settings of the config as options of the scripts that rules start."""

import json
import shlex

from eyrie.config import Config, SourceBlock, Train


def flag(name: str, value) -> list[str]:
    """A switch: the option itself, or nothing."""
    return [f"--{name}"] if value else []


def source(block: SourceBlock) -> list[str]:
    """What scripts/fetch.py is told of a source."""
    return ["--source", block.source, *(["--sha256", block.sha256] if block.sha256 else [])]


def draft_shape(config: Config, run: str) -> list[str]:
    """The `draft` block of a run. Its `reference` is laid under it by then."""
    options = []
    for key, value in config.runs[run].draft:
        name = key.replace("_", "-")
        if isinstance(value, bool):
            options += flag(name, value)
        elif key != "reference":
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            options += [f"--{name}", text]
    return options


def drafts(config: Config, runs: list[str]) -> str:
    """What scripts/preflight.py is told of some runs' drafts: JSON, {run: options}."""
    options = {}
    for run in runs:
        size, train = config.runs[run].vocab.draft_vocab_size, config.runs[run].train
        options[run] = [*draft_shape(config, run), "--draft-vocab-size", str(size)]
        options[run] += ["--ttt-steps", str(train.ttt_steps), "--layout", train.layout]
        options[run] += ["--nodes", str(train.nodes)]
    return json.dumps(options)


def prompts_asked(config: Config, runs: list[str]) -> str:
    """How many prompts of each file the benchmarks of some runs ask for: JSON, {path: number}."""
    counts = {f"{config.results}/prompts": 0}
    for bench in (config.runs[run].bench for run in runs):
        for path in counts.keys() | set(bench.prompt_files.values()):
            counts[path] = max(counts.get(path, 0), bench.prompts)
    return json.dumps(counts, sort_keys=True)


def preflight_engine(config: Config) -> str:
    """What decides whether extraction has the memory, and how long what is served may be."""
    extract = config.extract
    return shlex.join(
        [
            f"--dtype={config.verifier.dtype}",
            f"--max-model-len={config.bench.max_model_len}",
            f"--gpus={extract.gpus}",
            f"--gpu-memory-percent={round(100 * extract.gpu_memory_utilization)}",
            f"--kv-cache-gib={extract.kv_cache_gib}",
            f"--max-num-batched-tokens={extract.max_num_batched_tokens}",
        ]
    )


def launch(train: Train) -> str:
    """What starts training: torchrun where there is more than one process, on each of several
    machines that SLURM has given the job. They meet at the first, where the job's shell runs, at a
    port that two jobs of one machine hardly share. After `--`, since torchrun would take the
    script's --log for an abbreviation of its own options."""
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
