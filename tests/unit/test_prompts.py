import json
from types import SimpleNamespace

import pytest
import tiny
from templates import FAMILIES

from eyrie.bench_prompts import BenchError, Prompts, held_out_prompts, pick_prompts, trained_on
from eyrie.chat import Chat
from eyrie.prompts import read_prompts
from eyrie.shards import Rows
from eyrie.sources import DataError

SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
MORE = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row, asked",
    [
        ({"turns": ["hi", "more"], "system": "be brief"}, ["hi", "more"]),
        ({"messages": [SYSTEM, USER, *MORE]}, ["hi", "more"]),
        ({"prompt": "hi", "system": "be brief"}, ["hi"]),
        ({"instruction": "hi", "output": "yes", "system": "be brief"}, ["hi"]),
    ],
)
def test_prompts_of_any_layout(tmp_path, row, asked):
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", row | {"question_id": 81}))
    assert prompt["messages"] == [SYSTEM, USER]
    assert (prompt["id"], prompt["category"], prompt["asked"]) == (81, "all", asked)


@pytest.mark.parametrize("row", [{"turns": []}, {"turns": [7]}, {"text": "hi"}, "hi", {}])
def test_a_row_that_is_no_prompt_is_named(tmp_path, row):
    path = write(tmp_path / "p.jsonl", {"prompt": "hi"}, row)
    with pytest.raises(DataError, match=r"p.jsonl: prompt 1: .*; mend or remove it"):
        read_prompts(path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("empty", "holds no prompt"),
        ("none", "no such file"),
        ("", "no file"),
        ("a" * 300, "no such"),
    ],
)
def test_a_file_without_a_prompt_is_named(tmp_path, name, message):
    write(tmp_path / "empty")
    with pytest.raises(DataError, match=f"{tmp_path / name}: {message}"):
        read_prompts(tmp_path / name)


def test_prompts_are_taken_in_turn_from_the_categories(tmp_path):
    rows = [{"prompt": f"{i}", "category": "aaab"[i]} for i in range(4)]
    path = write(tmp_path / "p.jsonl", *rows)
    assert [p["asked"] for p in pick_prompts(path, 3)] == [["0"], ["3"], ["1"]]
    with pytest.raises(BenchError, match="4 prompts, bench"):
        pick_prompts(path, 5)


def arguments(folder, row: dict, **more) -> SimpleNamespace:
    """What bench.py is told of a file of one row, beside the tokenizer in `folder`."""
    given = {
        "verifier": folder / "verifier",
        "trust_remote_code": False,
        "prompts": write(folder / "p.jsonl", row),
        "prompts_name": "ours",
        "prompt_file": [],
        "num_prompts": 1,
        "turns": 2,
        "max_model_len": 256,
        "date": "2026-01-01",
        "system_turns": "merge",
        "template_options": "{}",
    }
    return SimpleNamespace(**given | more)


def test_the_benchmark_asks_as_the_training_data_do(tmp_path):
    """By the same rule for a template that takes no system turn, with the same options."""
    template, control, bos, eos, *_ = FAMILIES["gemma"]
    tokenizer = tiny.make_tokenizer("{{ greeting }}" + template, control, bos, eos)
    tokenizer.save_pretrained(tmp_path / "verifier")
    row = {"messages": [SYSTEM, USER]}
    args = arguments(tmp_path, row, template_options='{"greeting": "owl"}')
    for rule in ("merge", "drop"):
        args.system_turns = rule
        (prompt,) = Prompts(args, []).sets["ours"]
        chat = Chat(tokenizer, args.date, rule, {"greeting": "owl"})
        assert prompt["ids"] == [chat.prompt([dict(SYSTEM), dict(USER)]).ids]
        text = tokenizer.decode(prompt["ids"][0])
        assert text.startswith("owl") and ("be brief" in text) == (rule == "merge")
    args.system_turns = "reject"
    with pytest.raises(BenchError, match=r"p.jsonl: prompt 0: the chat template takes no system"):
        Prompts(args, [])


def asked(folder, row: dict, **more) -> tuple[Prompts, dict, tiny.PreTrainedTokenizerFast]:
    """The prompts of a file of one row, and that row's prompt."""
    folder.mkdir(exist_ok=True)
    template, control, bos, eos, *_ = FAMILIES["llama3"]
    tokenizer = tiny.make_tokenizer(template, control, bos, eos)
    tokenizer.save_pretrained(folder / "verifier")
    prompts = Prompts(arguments(folder, row, **more), [])
    (prompt,) = prompts.sets["ours"]
    return prompts, prompt, tokenizer


def test_the_template_is_applied_once_in_every_turn(tmp_path):
    """One BOS, and the same tokens as the same talk has in the training data."""
    prompts, prompt, tokenizer = asked(tmp_path, {"turns": ["hi", "more"]})
    prompts.answered("ours", prompt, [*tokenizer.encode("yes", add_special_tokens=False)])
    assert [ids.count(tokenizer.bos_token_id) for ids in prompt["ids"]] == [1, 1]
    talk = [{"role": "user", "content": "hi"}, *MORE]
    assert prompt["ids"][1] == prompts.chat.prompt([dict(m) for m in talk]).ids
    # All its turns are asked now.
    prompts.answered("ours", prompt, [])
    assert len(prompt["ids"]) == 2


def test_a_turn_that_does_not_fit_is_left_out_and_told(tmp_path):
    row = {"question_id": 81, "turns": ["hi", "more " * 40]}
    prompts, prompt, _ = asked(tmp_path, row, max_model_len=60)
    prompts.answered("ours", prompt, [40, 41])
    assert len(prompt["ids"]) == 1
    assert prompts.left_out[0].startswith("ours, prompt 81, turn 2: ")
    with pytest.raises(BenchError, match=r"leaves no room in bench\.max_model_len, 8"):
        asked(tmp_path / "short", row, max_model_len=8)


def test_prompts_in_the_training_data_are_named(tmp_path):
    prompts, prompt, _ = asked(tmp_path, {"question_id": 81, "turns": ["hi"]})
    ids = prompt["ids"][0]
    rows = [Rows.pack([[*ids[:-1], 7, 8]], [[False] * (len(ids) + 1)], [b"a" * 16], {})]
    assert trained_on(prompts, rows) == []
    rows.append(Rows.pack([[*ids, 7, 8]], [[False] * (len(ids) + 2)], [b"b" * 16], {}))
    assert trained_on(prompts, rows) == ["ours, prompt 81"]


def test_each_answer_of_a_held_out_conversation_is_asked_for():
    """As training estimates all of them: later ones after the turns before."""
    rows = Rows.pack(
        [[1, 2, 3, 4, 5, 6], [7, 8, 9]],
        [[False, True, False, False, True, True], [False, False, True]],
        [bytes(16), b"\xff" * 16],
        {},
    )
    # All but the second are held out, whose id is above the fraction.
    args = SimpleNamespace(held_out=0.5, num_held_out=8, max_model_len=4)
    assert held_out_prompts([rows], args) == [[1]]
    args.max_model_len = 5
    assert held_out_prompts([rows], args) == [[1], [1, 2, 3, 4]]
    args.num_held_out = 1
    assert held_out_prompts([rows], args) == [[1]]
