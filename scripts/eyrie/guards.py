"""What Snakemake itself does not see to: jobs that end whole, a limit on GPUs that nobody has to
set, and words for what it says too shortly or not at all.

`workflow` is Snakemake's own, of the version that the Snakefile asks for; tests/workflow holds each
of these to what it is for.
"""

import json
import os
import shlex
import sys
from pathlib import Path

from snakemake.resources import Resource

from eyrie.config import Config
from eyrie.files import read_json
from eyrie.jobs import end_orphans, runs_here
from eyrie.plan import make_plan

SCRIPTS = Path(__file__).parents[1]


def shell_prefix() -> str:
    """What each job's shell begins with: rules/job.sh, told which Python runs Snakemake and where
    its checkout lies, for rules run `python "$SCRIPTS/stage.py"`. In params these paths would rerun
    everything once the checkout has moved."""
    job = shlex.quote(str(SCRIPTS.parent / "rules/job.sh"))
    told = f"SCRIPTS={shlex.quote(str(SCRIPTS))} PYTHON={shlex.quote(sys.executable)}"
    return f"export {told}; . {job}; "


def limit_gpus(workflow, needed: int, on_cluster: bool) -> None:
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
    # A cluster has its own queue.
    elif "gpu" not in limits and not on_cluster:
        limits["gpu"] = Resource("gpu", needed)


def look_into_buckets(workflow) -> None:
    """Ask a bucket anew whether a folder is there. Snakemake's S3 plugin remembers that it was not,
    and misses what a pod uploads."""
    if workflow.storage_settings.default_storage_provider == "s3":
        bucket = workflow.storage_registry.default_storage_provider
        bucket.get_storage_object_cls().is_dir = lambda folder: any(folder.get_subkeys())


def asked_for(workflow, config: Config, default: str) -> list[str]:
    """The runs that the targets name, known once all rules are read. A job on another machine has
    its own outputs for targets: it takes what Snakemake was asked for, by the environment, or, in
    a pod, which has none of that, all runs."""
    if workflow.remote_exec:
        return json.loads(os.environ.get("EYRIE_ASKED", json.dumps(list(config.runs))))
    names = set()
    for target in workflow.dag_settings.targets or [default]:
        for part in Path(target).parts:
            _, _, name = part.partition("_")
            names |= {name, Path(name).stem}
    names |= set(config.sweep) if "sweep" in names else set()
    asked = [run for run in config.runs if run in names]
    os.environ["EYRIE_ASKED"] = json.dumps(asked)
    return asked


def require_whole(folder: Path) -> None:
    """End where a file of a checkpoint is gone. Snakemake looks at the folder alone, and would take
    what is left for done."""
    if not folder.exists():
        return
    manifest = folder / "manifest.json"
    try:
        files = read_json(manifest, "files")["files"] if manifest.exists() else ["manifest.json"]
    except ValueError as error:
        sys.exit(f"{error}; delete {folder}, and it is put there again")
    # An epoch's folder may be deleted to free disk.
    if gone := [name for name in files if "/" not in name and not (folder / name).exists()]:
        sys.exit(
            f"{folder}: {gone[0]} is gone; delete the folder, and it is put there again from what "
            "was trained, or trained again"
        )


def require_fit(config: Config, runs: list[str]) -> None:
    """End where the plan of what is still to be extracted does not fit."""
    for run in runs:
        states = Path(config.results) / f"data/{config.runs[run].data}/hidden.json"
        try:
            faults = [] if states.exists() else make_plan(config, run)["faults"]
        except ValueError as error:
            sys.exit(str(error))
        if faults:
            sys.exit(f"run {run} does not fit\n" + "\n".join(f"  {fault}" for fault in faults))


# This machine since it was started, the container in it, and whose processes `runs_here` can see.
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
HERE = f"{BOOT} {os.readlink('/proc/self/ns/pid')} user {os.getuid()}"
# Where the runs are that may hold this folder's locks, a line each.
HOLDERS = Path(".snakemake/eyrie-holders")


def free_of_locks() -> None:
    """Remove the locks that killed runs have left in this folder, and say so. Where one of another
    machine or user may be at work there, say with which command to remove them, and when."""
    locks = [path for path in Path(".snakemake/locks").glob("*") if path.is_file()]
    if "--unlock" in sys.argv or runs_here():
        return
    held_here = HOLDERS.exists() and set(HOLDERS.read_text().splitlines()) == {HERE}
    if not locks or held_here:
        for path in (*locks, HOLDERS):
            path.unlink(missing_ok=True)
        if locks:
            print("removed the lock of a run that was killed in this folder", file=sys.stderr)
            end_orphans()
        return
    unlock = shlex.join([*sys.argv, "--unlock"])
    print(
        "A run on another machine or on a cluster, or one that was killed, has locked this folder. "
        f"To go on once its jobs have ended, unlock it and run again:\n    {unlock}",
        file=sys.stderr,
    )


def tell_holder(on_cluster: bool) -> None:
    """Note for `free_of_locks` where the jobs run that this folder is locked for. A cluster's
    outlive Snakemake."""
    with open(HOLDERS, "a") as file:
        file.write("a cluster\n" if on_cluster else f"{HERE}\n")
