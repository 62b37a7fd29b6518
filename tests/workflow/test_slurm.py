"""The workflow under profiles/slurm, on a real SLURM of two nodes with 8 pretended GPUs each."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import tiny
from tiny_job import ROOT

if not shutil.which("slurmctld") or not importlib.util.find_spec("snakemake_executor_plugin_slurm"):
    pytest.skip("needs Debian's slurm-wlm and envs/slurm.txt", allow_module_level=True)

# Jobs that tell when they ran and on what. As training does, `long` saves its state when it is told
# to end, and goes on from it.
SNAKEFILE = """
configfile: "config.yaml"

include: "rules/common.smk"
include: "rules/inputs.smk"

rule gpus:
    output: "{job}.json"
    resources: gpu=8
    shell:
        '''python -c "import json, os, time; began = time.time(); time.sleep(1)
print(json.dumps([began, time.time(), os.environ['CUDA_VISIBLE_DEVICES']]))" >> {wildcards.job}.log
cp {wildcards.job}.log {output}'''

rule many:
    output: "sixteen"
    resources: gpu=16
    shell: "touch {output}"

rule long:
    output: "long"
    resources: gpu=1, prefill=halved(64)
    shell:
        '''test -e state && mv state {output} && exit
trap "echo saved > state; exit 1" TERM; touch started; sleep 60 & wait'''

rule hungry:
    output: "hungry"
    resources: gpu=1, prefill=halved(64)
    shell: "echo {resources.prefill} >> tries; test {resources.prefill} -lt 64; touch {output}"
"""

GPUS = ["--config", "extract={gpus: 8}"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which SLURM's commands find it."""
    folder = tmp_path_factory.mktemp("slurm")
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    script = ["bash", ROOT / "tests/slurm.sh"]
    subprocess.run([*script, "up", folder], env=os.environ | {"PATH": path}, check=True)
    path = f"{folder / 'bin'}{os.pathsep}{path}"
    yield os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    subprocess.run([*script, "down", folder], check=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny.make_workflow(tmp_path, SNAKEFILE)


def snakemake(folder: Path, slurm: dict, *arguments: str) -> subprocess.Popen:
    program = Path(sys.executable).with_name("snakemake")
    options = ["--workflow-profile", ROOT / "profiles/slurm"]
    options += [] if "--retries" in arguments else ["--retries", "0"]
    # A real cluster has more to do than to answer every few seconds.
    options += ["--slurm-init-seconds-before-status-checks", "5", "--latency-wait", "5"]
    with open(folder / "output", "w") as output:
        return subprocess.Popen(
            [program, *arguments, *options],
            cwd=folder,
            env=slurm,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def ended(process: subprocess.Popen, folder: Path) -> tuple[int, str]:
    return process.wait(timeout=600), (folder / "output").read_text()


def test_two_jobs_of_eight_gpus_queue_and_one_of_sixteen_is_refused(slurm, folder):
    run = snakemake(folder, slurm, "a.json", "b.json", "sixteen", "-k", *GPUS)
    code, output = ended(run, folder)
    assert code == 1
    assert "Requested node configuration is not available" in output
    assert "2 of 3 steps" in output and not (folder / "sixteen").exists()
    # A line each: a job runs once, on all of its GPUs.
    jobs = sorted(json.loads((folder / f"{name}.json").read_text()) for name in "ab")
    assert jobs[0][1] <= jobs[1][0]
    assert [visible for _, _, visible in jobs] == ["0,1,2,3,4,5,6,7"] * 2
    told = subprocess.run(
        ["scontrol", "-d", "show", "job"], env=slurm, capture_output=True, text=True, check=True
    )
    assert told.stdout.count("JOB_GRES=gpu:8") == 2


def test_a_cancelled_job_saves_its_state_and_the_next_goes_on(slurm, folder):
    # Not by Ctrl-C, which Snakemake forgets to pass on while it asks how its jobs fare.
    run = snakemake(folder, slurm, "long", *GPUS)
    deadline = time.monotonic() + 60
    while not (folder / "started").exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    running = ["squeue", "-h", "-o", "%i", "-t", "running,pending"]
    told = subprocess.run(running, env=slurm, capture_output=True, text=True, check=True)
    subprocess.run(["scancel", *told.stdout.split()], env=slurm, check=True)
    code, output = ended(run, folder)
    assert code == 1, output
    assert (folder / "state").read_text() == "saved\n"
    assert not subprocess.run(running, env=slurm, capture_output=True, check=True).stdout
    code, output = ended(snakemake(folder, slurm, "long", *GPUS), folder)
    assert code == 0, output
    assert (folder / "long").read_text() == "saved\n"


def test_a_job_that_failed_is_tried_again_with_half_the_prefill(slurm, folder):
    code, output = ended(snakemake(folder, slurm, "hungry", "--retries", "1", *GPUS), folder)
    assert code == 0, output
    assert (folder / "tries").read_text() == "64\n32\n"


def test_two_nodes_train_together(slurm, finished, tmp_path):
    """Each stage is a job, and training a process on each node, which take the steps of one that
    reads two batches a step."""
    folder = tmp_path / "job"
    subprocess.run(["cp", "-a", finished, folder], check=True)
    target = ["results/tiny/check_tiny.json", "-s", ROOT / "Snakefile"]
    target += [f"--configfile={ROOT / 'configs/tiny.yaml'}"]
    target += ["--set-resources", "train:slurm_partition=both", "--config", "train={nodes: 2}"]
    code, output = ended(snakemake(folder, slurm, *target), folder)
    assert code == 0, output
    assert re.search(r"^train +1$", output, re.MULTILINE)
    told = subprocess.run(
        ["scontrol", "show", "job"], env=slurm, capture_output=True, text=True, check=True
    )
    assert "NodeList=n[1-2]" in told.stdout
    together, alone = (
        pd.read_parquet(of / "results/tiny/ckpt_tiny/metrics.parquet").kind.eq("step").sum()
        for of in (folder, finished)
    )
    # Two epochs, each of half as many steps.
    assert together == 2 * -(-alone // 4)
