"""Files that are either whole or not there: atomic writes, checksums, hard links."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

# It is told only by setting it.
os.umask(UMASK := os.umask(0o022))


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield `path`.partial to write to; fsync it and rename it to `path` if the block succeeds.

    A reader, or a run killed at any moment, sees the old file, the new one or none.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        try:
            yield partial
        except SafetensorError as error:  # of a full disk, too
            raise OSError(f"{path}: cannot be written ({error})") from None
        # safetensors' files are the owner's alone.
        os.chmod(partial, 0o666 & ~UMASK)
        fsync_path(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)


def require_own(folder: Path, *patterns: str) -> None:
    """For whoever makes a folder anew, before it deletes the old one.

    patterns: of the names that it writes there.

    Raises:
        ValueError: naming what is there of somebody else's.
    """
    # A kill leaves files of `atomic`.
    patterns = (*patterns, *(f"{p}.partial" for p in patterns), ".snakemake_timestamp")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not any(path.match(pattern) for pattern in patterns):
            raise ValueError(
                f"{path}: is not of what is written to {folder}, which is made anew and so "
                "deleted: move it, or name another folder"
            )


def write_json(path: str | Path, value) -> None:
    with atomic(path) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: str | Path, *keys: str) -> dict:
    """The object that a JSON file holds, with these keys.

    Raises:
        ValueError: naming the file, which is not there, is no JSON, or holds no such object.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("it is a folder, a pipe or a device")
        value = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object but {str(value)[:60]}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{path}: has no {', '.join(missing)}; delete it, and make it again")
    return value


def read_table(path: str | Path, **options):
    """The pandas.DataFrame of a Parquet or CSV file; `options` are of pandas' reader.

    Raises:
        ValueError: naming the file, which is not there or no such table.
    """
    import pandas as pd  # most who write files read no table, and it takes half a second

    read = pd.read_csv if Path(path).suffix == ".csv" else pd.read_parquet
    try:
        return read(path, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from None


def log_line(path: str | Path | None, **values) -> None:
    """Append one JSON line to a stage's log, if it has one."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as log:
            log.write(json.dumps(values) + "\n")


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_or_copy(source: str | Path, target: str | Path) -> bool:
    """Make `target` the same file as `source`: a hard link, or a copy where none can be made.

    Returns True for a link. A copy doubles the bytes, so callers say when one was made.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
        linked = True
    except OSError:
        shutil.copyfile(source, partial)
        linked = False
    os.replace(partial, target)
    # rename() of two links to the same file does nothing and leaves both.
    partial.unlink(missing_ok=True)
    return linked
