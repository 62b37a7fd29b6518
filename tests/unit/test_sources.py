import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from eyrie.conversations import Reject
from eyrie.local import local_content
from eyrie.sources import CHUNK, BrokenFile, DataError, expand, read_rows

ROWS = [{"id": i, "turns": [{"from": "human", "value": "ö🦉" * i}]} for i in range(5)]
ARRAY = json.dumps(ROWS).encode()
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


def gz(content: bytes) -> bytes:
    """The same bytes whatever the time, so that the tests' names are the same in each process."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    "name, content",
    [
        ("array.json", ARRAY),
        ("array.jsonl", ARRAY),
        ("indented.json", json.dumps(ROWS, indent=2).encode()),
        ("lines.jsonl", LINES),
        ("lines.json", LINES + b"\n\n"),
        ("objects.json", "\n".join(json.dumps(row, indent=1) for row in ROWS).encode()),
        ("bom.json", b"\xef\xbb\xbf" + ARRAY),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n")),
        ("packed.jsonl.gz", gz(LINES)),
        ("packed.json.zst", zstandard.compress(ARRAY)),
        ("packed_without_ending", gz(ARRAY)),
        ("members.gz", gz(LINES[:50]) + gz(LINES[50:]) + bytes(512)),
        ("members.zst", zstandard.compress(LINES[:50]) + zstandard.compress(LINES[50:])),
        ("skipped.zst", b"\x50\x2a\x4d\x18\x02\0\0\0hi" + zstandard.compress(LINES)),
        ("bom.gz", gz(b"\xef\xbb\xbf" + LINES)),
    ],
)
def test_forms_are_told_by_content(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    found = list(read_rows(tmp_path / name))
    assert [row for _, row in found] == ROWS
    plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    if "zst" not in name:
        assert [json.JSONDecoder().raw_decode(plain[at:].decode())[0] for at, _ in found] == ROWS


def test_parquet(tmp_path):
    pd.DataFrame(ROWS).to_parquet(tmp_path / "rows.parquet")
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == ROWS


@pytest.mark.parametrize("size", [CHUNK - 40, CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("array", [True, False])
def test_rows_across_the_buffers_end(tmp_path, size, array):
    rows = [{"text": 'a"\\🦉' * 3, "n": [1.5, True, None]}] * 4
    rows.insert(2, {"text": "x" * size})
    text = json.dumps(rows) if array else "\n".join(map(json.dumps, rows))
    (tmp_path / "rows").write_text(text)
    assert [row for _, row in read_rows(tmp_path / "rows")] == rows


def test_every_place_of_the_buffers_end(tmp_path, monkeypatch):
    """A row, an escape or a number cut by the buffer's end is neither broken nor another."""
    rows = [{"a": '🦉 \\ " \n', "b": -1.5e10, "c": [True, False, None]}, {"d": 12345}]
    monkeypatch.setattr("eyrie.sources.CHUNK", 1)
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows)), json.dumps([1234, "x", rows])):
        (tmp_path / "rows").write_text(text)
        value = json.loads(text) if text[0] == "[" else rows
        assert [row for _, row in read_rows(tmp_path / "rows")] == value


@pytest.mark.parametrize("array", [True, False])
@pytest.mark.parametrize("chunk", [1000, CHUNK])
def test_what_python_cannot_hold_costs_its_row_alone(tmp_path, monkeypatch, array, chunk):
    monkeypatch.setattr("eyrie.sources.CHUNK", chunk)
    deep = '{"a": "]}", "b": ' + '[{"c": ' * 50_000 + "1" + "}]" * 50_000 + "}"
    huge = '{"a": "}\\"", "b": [' + "7" * 5000 + "]}"
    rows = ['{"id": 0}', deep, '{"id": 1}', huge, "-" + "9" * 5000, '{"id": 2}', "8" * 5000]
    text = f"[{','.join(rows)}]" if array else "\n".join(rows)
    (tmp_path / "rows").write_text(text)
    found = list(read_rows(tmp_path / "rows"))
    for (offset, _), row in zip(found, rows, strict=True):
        assert text.startswith(row, offset)
    number = "a number with too many digits"
    assert [str(row) if isinstance(row, Reject) else row["id"] for _, row in found] == [
        0, "nested too deeply", 1, number, number, 2, number
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content, rows, offset, why",
    [
        (ARRAY[:-1], 5, len(ARRAY) - 1, "cut off"),
        (b'{"a": 1}\n{"a": "the ow', 1, 15, "Unterminated string"),
        (LINES[:-3], 4, None, ""),
        (b'{"a": 1}\n{"a": tru}\n{"a": 2}' + b" " * 50, 1, 15, "Expecting value"),
        (b'[{"a": 1}] []', 1, 11, "text after the array's end"),
        (b'{"a": "\xff"}', 0, 7, "not UTF-8"),
        (b'{"a": 1}\n{"a": "caf\xe9"}\n', 1, 19, "not UTF-8"),
        (b'{"a": 1}\n{"a": "owl"}\xc3', 2, 21, "not UTF-8"),
        (gz(LINES + b"\n") + b"more", 5, len(LINES) + 1, "cannot be unpacked"),
        (zstandard.compress(LINES + b"\n") + b"more", 5, len(LINES) + 1, "cannot be unpacked"),
        (LINES.decode().encode("utf-16"), 0, 0, "not UTF-8"),
        (gz(LINES)[:-12], None, None, ""),
        (zstandard.compress(LINES * 9000)[:-30], None, None, ""),
        (b"PAR1 and then nothing", 0, None, ""),
        (b"[" * 100_000, 0, None, "recursion"),
        (b'{"a": 1}\n{"a": ' + b"[" * 100_000 + b"\n", 1, 9, "recursion"),
        (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b', "b": "]}', 1, 9, "5000 digits"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path, content, rows, offset, why):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(BrokenFile, match=r"broken.json: broken .*after .* whole rows") as error:
        list(read_rows(path))
    assert why in error.value.why
    assert rows is None or error.value.rows == rows
    assert offset is None or error.value.offset == offset


@pytest.mark.parametrize("pack", [gz, zstandard.compress])
def test_a_packed_file_cut_anywhere_is_broken_after_its_whole_rows(tmp_path, pack):
    """Also where the cut leaves whole rows only, or the checksum alone is missing."""
    rows = [{"id": i, "text": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(5000)]
    content = pack("".join(json.dumps(row) + "\n" for row in rows).encode())
    read = 0
    for kept in [*range(100, len(content), 49_999), len(content) - 2]:
        (tmp_path / "cut").write_bytes(content[:kept])
        found = []
        with pytest.raises(BrokenFile, match="cannot be unpacked: cut off") as error:
            for _, row in read_rows(tmp_path / "cut"):
                found.append(row)
        assert found == rows[: len(found)] and error.value.rows == len(found) >= read
        read = len(found)
    assert read > 0


def test_parquet_text_that_is_not_utf8(tmp_path):
    text = pa.StringArray.from_buffers(
        65, pa.array(range(66), pa.int32()).buffers()[1], pa.py_buffer(b"x" * 64 + b"\xff")
    )
    pq.write_table(pa.table({"prompt": text}), tmp_path / "rows.parquet")
    with pytest.raises(BrokenFile, match=r"rows.parquet: broken after \d+ whole rows .*utf-8"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_a_parquet_struct_has_the_fields_that_its_row_has(tmp_path):
    """One type for all rows gives each call the arguments of every other, as nulls."""
    rows = [
        {"messages": [{"content": "a", "arguments": {"city": "Paris", "days": None}}]},
        {"messages": [{"content": None, "arguments": {"city": None, "days": 3}}], "tools": None},
    ]
    table = pa.Table.from_pylist(rows)
    content = pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "d"], pa.large_string())
    table = table.append_column("kind", content[0]).append_column("large", content[1])
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == [
        {"messages": [{"content": "a", "arguments": {"city": "Paris"}}], "kind": "a", "large": "c"},
        {"messages": [{"arguments": {"days": 3}}], "kind": "b", "large": "d"},
    ]


def test_folders_and_patterns(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.json", "deep/c.jsonl.gz", "README.md", "d.parquet"):
        (tmp_path / name).write_bytes(b"")
    names = ["a.json", "b.jsonl", "d.parquet", "deep/c.jsonl.gz"]
    assert [str(p.relative_to(tmp_path)) for p in expand(tmp_path)] == names
    assert [p.name for p in expand(tmp_path / "*.json*")] == ["a.json", "b.jsonl"]
    assert [p.name for p in expand(f"{tmp_path}/**/*.gz")] == ["c.jsonl.gz"]
    # A pattern of folders; capitals; what macOS leaves beside a file.
    assert [p.name for p in expand(tmp_path / "de*")] == ["c.jsonl.gz"]
    for name in ("deep/D.JSONL", "deep/._c.jsonl"):
        (tmp_path / name).write_bytes(b"")
    assert [p.name for p in expand(tmp_path / "deep")] == ["D.JSONL", "c.jsonl.gz"]
    for missing in ("none", "*.csv"):
        with pytest.raises(DataError, match="no such file"):
            expand(tmp_path / missing)


def make_odd(folder, name):
    if name == "pipe.jsonl":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("gone")


@pytest.mark.parametrize("verifier", [False, True])
@pytest.mark.parametrize(
    "name, pattern, message",
    [
        ("pipe.jsonl", "pipe.jsonl", "pipe.jsonl: no file but a folder, a pipe or a device"),
        ("pipe.jsonl", "", "pipe.jsonl: no file but a folder, a pipe or a device"),
        ("link.jsonl", "*.jsonl", "link.jsonl: a link to gone, which is not there"),
        ("link.jsonl", "", "link.jsonl: a link to gone, which is not there"),
        ("link.jsonl", "**x/a", "no name of a file"),
        ("link.jsonl", "x" * 300, "no name of a file"),
        ("link.jsonl", "~nosuchuser/x", "no name of a file"),
    ],
)
def test_what_is_no_file_is_named_and_not_read(tmp_path, name, pattern, message, verifier):
    """A pipe would be waited for, for ever, when a run is planned."""
    make_odd(tmp_path, name)
    pattern = pattern if pattern.startswith("~") else f"{tmp_path}/{pattern}"
    with pytest.raises(DataError, match=message):
        expand(pattern)
    if pattern != f"{tmp_path}/":
        with pytest.raises(DataError, match=message):
            local_content(f"path:{pattern}", tmp_path / "none.json", verifier)
    with pytest.raises(DataError, match="/dev/zero: no file"):
        local_content("path:/dev/zero", tmp_path / "none.json", verifier)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"local": []}', '{"local": {"a": 1}}', '{"local": {"a": {}}}', b"\xff"],
)
def test_a_damaged_identity_is_named_with_the_way_out(tmp_path, text):
    file = tmp_path / "verifier.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=f"{file}: .*; delete it, and it is fetched again"):
        local_content("path:none", file)


READ = """
import sys
sys.path.insert(0, {scripts!r})
from eyrie.provenance import peak_rss_bytes
from eyrie.sources import read_rows
before = peak_rss_bytes()
rows = sum(1 for _ in read_rows(sys.argv[1]))
print(rows, peak_rss_bytes() - before)
"""


def test_memory_is_that_of_the_largest_row(tmp_path):
    """300 MB of rows and one of 40 MB among them, in an array, packed."""
    path = tmp_path / "large.json.gz"
    row = json.dumps({"value": "the owl " * 2000})
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("[" + ",".join([row] * 100) + ",")
        file.write(json.dumps({"value": "x" * (40 << 20)}))
        for _ in range(200):
            file.write("," + ",".join([row] * 100))
        file.write("]")
    scripts = str(Path(__file__).parents[2] / "scripts")
    command = [sys.executable, "-c", READ.format(scripts=scripts), str(path)]
    rows, grown = map(int, subprocess.check_output(command, text=True).split())
    assert rows == 20_101
    assert 40e6 < grown < 300e6
