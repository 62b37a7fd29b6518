import datetime
import json

import pytest

from eyrie.conversations import Reject, name_of, read_conversation

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
]
PAIR = TALK[1:]


def share(*names: str) -> dict:
    texts = [m["content"] for m in TALK]
    return {"conversations": [{"from": n, "value": t} for n, t in zip(names, texts, strict=True)]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]},
        {"messages": [{**m, "content": [m["content"]]} for m in TALK]},
        {"messages": PAIR, "system": "be brief"},
        share("system", "human", "gpt"),
        share("developer", "user", "assistant"),
        share("system", "User", "model"),
        share("system", " Human ", "gpt\n"),
        {"messages": PAIR, "system": [{"type": "text", "text": "be brief"}]},
        {"conversations": share("system", "human", "bard")["conversations"], "messages": None},
        {"system": "be brief", "prompt": "hi", "response": "yes"},
        {"system": "be brief", "prompt": "hi", "completion": "yes", "id": 7},
        {"prompt": TALK[:2], "completion": TALK[2:]},
        {"system": "be brief", "instruction": "hi", "input": "", "output": "yes"},
        {"system": "be brief", "instruction": "hi", "input": None, "output": "yes"},
    ],
)
def test_layouts_give_the_same_conversation(row):
    expected = read_conversation({"messages": TALK, "id": "7"})
    found = read_conversation(row)
    assert found.messages == expected.messages == TALK
    assert found.id == expected.id


def test_alpaca_input_and_history():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["hi", "yes"]]}
    assert read_conversation(row).messages == [
        *PAIR,
        {"role": "user", "content": "Add.\n\n1 and 2"},
        {"role": "assistant", "content": "3"},
    ]


def test_bare_prompts_and_empty_system_turns():
    messages = read_conversation({"prompt": "hi", "system": " "}).messages
    assert messages == PAIR[:1]


def test_ids_are_text_and_follow_nothing_but_content():
    rows = [{"messages": TALK, "id": i} for i in (7, "7", None)] + [{"messages": PAIR, "id": 7}]
    found = [read_conversation(row) for row in rows]
    assert [name_of(row) for row in rows] == ["7", "7", None, "7"]
    assert found[0].id == found[1].id == found[2].id != found[3].id


def test_tokenised_rows():
    row = read_conversation({"input_ids": [1, 2, 3], "loss_mask": [0, 1, True]})
    assert row.tokens == ([1, 2, 3], [False, True, True])
    other = read_conversation({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]})
    assert row.id != other.id


def call(**changes) -> dict:
    call = {"function": {"name": "look", "arguments": {"city": "Paris"}}} | changes
    return {"messages": [PAIR[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "row",
    [
        call(),
        call(function={"name": "look", "arguments": '{"city": "Paris"}'}),
        call(id=None, type="function"),
        {"messages": [{**PAIR[0], "tool_calls": []}, *call()["messages"][1:]]},
        {
            "messages": [
                PAIR[0],
                {
                    "role": "assistant",
                    **{
                        "tool_calls": json.dumps([{"name": "look", "arguments": {"city": "Paris"}}])
                    },
                },
            ]
        },
        {
            "messages": [
                PAIR[0],
                {
                    "role": "assistant",
                    "function_call": {"name": "look", "arguments": '{"city": "Paris"}'},
                },
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {
                    "from": "function_call",
                    "value": '{"name": "look", "arguments": {"city": "Paris"}}',
                },
            ]
        },
    ],
)
def test_tool_calls_of_any_spelling(row):
    (made,) = read_conversation(row).messages[1]["tool_calls"]
    function = {"name": "look", "arguments": {"city": "Paris"}}
    assert made == {"id": "call00000", "type": "function", "function": function}
    assert read_conversation(row).messages[1]["content"] == ""


def test_tool_results_find_their_calls():
    calls = [{"name": n, "arguments": {"time": t}} for n, t in (("a", "2025-08-01"), ("b", 169))]
    row = {
        "messages": [
            PAIR[0],
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "1"},
            {"role": "observation", "content": ""},
        ],
        "tools": json.dumps([{"name": "a"}, {"name": "b"}]),
    }
    conversation = read_conversation(row)
    made = conversation.messages[1]["tool_calls"]
    assert [c["function"]["arguments"]["time"] for c in made] == ["2025-08-01", 169]
    results = conversation.messages[2:]
    assert [m["tool_call_id"] for m in results] == [c["id"] for c in made]
    assert [m["role"] for m in results] == ["tool", "tool"]
    assert conversation.tools == [{"name": "a"}, {"name": "b"}]


def test_turns_as_json_text():
    rows = [{"messages": PAIR}, {"messages": json.dumps(PAIR)}]
    assert read_conversation(rows[0]).id == read_conversation(rows[1]).id


def test_a_call_without_arguments():
    (made,) = read_conversation(call(function={"name": "now", "arguments": ""})).messages[1][
        "tool_calls"
    ]
    assert made["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize("where", ["row", "turn"])
def test_cut_answers_are_marked(where):
    row = {"messages": [PAIR[0], dict(PAIR[1])]}
    (row if where == "row" else row["messages"][1])["finish_reason"] = "length"
    assert read_conversation(row).messages[1]["cut"] is True


def test_reasoning_is_kept():
    row = {"messages": [PAIR[0], {**PAIR[1], "reasoning_content": "because"}]}
    assert read_conversation(row).messages[1]["reasoning_content"] == "because"


def test_lone_surrogates_become_the_replacement_character():
    row = json.loads('{"prompt": "bad \\ud83d end", "response": "\\ud83e\\udd89"}')
    texts = [m["content"] for m in read_conversation(row).messages]
    assert texts == ["bad \ufffd end", "\U0001f989"]


def test_lone_surrogates_in_json_text():
    row = call(function={"name": "look", "arguments": '{"city": "bad \\ud83d end"}'})
    conversation = read_conversation(row)
    (made,) = conversation.messages[1]["tool_calls"]
    assert made["function"]["arguments"] == {"city": "bad \ufffd end"}
    assert len(conversation.id) == 16


def test_values_that_json_has_not_make_an_id():
    ids = [
        read_conversation(call(function={"name": "look", "arguments": {"day": day}})).id
        for day in (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), b"")
    ]
    assert len({*ids}) == 3


OK = {"from": "human", "value": "hi"}


@pytest.mark.parametrize(
    "row, reason",
    [
        ([], "not an object"),
        ({}, "no turns"),
        ({"conversations": []}, "no turns"),
        ({"conversations": "hi"}, "turns are not JSON"),
        ({"conversations": "7"}, "no turns"),
        ({"messages": [{"role": "system", "content": ""}]}, "no turns"),
        ({"text": "### User: hi"}, "rendered text in place of turns"),
        ({"conversations": ["hi"]}, "turn is not an object"),
        ({"conversations": [OK, {"from": "narrator", "value": "x"}]}, "unknown role"),
        ({"conversations": [OK, {"from": ["gpt"], "value": "x"}]}, "unknown role"),
        ({"conversations": [OK, {"value": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn without text"),
        ({"conversations": [{"from": "human", "value": "  "}]}, "turn without text"),
        ({"conversations": [OK, {"from": "gpt"}]}, "turn without text"),
        ({"messages": [{"role": "user", "content": 7}]}, "neither text nor a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content that is not"),
        (call(id=123), "id or type that is not text"),
        (call(type="x"), "id or type that is not text"),
        (call(function={"arguments": {}}), "tool call without a name"),
        (call(function={"name": "look", "arguments": "{broken"}), "tool arguments are not JSON"),
        (call(function={"name": "look", "arguments": "[1]"}), "arguments are not an object"),
        ({"messages": PAIR, "tools": "no"}, "tools are not JSON"),
        ({"messages": PAIR, "tools": "7"}, "tools are not a list"),
        ({"input_ids": [1]}, "input_ids without loss_mask"),
        ({"input_ids": [1], "loss_mask": [1, 0]}, "unequal length"),
        ({"input_ids": [], "loss_mask": []}, "unequal length"),
        ({"input_ids": [-1], "loss_mask": [1]}, "wrong type"),
        ({"input_ids": [1.0], "loss_mask": [1]}, "wrong type"),
        ({"input_ids": [1], "loss_mask": [2]}, "wrong type"),
        ({"instruction": "x", "output": "y", "history": ["a"]}, "list of pairs"),
        ({"instruction": "x", "output": "y", "history": 5}, "list of pairs"),
        ({"messages": PAIR, "system": 5}, "neither text nor a list of parts"),
        ({"messages": PAIR, "tools": "[" * 100_000}, "tools are not JSON"),
        ({"messages": [{**OK, "tool_calls": [{"name": "look"}]}]}, "not the assistant's"),
    ],
)
def test_rows_that_cannot_be_used(row, reason):
    with pytest.raises(Reject, match=reason):
        read_conversation(row)


def test_arguments_nested_too_deeply_reject_the_row():
    for levels in (101, 400):
        call = {"name": "look", "arguments": '{"a":' + "[" * levels + "]" * levels + "}"}
        with pytest.raises(Reject, match="nested too deeply"):
            read_conversation({"messages": [{"role": "assistant", "tool_calls": [call]}]})
