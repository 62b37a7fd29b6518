import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eyrie.files import atomic, link_or_copy, require_own
from eyrie.shards import (
    HiddenShardWriter,
    Rows,
    ShardError,
    check_hidden,
    read_rows,
    read_states,
    to_fp8,
    write_tokens,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"


def rows_of(lengths: list[int]) -> Rows:
    ids = [[i * 10 + k for k in range(n)] for i, n in enumerate(lengths)]
    masks = [[k % 2 == 0 for k in range(n)] for n in lengths]
    return Rows.pack(
        ids, masks, [bytes([i] * 16) for i in range(len(lengths))], {"made": "here", "by": "test"}
    )


def write_hidden(path, rows: Rows, states: torch.Tensor, order: list[int], scales=None) -> None:
    for row in order:
        start, end = rows.row_offsets[row : row + 2].tolist()
        part = None if scales is None else scales[start:end]
        HiddenShardWriter.write_states(path, start, states[start:end], part)
    HiddenShardWriter.finish(path, rows, states.shape[1:], states.dtype)


def test_token_shard_round_trip_and_same_bytes(tmp_path):
    rows = rows_of([3, 5, 1])
    for name in "ab":
        write_tokens(tmp_path / name, rows)
    # Another process, whose hash tables have another order.
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from eyrie.shards import *; "
    code += f"write_tokens({str(tmp_path / 'c')!r}, read_rows({str(tmp_path / 'a')!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()
    read = read_rows(tmp_path / "a")
    assert read.row(1).tolist() == [10, 11, 12, 13, 14]
    assert read.lengths == [3, 5, 1]
    assert read.metadata["made"] == "here"
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_hidden_shard_is_safetensors_whatever_the_order_of_its_rows(tmp_path):
    rows = rows_of([3, 5, 1])
    states = torch.randn(9, 4, 8).bfloat16()
    write_hidden(tmp_path / "a", rows, states, [0, 1, 2])
    write_hidden(tmp_path / "b", rows, states, [2, 0, 1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tensors = load_file(tmp_path / "a")
    assert torch.equal(tensors["hidden_states"], states)
    assert torch.equal(tensors["input_ids"], rows.input_ids)
    assert torch.equal(tensors["loss_mask"], rows.loss_mask)
    norms = check_hidden(tmp_path / "a", rows, 4, 8)
    assert norms == pytest.approx(states.float().norm(dim=-1).mean(0).tolist(), rel=1e-3)
    with safe_open(tmp_path / "a", "pt") as file:
        assert torch.equal(file.get_slice("hidden_states")[3:8], states[3:8])


def test_fp8_states_have_a_scale_for_each_token_and_layer(tmp_path):
    rows = rows_of([3, 5, 1])
    # A late layer a thousand times an early one, with one channel far above the others.
    states = torch.randn(9, 2, 64) * torch.tensor([1.0, 1000.0])[:, None]
    states[:, 1, 7] *= 100
    states[4, 0] = 0.0
    stored, scales = to_fp8(states)
    assert stored.float().isfinite().all() and stored.float().abs().max() == 448
    write_hidden(tmp_path / "a", rows, stored, [2, 0, 1], scales)
    with safe_open(tmp_path / "a", "pt") as file:
        found = read_states(file, 2, 9).float()
        assert file.get_slice("hidden_states").get_dtype() == "F8_E4M3"
    assert found.isfinite().all()
    error = (found - states[2:]).norm(dim=-1) / states[2:].norm(dim=-1).clamp(min=1e-9)
    assert 0 < error.max() < 0.04
    small = states[2:, 1, :7]
    assert ((found[:, 1, :7] - small).norm() / small.norm()) < 0.05
    bf16 = states.bfloat16()
    write_hidden(tmp_path / "b", rows, bf16, [0, 1, 2])
    # Half of each state, and four bytes for its scale.
    saved = (tmp_path / "b").stat().st_size - (tmp_path / "a").stat().st_size
    assert abs(saved - 9 * 2 * (64 - 4)) < 64


@pytest.mark.parametrize(
    "value, word",
    [(float("nan"), "NaN"), (float("inf"), "NaN"), (0.0, "all zero"), (2.0, "same")],
)
def test_unusable_states_are_named(tmp_path, value, word):
    rows = rows_of([3, 5])
    states = torch.randn(8, 2, 4).bfloat16()
    states[3:, 1] = value
    write_hidden(tmp_path / "a", rows, states, [0, 1])
    with pytest.raises(ShardError, match=rf"row 1 holds .*{word}"):
        check_hidden(tmp_path / "a", rows, 2, 4)


def test_cut_or_foreign_files_are_not_shards(tmp_path):
    write_tokens(tmp_path / "a", rows_of([30, 50]))
    data = (tmp_path / "a").read_bytes()
    for name, content in {"cut": data[:-7], "empty": b"", "text": b"hello there, no shard"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ShardError, match=name):
            read_rows(tmp_path / name)


def test_atomic_leaves_nothing_behind_a_failure(tmp_path):
    with pytest.raises(RuntimeError), atomic(tmp_path / "x") as partial:
        partial.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_elses_is_not_made_anew(tmp_path):
    require_own(tmp_path / "none", "*.svg")
    for name in ("loss.svg", "norms.svg.partial", ".snakemake_timestamp"):
        (tmp_path / name).touch()
    require_own(tmp_path, "*.svg")
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"thesis\.tex: is not of what is written"):
        require_own(tmp_path, "*.svg")


def test_link_or_copy_replaces_what_is_there(tmp_path):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    assert link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")
    assert link_or_copy(tmp_path / "a", tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
