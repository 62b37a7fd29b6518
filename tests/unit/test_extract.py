import json
from types import SimpleNamespace

import pytest
import tiny
import torch
from templates import FAMILIES

from extract import Sealing, Shard, Talk, fingerprint, row_seed
from eyrie import config
from eyrie.chat import Chat
from eyrie.hidden import HiddenStates
from eyrie.shards import HiddenShardWriter, Rows, ShardError, token_hash


def chat_of(name: str) -> Chat:
    template, control, bos, eos, *_ = FAMILIES[name]
    return Chat(tiny.make_tokenizer(template, control, bos, eos))


def answer(talk: Talk, text: str, cut: bool = False) -> list[int] | None:
    tokenizer = talk.chat.tokenizer
    return talk.answered(tokenizer(text).input_ids, cut)


def users(*texts: str) -> dict:
    head = [{"role": "system", "content": "be brief"}]
    return {"messages": head + [{"role": "user", "content": t} for t in texts], "tools": None}


def supervised(chat: Chat, row) -> str:
    return chat.tokenizer.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m])


@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek", "mistral"])
def test_each_turn_is_asked_with_the_answers_before(name):
    chat, end = chat_of(name), FAMILIES[name][4]
    talk = Talk(chat, users("the owl", "a mouse", "run"), 1000)
    prompt = answer(talk, "sees" + end)
    text = chat.tokenizer.decode(prompt)
    assert "sees" + end in text and text.index("sees") < text.index("a mouse")
    assert answer(talk, "waits", cut=True) is not None
    assert answer(talk, "falls" + end) is None
    (row,) = talk.rows()
    assert row.ids[: len(prompt)] == prompt
    # The limit ended the second answer, so its end of turn is the template's.
    space = " " if name == "mistral" else ""
    assert supervised(chat, row) == f"{space}sees{end}{space}waits{space}falls{end}"


def test_a_conversation_ends_with_the_last_turn_that_fits():
    chat = chat_of("chatml")
    room = len(chat.prompt(users("the owl")["messages"]).ids) + 8
    talk = Talk(chat, users("the owl", "a mouse " * 9, "run"), room)
    assert answer(talk, "sees<|im_end|>") is None
    (row,) = talk.rows()
    assert supervised(chat, row) == "sees<|im_end|>" and "mouse" not in chat.tokenizer.decode(
        row.ids
    )


def test_answers_whose_thinking_is_dropped_have_a_row_of_their_own():
    chat = chat_of("qwen3")
    talk = Talk(chat, users("owl?", "mouse?", "grass?"), 1000)
    think = "<think>\n{}\n</think>\n\n{}<|im_end|>"
    prompt = answer(talk, think.format("one", "a"))
    assert "one" not in chat.tokenizer.decode(prompt)
    answer(talk, "b<|im_end|>")
    assert answer(talk, think.format("three", "c")) is None
    whole, first = talk.rows()
    assert supervised(chat, whole) == "b<|im_end|>" + think.format("three", "c")
    assert supervised(chat, first) == think.format("one", "a")
    assert first.ids[-1:] != whole.ids[-1:] or len(first.ids) < len(whole.ids)


def test_answers_that_the_template_begins_itself_have_rows_of_their_own():
    """A prompt that ends within the thinking, as DeepSeek-R1's, is repeated by no history."""
    template, control, bos, eos, *_ = FAMILIES["deepseek"]
    template = template.replace("<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}")
    chat = Chat(tiny.make_tokenizer(template, control, bos, eos))
    talk = Talk(chat, users("owl?", "mouse?"), 1000)
    wrote = [f"one\n</think>\n\na{eos}", "two\n</think>\n\nb"]
    prompts = [talk.prompt, answer(talk, wrote[0])]
    assert answer(talk, wrote[1], cut=True) is None
    rows = talk.rows()
    assert [supervised(chat, row) for row in rows] == wrote
    assert [row.ids[: row.mask.index(True)] for row in rows] == prompts
    assert chat.tokenizer.decode(prompts[1]).endswith(
        f"a{eos}<｜User｜>mouse?<｜Assistant｜><think>\n"
    )


def test_an_answer_that_cannot_be_rendered_is_the_last():
    chat = chat_of("chatml")
    talk = Talk(chat, users("owl?", "mouse?"), 1000)
    prompt = talk.prompt
    assert answer(talk, "\U000f0001<|im_end|>") is None
    (row,) = talk.rows()
    assert row.ids[: row.mask.index(True)] == prompt
    assert supervised(chat, row) == "\U000f0001<|im_end|>"


def test_seeds_are_of_the_row_and_the_turn():
    seeds = {row_seed(bytes([row] * 16), turn, seed) for row in (1, 2) for turn in (1, 2)
             for seed in (0, 1)}  # fmt: skip
    assert len(seeds) == 8 and all(0 <= seed < 2**32 for seed in seeds)
    assert row_seed(b"x" * 16, 3, 0) == row_seed(b"x" * 16, 3, 0)


def written_shard(folder) -> Shard:
    """A shard of two prompts whose states have come back, the second row's first."""
    prompts = Rows.pack([[5, 6, 7], [8, 9]], [[True] * 3, [True] * 2], [b"a" * 16, b"b" * 16], {})
    shard = Shard(prompts, folder / "f00d.safetensors", 0, [1, 3, 4], 8, "bf16")
    records = []
    for row, start in ((1, 0), (0, 2)):
        ids = prompts.row(row).tolist()
        shard.rows[row] = (ids, [True] * len(ids), shard.row_id(row))
        records.append({"row": row, "offset": start, "tokens": len(ids), "ids": token_hash(ids)})
    HiddenShardWriter.write_states(shard.partial, 0, torch.randn(5, 3, 8).bfloat16())
    write_records(shard, records)
    return shard


def write_records(shard: Shard, records: list[dict]) -> None:
    path = shard.partial.with_name(shard.partial.name + ".rows")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_shard_knows_its_layers(tmp_path):
    shard = written_shard(tmp_path)
    shard.finish(None, greedy=False)
    states = HiddenStates([shard.path])
    assert states.row(0, 0)["input_ids"].tolist() == [8, 9]
    states.require_layers([1, 3, 4])
    # As many, but others, would train without a complaint.
    with pytest.raises(ValueError, match=r"holds the states of layers \[1, 3, 4\], \[2, 3, 4\]"):
        states.require_layers([2, 3, 4])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": token_hash([8, 8])}, "row 1 got the states of other tokens"),
        ({"tokens": 1}, r"other tokens than its own \(1 states for 2 tokens\)"),
        ({"offset": 1}, "row 1 is at token 1, not 0"),
    ],
)
def test_states_of_other_tokens_stop_the_shard(tmp_path, change, message):
    shard = written_shard(tmp_path)
    first, second = shard.records()
    write_records(shard, [first | change, second])
    with pytest.raises(ShardError, match=message):
        shard.finish(None, greedy=False)
    assert not shard.path.exists()


@pytest.mark.parametrize("beside", [False, True])
def test_shards_are_sealed_in_order_and_a_wrong_one_stops_the_job(tmp_path, beside):
    """On the engine's own thread and beside it."""
    sealing, shards = Sealing(beside), []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        shards.append(written_shard(tmp_path / name))
        sealing.begin(shards[-1], None, False)
    ended = list(sealing.ended(wait=True))
    assert [shard for shard, _ in ended] == shards
    assert all(shard.path.exists() and "layer_norms" in report for shard, report in ended)
    assert list(sealing.ended()) == []
    wrong = written_shard(tmp_path)
    first, second = wrong.records()
    write_records(wrong, [first | {"ids": token_hash([8, 8])}, second])
    with pytest.raises(ShardError, match="row 1 got the states of other tokens"):
        sealing.begin(wrong, None, False)
        list(sealing.ended(wait=True))
    assert not wrong.path.exists()


# Where each key of the config that could change a state goes.
IN_FINGERPRINT = {
    "layer_ids": [1, 2, 3],
    "dtype": "bfloat16",
    "states": "fp8",
    "max_model_len": 256,
    "answers": "dataset",
    "max_new_tokens": 8,
    "max_length": 32,
}
# Their numbers count only where answers are sampled.
IN_FINGERPRINT_OF_SAMPLES = {"top_p": 0.5, "seed": 1}
# The token shard's content follows them, and its hash is in the fingerprint.
IN_THE_TOKENS = {
    "shard_size", "min_supervised_tokens", "max_turns", "on_bad_file", "max_reject_fraction",
    "system_turns", "date", "template_options",
}  # fmt: skip
# The verifier's files and source are its identity.
IN_THE_VERIFIER = {"source", "sha256", "chat_template", "trust_remote_code"}
CHANGE_NO_NUMBER = {
    "gpus", "gpu_memory_utilization", "kv_cache_gib", "max_num_seqs", "max_num_batched_tokens",
    "runtime", "nodes",
}  # fmt: skip


def test_every_key_is_in_the_fingerprint_or_changes_no_number(tmp_path):
    keys = {*config.Extract.model_fields, *config.Shard.model_fields, *config.Verifier.model_fields}
    known = {*IN_FINGERPRINT, *IN_FINGERPRINT_OF_SAMPLES, "temperature"}
    assert keys == known | IN_THE_TOKENS | IN_THE_VERIFIER | CHANGE_NO_NUMBER
    shard = tmp_path / "shard"
    shard.write_bytes(b"tokens")
    plain = {
        "layer_ids": [1, 2], "dtype": "float32", "states": "bf16", "max_model_len": 128,
        "answers": "verifier",
        "max_new_tokens": 16, "max_length": 64, "temperature": 0.0, "top_p": 1.0, "seed": 0,
    }  # fmt: skip

    def of(**changes) -> str:
        return fingerprint(shard, "verifier", SimpleNamespace(**plain | changes))

    for key, value in [*IN_FINGERPRINT.items(), ("temperature", 1.0)]:
        assert of(**{key: value}) != of(), key
    for key, value in IN_FINGERPRINT_OF_SAMPLES.items():
        assert of(**{key: value}) == of()
        assert of(temperature=1.0, **{key: value}) != of(temperature=1.0)
    for key in CHANGE_NO_NUMBER:
        assert of(**{key: 7}) == of()
    before = of()
    shard.write_bytes(b"other tokens")
    assert of() != before != fingerprint(shard, "another", SimpleNamespace(**plain))
