"""One GPU job at a time on a machine, whoever started it."""

import fcntl
import os
import sys
import time
from pathlib import Path

from eyrie.jobs import end_orphans

# Not in TMPDIR, which may differ between two terminals.
LOCK = Path(f"/tmp/eyrie-gpus-{os.getuid()}.lock")


def hold_gpus(count: int):
    """Wait for the machine's GPUs and hold them until this process ends; nothing for a CPU job.

    Snakemake keeps the jobs of one run apart; two runs in two terminals are kept apart by this
    lock. Under SLURM the scheduler has given the job GPUs of its own. Returns the lock's open
    file, to be kept.

    Raises:
        ValueError: fewer GPUs are visible than the job needs.
    """
    if not count:
        return None
    import torch

    require_gpus(count, torch.cuda.device_count())
    return None if "SLURM_JOB_ID" in os.environ else hold(LOCK)


def require_gpus(count: int, visible: int) -> None:
    """Raise ValueError if fewer are visible: a job never runs on fewer than its rule says."""
    if visible < count:
        raise ValueError(
            f"{count} GPUs needed, {visible} visible (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); set `gpus` in the config"
        )


def hold(path: Path):
    """Lock a file, telling who holds it if that takes time, once what killed jobs left is ended.

    The system drops the lock when this process and those forked from it have ended, in whatever
    way. Returns the open file.
    """
    for process in end_orphans():
        print(f"ended process {process}, left by a job that was killed", file=sys.stderr)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for the GPUs, held by {file.read().strip()}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
    file.truncate()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} in {os.getcwd()} since {since}: {' '.join(sys.argv)}\n")
    file.flush()
    return file
