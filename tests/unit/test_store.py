import os
from unittest.mock import patch

import pytest

import store as script
from eyrie import store


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "f00d.safetensors"
    partial = tmp_path / "f00d.safetensors.partial"
    partial.write_bytes(bytes(range(256)) * 40)
    store.seal(partial, path, given_back=1.0)
    return path


def test_a_sealed_shard_is_sound(shard):
    assert store.fault(shard) is None
    assert sorted(p.name for p in shard.parent.iterdir()) == ["f00d.json", "f00d.safetensors"]


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "it has 0 bytes, 10,240 were written"),
        (bytes(range(256)) * 39, "it has 9,984 bytes"),
        (bytes(10_240), "its content is not what was written"),
    ],
)
def test_damage_breaks_the_seal(shard, content, why):
    shard.write_bytes(content)
    assert why in store.fault(shard)
    aside = store.set_aside(shard)
    assert aside.read_bytes() == content and not shard.exists()


def test_a_file_that_was_not_touched_is_read_only_when_asked(shard):
    before = shard.stat()
    shard.write_bytes(bytes(10_240))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.fault(shard) is None
    assert store.fault(shard, read_all=True) == "its content is not what was written"


def test_a_file_that_was_only_touched_is_sound(shard):
    os.utime(shard)
    assert store.fault(shard) is None
    assert store.read_seal(shard)["changed_ns"] == shard.stat().st_mtime_ns


def test_a_shard_without_a_seal_is_not_trusted(shard):
    shard.with_suffix(".json").unlink()
    assert store.fault(shard) == "it has no seal"


def test_a_disk_too_small_is_told_with_the_numbers(tmp_path):
    store.require_space(tmp_path, 1000)
    with pytest.raises(OSError, match=r"1,000,000.00 GB may be needed, .* GB are free"):
        store.require_space(tmp_path, 10**15)


@pytest.mark.parametrize("seal", ["", "{}", "[]", "\xff", '{"bytes": 10240, "changed_ns": null}'])
def test_a_damaged_seal_is_a_fault(shard, seal):
    shard.with_suffix(".json").write_bytes(seal.encode("latin-1"))
    assert "its seal is damaged" in store.fault(shard)


def run(*argv) -> None:
    with patch("sys.argv", ["store.py", *map(str, argv)]):
        script.main()


@pytest.fixture
def folder(shard):
    """A store with a sound shard that no output uses, a folder and a link to nothing."""
    folder = shard.parent / ".state/store"
    folder.mkdir(parents=True)
    for path in (shard, shard.with_suffix(".json")):
        path.rename(folder / path.name)
    (folder / "dir.safetensors").mkdir()
    (folder / "link.safetensors").symlink_to("nowhere")
    (folder / "x.partial").mkdir()
    return folder


def test_what_is_no_file_is_told_and_stays(folder, capsys):
    run("list", folder)
    with pytest.raises(SystemExit, match="2 of 3 shards are damaged"):
        run("verify", folder)
    run("prune", folder, "--yes")
    assert capsys.readouterr().out.count("it is no file, and stays as it is") == 6
    left = {path.name for path in folder.iterdir()}
    assert left == {"dir.safetensors", "link.safetensors", "x.partial"}


@pytest.mark.parametrize("linked", [False, True])
def test_a_shard_in_use_is_not_pruned(folder, tmp_path, linked):
    if linked:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    hidden = folder.parents[1] / "data/1k/hidden"
    hidden.mkdir(parents=True)
    (hidden / "0.safetensors").hardlink_to(folder / "f00d.safetensors")
    (hidden / "1.safetensors").symlink_to("nowhere")
    run("prune", folder, "--yes")
    assert (folder / "f00d.safetensors").exists()


def test_only_a_store_is_pruned(shard):
    for path in (shard.parent, "/"):
        with pytest.raises(SystemExit, match="is no store"):
            run("prune", path, "--yes")
    assert shard.exists()
