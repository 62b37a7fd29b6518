"""Token shards made for a benchmark, and scripts/extract.py run on them."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from eyrie.shards import Rows, write_tokens  # noqa: E402


def write_shards(folder: Path, ids: list[list[int]], size: int) -> list[Path]:
    """Shards of `size` rows, every token of which is supervised."""
    paths = []
    for start in range(0, len(ids), size):
        rows = ids[start : start + size]
        row_ids = [(start + i).to_bytes(16, "little") for i in range(len(rows))]
        paths.append(folder / f"{start:05d}.safetensors")
        write_tokens(paths[-1], Rows.pack(rows, [[True] * len(r) for r in rows], row_ids, {}))
    return paths


def extraction(folder: Path, shards: list[Path], store: str, *options) -> dict:
    """Run extract.py on the shards' own answers with folder/verifier; its summary."""
    (folder / "identity.json").write_text('{"source": "", "files": {}}')
    command = [sys.executable, SCRIPTS / "extract.py", "--shards", *shards]
    command += ["--out", *(folder / f"out-{store}" / path.name for path in shards)]
    command += ["--store", folder / store, "--verifier", folder / "verifier"]
    command += ["--identity", folder / "identity.json", "--summary", folder / "hidden.json"]
    command += ["--log", folder / "log.jsonl", "--answers", "dataset", "--layer-ids", 1, 2, 3]
    command += ["--dtype", "float32", *options]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return json.loads((folder / "hidden.json").read_text())
