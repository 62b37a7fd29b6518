import subprocess
from pathlib import Path

import pytest
import tiny
from filelock import FileLock
from tiny_job import REPORT, ROOT, snakemake_command


@pytest.fixture(scope="session")
def finished(tmp_path_factory, worker_id) -> Path:
    """A finished tiny job, made once for the processes that pytest-xdist runs tests in, in a folder
    with a blank and a quote in its path, which is another working directory than the repository's.
    Nothing of it is forked from what the tests have imported.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    folder = shared / "finished"
    with FileLock(shared / "finished.lock"):
        if not folder.exists():
            made = shared / "a job's folder"
            tiny.make_inputs(made / "inputs")
            command = snakemake_command(ROOT, "tiny", REPORT)
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
            made.rename(folder)
    return folder


@pytest.fixture(scope="module")
def job(finished, tmp_path_factory) -> Path:
    """A copy of the finished job, which tests may change."""
    folder = tmp_path_factory.mktemp("a job's copy") / "job"
    # With the links between the store and the hidden shards.
    subprocess.run(["cp", "-a", finished, folder], check=True)
    return folder
