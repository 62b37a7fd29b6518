"""What is fetched from this machine: whole, or not at all, and in the way of nothing else."""

import json
import os
from pathlib import Path

import pytest

from fetch import main

ROW = json.dumps({"prompt": "hi"}) + "\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with sources of each kind, good and bad."""
    monkeypatch.chdir(tmp_path)
    for folder in ("verifier", "dangling", "piped", "bare"):
        Path(folder).mkdir()
        if folder != "bare":
            Path(folder, "config.json").write_text("{}")
    Path("dangling/model.safetensors").symlink_to("gone")
    os.mkfifo("piped/model.safetensors")
    os.mkfifo("pipe")
    Path("prompts.jsonl").write_text(ROW)
    Path("empty.jsonl").write_text("")
    Path("short.gguf").write_bytes(b"GGUF\1")
    return tmp_path


def fetch(monkeypatch, *options: str) -> str | None:
    """Run scripts/fetch.py in this process; its message, if it fails."""
    given = {"--kind": "verifier", "--source": "path:verifier", "--out": "r/v"}
    given |= {"--identity": "r/v.json"} | dict(zip(options[::2], options[1::2], strict=True))
    monkeypatch.setattr(
        "sys.argv", ["fetch.py", *(text for pair in given.items() for text in pair)]
    )
    try:
        main()
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.parametrize(
    "options, message",
    [
        (["--source", "path:typo"], "path:typo: there is no such file or folder"),
        (["--source", "path:~nosuchuser/x"], "path:~nosuchuser/x: there is no such file or folder"),
        (["--source", f"path:{'a' * 300}"], "File name too long"),
        (["--source", "path:dangling"], "dangling/model.safetensors: a link to gone, which"),
        (["--source", "path:piped"], "piped/model.safetensors: no file but a folder, a pipe"),
        (["--source", "path:bare"], "path:bare: no config.json"),
        (["--source", "path:short.gguf"], "short.gguf: cannot be read as GGUF"),
        (["--sha256", "0" * 64], "path:verifier: a sha256 goes with a single file"),
        (["--chat-template", "bare"], "bare: no file but a folder"),
        (["--chat-template", "pipe"], "pipe: no file but a folder, a pipe"),
        (["--identity", "/proc/x/y"], "No such file or directory"),
        (["--kind", "prompts", "--source", "path:empty.jsonl"], "empty.jsonl: holds no prompt"),
        (["--kind", "prompts", "--source", "path:pipe"], "pipe: no file but a folder, a pipe"),
        (["--kind", "conversations", "--source", "path:pipe"], "pipe: no file but a folder, a"),
        (["--kind", "conversations", "--source", "path:none"], "none: no such file"),
        (
            ["--kind", "conversations", "--source", "path:*.jsonl", "--sha256", "0" * 64],
            "path:*.jsonl: a sha256 goes with a single file",
        ),
        (
            ["--kind", "conversations", "--source", "path:bare/..", "--sha256", "0" * 64],
            "path:bare/..: a sha256 goes with a single file",
        ),
    ],
)
def test_what_cannot_be_fetched_leaves_what_is_there(here, monkeypatch, options, message):
    """An earlier fetch's files, too, which the new ones were to replace."""
    assert message in fetch(monkeypatch, *options)
    assert not (here / "r").exists() or [*(here / "r").iterdir()] == []
    assert fetch(monkeypatch) is None
    if "--identity" not in options:
        before = Path("r/v.json").read_text()
        assert message in fetch(monkeypatch, *options)
        assert Path("r/v.json").read_text() == before and Path("r/v/config.json").exists()
    assert sorted(path.name for path in Path("r").iterdir()) == ["v", "v.json"]


@pytest.mark.parametrize("kind", ["verifier", "prompts", "conversations"])
def test_what_no_fetch_has_put_there_stays(here, monkeypatch, kind):
    Path("r/v").mkdir(parents=True)
    Path("r/v/precious").write_text("")
    source = "path:verifier" if kind == "verifier" else "path:prompts.jsonl"
    found = fetch(monkeypatch, "--kind", kind, "--source", source)
    assert found.startswith("fetch: r/v is there, and there is no r/v.json of a fetch")
    assert Path("r/v/precious").exists() and len([*Path("r").iterdir()]) == 1


def test_a_fetch_replaces_an_earlier_one(here, monkeypatch):
    assert fetch(monkeypatch) is None
    options = ["--kind", "prompts", "--source", "path:prompts.jsonl"]
    assert fetch(monkeypatch, *options) is None
    assert Path("r/v").read_text() == ROW
    assert fetch(monkeypatch) is None
    assert Path("r/v/config.json").read_text() == "{}"
    identity = json.loads(Path("r/v.json").read_text())
    assert identity["source"] == "path:verifier" and list(identity["files"]) == ["config.json"]
