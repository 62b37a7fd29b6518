"""Check a draft against its verifier: everything that vLLM would load without a word and serve
badly.

One line a check, `ok` or `FAIL` with what was found, what was expected and what it would have
done when served. Configs and headers of every epoch come first, in under a second; weights are
read only where these are right, and loaded by vLLM's own class last.
"""

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

from eyrie.checkpoint import WEIGHTS, flat_name, read_header
from eyrie.checks import (
    TRAINED,
    check_content,
    check_light,
    check_reference,
    check_trained,
    check_values,
    passed,
    read_reference,
    tell,
)
from eyrie.errors import in_one_line
from eyrie.files import log_line, write_json
from eyrie.loads import check_loads
from eyrie.provenance import peak_rss_bytes
from eyrie.results import read_result
from eyrie.verifier import text_sizes

# What of a manifest a checkpoint is held beside, as `misfit` takes it.
TRAINED_BY = {"config": dict.fromkeys([*TRAINED, "norms"], object), "files": {str: str}}


def light(args, name: str, verifier: dict, manifest: dict) -> tuple[list[dict], dict]:
    """Every check of one epoch that reads no weights; and its config as a flat one."""
    folder = args.draft / name
    checks, config = check_light(folder, verifier, args.max_model_len, args.layout)
    if config and manifest:
        checks += check_trained(config, manifest["config"])
    if config and args.reference:
        header = {flat_name(n): entry for n, entry in read_header(folder / WEIGHTS).items()}
        checks += check_reference(header, config, args.reference)
    return checks, config


def weights(args, name: str, config: dict, manifest: dict) -> list[dict]:
    """Every check of one epoch that reads its weights, but for what vLLM makes of them."""
    folder = args.draft / name
    checks = check_content(folder, manifest, name) if manifest else []
    verifier = None if args.trained_head else args.verifier
    return checks + check_values(folder / WEIGHTS, config, verifier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path, help="a checkpoint, or a folder of epochs")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--layout", choices=["flat", "sglang", "speculators"], help="as it must be")
    parser.add_argument("--max-model-len", type=int, help="tokens to be served; the verifier's")
    parser.add_argument(
        "--trained-head", action="store_true", help="its head is not the verifier's"
    )
    parser.add_argument("--reference", type=Path, help="JSON of a draft that is known to serve")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--log", type=Path, help="gets a JSON line an epoch")
    args = parser.parse_args()
    # vLLM and transformers would ask the Hub about a folder's name.
    os.environ["HF_HUB_OFFLINE"] = "1"

    started = time.time()
    try:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            if args.json.is_dir():
                raise IsADirectoryError("it is a folder")
    except OSError as error:
        sys.exit(f"check: --json {args.json}: cannot be written ({error})")
    if not args.draft.is_dir():
        sys.exit(f"check: {args.draft}: there is no such folder")
    try:
        verifier = text_sizes(args.verifier, args.trust_remote_code)
    except (OSError, ValueError) as error:
        sys.exit(f"check: {args.verifier}: {error}")
    try:
        path = args.draft / "manifest.json"
        manifest = read_result(path, TRAINED_BY) if path.exists() else {}
        if args.reference:
            read_reference(args.reference)
    except ValueError as error:
        sys.exit(f"check: {error}")
    if not manifest:
        print(f"no manifest.json in {args.draft}: nothing tells what was trained, and how")
    epochs = sorted((p.name for p in args.draft.iterdir() if p.name.isdecimal()), key=int)
    names = {"chosen": ""} | {name: name for name in epochs}
    results, configs, told = {}, {}, {}
    for name, folder in names.items():
        results[name], configs[name] = light(args, folder, verifier, manifest)
    tell(results, told)
    # The chosen epoch is the same file as one of the others.
    right = {
        name: (args.draft / folder / WEIGHTS).stat().st_ino
        for name, folder in names.items()
        if passed(results[name])
    }
    first = {inode: name for name, inode in reversed(right.items())}
    # vLLM's import takes as long as all else, so it goes beside it, in a process that is forked
    # before this one has imported anything with threads.
    with multiprocessing.get_context("fork").Pool(1) as beside:
        loading = {
            inode: beside.apply_async(
                check_loads,
                (args.draft / names[name], configs[name], args.verifier, args.trust_remote_code),
            )
            for inode, name in first.items()
        }
        found = {
            inode: weights(args, names[name], configs[name], manifest)
            for inode, name in first.items()
        }
        found = {inode: checks + loading[inode].get() for inode, checks in found.items()}
        peak = max(peak_rss_bytes(), beside.apply(peak_rss_bytes))
    for name, inode in right.items():
        results[name] = results[name] + found[inode]
    tell(results, told)
    for name, checks in results.items():
        failed = sum(not c["ok"] for c in checks)
        print(f"{'FAIL' if failed else 'ok  '} {name}: {len(checks)} checks, {failed} failed")
        log_line(args.log, epoch=name, checks=len(checks), failed=failed)
    ok = all(map(passed, results.values()))
    if args.json:
        write_json(
            args.json,
            {
                "ok": ok,
                "epochs": results,
                "seconds": round(time.time() - started, 2),
                "peak_rss_bytes": peak,
            },
        )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    with in_one_line("check"):
        main()
