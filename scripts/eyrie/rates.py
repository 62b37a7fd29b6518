"""How fast the stages of earlier runs were, from which the next plan is made.

Each stage that costs time appends a line to `results/.state/rates.jsonl` when it is done:

    stage      load, prefill, answers, train or serve
    verifier   its source, as its identity names it
    gpus       how many it used; 0 is the CPU
    device     the name of one of them, or of the CPU and its cores; null where it cannot be told
    amount     bytes (load), or tokens; of train, tokens x `passes`
    seconds    that they took
    of         the data set or the run
    at         the day, ISO 8601
"""

import datetime
import json
import os
import subprocess
from pathlib import Path

from eyrie.files import log_line
from eyrie.misfit import misfit

LINE = {
    "stage": str,
    "verifier": str,
    "gpus": int,
    "device": (str,),
    "amount": float,
    "seconds": float,
    "of": str,
    "at": str,
}


def gpus_here() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU that nvidia-smi lists; none where there is no such
    program. It loads nothing, and CUDA_VISIBLE_DEVICES does not change it."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [line.rsplit(",", 1) for line in lines]
    return [(name, int(mib) * 2**20) for name, mib in rows if mib.strip().isdecimal()]


def device_name(gpus: int) -> str | None:
    """The name of a GPU of this machine, or of its CPU with the cores there are for a process;
    None where it has no GPU and one is asked for."""
    if gpus:
        here = gpus_here()
        return here[0][0] if here else None
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def passes(ttt_steps: int) -> int:
    """The cost of training on a token: one for each TTT step, and two for what a batch costs
    however far it looks ahead (reading, the verifier's own head, the optimizer). Measured on the
    default job: an epoch of one TTT step took 0.65 of the time of one of three."""
    return 2 + ttt_steps


def record_rate(
    path: Path | None, stage: str, verifier: str, gpus: int, amount: float, seconds: float, of: str
) -> None:
    """Append what a stage took, if it did anything."""
    if not amount or seconds < 0.005:
        return
    log_line(
        path,
        stage=stage,
        verifier=verifier,
        gpus=gpus,
        device=device_name(gpus),
        amount=amount,
        seconds=round(seconds, 2),
        of=of,
        at=datetime.date.today().isoformat(),
    )


def measured(
    lines: list[dict], stage: str, verifier: str, gpus: int, device: str | None
) -> tuple[float, str] | None:
    """The rate of a stage with this verifier on as many of these devices, over all that was
    measured, so that a short run weighs little; and where it comes from. None if there is nothing.

    device: None takes any: the machine that plans need not have a GPU.
    """
    found = [
        line
        for line in lines
        if (line["stage"], line["verifier"], line["gpus"]) == (stage, verifier, gpus)
        and device in (None, line["device"])
    ]
    if not found:
        return None
    amount = sum(line["amount"] for line in found)
    runs = ", ".join(dict.fromkeys(line["of"] for line in found))
    over = f"{amount / 1e9:,.2f} GB" if stage == "load" else f"{amount:,.0f} tokens"
    source = f"measured in {runs}, {over}, last on {found[-1]['at']}"
    return amount / sum(line["seconds"] for line in found), source


def read_rates(path: Path) -> list[dict]:
    """All lines, oldest first; none where nothing has run.

    Raises:
        ValueError: naming a line that is none, such as one half written.
    """
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
            wrong = misfit(line, LINE)
            if not wrong and min(line["amount"], line["seconds"]) <= 0:
                wrong = "amount and seconds must be more than 0"
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ValueError(f"{path}: line {number} is no measurement ({wrong}); delete that line")
        found.append(line)
    return found
