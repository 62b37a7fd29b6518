import shutil
import subprocess
import sys
from pathlib import Path

from eyrie.provenance import code_hash, read_module

SCRIPTS = Path(__file__).parents[2] / "scripts"
STAGES = ["fetch", "shard", "extract", "vocab", "train", "check", "bench", "report"]


def edited(tmp_path, file: str, old: str, new: str) -> set[str]:
    """The stages whose hash changes by an edit of `file`."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts", dirs_exist_ok=True)
    path = tmp_path / "scripts" / file
    text = path.read_text()
    assert old in text
    read_module.cache_clear()
    before = {s: code_hash(tmp_path / "scripts" / f"{s}.py") for s in STAGES}
    path.write_text(text.replace(old, new, 1))
    read_module.cache_clear()
    return {s for s in STAGES if code_hash(tmp_path / "scripts" / f"{s}.py") != before[s]}


def test_comments_touches_and_docstrings_change_nothing(tmp_path):
    assert edited(tmp_path, "train.py", "import argparse", "# why\nimport argparse") == set()
    assert edited(tmp_path, "train.py", '"""Train an', '"""Train one') == set()


def test_an_edit_reaches_the_stages_that_use_it(tmp_path):
    assert edited(tmp_path, "eyrie/trainer.py", "int(batch", "float(batch") == {"train"}
    assert edited(tmp_path, "eyrie/draft_model.py", "CHUNK = 1024", "CHUNK = 512") == {"train"}
    assert edited(tmp_path, "eyrie/connector.py", "offset + tokens", "offset + 0") == {"extract"}
    assert "extract" in edited(tmp_path, "eyrie/scheduler.py", "pass", "return None")
    users = edited(tmp_path, "eyrie/engine.py", "<< 28", "<< 20")
    assert {"extract", "bench"} <= users and "vocab" not in users


def test_peak_memory_is_this_program_s_and_not_its_starter_s():
    measure = "from eyrie.provenance import peak_rss_bytes; print(peak_rss_bytes())"
    program = "import sys, subprocess; held = bytearray(b'x') * (400 << 20); "
    program += f"subprocess.run([sys.executable, '-c', {measure!r}], check=True)"
    command = [sys.executable, "-c", program]
    found = subprocess.check_output(command, cwd=SCRIPTS, text=True)
    assert 5e6 < int(found) < 100e6
