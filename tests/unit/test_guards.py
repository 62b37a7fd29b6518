"""What is asked of Snakemake's own objects, and what it leaves in a folder."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyrie import guards, jobs

RUNS = SimpleNamespace(runs=dict.fromkeys(["10", "1k", "1k-wide"]), sweep=["10", "1k-wide"])


def workflow(*targets: str, remote: bool = False) -> SimpleNamespace:
    return SimpleNamespace(remote_exec=remote, dag_settings=SimpleNamespace(targets=set(targets)))


def test_a_job_on_another_machine_knows_which_runs_were_asked_for(monkeypatch):
    """Its own target is what it makes, which names a data set alone."""
    monkeypatch.setenv("EYRIE_ASKED", "[]")
    elsewhere = workflow("results/data/1k/preflights.json", remote=True)
    for targets, asked in {
        ("results/ckpt_1k",): ["1k"],
        ("results/report_sweep.html",): ["10", "1k-wide"],
        ("r/bench_1k-wide.json", "r/ckpt_10/"): ["10", "1k-wide"],
        (): ["10"],
    }.items():
        assert guards.asked_for(workflow(*targets), RUNS, "results/report_10.html") == asked
        assert guards.asked_for(elsewhere, RUNS, "") == asked
    # A pod gets no variable: all runs are looked at.
    monkeypatch.delenv("EYRIE_ASKED")
    assert guards.asked_for(elsewhere, RUNS, "") == ["10", "1k", "1k-wide"]


@pytest.fixture
def locked(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["snakemake", "-j", "8", "a target"])
    monkeypatch.setattr(jobs, "end", lambda wanted: ["12 python"])
    lock = tmp_path / ".snakemake/locks/0.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("a target\n")
    return lock


def test_a_lock_of_a_killed_run_is_removed_and_what_was_cleaned_is_told(locked, capsys):
    guards.tell_holder(False)
    guards.free_of_locks()
    assert not locked.exists() and not guards.HOLDERS.exists()
    told = capsys.readouterr().err
    assert "removed the lock" in told and "ended process 12 python" in told


@pytest.mark.parametrize("holder", ["none", "cluster", "reboot"])
def test_a_lock_whose_jobs_may_run_elsewhere_stays(locked, capsys, holder):
    if holder == "cluster":
        guards.tell_holder(False)
        guards.tell_holder(True)
    elif holder == "reboot":
        guards.HOLDERS.write_text(f"another boot {os.readlink('/proc/self/ns/pid')}\n")
    guards.free_of_locks()
    assert locked.exists()
    assert "snakemake -j 8 'a target' --unlock" in capsys.readouterr().err
