"""What a source of this machine holds, so that an edit is noticed and a touch is not.

Snakemake would go by a file's time. Here a file counts by its content, which is read again only
where its size, its time or its inode's time, which nobody sets back, differ from when it was
fetched.
"""

import functools
import hashlib
import os
from pathlib import Path

from eyrie.files import read_json, sha256_file
from eyrie.sources import DataError, NoFiles, expand

# The text of a model; its weights count by their size, since to read them takes minutes.
TEXT = {".json", ".jinja", ".txt", ".model", ".py"}


def files_of(source: str, verifier: bool) -> list[Path]:
    """The files of a `path:` source, sorted; none where it is not there or of another kind.

    Raises:
        DataError: what is there is no file.
    """
    kind, _, spec = source.partition(":")
    if kind != "path":
        return []
    if verifier and os.path.isdir(folder := os.path.expanduser(spec)):
        return sorted(p for p in Path(folder).iterdir() if p.is_file())
    try:
        return expand(spec)
    except NoFiles:
        return []


def local_files(source: str, verifier: bool, known: dict[str, dict]) -> dict[str, dict]:
    """{file: {mark, content}}: mark is [bytes, mtime, ctime] in nanoseconds, content a sha256, or
    the bytes of a verifier's weights. What `known` has under the same mark is not read again."""
    found = {}
    for path in files_of(source, verifier):
        stat = path.stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        old = known.get(str(path))
        if old and old["mark"] == mark:
            content = old["content"]
        elif verifier and path.suffix not in TEXT:
            content = f"{stat.st_size} bytes"
        else:
            content = sha256_file(path)
        found[str(path)] = {"mark": mark, "content": content}
    return found


def sampled(path: Path) -> str:
    """A sha256 of a file's size and of 64 blocks of 64 KiB spread over it: all of a file that they
    cover, and of larger ones, as weights, enough to tell one training from another at once."""
    size, block = path.stat().st_size, 1 << 16
    hashed = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for place in sorted({max(size - block, 0) * part // 63 for part in range(64)}):
            file.seek(place)
            hashed.update(file.read(block))
    return hashed.hexdigest()


@functools.cache
def named_content(path: str) -> tuple[str, ...]:
    """What a file of prompts or a draft's folder holds, by `sampled`; nothing where it is not
    there. Several rules ask."""
    if os.path.isdir(path):
        files = [file for file in sorted(Path(path).iterdir()) if file.is_file()]
    else:
        files = [Path(path)] if os.path.exists(path) else []
    return tuple(map(sampled, files))


def local_content(source: str, identity: Path, verifier: bool = False) -> dict[str, str]:
    """{file: content} of a `path:` source as it is now; as it was fetched once it is gone.

    identity: the JSON of scripts/fetch.py, which need not be there yet.

    Raises:
        DataError: what is there is no file, or the identity is damaged.
    """
    try:
        entries = read_json(identity)["local"].items() if identity.exists() else ()
        known = {file: {key: e[key] for key in ("mark", "content")} for file, e in entries}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{identity}: not what scripts/fetch.py wrote ({error}); delete it, and it is fetched "
            "again"
        ) from None
    now = local_files(source, verifier, known) or known
    return {file: entry["content"] for file, entry in now.items()}
