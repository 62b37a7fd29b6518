import json
import subprocess
from pathlib import Path

import pytest
import templates
import tiny
import torch
from forking import python
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from eyrie.shards import Rows, ShardError, write_tokens
from eyrie.verifier import draft_size
from eyrie.vocab import load_map, made_of, map_fault, save_map
from vocab import choose, pinned, read_shards

ROOT = Path(__file__).parents[2]


def ids_of(d2t: torch.Tensor) -> list[int]:
    return (torch.arange(len(d2t)) + d2t).tolist()


def all_real(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bool)


def test_offsets_ties_and_special_tokens():
    counts = torch.tensor([0, 5, 5, 9, 0, 5, 0, 1])
    d2t, t2d = choose(counts, [6], 4, all_real(8))
    # 6 is special, 3 is most frequent, 1 and 2 win the tie with 5 by their ids
    assert ids_of(d2t) == [1, 2, 3, 6]
    assert map_fault(d2t, t2d, 4, 8) is None


@pytest.mark.parametrize("size", [4, 400, 500])
def test_fewer_distinct_tokens_than_the_size_are_filled_from_the_lowest_ids(size):
    counts = torch.zeros(500, dtype=torch.int64)
    counts[498] = 7
    d2t, t2d = choose(counts, [499], size, all_real(500))
    assert ids_of(d2t) == [*range(size - 2), 498, 499]
    assert map_fault(d2t, t2d, size, 500) is None


def test_padding_comes_after_every_real_token():
    """Rows of the embeddings that no token has, in the middle and at the end."""
    counts = torch.tensor([0, 0, 0, 3, 0, 0, 0, 0])
    real = torch.tensor([1, 0, 0, 1, 1, 1, 0, 0]).bool()
    assert ids_of(choose(counts, [5], 4, real)[0]) == [0, 3, 4, 5]
    d2t, t2d = choose(counts, [5], 6, real)
    assert ids_of(d2t) == [0, 1, 2, 3, 4, 5] and len(t2d) == 8


def test_no_room_for_what_is_always_in():
    with pytest.raises(ValueError, match="1 leaves no room for the 2 special"):
        choose(torch.zeros(5, dtype=torch.int64), [3, 4], 1, all_real(5))


def test_sizes():
    assert draft_size("full", 512) == draft_size(512, 512) == draft_size("512", 512) == 512
    with pytest.raises(ValueError, match="513 is more than the verifier's vocabulary, 512"):
        draft_size(513, 512)


def test_what_is_always_in_of_a_byte_level_vocabulary():
    tokenizer = tiny.make_tokenizer(control=("<|im_start|>", "<|im_end|>", "<|tool|>"))
    tokenizer.add_tokens([AddedToken("<|unnamed|>", special=True), AddedToken("<plain>")])
    vocabulary = tokenizer.get_vocab()
    # An end that the configs name, and one for which the model has no row.
    found = pinned(tokenizer, [vocabulary["<plain>"], 512], 512)
    named = ("<|im_start|>", "<|im_end|>", "<|tool|>", "<|pad|>", "<|unnamed|>", "<plain>")
    assert {vocabulary[token] for token in named} < {*found}
    text = bytes(range(256)).decode("latin-1") + "鷹🦉"
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert {vocabulary[char] for piece, _ in pieces for char in piece} < {*found}
    assert len(found) == 256 + len(named)


def test_what_is_always_in_of_a_sentencepiece_vocabulary():
    # Control tokens that nothing marks special end turns all the same.
    tokenizer = tiny.make_sentencepiece(
        templates.CHATML, ("<|im_start|>", "<|im_end|>"), marked=False
    )
    vocabulary = tokenizer.get_vocab()
    found = {*pinned(tokenizer, [], len(vocabulary))}
    assert {vocabulary[f"<0x{i:02X}>"] for i in range(256)} < found
    assert {vocabulary["<|im_start|>"], vocabulary["<|im_end|>"]} < found
    assert len(found) == 258


def good_map() -> tuple[torch.Tensor, torch.Tensor]:
    return choose(torch.tensor([0, 5, 5, 9, 0, 5, 0, 1]), [6], 4, all_real(8))


BAD_MAPS = {
    "ids for offsets": lambda d2t, t2d: (torch.arange(len(d2t)) + d2t, t2d),
    "ids that ascend from 0": lambda d2t, t2d: (torch.arange(len(d2t)) // 2, t2d),
    "no offsets": lambda d2t, t2d: (torch.zeros_like(d2t), t2d),
    "offsets past the vocabulary": lambda d2t, t2d: (d2t + len(t2d), t2d),
    "offsets below 0": lambda d2t, t2d: (d2t - 2, t2d),
    "a token twice": lambda d2t, t2d: (d2t - torch.eye(len(d2t), dtype=torch.int64)[1], t2d),
    "int32 offsets": lambda d2t, t2d: (d2t.int(), t2d),
    "float offsets": lambda d2t, t2d: (d2t.float(), t2d),
    "offsets of rank 2": lambda d2t, t2d: (d2t[None], t2d),
    "int8 marks": lambda d2t, t2d: (d2t, t2d.to(torch.int8)),
    "marks of rank 2": lambda d2t, t2d: (d2t, t2d[None]),
    "marks of a smaller vocabulary": lambda d2t, t2d: (d2t, t2d[:-1]),
    "fewer offsets than marks": lambda d2t, t2d: (d2t[:-1], t2d),
    "more marks than offsets": lambda d2t, t2d: (d2t, torch.ones_like(t2d)),
    "other marks": lambda d2t, t2d: (d2t, t2d.roll(1)),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_bad_map_is_named(name):
    assert map_fault(*good_map(), 4, 8) is None
    assert map_fault(*BAD_MAPS[name](*good_map()), 4, 8)


def rows_of(*fingerprints: str) -> list[Rows]:
    return [Rows.pack([[1]], [[True]], [bytes(16)], {"fingerprint": f}) for f in fingerprints]


def test_a_map_of_anything_else_is_refused(tmp_path):
    path, identity = tmp_path / "map.safetensors", {"files": {"tokenizer.json": "aa"}}
    own = made_of(identity, rows_of("x", "y"), 0.05, 4)
    save_map(path, *good_map(), own)
    assert torch.equal(load_map(path, own, 8)[0], good_map()[0])
    # In any order the same rows.
    load_map(path, made_of(identity, rows_of("y", "x"), 0.05, 4), 8)
    others = {
        "verifier": made_of({"files": {"tokenizer.json": "bb"}}, rows_of("x", "y"), 0.05, 4),
        "data": made_of(identity, rows_of("x", "z"), 0.05, 4),
        "held_out is 0.05, not 0.1": made_of(identity, rows_of("x", "y"), 0.1, 4),
        "draft_vocab_size is 4, not 5": made_of(identity, rows_of("x", "y"), 0.05, 5),
    }
    for named, other in others.items():
        with pytest.raises(ValueError, match=rf"{path}: not the vocabulary map .*: {named}"):
            load_map(path, other, 8)
    with pytest.raises(ValueError, match=r"t2d is torch.bool \[8\], not torch.bool \[9\]"):
        load_map(path, own, 9)
    save_file(dict(zip(("d2t", "t2d"), good_map(), strict=True)), path)
    with pytest.raises(ValueError, match="verifier is not told"):
        load_map(path, own, 8)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{path}: cannot be read"):
        load_map(path, own, 8)


def run(inputs: Path, out: Path, *options: str) -> subprocess.CompletedProcess:
    """scripts/vocab.py on two shards of rows, written or not by the tiny verifier."""
    for number in range(2):
        ids = [[256 + 20 * number + i + j for j in range(8)] for i in range(20)]
        row_ids = [bytes([37 * (20 * number + i) % 256] * 16) for i in range(20)]
        masks = [[False] * 4 + [True] * 4] * 20
        rows = Rows.pack(ids, masks, row_ids, {"fingerprint": str(number)})
        write_tokens(out / f"{number}.safetensors", rows)
    (out / "verifier.json").write_text(
        json.dumps({"source": "path:a", "files": {"config.json": "c0ffee"}})
    )
    command = [python(), ROOT / "scripts/vocab.py", "--verifier", inputs / "verifier"]
    command += ["--hidden", out / "0.safetensors", out / "1.safetensors"]
    command += ["--identity", out / "verifier.json", "--prompts", inputs / "prompts.jsonl"]
    command += ["--held-out", "0.3", "--min-coverage", "0.5"]
    command += ["--out", out / "map.safetensors", "--summary", out / "map.json", *options]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_the_map_and_what_it_covers(inputs, tmp_path):
    done = run(inputs, tmp_path, "--size", "285")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "map.json").read_text())
    found = load_file(tmp_path / "map.safetensors")
    assert map_fault(found["d2t"], found["t2d"], 285, 512) is None
    kept = {*ids_of(found["d2t"])}
    sides = {True: [], False: []}
    for number in range(40):
        out = 37 * number % 256 < 0.3 * 256  # of an id's first eight bytes, all alike
        sides[out] += range(256 + number + 4, 256 + number + 8)
    assert len(sides[True]) > 20
    tokenizer = AutoTokenizer.from_pretrained(inputs / "verifier")
    texts = [json.loads(s)["turns"] for s in (inputs / "prompts.jsonl").read_text().splitlines()]
    asked = [i for turns in texts for text in turns for i in tokenizer(text).input_ids]
    for name, ids in (("", sides[False]), ("held_out_", sides[True]), ("prompts_", asked)):
        share = sum(i in kept for i in ids) / len(ids)
        assert summary[f"{name}coverage"] == pytest.approx(share, abs=1e-6), name
    assert summary["supervised_tokens"] == len(sides[False])
    assert summary["held_out_tokens"] == len(sides[True])
    assert 0.5 < summary["coverage"] < 1
    # 256 bytes and three control tokens.
    assert summary["special_tokens"] == 259


def test_the_whole_vocabulary(inputs, tmp_path):
    done = run(inputs, tmp_path, "--size", "full")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "map.safetensors")
    assert ids_of(found["d2t"]) == [*range(512)] and found["t2d"].all()
    assert json.loads((tmp_path / "map.json").read_text())["prompts_coverage"] == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["--size", "513"], "513 is more than the verifier's vocabulary, 512"),
        (["--size", "200"], "200 leaves no room for the 259 special"),
        (["--size", "259", "--min-coverage", "0.99"], "259 tokens cover .* raise"),
    ],
)
def test_sizes_that_cannot_be(inputs, tmp_path, options, message):
    done = run(inputs, tmp_path, *options)
    assert done.returncode == 1 and message.split(" .* ")[0] in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "map.safetensors").exists()


@pytest.mark.parametrize(
    "tokens, metadata, message",
    [
        (10**6, {"fingerprint": "0"}, "0.safetensors: holds tokens 1 to 1,000,000, and the verifi"),
        (-1, {"fingerprint": "0"}, "0.safetensors: holds tokens -1 to 1, and the verifier"),
        (1, {}, "0.safetensors: a token shard, which has no states"),
        (1, {"fingerprint": "1"}, "1.safetensors: the same shard as .*0.safetensors"),
    ],
)
def test_shards_of_something_else_are_named(tmp_path, tokens, metadata, message):
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for path, last, made in ((paths[0], tokens, metadata), (paths[1], 1, {"fingerprint": "1"})):
        write_tokens(path, Rows.pack([[1, last]], [[False, True]], [bytes(16)], made))
    with pytest.raises(ShardError, match=message):
        read_shards(paths, 512)
