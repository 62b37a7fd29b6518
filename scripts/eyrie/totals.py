"""The closing line of a dry run: what all of its jobs come to.

Snakemake tells each job to Python's logging as an event that its logger plugins are promised
(LogEvent.JOB_INFO, with the job's resources), and closes its handlers when it ends. A plugin would
have to be an installed package that every user names on the command line; a handler on the same
logger hears the same events, and needs neither.
"""

import logging

from snakemake_interface_logger_plugins.common import LogEvent


class Totals(logging.Handler):
    """Adds up the resources of a dry run's jobs, and prints the sum when logging ends.

    workflow: Snakemake's, which knows only then whether it is a dry run.
    """

    def __init__(self, workflow):
        super().__init__()
        self.workflow, self.jobs = workflow, []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            self.jobs.append(dict(record.resources.items()))

    def close(self) -> None:
        super().close()
        if self.jobs and self.workflow.dryrun:
            print(summed(self.jobs), flush=True)


def summed(jobs: list[dict]) -> str:
    """The line, from each job's `gpu`, `runtime` (minutes), `disk_mb` and `mem_mb`. They are upper
    bounds, so the sums are. Resources not known yet are not numbers, and count as none."""

    def of(job: dict, name: str) -> float:
        value = job.get(name, 0)
        return value if isinstance(value, int | float) else 0

    hours = sum(of(job, "runtime") for job in jobs) / 60
    gpu_hours = sum(of(job, "runtime") * of(job, "gpu") for job in jobs) / 60
    disk = sum(of(job, "disk_mb") for job in jobs) / 1000
    memory = max(of(job, "mem_mb") for job in jobs) / 1000
    return (
        f"Plan: {len(jobs):,} jobs left; at most {hours:,.1f} h one after the other, "
        f"{gpu_hours:,.1f} GPU-hours, {disk:,.2f} GB of disk, {memory:,.1f} GB of memory for one. "
        "make plan tells what is expected"
    )
