"""The benchmark's prompts: what drafts are measured on, and are never trained on."""

from pathlib import Path

from eyrie.conversations import Reject, name_of, read_conversation
from eyrie.sources import DataError, read_rows, require_file


def read_prompts(path: Path) -> list[dict]:
    """Prompts in their order: {id, category, messages, tools, asked}.

    A row is one of any layout of conversations, or has `turns`, the user's turns one after the
    other, with an optional `system`. `messages` is what is to be answered: all up to the first
    user turn. `asked` are the texts of all user turns.

    Raises:
        DataError: a row has no user turn, or is none; the message names it. Or there is no row,
            or no file.
    """
    require_file(path)
    prompts = []
    for number, (_, row) in enumerate(read_rows(path)):
        try:
            if isinstance(row, dict) and isinstance(row.get("turns"), list):
                turns = [{"role": "user", "content": turn} for turn in row["turns"]]
                row = row | {"messages": turns}
            conversation = read_conversation(row)
            messages = conversation.messages
            users = [i for i, m in enumerate(messages) if m["role"] == "user"]
            if not users:
                raise Reject("no user turn")
        except Reject as reject:
            raise DataError(f"{path}: prompt {number}: {reject}; mend or remove it") from None
        prompts.append(
            {
                "id": row.get("question_id", name_of(row) or number),
                "category": row.get("category") or "all",
                "messages": messages[: users[0] + 1],
                "tools": conversation.tools,
                "asked": [messages[i]["content"] for i in users],
            }
        )
    if not prompts:
        raise DataError(f"{path}: holds no prompt; name a file that does")
    return prompts
