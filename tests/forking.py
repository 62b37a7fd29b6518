"""Scripts, and Snakemake itself, in processes that are forked from one that has imported what they
need: a job of the workflow spends most of its time on that, and a suite runs hundreds.

As a program, in the place of Python, it runs the script or the Snakemake that it is given so.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The engine's own OpenMP; with it preloaded the scripts need not start themselves again.
OPENMP = str(Path(sys.prefix) / "lib" / "libiomp5.so")

PYTHON = """#!/bin/sh
case $1 in
*.py | */snakemake) exec "{python}" -SE "{client}" "$@" ;;
*) exec "{python}" "$@" ;;
esac
"""


class Forked:
    """A script with its options, in the folder and the environment of this process, after `code`.
    files: its standard input, output and error."""

    def __init__(self, command: list[str], files: list[int], code: str = ""):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(os.environ["EYRIE_FORKS"])
        order = json.dumps([command, os.getcwd(), dict(os.environ), code])
        socket.send_fds(self.socket, [order.encode()], files)
        self.pid = int(self.socket.recv(100))

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, or None if it still runs after so many seconds."""
        self.socket.settimeout(timeout)
        try:
            return int(self.socket.recv(100))
        except (TimeoutError, BlockingIOError):  # the second, of no time at all
            return None


def python() -> Path:
    """What takes Python's place: it starts what forks at its first use, for all that run tests."""
    from filelock import FileLock

    worker = "PYTEST_XDIST_WORKER" in os.environ
    tests = os.getppid() if worker else os.getpid()
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", tests)
    folder = Path(tempfile.gettempdir()) / f"eyrie-tests-{run}"
    program, address = folder / "python", folder / "socket"
    with FileLock(f"{folder}.lock"):
        if not address.exists():
            folder.mkdir()
            program.write_text(PYTHON.format(python=sys.executable, client=__file__))
            program.chmod(0o755)
            server = Path(__file__).with_name("forking_server.py")
            started = subprocess.Popen(
                [sys.executable, server, address, str(tests)],
                env=os.environ | {"LD_PRELOAD": OPENMP},
                start_new_session=True,
            )
            while not address.exists():
                assert started.poll() is None
                time.sleep(0.1)
    os.environ["EYRIE_FORKS"] = str(address)
    return program


def start(command: list[str], folder: Path, code: str = "") -> Forked:
    """Start a script with its options; what it prints is folder/output."""
    python()
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.devnull) as nothing, open(folder / "output", "w") as file:
        return Forked(command, [nothing.fileno(), file.fileno(), file.fileno()], code)


def run_to_end(command: list[str], folder: Path, code: str = "") -> tuple[int, str]:
    """(exit code, output)"""
    code = start(command, folder, code).wait()
    return code, (folder / "output").read_text()


def main() -> None:
    process = Forked(sys.argv[1:], [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    code = process.wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
