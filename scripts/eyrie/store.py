"""The store: hidden shards under their fingerprints, each with a seal that damage breaks.

{fingerprint}.safetensors    the shard; outputs are hard links to it
{fingerprint}.json           its seal: bytes and sha256, there before the shard has its name
{fingerprint}.damaged        a shard that its seal did not fit, out of the way
"""

import os
import shutil
from pathlib import Path

from eyrie.files import fsync_path, read_json, sha256_file, write_json
from eyrie.memory import disk_fault
from eyrie.misfit import misfit

SEAL = {"bytes": int, "changed_ns": int, "sha256": str}


def seal(partial: Path, path: Path, **found) -> None:
    """Give a finished shard its name and its seal; a kill leaves both or neither in use.

    found: what was found of the shard when it was made, kept in the seal.
    """
    fsync_path(partial)
    status = partial.stat()
    sealed = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}
    write_json(path.with_suffix(".json"), sealed | {"sha256": sha256_file(partial), **found})
    os.replace(partial, path)
    fsync_path(path.parent)


def read_seal(path: Path) -> dict:
    """Raises ValueError, naming the seal, where it is damaged."""
    seal = path.with_suffix(".json")
    found = read_json(seal)
    if fault := misfit(found, SEAL):
        raise ValueError(f"{seal}: {fault}")
    return found


def fault(path: Path, read_all: bool = False) -> str | None:
    """What is wrong with a stored shard, or None.

    A file that has not been changed since its content was last compared is not read again, unless
    `read_all`: a hundred shards of a large verifier take an hour to read.
    """
    if not path.is_file():
        return "it is no file"
    if not path.with_suffix(".json").exists():
        return "it has no seal"
    try:
        sealed, status = read_seal(path), path.stat()
    except ValueError as error:
        return f"its seal is damaged ({error})"
    if status.st_size != sealed["bytes"]:
        return f"it has {status.st_size:,} bytes, {sealed['bytes']:,} were written"
    if status.st_mtime_ns == sealed["changed_ns"] and not read_all:
        return None
    if sha256_file(path) != sealed["sha256"]:
        return "its content is not what was written"
    write_json(path.with_suffix(".json"), sealed | {"changed_ns": status.st_mtime_ns})
    return None


def set_aside(path: Path) -> Path:
    damaged = path.with_suffix(".damaged")
    os.replace(path, damaged)
    return damaged


def require_space(folder: Path, needed: int) -> None:
    """Raise OSError where the disk has no room for `needed` bytes."""
    if fault := disk_fault(folder, needed, shutil.disk_usage(folder).free):
        raise OSError(fault)
