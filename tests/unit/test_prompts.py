import json
from types import SimpleNamespace

import pytest
import tiny
from templates import FAMILIES

from bench import BenchError, pick_prompts, tokenised
from eyrie.chat import Chat
from eyrie.prompts import read_prompts
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


def test_prompts_are_taken_in_turn_from_the_categories(tmp_path):
    rows = [{"prompt": f"{i}", "category": "aaab"[i]} for i in range(4)]
    path = write(tmp_path / "p.jsonl", *rows)
    assert [p["asked"] for p in pick_prompts(path, 3)] == [["0"], ["3"], ["1"]]
    with pytest.raises(BenchError, match="4 prompts, bench"):
        pick_prompts(path, 5)
    with pytest.raises(BenchError, match="0 prompts"):
        pick_prompts(write(tmp_path / "none.jsonl"), 1)


def test_the_benchmark_asks_as_the_training_data_do(tmp_path):
    """By the same rule for a template that takes no system turn, with the same options."""
    template, control, bos, eos, *_ = FAMILIES["gemma"]
    tokenizer = tiny.make_tokenizer("{{ greeting }}" + template, control, bos, eos)
    tokenizer.save_pretrained(tmp_path / "verifier")
    args = SimpleNamespace(
        verifier=tmp_path / "verifier",
        trust_remote_code=False,
        prompts=write(tmp_path / "p.jsonl", {"messages": [SYSTEM, USER]}),
        num_prompts=1,
        date="2026-01-01",
        system_turns="merge",
        template_options='{"greeting": "owl"}',
    )
    for rule in ("merge", "drop"):
        args.system_turns = rule
        (prompt,) = tokenised(args)
        chat = Chat(tokenizer, args.date, rule, {"greeting": "owl"})
        assert prompt["ids"] == chat.prompt([dict(SYSTEM), dict(USER)]).ids
        text = tokenizer.decode(prompt["ids"])
        assert text.startswith("owl") and ("be brief" in text) == (rule == "merge")
    args.system_turns = "reject"
    with pytest.raises(BenchError, match=r"p.jsonl: prompt 0: the chat template takes no system"):
        tokenised(args)
