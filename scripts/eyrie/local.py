"""What a source of this machine holds, so that an edit is noticed and a touch is not.

Snakemake would go by a file's time. Here a file counts by its content, which is read again only
where its size, its time or its inode's time, which nobody sets back, differ from when it was
fetched.
"""

import json
from pathlib import Path

from eyrie.files import sha256_file
from eyrie.sources import DataError, expand

# The text of a model; its weights count by their size, since to read them takes minutes.
TEXT = {".json", ".jinja", ".txt", ".model", ".py"}


def files_of(source: str, verifier: bool) -> list[Path]:
    """The files of a `path:` source, sorted; none where it is not there or of another kind."""
    kind, _, spec = source.partition(":")
    path = Path(spec).expanduser()
    if kind != "path":
        return []
    if verifier and path.is_dir():
        return sorted(p for p in path.iterdir() if p.is_file())
    try:
        return expand(spec)
    except DataError:
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


def local_content(source: str, identity: Path, verifier: bool = False) -> dict[str, str]:
    """{file: content} of a `path:` source as it is now; as it was fetched once it is gone.

    identity: the JSON of scripts/fetch.py, which need not be there yet.
    """
    known = json.loads(identity.read_text()).get("local", {}) if identity.exists() else {}
    now = local_files(source, verifier, known) or known
    return {file: entry["content"] for file, entry in now.items()}
