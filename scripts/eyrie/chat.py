"""Conversations as messages, and messages as the verifier's own tokens."""

import hashlib
import json
from pathlib import Path

# Who spoke, in the spellings that public data sets use. Any other role rejects the row.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


class Reject(Exception):
    """A row that cannot be used; the message is the reason it is counted under."""


def messages_of(row: dict) -> list[dict]:
    """Read a ShareGPT (`conversations`: from/value) or OpenAI (`messages`: role/content) row.

    Raises:
        Reject: no turns, an unknown role, a turn without text.
    """
    if not isinstance(row, dict):
        raise Reject("not an object")
    turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list) or not turns:
        raise Reject("no turns")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Reject("turn is not an object")
        role = ROLES.get(turn.get("from", turn.get("role")))
        content = turn.get("value", turn.get("content"))
        if role is None:
            raise Reject("unknown role")
        if not isinstance(content, str) or not content.strip():
            raise Reject("turn without text")
        # A lone surrogate passes json.loads but cannot be encoded.
        content = content.encode("utf-8", "replace").decode()
        messages.append({"role": role, "content": content})
    return messages


def conversation_id(messages: list[dict]) -> bytes:
    """16 bytes that follow the content: duplicates and the validation split are decided by it."""
    text = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_held_out(row_id: bytes, fraction: float) -> bool:
    """Whether a conversation is in the validation split: a matter of its id alone, so that
    the split stays the same when data is added."""
    return int.from_bytes(row_id[:8], "little") < fraction * 2**64


def load_tokenizer(folder: Path, trust_remote_code: bool):
    """The verifier's tokenizer. Raises ValueError if it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder}: the tokenizer has no chat template, so conversations cannot be rendered. "
            "Take the -Instruct or -Chat model, or put its chat_template.jinja into that folder"
        )
    return tokenizer


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The tokens that a server would send to the verifier to answer `messages`.

    The template writes its own BOS, so the tokenizer must not add another.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def answer_mask(tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """Tokens of a whole conversation and which of them the assistant wrote.

    A turn is the text by which rendering it lengthens the rendering of what precedes it, up
    to its end-of-turn token: what a template writes after that (a newline) is never generated.

    Raises:
        Reject: the template rewrites earlier text, so no turn can be told apart.
    """

    def render(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt
        )

    text = render(len(messages), False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(index, True), render(index + 1, False)
            if not (text.startswith(before) and text.startswith(after)):
                raise Reject("template rewrites earlier turns")
            spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids)
    mask = [False] * len(encoded.input_ids)
    for start, end in spans:
        inside = [i for i, (a, b) in enumerate(encoded.offset_mapping) if start <= a < b <= end]
        while inside and encoded.input_ids[inside[-1]] not in special:
            if text[slice(*encoded.offset_mapping[inside[-1]])].strip():
                break
            inside.pop()
        for i in inside:
            mask[i] = True
    return encoded.input_ids, mask
