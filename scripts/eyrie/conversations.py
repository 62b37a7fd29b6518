"""A row of any layout that users have, as one conversation of messages.

    conversations   ShareGPT: [{from, value}], with optional `system` and `tools`
    messages        OpenAI: [{role, content, tool_calls, reasoning_content}], `tools`
    prompt          with response, completion, answer or output; each text or a list of messages
    instruction     Alpaca: instruction, input, output, with optional `system` and `history`
    input_ids       with loss_mask: tokens of the verifier's own tokenizer

A column that is null counts as missing (Parquet has every column in every row).
"""

import hashlib
import json
from dataclasses import dataclass, field

# Who spoke, in the spellings that public data sets use; capitals do not matter. Any other role
# rejects its row: taken for the assistant, its text would be trained on.
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",  # its text is the call
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
ANSWERS = ("response", "completion", "answer", "output")
# Levels of a row. What is deeper could not be handed from one process to another.
DEEPEST = 100
TOO_DEEP = "nested too deeply"


class Reject(Exception):
    """A row that cannot be used; the message is the reason it is counted under."""


@dataclass
class Conversation:
    """Messages of roles system, user, assistant and tool, in the form that chat templates take.

    An assistant's message may hold `reasoning_content`, `tool_calls` (arguments as objects) and
    `cut`, true where a token limit ended it. `tokens` is (input_ids, loss_mask) of a row that
    came tokenised, and has no messages.
    """

    messages: list[dict] = field(default_factory=list)
    tools: list[dict] | None = None
    tokens: tuple[list[int], list[bool]] | None = None

    @property
    def id(self) -> bytes:
        """16 bytes that follow the content alone: duplicates and the split are decided by it."""
        content = list(self.tokens) if self.tokens else [self.messages, self.tools]
        # Parquet has values that JSON has not; the chat template refuses them.
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_too_deep(value, levels: int = DEEPEST) -> bool:
    """Whether a JSON value has more than so many levels of lists and objects."""
    if not isinstance(value, (list, dict)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not levels or any(is_too_deep(p, levels - 1) for p in parts if type(p) in (list, dict))


def repaired(value):
    """Text without lone surrogates, which pass json.loads but cannot be encoded: U+FFFD."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [repaired(item) for item in value]
    if isinstance(value, dict):
        return {repaired(key): repaired(item) for key, item in value.items()}
    return value


def text_of(content) -> str:
    """Text that is given as a string, a list of text parts, or not at all."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Reject("content is neither text nor a list of parts")
    parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
    if any(not isinstance(p, dict) or not isinstance(p.get("text"), str) for p in parts):
        raise Reject("content that is not text")
    return "".join(part["text"] for part in parts)


def parsed(value, what: str):
    """A value that is given as itself or as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        raise Reject(f"{what} are not JSON") from None
    if is_too_deep(found):
        raise Reject(TOO_DEEP)
    return repaired(found)


def call_of(call, number: int) -> dict:
    """One tool call, as templates take it: arguments are an object, id and type are filled in."""
    if not isinstance(call, dict):
        raise Reject("tool call is not an object")
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    name, arguments = (
        function.get("name"),
        parsed(function.get("arguments") or None, "tool arguments"),
    )
    if not isinstance(name, str) or not name:
        raise Reject("tool call without a name")
    if not isinstance(arguments, dict | None):
        raise Reject("tool arguments are not an object")
    # Nine letters and digits, as the strictest template (Mistral's) wants it.
    identity, kind = call.get("id") or f"call{number:05d}", call.get("type") or "function"
    if not isinstance(identity, str) or kind != "function":
        raise Reject("tool call with an id or type that is not text")
    return {"id": identity, "type": kind, "function": {"name": name, "arguments": arguments or {}}}


def message_of(turn, calls: list[str]) -> dict | None:
    """One turn as a message, or None for a system turn that says nothing.

    `calls` are the ids of the conversation's tool calls that have no result yet.
    """
    if not isinstance(turn, dict):
        raise Reject("turn is not an object")
    spoken = turn.get("from") or turn.get("role")
    spoken = spoken.strip().lower() if isinstance(spoken, str) else None
    role = ROLES.get(spoken)
    if role is None:
        raise Reject("unknown role")
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    message = {"role": role, "content": text_of(content)}
    if role != "assistant" and (turn.get("tool_calls") or turn.get("function_call")):
        raise Reject("tool calls in a turn that is not the assistant's")
    if role == "assistant":
        found = parsed(turn.get("tool_calls") or [], "tool calls") or []
        found = [*found, turn["function_call"]] if turn.get("function_call") else found
        if spoken == "function_call":
            found, message["content"] = parsed(message["content"], "tool calls"), ""
            found = found if isinstance(found, list) else [found]
        if not isinstance(found, list):
            raise Reject("tool calls are not a list")
        found = [call_of(call, len(calls) + i) for i, call in enumerate(found)]
        calls += [call["id"] for call in found]
        reasoning = turn.get("reasoning_content") or turn.get("reasoning")
        if reasoning:
            message["reasoning_content"] = text_of(reasoning)
        if found:
            message["tool_calls"] = found
        if turn.get("finish_reason") == "length":
            message["cut"] = True
        if not (message["content"].strip() or found):
            raise Reject("turn without text")
    elif role == "tool":
        answered = turn.get("tool_call_id") or (calls[0] if calls else None)
        if answered in calls:
            calls.remove(answered)
        if answered:
            message["tool_call_id"] = str(answered)
        if isinstance(turn.get("name"), str):
            message["name"] = turn["name"]
    elif not message["content"].strip():
        if role == "system":
            return None
        raise Reject("turn without text")
    return message


def turns_of(row: dict) -> list:
    """The turns of a row of any layout but the tokenised one."""

    def turns(value, role: str) -> list:
        return value if isinstance(value, list) else [{"role": role, "content": value}]

    listed = parsed(row.get("conversations") or row.get("messages"), "turns")
    answer = next((row[key] for key in ANSWERS if row.get(key) is not None), None)
    if listed is not None:
        found = list(listed) if isinstance(listed, list) else []
    elif row.get("instruction") is not None:
        parts = [row["instruction"], row.get("input")]
        asked = "\n\n".join(text_of(part) for part in parts if part)
        pairs = row.get("history") or []
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            raise Reject("history is not a list of pairs")
        found = [t for q, a in pairs for t in turns(q, "user") + turns(a, "assistant")]
        found += turns(asked, "user")
    elif row.get("prompt") is not None:
        found = turns(row["prompt"], "user")
    elif isinstance(row.get("text"), str):
        raise Reject("rendered text in place of turns")
    else:
        found = []
    if not found:
        raise Reject("no turns")
    if listed is None and answer is not None:
        found += turns(answer, "assistant")
    if row.get("system") is not None:
        found = [{"role": "system", "content": row["system"]}, *found]
    return found


def tokens_of(row: dict) -> tuple[list[int], list[bool]]:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(mask, list):
        raise Reject("input_ids without loss_mask")
    if not isinstance(ids, list) or len(ids) != len(mask) or not ids:
        raise Reject("input_ids and loss_mask of unequal length")
    if not all(type(i) is int and i >= 0 for i in ids) or not all(m in (0, 1) for m in mask):
        raise Reject("input_ids or loss_mask of a wrong type")
    return ids, [bool(m) for m in mask]


def name_of(row) -> str | None:
    """What the data set calls a row: shown to people, never relied on."""
    names = (row.get(key) for key in ("id", "conversation_id")) if isinstance(row, dict) else ()
    return next((str(name) for name in names if name is not None), None)


def read_conversation(row) -> Conversation:
    """A row of any layout as a conversation.

    Raises:
        Reject: it is none, or a turn has no text or an unknown role.
    """
    if isinstance(row, Reject):  # by what read it
        raise row
    if not isinstance(row, dict):
        raise Reject("not an object")
    row = repaired(row)
    conversation = Conversation()
    if row.get("input_ids") is not None:
        conversation.tokens = tokens_of(row)
        return conversation
    calls: list[str] = []
    read = (message_of(turn, calls) for turn in turns_of(row))
    conversation.messages = [message for message in read if message]
    if not conversation.messages:
        raise Reject("no turns")
    tools = parsed(row.get("tools"), "tools") if row.get("tools") else None
    if not isinstance(tools, list | None):
        raise Reject("tools are not a list")
    conversation.tools = tools
    if row.get("finish_reason") == "length" and conversation.messages[-1]["role"] == "assistant":
        conversation.messages[-1]["cut"] = True
    return conversation
