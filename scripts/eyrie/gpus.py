"""One job at a time on a GPU, whoever started it."""

import fcntl
import os
import sys
import time
from collections.abc import Iterable

from eyrie.jobs import end_orphans

# Not in TMPDIR, which may differ between two terminals.
LOCK = "/tmp/eyrie-gpu-{user}-{device}.lock"


def hold_gpus(count: int):
    """Wait for all GPUs that are visible and hold them until this process ends; nothing for a CPU
    job.

    Snakemake keeps the jobs of one run apart; two runs in two terminals are kept apart by these
    locks, unless CUDA_VISIBLE_DEVICES gives each GPUs of its own. Under SLURM the scheduler has
    given the job its own. Returns the locks' open files, to be kept.

    Raises:
        ValueError: fewer GPUs are visible than the job needs.
    """
    if not count:
        return None
    import torch

    visible = torch.cuda.device_count()
    require_gpus(count, visible)
    if "SLURM_JOB_ID" in os.environ:
        return None
    return hold(LOCK.format(user=os.getuid(), device=name) for name in devices(visible))


def devices(visible: int) -> list[str]:
    """The names of so many visible GPUs, as CUDA_VISIBLE_DEVICES has them; else their numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else map(str, range(visible))
    # CUDA leaves out what follows the first name that is none.
    return [name.strip() for name in names][:visible]


def require_gpus(count: int, visible: int) -> None:
    """Raise ValueError if fewer are visible: a job never runs on fewer than its rule says."""
    if visible < count:
        raise ValueError(
            f"{count} GPUs needed, {visible} visible (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); set `gpus` in the config"
        )


def hold(paths: Iterable[str]) -> list:
    """Lock files, telling who holds one if that takes time, once what killed jobs left is ended.

    The system drops the locks when this process and those forked from it have ended, in whatever
    way. Returns the open files.

    Raises:
        ValueError: one of them is no file of ours.
    """
    end_orphans()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    files = []
    # In one order, so that no two jobs wait for each other.
    for path in sorted(paths):
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
        except OSError as error:
            raise ValueError(f"{error}: what keeps GPU jobs apart; delete it") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read().strip()
            print(f"waiting for the GPUs, held by {holder}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} in {os.getcwd()} since {since}: {' '.join(sys.argv)}\n")
        file.flush()
        files.append(file)
    return files
