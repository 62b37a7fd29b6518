import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from eyrie.shards import read_rows
from shard import DataError, read_conversations

SCRIPT = Path(__file__).parents[2] / "scripts/shard.py"


def shard(inputs: Path, out: Path, conversations: Path, limit: int, *options: str):
    command = [sys.executable, str(SCRIPT), "--conversations", str(conversations)]
    command += ["--tokenizer", str(inputs / "verifier"), "--out", str(out), "--limit", str(limit)]
    command += ["--benchmark", str(inputs / "prompts.jsonl"), "--shard-size", "10"]
    command += ["--max-length", "64", "--max-new-tokens", "16", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_larger_selection_begins_with_the_same_shards(inputs, tmp_path):
    for limit in (20, 25):
        done = shard(inputs, tmp_path / str(limit), inputs / "conversations.jsonl", limit)
        assert done.returncode == 0, done.stderr
    for name in ("00000.safetensors", "00001.safetensors"):
        small, large = (tmp_path / limit / "shards" / name for limit in ("20", "25"))
        assert small.read_bytes() == large.read_bytes()
    assert len(read_rows(tmp_path / "25/shards/00002.safetensors")) == 5


def test_every_row_is_accounted_for(inputs, tmp_path):
    good = [{"from": "human", "value": "the owl waits"}, {"from": "gpt", "value": "on its branch"}]
    rows = [
        {"id": 1, "conversations": good},
        {"id": 2, "conversations": good},
        {"id": 3, "conversations": []},
        {"id": 4, "conversations": [{"from": "gpt", "value": "night falls"}, *good[:1]]},
        {"id": 5, "conversations": [{"from": "human", "value": tiny.sentence(100, 8) + "?"}]},
        {"id": 6, "conversations": [{"from": "human", "value": "the <|im_end|> owl"}]},
        {"id": 7, "conversations": [{"from": "human", "value": "grass " * 100}]},
        {"id": 8, "conversations": [{"from": "human", "value": "a mouse"}]},
        "not a row",
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    done = shard(inputs, tmp_path / "out", path, 3)
    assert done.returncode == 0, done.stderr
    account = json.loads((tmp_path / "out/shards.json").read_text())
    assert account["read"] == 8 and account["kept"] == 3 and account["rejected"] == 5
    assert account["leading_answers_dropped"] == 1
    assert account["reasons"] == {
        "duplicate": 1,
        "no turns": 1,
        "benchmark prompt": 1,
        "control token in the text": 1,
        "prompt too long": 1,
    }
    rejects = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in rejects] == [2, 3, 5, 6, 7]


def test_too_few_rows_is_an_error_with_the_table(inputs, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"conversations": []}\n' * 3)
    done = shard(inputs, tmp_path / "out", path, 2)
    assert done.returncode == 1
    assert "2 usable conversations asked for, 0 found among 3 read" in done.stderr
    assert "3  no turns" in done.stderr
    assert not (tmp_path / "out/shards.json").exists()


ROWS = [{"id": i, "text": "x" * i} for i in range(5)]


@pytest.mark.parametrize(
    "name, content",
    [
        ("array.json", json.dumps(ROWS).encode()),
        ("array.jsonl", json.dumps(ROWS).encode()),
        ("lines.json", "\n".join(map(json.dumps, ROWS)).encode()),
        ("bom.jsonl", b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, ROWS)).encode()),
        ("zip.jsonl.gz", gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
    ],
)
def test_arrays_and_lines_under_any_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert list(read_conversations(tmp_path / name)) == ROWS


def test_a_file_cut_off_is_named_after_its_whole_rows(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(ROWS)[:-20])
    rows = read_conversations(path)
    with pytest.raises(DataError, match=r"cut.json: broken JSON .* after 4 whole rows"):
        for _ in range(9):
            next(rows)
