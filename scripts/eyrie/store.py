"""The store: hidden shards under their fingerprints, each with a seal that damage breaks.

{fingerprint}.safetensors    the shard; outputs are hard links to it
{fingerprint}.json           its seal: bytes and sha256, there before the shard has its name
{fingerprint}.damaged        a shard that its seal did not fit, out of the way
"""

import json
import os
import shutil
from pathlib import Path

from eyrie.files import fsync_path, sha256_file, write_json


def seal(partial: Path, path: Path) -> None:
    """Give a finished shard its name and its seal; a kill leaves both or neither in use."""
    fsync_path(partial)
    write_json(
        path.with_suffix(".json"),
        {"bytes": partial.stat().st_size, "sha256": sha256_file(partial)},
    )
    os.replace(partial, path)
    fsync_path(path.parent)


def fault(path: Path) -> str | None:
    """What is wrong with a stored shard, or None. Reads it whole."""
    sealed = path.with_suffix(".json")
    if not sealed.exists():
        return "it has no seal"
    expected = json.loads(sealed.read_text())
    size = path.stat().st_size
    if size != expected["bytes"]:
        return f"it has {size:,} bytes, {expected['bytes']:,} were written"
    if sha256_file(path) != expected["sha256"]:
        return "its content is not what was written"
    return None


def set_aside(path: Path) -> Path:
    damaged = path.with_suffix(".damaged")
    os.replace(path, damaged)
    return damaged


def require_space(folder: Path, needed: int) -> None:
    """Raise OSError where the disk has no room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder}: {needed / 1e9:,.2f} GB may be needed, {free / 1e9:,.2f} GB are free; make "
            "room, name another `results:`, or take fewer conversations or shorter rows"
        )
