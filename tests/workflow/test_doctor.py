"""scripts/doctor.py on a draft that was trained until it knows its conversations, right and damaged
in each of the ways that load without a word."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_training import OPTIONS, states_of, write_shard
from transformers import AutoModelForCausalLM

import doctor
from eyrie.chat import Chat, load_tokenizer
from eyrie.files import sha256_file, write_json
from eyrie.shards import read_rows
from eyrie.vocab import made_of, save_map
from vocab import choose, pinned

SCRIPTS = Path(__file__).parents[2] / "scripts"
ROWS, NEW_TOKENS = 40, 16


def answered(verifier: Path, chat: Chat) -> tuple[list[list[int]], list[list[bool]]]:
    """Prompts and the verifier's own likeliest answers to them."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    ids, masks = [], []
    for number in range(ROWS):
        prompt = chat.prompt([{"role": "user", "content": tiny.sentence(number)}]).ids
        row = torch.tensor([prompt])
        whole = model.generate(
            row, attention_mask=row * 0 + 1, max_new_tokens=NEW_TOKENS, do_sample=False
        )[0].tolist()
        ids.append(whole)
        masks.append([False] * len(prompt) + [True] * (len(whole) - len(prompt)))
    return ids, masks


@pytest.fixture(scope="module")
def tree(inputs, tmp_path_factory) -> Path:
    """A results folder with a draft that was trained on one hidden shard."""
    tree = tmp_path_factory.mktemp("doctor") / "results"
    verifier = tree / "verifier"
    shutil.copytree(inputs / "verifier", verifier)
    files = {path.name: sha256_file(path) for path in sorted(verifier.iterdir())}
    identity = {"source": "path:here", "files": files}
    write_json(tree / "verifier.json", identity)
    shutil.copy(inputs / "prompts.jsonl", tree / "prompts")
    tokenizer = load_tokenizer(verifier, False)
    chat = Chat(tokenizer)
    ids, masks = answered(verifier, chat)
    shard = tree / "data/tiny/hidden/00000.safetensors"
    shard.parent.mkdir(parents=True)
    write_shard(shard, ids, masks, states_of(verifier, ids))
    account = {"answers": "verifier", "tokenizer": chat.identity(), "chat": chat.settings()}
    write_json(tree / "data/tiny/shards.json", account)
    counts = torch.bincount(torch.tensor(sum(ids, [])), minlength=512)
    always = pinned(tokenizer, [], 512)
    map_of = made_of(identity, [read_rows(shard)], 0.1, 400)
    vocab = tree / "vocab_tiny.safetensors"
    save_map(vocab, *choose(counts, always, 400, torch.ones(512, dtype=torch.bool)), map_of)
    options = OPTIONS | {
        "draft-vocab-size": 400,
        "norms": "eagle3.1",
        "epochs": 60,
        "noise": 0.0,
        "ttt-warmup-epochs": 0,
        "total-seq-len": 512,
        "held-out": 0.1,
        "checkpoint-every": 1000,
        "hidden": shard,
        "vocab": vocab,
        "verifier": verifier,
        "identity": tree / "verifier.json",
        "state": tree / ".state",
        "out": tree / "ckpt_tiny",
    }
    command = [sys.executable, str(SCRIPTS / "train.py"), "--layer-ids", "1", "2", "3"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return tree
