"""One GPU job at a time on a machine, whoever started it."""

import fcntl
import os
import sys
import tempfile
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / f"eyrie-gpus-{os.getuid()}.lock"


def hold_gpus(count: int):
    """Wait for the machine's GPUs and hold them until this process ends; nothing for a CPU job.

    Snakemake keeps the jobs of one run apart; two runs in two terminals are kept apart by this
    lock, which the system drops with the process. Returns the lock's open file, to be kept.

    Raises:
        ValueError: fewer GPUs are visible than the job needs.
    """
    if not count:
        return None
    import torch

    visible = torch.cuda.device_count()
    if visible < count:
        raise ValueError(
            f"{count} GPUs needed, {visible} visible (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); set `gpus` in the config"
        )
    file = open(LOCK, "a+")  # noqa: SIM115, held as long as the process lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        print(f"waiting for the GPUs, held by {file.read().strip()}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(f"process {os.getpid()}: {' '.join(sys.argv)}\n")
    file.flush()
    return file
