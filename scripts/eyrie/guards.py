"""What Snakemake itself does not see to: jobs that end whole, a limit on GPUs that nobody has to
set, and words for what it says too shortly.

`workflow` is Snakemake's own, of the version that the Snakefile asks for; tests/workflow holds each
of these to what it is for.
"""

import os
import shlex
import sys
from pathlib import Path

from snakemake.resources import Resource

from eyrie.jobs import runs_here

SCRIPTS = Path(__file__).parents[1]
KILLED = (
    "killed by signal 9, most often for want of memory: lower extract.max_num_seqs or kv_cache_gib"
)


def shell_prefix() -> str:
    """What each job's shell begins with. Rules run `python "$SCRIPTS/stage.py"`: the Python that
    runs Snakemake, and its checkout wherever it lies; in params these paths would rerun everything
    once the checkout has moved. Beside each job runs what ends its processes with it and with
    Snakemake."""
    python = shlex.quote(sys.executable)
    return (
        # Snakemake's own, which a prefix replaces.
        "set -euo pipefail; "
        f"trap '[ $? != 137 ] || echo {KILLED} >&2' EXIT; "
        f"{python} -SE {shlex.quote(str(SCRIPTS / 'eyrie/jobs.py'))} $$ $PPID & "
        # speculators tells by loguru of each weight that it looks for.
        f"export SCRIPTS={shlex.quote(str(SCRIPTS))} EYRIE_JOB=$$:$PPID LOGURU_LEVEL=ERROR "
        # Huge pages make a CPU's products 5 to 8% faster.
        "GLIBC_TUNABLES=${{GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}} "
        f"PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; "
    )


def limit_gpus(workflow, needed: int) -> None:
    """Let jobs that together need more than `needed` GPUs wait for each other, where no profile and
    no option says how many there are; end where one says fewer.

    A limit set here survives `--resources other=1`, which replaces the profile's: without one,
    Snakemake ignores the resource and two GPU jobs overlap. To a job that needs more than the limit
    it would give fewer without a word.
    """
    limits = workflow.global_resources
    if "gpu" in limits and limits["gpu"].value < needed:
        sys.exit(
            f"a job needs {needed} GPUs, and Snakemake may give {limits['gpu'].value} "
            "(`resources: gpu` of the profile). With that many on this machine, add --resources "
            f"gpu={needed}; on a cluster take --workflow-profile, which replaces profiles/default"
        )
    # `nodes` is the number of jobs on a cluster, which has its own queue.
    elif "gpu" not in limits and workflow.resource_settings.nodes is None:
        limits["gpu"] = Resource("gpu", needed)


def look_into_buckets(workflow) -> None:
    """Ask a bucket anew whether a folder is there. Snakemake's S3 plugin remembers that it was not,
    and misses what a pod uploads."""
    if workflow.storage_settings.default_storage_provider == "s3":
        bucket = workflow.storage_registry.default_storage_provider
        bucket.get_storage_object_cls().is_dir = lambda folder: any(folder.get_subkeys())


def advise_of_lock() -> None:
    """Say with which command a lock can be removed, and when; Snakemake says only that it can."""
    locked = any(Path(".snakemake/locks").glob("*"))
    if locked and "--unlock" not in sys.argv and not runs_here():
        print(
            "A run that was killed, or one on another machine, has locked this folder. To go on "
            "after a kill, unlock it and run again:\n    "
            f"{shlex.join([*sys.argv, '--unlock'])}",
            file=sys.stderr,
        )
