"""Processes that a stage starts."""

import ctypes
import signal


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, whatever ended that."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
