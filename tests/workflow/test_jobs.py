"""Jobs that need GPUs and one that is killed, under the project's own profile and common.smk."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from forking import python

# Each job tells when it began and ended.
SNAKEFILE = """
configfile: "config.yaml"

include: "rules/common.smk"
include: "rules/inputs.smk"

rule all:
    default_target: True
    input: expand("{job}.json", job=["a", "b"])

rule job:
    output: "{job}.json"
    resources: gpu=8
    shell:
        '''python -c "import json, os, time; began = time.time(); time.sleep(0.5)
json.dump([began, time.time(), os.environ['CUDA_VISIBLE_DEVICES']], open('{output}', 'w'))"'''

rule killed:
    output: "killed"
    shell: '''python -c "import os; os.kill(os.getpid(), 9)"'''

rule failing:
    output: "shared/failed"
    shell: "exit 3"

rule slow:
    output: "shared/made"
    shell: "sleep 2; touch {output}"

rule retried:
    output: "retried"
    resources: prefill=halved(5)
    shell: "echo {resources.prefill} >> tried; test {resources.prefill} = 1 && mv tried {output}"
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny.make_workflow(tmp_path, SNAKEFILE)


def run(folder: Path, *options: str, config: Sequence[str] = ()) -> subprocess.CompletedProcess:
    snakemake = Path(sys.executable).with_name("snakemake")
    command = [python(), snakemake, "-j", "2", *options, "--config", "extract={gpus: 8}", *config]
    return subprocess.run(
        ["env", "CUDA_VISIBLE_DEVICES=7,6,5,4,3,2,1,0", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "options, overlap",
    [
        ([], False),
        (["--resources", "other=1"], False),
        # The same two jobs do overlap where there are GPUs for both.
        (["--resources", "gpu=16"], True),
    ],
)
def test_two_jobs_overlap_only_where_there_are_gpus_for_both(folder, options, overlap):
    done = run(folder, *options)
    assert done.returncode == 0, done.stderr
    jobs = sorted(json.loads((folder / f"{name}.json").read_text()) for name in "ab")
    assert (jobs[1][0] < jobs[0][1]) == overlap
    assert {visible for _, _, visible in jobs} == {"7,6,5,4,3,2,1,0"}


def test_a_limit_below_what_a_job_needs_is_an_error(folder):
    """Snakemake would give the job fewer without a word."""
    done = run(folder, "--resources", "gpu=4")
    assert done.returncode == 1
    assert "a job needs 8 GPUs, and Snakemake may give 4" in done.stderr
    assert not list(folder.glob("?.json"))


def test_a_job_killed_for_want_of_memory_says_what_to_lower(folder):
    done = run(folder, "killed")
    assert done.returncode == 1
    hint = "killed by signal 9, most often for want of memory: lower extract.max"
    assert any(line.startswith(hint) for line in done.stderr.splitlines())


def test_a_job_that_fails_is_not_said_to_be_killed_and_ends_no_other(folder):
    done = run(folder, "shared/failed", "shared/made")
    assert done.returncode == 1 and "exit 3" in done.stderr
    assert "signal 9" not in done.stderr
    assert (folder / "shared/made").exists()


def test_each_further_attempt_takes_half(folder):
    done = run(folder, "retried", "--retries", "3")
    assert done.returncode == 0, done.stderr
    assert (folder / "retried").read_text().split() == ["5", "2", "1"]


def test_training_on_several_machines_needs_the_gpus_of_all(folder):
    done = run(folder, config=["train={gpus: 8, nodes: 2}"])
    assert done.returncode == 1
    assert "a job needs 16 GPUs, and Snakemake may give 8" in done.stderr
    assert "on a cluster take --workflow-profile" in done.stderr
