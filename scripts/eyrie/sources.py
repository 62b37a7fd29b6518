"""Rows of conversation files, one at a time, whatever the files are called or packed in."""

import codecs
import json
import os
import re
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from eyrie.conversations import TOO_DEEP, Reject, is_too_deep

# Bytes read at a time; a longer row doubles it.
CHUNK = 1 << 20
# Bytes of a packed file unpacked at a time: a few of them may hold very many.
PACKED = 1 << 12
# No conversation is this long: a quote is missing, and the rest of the file would be one string.
MAX_ROW = 1 << 28
BETWEEN = re.compile(r"[\s,\ufeff]*")
# A literal, an escape or a surrogate pair cut by the buffer's end fails so far before it.
LONGEST_TOKEN = 12
# What tells where a JSON value ends: strings, brackets, numbers, and a quote whose string is cut.
PART = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]|-?\d[^\s,\]}]*', re.DOTALL)
# Files of a folder that may hold conversations.
ENDINGS = (".json", ".jsonl", ".ndjson", ".parquet", ".gz", ".zst")


class DataError(Exception):
    """Input that stops the job; the message names the file and the way out."""


class NoFiles(DataError):
    """Nothing is there."""


class BrokenFile(DataError):
    """A file that cannot be read to its end."""

    def __init__(self, path: Path, rows: int, offset: int | None, why: str):
        self.rows, self.offset, self.why = rows, offset, why
        place = "" if offset is None else f" at byte {offset:,}"
        super().__init__(
            f"{path}: broken{place} after {rows:,} whole rows ({why}). Repair the file, ask for "
            "no more rows than it holds, or set shard.on_bad_file: keep to go on without the rest"
        )


def expand(pattern: str | Path) -> list[Path]:
    """The files that a file's name, a folder (its whole tree) or a glob stands for, sorted.

    Of a folder these are the files with one of ENDINGS. What macOS puts beside a file on other
    file systems, ._NAME, is left out.

    Raises:
        NoFiles: there are none. DataError: one is no file, or the name can be none's.
    """
    try:
        path = Path(pattern).expanduser()
        root = Path(path.anchor)
        matches = [path] if path.exists() else root.glob(str(path.relative_to(root)))
        found = {file for match in matches for file in files_of(match)}
    # RuntimeError: ~ of no user. ValueError: ** within a name. OSError: a name too long.
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{pattern}: no name of a file, nor a pattern of any ({error})") from None
    found = sorted(file for file in found if not file.name.startswith("._"))
    if not found:
        raise NoFiles(f"{pattern}: no such file, and no folder or pattern that holds any")
    for file in found:
        require_file(file)
    return found


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and not p.is_dir()]


def require_file(path: Path) -> None:
    """Raise DataError where a path is no regular file: a pipe would be waited for, and a device
    read, for ever."""
    if not os.path.exists(path):
        link = f"a link to {os.readlink(path)}, which is not there" if os.path.islink(path) else ""
        raise DataError(f"{path}: {link or 'no such file'}; mend or remove it")
    if not path.is_file():
        raise DataError(f"{path}: no file but a folder, a pipe or a device; name a file")


def unpacked(path: Path) -> Iterator[bytes]:
    """The file's bytes, gzip and zstd undone; told by content, not by name.

    Raises:
        EOFError: it is cut off. zlib.error, zstandard.ZstdError: it is damaged.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic[:2] == b"\x1f\x8b":
            begin = partial(zlib.decompressobj, wbits=31)
        elif magic == b"\x28\xb5\x2f\xfd" or magic[1:] == b"\x2a\x4d\x18":  # or a frame to skip
            begin = zstandard.ZstdDecompressor().decompressobj
        else:
            yield from iter(partial(file.read, CHUNK), b"")
            return
        stream = None
        while data := file.read(PACKED):
            while data:
                # Members follow one another, and zeros may follow the last.
                data = data if stream else data.lstrip(b"\0")
                if not data:
                    break
                stream = stream or begin()
                yield stream.decompress(data)
                data = stream.unused_data
                stream = None if stream.eof else stream
        if stream:
            raise EOFError("cut off")


def read_rows(path: Path) -> Iterator[tuple[int | None, object]]:
    """Yield (byte offset, row) of a Parquet file, a JSON array, JSON lines, or JSON objects one
    after another. Offsets are those of the unpacked text; Parquet has none. In place of
    a row that is too deep, or has a number of more digits than Python takes, there is a Reject.

    Memory is bounded by the largest row, whatever the file's size.

    Raises:
        BrokenFile: the file is none of these, or is damaged or cut off.
    """
    with open(path, "rb") as file:
        parquet = file.read(4) == b"PAR1"
    return parquet_rows(path) if parquet else json_rows(path)


def parquet_rows(path: Path) -> Iterator[tuple[None, dict]]:
    rows = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    rows += 1
                    yield None, without_nulls(row)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text not UTF-8
        raise BrokenFile(path, rows, None, str(error).splitlines()[0]) from error


def without_nulls(value):
    """A Parquet value without its null fields: a struct has every field that any row has."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def end_of_value(text: str, start: int) -> int | None:
    """Where the JSON value that begins at text[start] ends, told by its brackets alone; None if it
    does not end within the text."""
    depth = 0
    for part in PART.finditer(text, start):
        if part[0] == '"':
            return None
        depth += (part[0] in "[{") - (part[0] in "]}")
        if not depth:
            return part.end()
    return None


def json_rows(path: Path) -> Iterator[tuple[int, object]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    parse = json.JSONDecoder().raw_decode
    buffer, start, offset, rows, chunk = "", 0, 0, 0, CHUNK
    ended = array = closed = False
    # Why no more can be read, though the file is not at its end.
    stopped = ""
    pieces = unpacked(path)

    def read() -> None:
        nonlocal buffer, start, ended, stopped
        data = bytearray()
        try:
            while len(data) < chunk and not ended:
                piece = next(pieces, None)
                ended = piece is None
                data += piece or b""
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            ended, stopped = True, f"cannot be unpacked: {error}"
        try:
            text = decoder.decode(data, final=ended and not stopped)
        except UnicodeDecodeError as error:
            # What precedes the fault is read.
            text = error.object[: error.start].decode()
            ended, stopped = True, f"not UTF-8: {error.reason}"
        buffer, start = buffer[start:] + text, 0

    def skip(end: int) -> None:
        nonlocal start, offset
        offset += len(buffer[start:end].encode())
        start = end

    while True:
        skip(BETWEEN.match(buffer, start).end())
        if start == len(buffer):
            if ended:
                break
            read()
            continue
        if closed:
            raise BrokenFile(path, rows, offset, "text after the array's end")
        if buffer[start] == "[" and not array and not rows:
            array = True
            skip(start + 1)
            continue
        if buffer[start] == "]" and array:
            closed = True
            skip(start + 1)
            continue
        try:
            value, end = parse(buffer, start)
            # A number or word may go on behind the buffer's end.
            whole = end < len(buffer) or isinstance(value, (dict, list))
            fault, why = end, ""
        except json.JSONDecodeError as error:
            near_end = error.pos > len(buffer) - LONGEST_TOKEN
            whole = not (near_end or error.msg.startswith("Unterminated string"))
            fault, why = error.pos, error.msg
        except (ValueError, RecursionError) as error:
            # A number too long for Python, or nesting too deep; it may be whole nonetheless.
            deep = isinstance(error, RecursionError)
            value = Reject(TOO_DEEP if deep else "a number with too many digits")
            end = end_of_value(buffer, start)
            whole, fault, why = end is not None, start, "" if end else str(error)
        if not whole and not ended and len(buffer) - start < MAX_ROW:
            chunk = max(CHUNK, len(buffer) - start)
            read()
            continue
        if stopped and not whole:
            fault, why = len(buffer), stopped
        if why:
            skip(fault)
            raise BrokenFile(path, rows, offset, why)
        chunk = CHUNK
        rows += 1
        yield offset, Reject(TOO_DEEP) if is_too_deep(value) else value
        skip(end)
    if stopped:
        raise BrokenFile(path, rows, offset, stopped)
    if array and not closed:
        raise BrokenFile(path, rows, offset, "cut off: the array is not closed")
