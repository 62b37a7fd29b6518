"""Inputs for tests, made from nothing: a tiny Llama or Qwen3 with random weights and its tokenizer,
conversations, and benchmark prompts."""

import json
from pathlib import Path

import torch
from templates import CHATML
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TALE = "the owl sees a mouse run over grass and waits high on its branch until night falls"
WORDS = TALE.split(" ")


def sentence(number: int, length: int = 6) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(length))


def make_tokenizer(
    template: str | None = CHATML,
    control: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    bos: str = "<|im_start|>",
    eos: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `control` as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([sentence(i) for i in range(50)], trainer)
    special = [AddedToken(t, special=True) for t in (*control, "<|pad|>")]
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        pad_token="<|pad|>",
        # The others, as real tokenizers list them.
        additional_special_tokens=[t for t in control if t not in (bos, eos)],
    )
    fast.chat_template = template
    return fast


def make_verifier(folder: Path, template: str | None = CHATML, config_class=LlamaConfig) -> Path:
    """A 4-layer Llama or its like, hidden 64, with untied head, whose layers change the state
    enough for a wrong layer id to show."""
    tokenizer = make_tokenizer(template)
    config = config_class(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.125,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_conversations(path: Path, count: int = 40) -> Path:
    rows = []
    for i in range(count):
        turns = [("human", sentence(i)), ("gpt", sentence(i + 3, 9)), ("human", sentence(i + 5))]
        rows.append({"id": f"c{i}", "conversations": [{"from": a, "value": b} for a, b in turns]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_prompts(path: Path, count: int = 6) -> Path:
    rows = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [sentence(100 + i, 8) + "?"]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_inputs(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_verifier(folder / "verifier")
    make_conversations(folder / "conversations.jsonl")
    make_prompts(folder / "prompts.jsonl")
    return folder
