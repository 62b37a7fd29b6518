"""Folders that may not be written to, and results that lie where the data do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from tiny_job import ROOT, snakemake

SHARDS = "results/tiny/data/tiny/shards.json"


def read_only(folder: Path) -> Path:
    """Take away the right to write to a folder and to all in it."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def run(folder: Path, repo: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Snakemake as a user whom modes bind; root is not, but for these capabilities."""
    command = [str(Path(sys.executable).with_name("snakemake")), "-s", str(repo / "Snakefile")]
    command += [f"--configfile={repo / 'configs/tiny.yaml'}", "-j", "2", *arguments]
    if not os.getuid():
        without = "-dac_override,-dac_read_search,-fowner"
        command = ["setpriv", f"--bounding-set={without}", f"--inh-caps={without}", *command]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_inputs_and_a_checkout_that_are_read_only_in_a_folder_with_a_blank_and_a_quote(tmp_path):
    """And results that are, which is told in one line, before anything is deleted."""
    folder = tmp_path / "my run's dir"
    ignore = shutil.ignore_patterns(".*", "results", "tests", "__pycache__")
    repo = read_only(Path(shutil.copytree(ROOT, folder / "repo", ignore=ignore)))
    tiny.make_inputs(folder / "inputs")
    read_only(folder / "inputs")
    done = run(folder, repo, SHARDS)
    assert done.returncode == 0, done.stderr
    made = folder / "results/tiny"
    assert (made / "verifier/model.safetensors").samefile(
        folder / "inputs/verifier/model.safetensors"
    )
    before = sorted(made.rglob("*"))
    made.chmod(0o555)
    done = run(folder, repo, SHARDS, "-F")
    assert done.returncode == 1
    assert "results: results/tiny may not be written to" in done.stderr
    assert "Traceback" not in done.stderr and sorted(made.rglob("*")) == before
    made.chmod(0o755)


@pytest.mark.parametrize("results", ["inputs/verifier", "."])
def test_results_where_the_sources_lie_are_refused(tmp_path, results):
    """A rule's output is deleted before it is made, and would be the source."""
    tiny.make_inputs(tmp_path / "inputs")
    before = sorted((tmp_path / "inputs").rglob("*"))
    output = snakemake(tmp_path, "all", "--config", f"results={results}", ok=False)
    assert "lies in the results" in output and "Traceback" not in output
    assert sorted((tmp_path / "inputs").rglob("*")) == before


def test_files_are_for_whom_the_umask_lets(job):
    """safetensors writes them for their owner alone."""
    made = [p for p in (job / "results/tiny").rglob("*") if p.is_file() and not p.is_symlink()]
    made = [p for p in made if not p.is_relative_to(job / "results/tiny/.state/preflight")]
    assert made and [p for p in made if not p.stat().st_mode & 0o044] == []


def test_a_draft_and_prompts_that_the_config_names_count_by_what_they_hold(job):
    """Not by their times; those that a rule makes do."""
    inputs, target = job / "inputs", "results/tiny/bench_tiny.json"
    draft = shutil.copytree(job / "results/tiny/ckpt_tiny", inputs / "draft")
    (inputs / "more.jsonl").write_bytes((inputs / "prompts.jsonl").read_bytes())
    names = "bench={drafts: {a: inputs/draft}, prompt_files: {more: inputs/more.jsonl}}"
    arguments = ["-n", target, "--config", names]
    snakemake(job, "--touch", target, "--config", names)
    assert "Nothing to be done" in snakemake(job, *arguments)
    os.utime(draft / "model.safetensors")
    os.utime(draft)
    os.utime(inputs / "more.jsonl")
    assert "Nothing to be done" in snakemake(job, *arguments)
    for path, rule in (
        (draft / "model.safetensors", "bench"),
        (inputs / "more.jsonl", "shard_tiny"),
    ):
        whole, stat = path.read_bytes(), path.stat()
        path.write_bytes(whole[:-2] + b" " + whole[-1:])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert f"rule {rule}:" in snakemake(job, *arguments)
        path.write_bytes(whole)


def test_a_checkpoint_that_has_lost_its_weights_is_not_taken_for_done(job):
    weights = job / "results/tiny/ckpt_tiny/model.safetensors"
    weights.rename(job / "kept")
    output = snakemake(job, "-n", "results/tiny/ckpt_tiny", ok=False)
    assert "results/tiny/ckpt_tiny: model.safetensors is gone; delete the folder" in output
    assert ".smk" not in output and "Traceback" not in output
    (job / "kept").rename(weights)
