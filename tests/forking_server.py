"""Imports what the project's scripts do, listens at a socket, and forks for each that
forking.Forked asks for. It ends with the tests."""

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

# Not the project's own modules: a script may be of a changed copy.
PRELOAD = [
    "matplotlib.figure",
    "pandas",
    "snakemake.cli",
    "speculators.models.eagle3.core",
    "speculators.train.trainer",
    "torch.utils.tensorboard",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_model_runner",
]


def run(command: list[str], folder: str, environment: dict, code: str, files: list[int]) -> None:
    """What the forked process does."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    preloaded = os.environ["LD_PRELOAD"]
    os.environ.clear()
    os.environ.update(environment)
    # A script takes it as set for all that it starts; Snakemake has its scripts start with it.
    os.environ["LD_PRELOAD"] = preloaded
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    exec(code, {})
    runpy.run_path(command[0], run_name="__main__")


def watch(connection: socket.socket, pid: int) -> None:
    """Tell how the process ends, or end it with whom it is for."""
    connection.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended in ready:
        connection.send(str(code).encode())


def main() -> None:
    address, tests = Path(sys.argv[1]), Path("/proc") / sys.argv[2]
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}.partial")
    listener.listen(16)
    Path(f"{address}.partial").rename(address)
    listener.settimeout(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while tests.exists():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        order, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        pid = os.fork()
        if not pid:
            connection.close()
            run(*json.loads(order), files)
            return
        for file in files:
            os.close(file)
        watch(connection, pid)
        os._exit(0)
    shutil.rmtree(address.parent)
    Path(f"{address.parent}.lock").unlink()


if __name__ == "__main__":
    main()
