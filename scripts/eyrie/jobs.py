"""A job's processes end with it, and the job ends with Snakemake.

Snakemake cannot end its jobs when it is killed, and neither can a job whose workers, an engine's
or torchrun's, do not watch it. So rules/job.sh has `python jobs.py JOB SNAKEMAKE` run beside
each job, and every process of the job carries MARK in the environment that it was started with.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

MARK = b"EYRIE_JOB="  # then the process ids of the job's shell and of its Snakemake, as 12:10
GRACE = 10.0  # seconds from SIGTERM to SIGKILL: training saves its state in them
POLL = 0.05
ENDING = 2.0  # seconds in which what a job that is done has left, as a forkserver, ends by itself


def running() -> dict[int, list[int]]:
    """The processes of all jobs, of this user and this container, and the two ids of each."""
    container = os.readlink("/proc/self/ns/pid")
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid() or os.readlink(folder / "ns/pid") != container:
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended since, or not to be looked into
            continue
        marks = [entry.removeprefix(MARK) for entry in environment if entry.startswith(MARK)]
        if marks:
            found[int(folder.name)] = [int(part) for part in marks[0].split(b":")]
    return found


def end(wanted) -> list[str]:
    """End the processes whose two ids fulfil `wanted`; returns the number and name of each."""
    ended = {}
    deadline = time.monotonic() + GRACE
    while pids := [pid for pid, ids in running().items() if wanted(*ids) and pid != os.getpid()]:
        late = time.monotonic() - deadline
        if late > GRACE:  # not even SIGKILL ends what hangs in a driver
            break
        for pid in pids:
            try:
                if late > 0 or pid not in ended:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    os.kill(pid, signal.SIGKILL if late > 0 else signal.SIGTERM)
                    ended.setdefault(pid, f"{pid} {name}")
            except (FileNotFoundError, ProcessLookupError):
                continue
        time.sleep(POLL)
    return list(ended.values())


def end_orphans() -> None:
    """End what jobs have left whose shell or Snakemake is gone, and say what that was."""
    for process in end(
        lambda job, snakemake: not all(map(os.path.exists, (f"/proc/{job}", f"/proc/{snakemake}")))
    ):
        print(f"ended process {process}, left by a job that was killed", file=sys.stderr)


def runs_here() -> list[int]:
    """The other Snakemake processes of this machine that run in this folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            here = os.readlink(folder / "cwd") == os.getcwd()
            words = (folder / "cmdline").read_text().split("\0")[:3]
        except OSError:
            continue
        if here and "snakemake" in [Path(word).name for word in words]:
            found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def main() -> None:
    job, snakemake = map(int, sys.argv[1:])
    os.setsid()  # not reached by the terminal's Ctrl-C
    try:
        watched = [os.pidfd_open(job), os.pidfd_open(snakemake)]
    except ProcessLookupError:
        watched = []
    if watched:
        gone, _, _ = select.select(watched, [], [])
        if watched[0] not in gone:
            signal.pidfd_send_signal(watched[0], signal.SIGTERM)
        late = time.monotonic() + (ENDING if watched[0] in gone else 0)
        while time.monotonic() < late and any(number == job for number, _ in running().values()):
            time.sleep(POLL)
    ended = end(lambda number, _: number == job)
    if ended:
        print(f"ended what was left of job {job}: {', '.join(ended)}", file=sys.stderr)


if __name__ == "__main__":
    main()
