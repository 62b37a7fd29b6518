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
from pathlib import Path
from eyrie.gpus import hold
file = hold(Path(sys.argv[1]))
print("held", flush=True)
if sys.argv[2:] == ["fork"]:
    os.fork()
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that takes the lock; all are ended with the test."""
    started = []

    def run(*options: str, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), *options]
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
