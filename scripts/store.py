"""List, verify or prune the stored hidden states.

    python scripts/store.py list results/.state/store
    python scripts/store.py verify results/.state/store
    python scripts/store.py prune results/.state/store

A stored shard is the same file as the outputs linked to it (results/data/DATA/hidden/), and `list`
says to which data set each belongs. `prune` deletes what has no such output, after showing it:
nothing is deleted without --yes.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from eyrie import store
from eyrie.errors import in_one_line


def owners(folder: Path) -> dict[int, list[str]]:
    """File number -> the data sets whose outputs are that file."""
    found: dict[int, list[str]] = {}
    # By its name: the store itself may be a link to another place.
    results = folder.absolute().parents[1]
    for path in filter(Path.is_file, sorted(results.glob("data/*/hidden/*.safetensors"))):
        found.setdefault(path.stat().st_ino, []).append(path.parts[-3])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["list", "verify", "prune"])
    parser.add_argument("store", type=Path)
    parser.add_argument("--yes", action="store_true", help="delete what prune shows")
    args = parser.parse_args()

    if not args.store.is_dir():
        sys.exit(f"store: {args.store}: no such folder")
    if args.store.absolute().parts[-2:] != (".state", "store"):
        # Elsewhere nothing would tell which weights are in use, and prune would delete them all.
        sys.exit(f"store: {args.store}: is no store; name the results' own, .state/store")
    linked = owners(args.store)
    shards = sorted(args.store.glob("*.safetensors"))
    bytes_of: Counter = Counter()
    bad = unused = 0
    for path in shards:
        if not path.is_file():
            bad += args.action == "verify"
            print(f"{path.stem}  it is no file, and stays as it is")
            continue
        size, names = path.stat().st_size, linked.get(path.stat().st_ino, [])
        bytes_of.update(dict.fromkeys(names or ["(no output)"], size))
        if args.action == "list":
            print(f"{path.stem}  {size:>15,} bytes  {', '.join(names) or '(no output)'}")
        elif args.action == "verify":
            fault = store.fault(path, read_all=True)
            bad += fault is not None
            print(f"{path.stem}  {fault or 'ok'}")
        elif not names:
            unused += size
            print(f"{'deleted' if args.yes else 'unused'}  {path.name}  {size:,} bytes")
            if args.yes:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
    suffixes = {".damaged", ".partial", ".rows"}
    leftovers = [p for p in args.store.iterdir() if p.suffix in suffixes and p.is_file()]
    if args.action == "list":
        for name, size in sorted(bytes_of.items()):
            print(f"{name}: {size:,} bytes")
    if args.action == "prune":
        for path in leftovers:
            print(f"{'deleted' if args.yes else 'unused'}  {path.name}")
            if args.yes:
                path.unlink()
        print(f"{unused:,} bytes" + ("" if args.yes else "; add --yes to delete them"))
    if bad:
        sys.exit(f"store: {bad} of {len(shards)} shards are damaged; a rerun makes them again")


if __name__ == "__main__":
    with in_one_line("store"):
        main()
