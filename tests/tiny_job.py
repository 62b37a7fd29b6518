"""The workflow on the jobs of configs/, and what tests ask of the tiny one's results."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from forking import python, run_to_end

from eyrie.hidden import HiddenStates

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
REPORT = "results/tiny/report_tiny.html"


def snakemake(
    cwd: Path, *arguments: str, ok: bool = True, repo: Path = ROOT, config: str = "tiny"
) -> str:
    """Run Snakemake on a job of configs/ in `cwd`; returns all that it printed. It and its jobs'
    scripts are forked."""
    code, output = forked_snakemake(cwd, snakemake_command(repo, config, *arguments))
    assert (code == 0) == ok, output[-6000:]
    return output


def forked_snakemake(cwd: Path, command: list[str]) -> tuple[int, str]:
    """(exit code, output)"""
    with tempfile.TemporaryDirectory() as folder:
        # Jobs start their scripts with the Python that runs Snakemake.
        code = f"import os, sys; os.chdir({str(cwd)!r}); sys.executable = {str(python())!r}"
        return run_to_end(command, Path(folder), code)


def snakemake_command(repo: Path, config: str, *arguments: str) -> list[str]:
    program = str(Path(sys.executable).with_name("snakemake"))
    options = ["--configfile", str(repo / f"configs/{config}.yaml"), "-j", "2", *arguments]
    return [program, "-s", str(repo / "Snakefile"), *options]


def jobs_of(output: str) -> set[str]:
    """The rules that a dry run would run."""
    if "Nothing to be done" in output:
        return set()
    table = output.split("Job stats:")[1].split("total")[0].splitlines()[3:]
    return {line.split()[0] for line in table if line.strip()}


def check_states(verifier: Path, tree: Path) -> tuple[int, int]:
    """Compare each stored layer with transformers' own forward; a layer off by one must fail.

    Returns the supervised tokens, and how many of them the verifier's own head gives on the last
    state of the token before.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    paths = sorted((tree / "data/tiny/hidden").glob("*.safetensors"))
    states = HiddenStates(paths)
    assert len(paths) == 3 and sum(map(len, states.rows)) == 24
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    greedy = total = 0
    for shard, rows in enumerate(states.rows):
        for index in range(len(rows)):
            row = states.row(shard, index)
            with torch.no_grad():
                out = model(row["input_ids"].long()[None], output_hidden_states=True)
            expected = [h[0] for h in out.hidden_states[:4]] + [before_norm[-1]]
            for position, layer in enumerate([1, 2, 3, 4]):
                found = row["hidden_states"][:, position].float()
                errors = [float((found - e).norm() / e.norm()) for e in expected]
                # 4e-3 is bf16's own rounding.
                assert errors[layer] < 4e-3, (layer, errors)
                assert min(errors[:layer] + errors[layer + 1 :]) > 0.05, (layer, errors)
            last = row["hidden_states"][:, 3].float()
            predicted = model.lm_head(model.model.norm(last)).argmax(-1)
            written = row["loss_mask"][1:]
            greedy += int((predicted[:-1] == row["input_ids"][1:])[written].sum())
            total += int(written.sum())
    return total, greedy


def train(job: Path, folder: Path, **changes) -> list[str]:
    """scripts/train.py on the job's states, with its settings but for `changes`."""
    tree = job / "results/tiny"
    settings = json.loads((tree / "ckpt_tiny/manifest.json").read_text())["config"] | changes
    given = {k: v for k, v in settings.items() if not isinstance(v, bool | list | None)}
    given |= {"vocab": tree / "vocab_tiny.safetensors", "verifier": tree / "verifier"}
    given |= {"identity": tree / "verifier.json", "state": folder / "state"}
    given |= {"out": folder / "ckpt"}
    command = [SCRIPTS / "train.py", "--layer-ids", 1, 2, 3, "--hidden"]
    command += sorted((tree / "data/tiny/hidden").glob("*.safetensors"))
    flags = [name for name, value in settings.items() if value is True]
    command += ["--" + name.replace("_", "-") for name in flags]
    for name, value in given.items():
        command += ["--" + name.replace("_", "-"), value]
    return [str(part) for part in command]


def processes_with(text: str) -> list[str]:
    """The processes in whose environment `text` is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found
