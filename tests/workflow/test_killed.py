"""Stages of a finished job that are ended in the midst or find damage, and go on."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from forking import run_to_end, start
from tiny_job import (
    ROOT,
    SCRIPTS,
    check_states,
    jobs_of,
    processes_with,
    snakemake,
    snakemake_command,
)

from eyrie.jobs import running


def test_a_killed_benchmark_goes_on_and_measures_the_same(job, tmp_path):
    """With a draft more, whose context is shorter than what is served."""
    tree = job / "results/tiny"
    short = shutil.copytree(tree / "ckpt_tiny", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    command = [SCRIPTS / "bench.py", "--run", "tiny", "--checkpoint", tree / "ckpt_tiny"]
    command += ["--draft", f"short={short}", "--methods", "--verifier", tree / "verifier"]
    command += ["--identity", tree / "verifier.json", "--prompts", tree / "prompts"]
    command += ["--hidden", *sorted((tree / "data/tiny/hidden").glob("*.safetensors"))]
    options = {"num-prompts": 4, "turns": 2, "held-out": 0.2, "num-held-out": 0}
    options |= {"max-new-tokens": 8, "draft-tokens": 3, "max-model-len": 128, "max-num-seqs": 8}
    options |= {"max-num-batched-tokens": 256, "kv-cache-gib": 0.1, "dtype": "float32"}
    options |= {"state": tmp_path / "state"}
    options |= {"summary": tmp_path / "bench.json", "rows": tmp_path / "bench.jsonl"}
    options |= {"measurements": tmp_path / "bench.csv"}
    command += [part for name, value in options.items() for part in ("--" + name, value)]
    command = [str(part) for part in command]

    mark = f"import os; os.environ['EYRIE_TEST'] = {str(tmp_path)!r}"
    process = start(command, tmp_path / "killed", mark)
    state = tmp_path / "state"
    while process.wait(0.05) is None:
        lines = [line for file in state.rglob("*.jsonl") for line in file.read_text().splitlines()]
        # All eight of the baseline, and two of the draft.
        if sum('"seconds"' in line for line in lines) >= 10:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (file,) = state.rglob("measured.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True)
             if line.endswith("\n")]  # fmt: skip
    before = [value for _, value in lines]
    # As if the draft had changed an output's last token.
    changed = next(v[0] for v in before if isinstance(v, list) and v[0]["method"] == "eagle3")
    changed["tokens"][-1] = (changed["tokens"][-1] + 1) % 512
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = [row["seconds"] for value in before if isinstance(value, list) for row in value]
    assert len(seconds) >= 10 and not (tmp_path / "bench.json").exists()
    deadline = time.time() + 20
    while left := processes_with(str(tmp_path)):
        assert time.time() < deadline, left
        time.sleep(0.2)

    code, output = run_to_end(command, tmp_path / "resumed")
    assert code == 0, output[-3000:]
    assert f"bench: {len(seconds)} of 24 groups were measured before" in output
    rows = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and set(seconds) <= {row["seconds"] for row in rows}
    assert not state.exists()
    bench = json.loads((tmp_path / "bench.json").read_text())
    _, eagle, short = bench["methods"]
    first = json.loads((tree / "bench_tiny.json").read_text())["methods"][2]
    for name in ("acceptance_length", "acceptance_per_position", "acceptance_rate"):
        assert eagle[name] == first[name], name
    # That benchmark asked twice.
    assert 2 * eagle["drafts"] == first["drafts"]
    (parting,) = bench["partings"]
    # Of random weights no two tokens are level.
    assert (eagle["identical"], eagle["rounding"], eagle["faults"]) == (7, 0, 1)
    assert parting["token"] == changed["tokens"][-1] and parting["gap"] > 0
    assert parting["top_two"][0] == parting["baseline_token"]
    # The other draft reaches no prompt's end, so none of its drafts count.
    assert short["method"] == "eagle3, short" and short["identical"] == 8
    assert short["beyond"] == 8 and short["drafts"] == 0 and short["acceptance_length"] is None


def test_a_killed_extraction_makes_only_what_is_missing(job):
    """Without the middle shard in the store, one shard is made and the others are not touched."""
    hidden = job / "results/tiny/data/tiny/hidden"
    middle = hidden / "00001.safetensors"
    before = {p.name: (p.stat().st_ino, p.read_bytes()) for p in hidden.iterdir()}
    store = job / "results/tiny/.state/store"
    (stored,) = [p for p in store.glob("*.safetensors") if p.samefile(middle)]
    stored.unlink()
    middle.unlink()
    output = snakemake(job, str(middle.relative_to(job)))
    assert "3 shards, 2 in the store, 1 to make" in output
    for path in hidden.iterdir():
        if path != middle:
            assert path.stat().st_ino == before[path.name][0]
    assert len(list(store.glob("*.safetensors"))) == len(list(store.glob("*.json"))) == 3
    log = (job / "results/tiny/logs/extract_tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["shard"] for line in log] == [1]


def test_a_damaged_shard_is_set_aside_and_made_again(job):
    hidden = job / "results/tiny/data/tiny/hidden"
    store = job / "results/tiny/.state/store"
    with open(hidden / "00002.safetensors", "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    command = [sys.executable, str(ROOT / "scripts/store.py"), "verify", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.count("its content is not what was written") == 1
    (hidden / "00000.safetensors").unlink()
    output = snakemake(job, "results/tiny/data/tiny/hidden/00000.safetensors")
    assert "is made again, its content is not what was written" in output
    assert "3 shards, 2 in the store, 1 to make" in output
    subprocess.run(command, check=True)
    check_states(job / "inputs/verifier", job / "results/tiny")
    command[2:] = ["prune", str(store), "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("deleted") == 1 and ".damaged" in done.stdout
    command[2:] = ["list", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tiny: " in done.stdout and "(no output)" not in done.stdout


class Killable:
    """Snakemake on the tiny job in a process group of its own, as a terminal gives it."""

    def __init__(self, job: Path, *arguments: str):
        self.output = job / "killed.log"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                snakemake_command(ROOT, "tiny", *arguments),
                cwd=job,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """The processes of its jobs, without their shells."""
        return [pid for pid, ids in running().items() if ids[1] == self.process.pid]

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def ends_with_all_processes(self) -> int:
        """Snakemake's exit code, once none of its jobs' processes is left."""
        code = self.process.wait(timeout=30)
        deadline = time.monotonic() + 30
        while found := self.processes():
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return code


def test_sigterm_lets_the_running_job_finish(job):
    run = Killable(job, "results/tiny/bench_tiny.json", "-R", "check", "bench")
    run.wait_for(run.processes)
    run.process.terminate()
    assert run.ends_with_all_processes()
    assert "Will exit after finishing currently running jobs" in run.output.read_text()
    assert jobs_of(snakemake(job, "-n", "results/tiny/bench_tiny.json")) == {"bench"}


def test_ctrl_c_ends_a_benchmark_with_its_forkserver_and_what_that_forked(job):
    run = Killable(job, "results/tiny/bench_tiny.json", "-f")
    run.wait_for(lambda: len(run.processes()) >= 4)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends_with_all_processes()


def test_the_ranks_of_a_killed_training_end(job):
    arguments = ["-f", "results/tiny/ckpt_tiny", "--config", "train={gpus: 2}"]
    run = Killable(job, *arguments)
    run.wait_for(lambda: len(run.processes()) >= 3)
    run.process.kill()
    run.ends_with_all_processes()


def test_a_killed_training_goes_on_at_once(job):
    """No step is done twice; a second run beside a live one is refused. The lock of one that may
    be of another machine stays, with the command that removes it."""
    arguments = ["results/tiny/ckpt_tiny", "--config", "train={epochs: 4}"]
    run = Killable(job, *arguments)
    states = job / "results/tiny/.state/train/tiny"
    before = set(states.glob("*"))

    def saved() -> list[int]:
        new = [path for folder in set(states.glob("*")) - before for path in folder.iterdir()]
        return [int(p.name.split("-")[1]) for p in new if p.match("state-*.safetensors")]

    run.wait_for(saved)
    refused = snakemake(job, *arguments, ok=False)
    assert "Directory cannot be locked" in refused and "--unlock\n" not in refused
    run.process.kill()
    run.ends_with_all_processes()
    last = max(saved())
    holders = job / ".snakemake/eyrie-holders"
    here = holders.read_text()
    holders.write_text(f"{here}another machine\n")
    refused = snakemake(job, *arguments, ok=False)
    assert "Directory cannot be locked" in refused
    (unlock,) = [line for line in refused.splitlines() if line.endswith(" --unlock")]
    assert shlex.split(unlock)[-3:] == [arguments[1], arguments[2], "--unlock"]
    holders.write_text(here)
    output = snakemake(job, *arguments)
    assert "removed the lock of a run that was killed in this folder" in output
    assert f", step {last}\n" in output


def test_extraction_ends_with_a_killed_snakemake(job):
    arguments = ["results/tiny/data/tiny/hidden.json", "--config", "extract={states: fp8}"]
    run = Killable(job, *arguments)
    run.wait_for(run.processes)
    run.process.kill()
    run.ends_with_all_processes()
