"""The sets of prompts that every method is asked, as tokens."""

import json
from pathlib import Path

from eyrie.bench_plan import HELD_OUT
from eyrie.conversations import Reject
from eyrie.prompts import read_prompts


class BenchError(Exception):
    """Something that makes the comparison worthless; the message says what."""


def pick_prompts(path: Path, count: int) -> list[dict]:
    """The first `count` prompts, taken in turn from each category."""
    by_category: dict[str, list[dict]] = {}
    for prompt in read_prompts(path):
        by_category.setdefault(prompt["category"], []).append(prompt)
    rounds = max(map(len, by_category.values()))
    turns = [rows[i] for i in range(rounds) for rows in by_category.values() if i < len(rows)]
    if len(turns) < count:
        raise BenchError(f"{path}: {len(turns)} prompts, bench.prompts asks for {count}")
    return turns[:count]


class Prompts:
    """The sets of prompts. Each prompt has `ids`, of each turn that can be asked its tokens, made
    as those of the training data are: by the template, once, so that there is one BOS."""

    def __init__(self, args, held_out: list[list[int]]):
        from eyrie.chat import Chat, load_tokenizer

        self.args, tokenizer = args, load_tokenizer(args.verifier, args.trust_remote_code)
        self.tokenizer = tokenizer
        options = json.loads(args.template_options)
        self.chat = Chat(tokenizer, args.date, args.system_turns, options)
        self.left_out: list[str] = []
        files = {args.prompts_name: args.prompts, **dict(args.prompt_file)}
        self.sets = {
            name: [self.first(path, prompt) for prompt in pick_prompts(path, args.num_prompts)]
            for name, path in files.items()
        }
        self.sets[HELD_OUT] = [
            {"id": number, "category": "held out", "ids": [ids], "later": []}
            for number, ids in enumerate(held_out)
        ]

    def first(self, path: Path, prompt: dict) -> dict:
        try:
            ids = self.chat.prompt(prompt["messages"], prompt["tools"]).ids
        except Reject as reject:
            raise BenchError(f"{path}: prompt {prompt['id']}: {reject}") from None
        if len(ids) >= self.args.max_model_len:
            raise BenchError(
                f"{path}: prompt {prompt['id']} has {len(ids)} tokens, which leaves no room in "
                f"bench.max_model_len, {self.args.max_model_len}"
            )
        later = prompt["asked"][1 : self.args.turns]
        return prompt | {"ids": [ids], "later": later, "messages": [*prompt["messages"]]}

    def answered(self, name: str, prompt: dict, tokens: list[int]) -> None:
        """Take the baseline's answer to a prompt's last turn, and make the next turn's tokens."""
        if not prompt["later"]:
            return
        text = self.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
        question = prompt["later"].pop(0)
        prompt["messages"] += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": question},
        ]
        try:
            ids = self.chat.prompt(prompt["messages"], prompt["tools"]).ids
            why = f"{len(ids)} tokens" if len(ids) >= self.args.max_model_len else None
        except Reject as reject:
            why = str(reject)
        if why:
            prompt["later"].clear()
            self.left_out.append(
                f"{name}, prompt {prompt['id']}, turn {len(prompt['ids']) + 1}: {why}"
            )
        else:
            prompt["ids"].append(ids)


def held_out_prompts(shards: list, args) -> list[list[int]]:
    """The tokens before each of the first answers of held-out conversations, those of a
    conversation's later turns after its earlier ones. One that leaves no room to answer is left
    out."""
    from eyrie.hidden import split
    from eyrie.shards import runs

    _, held_out = split(shards, args.held_out)
    prompts = [
        shards[shard].row(index)[:start].tolist()
        for shard, index in held_out
        for start, _ in runs(shards[shard].mask(index))
    ]
    return [ids for ids in prompts if 0 < len(ids) < args.max_model_len][: args.num_held_out]


def read_shards(paths: list[Path]) -> list:
    """The rows of hidden shards, without their states."""
    from eyrie.shards import ShardError, read_rows

    try:
        return [read_rows(path) for path in paths]
    except ShardError as error:
        raise BenchError(str(error)) from None


def trained_on(prompts: Prompts, shards: list) -> list[str]:
    """The prompts that open a row of the data, for whatever reason it was not kept out."""
    import numpy as np

    openings = {
        np.asarray(prompt["ids"][0], np.int32).tobytes(): f"{name}, prompt {prompt['id']}"
        for name, of in prompts.sets.items()
        if name != HELD_OUT
        for prompt in of
    }
    heads, found = tuple(openings), set()
    for rows in shards:
        for index in range(len(rows)):
            row = rows.row(index).numpy().astype(np.int32).tobytes()
            if row.startswith(heads):
                found |= {name for head, name in openings.items() if row.startswith(head)}
    return sorted(found)
