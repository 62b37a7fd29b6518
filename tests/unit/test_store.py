import os

import pytest

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
