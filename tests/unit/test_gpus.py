"""The lock on a machine's GPUs, between processes that really hold it and are really killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyrie import gpus

SCRIPTS = Path(__file__).parents[2] / "scripts"
# A job that holds the lock, with a worker that was forked from it and so holds it too.
HOLD = """
import os, sys, time
from eyrie.gpus import hold
files = hold(sys.argv[1].split(","))
print("held", flush=True)
if sys.argv[2:] == ["fork"]:
    os.fork()
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that takes the lock; all are ended with the test."""
    started = []

    def run(*options: str, locks: str = "0", **environment: str) -> subprocess.Popen:
        paths = ",".join(str(tmp_path / name) for name in locks)
        command = [sys.executable, "-c", HOLD, paths, *options]
        environment = os.environ | {"PYTHONPATH": str(SCRIPTS)} | environment
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_the_second_waits_for_the_first_and_says_for_whom(start):
    first = start()
    assert first.stdout.readline() == "held\n"
    second = start()
    told = second.stderr.readline()
    assert f"waiting for the GPUs, held by process {first.pid} in {os.getcwd()} since" in told
    time.sleep(0.3)
    assert os.read(first.stdout.fileno(), 0) == b"" and second.poll() is None
    first.kill()
    assert second.stdout.readline() == "held\n"


def test_jobs_on_gpus_of_their_own_run_at_once(start):
    """And one that shares a GPU with each waits for both."""
    first, second = start(locks="01"), start(locks="23")
    assert first.stdout.readline() == second.stdout.readline() == "held\n"
    third = start(locks="21")
    assert f"held by process {first.pid} " in third.stderr.readline()
    first.kill()
    assert f"held by process {second.pid} " in third.stderr.readline()
    second.kill()
    assert third.stdout.readline() == "held\n"


def test_gpus_are_named_as_they_are_made_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.devices(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-f00,../x")
    assert gpus.devices(2) == ["2", "GPU-f00"]


def test_a_lock_is_not_kept_by_what_a_killed_job_left(start):
    ended = subprocess.Popen(["true"])
    ended.wait()
    first = start("fork", EYRIE_JOB=f"{ended.pid}:{os.getpid()}")
    assert first.stdout.readline() == "held\n"
    time.sleep(0.3)
    first.kill()
    second = start()
    assert second.stdout.readline() == "held\n"
    told = second.stderr.readline()
    assert told.startswith("ended process ") and told.endswith(", left by a job that was killed\n")


def test_processes_of_a_running_job_are_left_alone(start):
    first = start("fork", EYRIE_JOB=f"{os.getpid()}:{os.getppid()}")
    assert first.stdout.readline() == "held\n"
    second = start()
    assert "waiting for the GPUs" in second.stderr.readline()
    assert first.poll() is None


def test_fewer_gpus_than_needed_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    gpus.require_gpus(2, visible=2)
    with pytest.raises(ValueError, match=r"8 GPUs needed, 2 visible \(CUDA_VISIBLE_DEVICES is 2,3"):
        gpus.require_gpus(8, visible=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="is not set"):
        gpus.require_gpus(1, visible=0)
