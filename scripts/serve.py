"""Serve the benchmark's prompts through vLLM's own OpenAI server, with the draft as users load it.

The server listens on 127.0.0.1 for as long as this runs, and ends with it, whatever ends it. What
the draft has accepted there must be what was accepted in the benchmark's engine: same prompts, same
draft tokens, same counters, read as differences. Requests that fail are counted apart.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eyrie import engine
from eyrie.errors import in_one_line
from eyrie.figures import acceptance
from eyrie.files import write_json
from eyrie.gpus import hold_gpus
from eyrie.misfit import misfit
from eyrie.provenance import versions
from eyrie.results import again, read_bench, row_counts

METRIC = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
# Seconds that one answer may take.
PATIENCE = 600
# Acceptance lengths closer than this are the same: outputs that part by rounding move a few drafts.
SAME = 0.01

# By what a row of the benchmark is found, and what of it is asked again and compared.
SETTING = {"set": str, "method": str, "draft_tokens": int, "concurrency": int}
FOUND = {**SETTING, "repeat": int}
ASKED = {"prompt_ids": [int], "tokens": [int], "beyond": bool}


class ServeError(Exception):
    """A server that does not start, or does not do what the engine did."""


def read_counters(url: str) -> dict[str, int]:
    """The server's counters since its start: drafts, draft_tokens, accepted_tokens, and accepted_k
    of each position from 1."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    counters: dict[str, int] = {}
    for name, labels, value in METRIC.findall(text):
        if position := POSITION.search(labels):
            name = f"accepted_{int(position[1]) + 1}"
        # One line for each of several engines.
        counters[name] = counters.get(name, 0) + int(float(value))
    return counters


def complete(url: str, model: str, ids: list[int], max_tokens: int) -> list[int] | None:
    """The tokens that the server writes after a prompt of tokens, to which it adds none; None where
    the request failed."""
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)["choices"][0]["token_ids"]
    except (OSError, ValueError, LookupError) as error:
        print(f"serve: a request failed: {error}", file=sys.stderr, flush=True)
        return None


def read_rows(path: Path, draft: dict) -> list[dict]:
    """The rows of bench_RUN.jsonl of a method at its setting, in the first repetition.

    Raises:
        OSError, ValueError: naming the file, and the line that is no such row.
    """
    asked = ASKED | dict.fromkeys(row_counts(draft["draft_tokens"]), int)
    rows = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}: {again(path)}") from None
            fault = misfit(row, FOUND)
            ours = not fault and row["repeat"] == 0 and all(row[k] == draft[k] for k in SETTING)
            if fault := fault or (ours and misfit(row, asked)):
                raise ValueError(f"{path}: line {number}: {fault}: {again(path)}")
            if ours:
                rows.append(row)
    if len(rows) < draft["prompts"]:
        raise ValueError(
            f"{path}: has {len(rows)} rows of the draft, and its figures are of "
            f"{draft['prompts']} prompts: {again(path)}"
        )
    return rows


def measure(url: str, model: str, rows: list[dict], max_tokens: int, concurrency: int) -> dict:
    """Ask what the rows of the benchmark asked. Figures are of the requests answered; acceptance is
    by how much the counters rose, so that earlier traffic has no part in it."""
    before = read_counters(url)
    with ThreadPoolExecutor(concurrency) as pool:
        outputs = list(
            pool.map(lambda row: complete(url, model, row["prompt_ids"], max_tokens), rows)
        )
    after = read_counters(url)
    rose = {name: count - before.get(name, 0) for name, count in after.items()}
    drafts, accepted = rose.get("drafts", 0), rose.get("accepted_tokens", 0)
    proposed = rose.get("draft_tokens", 0)
    positions = sorted(int(n.removeprefix("accepted_")) for n in rose if n[9:].isdecimal())
    return {
        "requests": len(rows),
        "failed": outputs.count(None),
        "identical": sum(
            tokens == row["tokens"] for tokens, row in zip(outputs, rows, strict=True)
        ),
        "drafts": drafts,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
        "acceptance_rate": round(accepted / proposed, 4) if proposed else None,
        "acceptance_per_position": [round(rose[f"accepted_{k}"] / drafts, 4) for k in positions]
        if drafts
        else None,
    }


def options(args, draft_tokens: int) -> list[str]:
    """The server's options: the benchmark's engine settings and the draft."""
    config = {
        "method": "eagle3",
        "model": str(args.checkpoint),
        "num_speculative_tokens": draft_tokens,
    }
    settings = engine.engine_arguments(args) | {"speculative_config": json.dumps(config)}
    # The server takes and writes text, too.
    del settings["skip_tokenizer_init"]
    result = ["--no-enable-prefix-caching"]
    for name, value in settings.items():
        if value is not False:
            result.append("--" + name.replace("_", "-"))
            result += [] if value is True else [str(value)]
    return result


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """A server in a process group of its own, which is killed when the block ends, and when this
    process does, by whatever: a shell waits for its input to close.

    vLLM's engine is a child of the server that outlives it when that is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    # The group's number is the server's own, and stays taken until it is waited for.
    keeper = subprocess.Popen(
        ["sh", "-c", 'read _; kill -9 "-$1"', "sh", str(process.pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        keeper.stdin.close()
        keeper.wait()
        process.wait()


def wait_for(process: subprocess.Popen, url: str, log: Path) -> None:
    """Raises ServeError where the server ends before it answers."""
    while True:
        if process.poll() is not None:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ServeError(f"the server ended with exit code {process.returncode}:\n{last}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True, help="bench_RUN.json")
    parser.add_argument("--rows", type=Path, required=True, help="bench_RUN.jsonl")
    parser.add_argument("--summary", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, required=True, help="gets what the server prints")
    engine.add_arguments(parser)
    args = parser.parse_args()

    try:
        bench = read_bench(args.bench)
        draft = next(m for m in bench["methods"] if m["method"] == "eagle3")
        rows = read_rows(args.rows, draft)
    except (OSError, ValueError) as error:
        sys.exit(f"serve: {error}")
    args.dtype, args.compile = bench["settings"]["dtype"], bench["settings"]["compile"]
    engine.prepare(args.gpus, in_process=False, compiled=args.compile)
    # The server's engine is always a process of its own.
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    started = time.time()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    try:
        _lock = hold_gpus(args.gpus)
        with server([*command, *options(args, draft["draft_tokens"])], args.log) as process:
            wait_for(process, url, args.log)
            found = measure(
                url,
                str(args.verifier),
                rows,
                bench["prompt_set"]["max_new_tokens"],
                draft["concurrency"],
            )
        lengths = found["acceptance_length"], draft["acceptance_length"]
        if found["failed"]:
            raise ServeError(f"{found['failed']} of {found['requests']} requests failed")
        if None in lengths or abs(lengths[0] - lengths[1]) > SAME:
            raise ServeError(
                f"an acceptance length of {lengths[0]} through the server and {lengths[1]} in the "
                "benchmark's engine"
            )
    except (ServeError, ValueError) as error:
        sys.exit(f"serve: {error}")
    write_json(
        args.summary,
        {
            **found,
            "in_process": acceptance(rows, draft["draft_tokens"]),
            "versions": versions(),
            "seconds": round(time.time() - started, 2),
        },
    )
    print(
        f"serve: an acceptance length of {lengths[0]} through the server, {lengths[1]} in the "
        f"benchmark's engine; {found['identical']} of {found['requests']} outputs are the same"
    )


if __name__ == "__main__":
    with in_one_line("serve"):
        main()
