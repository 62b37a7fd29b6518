import pytest
import tiny

from eyrie.chat import (
    Reject,
    answer_mask,
    conversation_id,
    is_held_out,
    messages_of,
    prompt_ids,
)

OK = {"from": "human", "value": "hi"}


def test_layouts_give_the_same_conversation():
    share = {"conversations": [OK, {"from": "gpt", "value": "yes"}]}
    openai = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    }
    assert messages_of(share) == messages_of(openai)
    assert conversation_id(messages_of(share)) == conversation_id(messages_of(openai))


@pytest.mark.parametrize(
    "row, reason",
    [
        ([], "not an object"),
        ({}, "no turns"),
        ({"conversations": []}, "no turns"),
        ({"conversations": "hi"}, "no turns"),
        ({"conversations": ["hi"]}, "turn is not an object"),
        ({"conversations": [{"from": "function", "value": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn without text"),
        ({"conversations": [{"from": "human", "value": "  "}]}, "turn without text"),
    ],
)
def test_rows_that_cannot_be_used(row, reason):
    with pytest.raises(Reject, match=reason):
        messages_of(row)


def test_lone_surrogates_are_repaired():
    (message,) = messages_of({"conversations": [{"from": "human", "value": "bad \ud83d end"}]})
    assert message["content"].encode() == b"bad ? end"


def test_mask_is_the_answers_and_their_end_of_turn():
    tokenizer = tiny.make_tokenizer()
    messages = [
        {"role": "user", "content": "the owl"},
        {"role": "assistant", "content": "sees a mouse"},
        {"role": "user", "content": "the owl"},
        {"role": "assistant", "content": "the owl"},
    ]
    ids, mask = answer_mask(tokenizer, messages)
    written = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert written == "sees a mouse<|im_end|>the owl<|im_end|>"
    assert ids[: len(prompt_ids(tokenizer, messages[:1]))] == prompt_ids(tokenizer, messages[:1])


def test_template_that_rewrites_earlier_turns_is_refused():
    template = "{{ messages | length }} turns\n" + tiny.CHATML
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(Reject, match="rewrites"):
        answer_mask(tiny.make_tokenizer(template), messages)


def test_split_is_a_matter_of_the_id_alone():
    ids = [conversation_id([{"role": "user", "content": str(i)}]) for i in range(2000)]
    held_out = [is_held_out(i, 0.05) for i in ids]
    assert 60 < sum(held_out) < 140
    assert [is_held_out(i, 0.05) for i in ids[::-1]] == held_out[::-1]
