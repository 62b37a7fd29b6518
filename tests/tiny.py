"""Inputs for tests, made from nothing: a tiny Llama or Qwen3 with random weights and its tokenizer,
conversations, and benchmark prompts."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
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


def make_sentencepiece(
    template: str,
    control: tuple[str, ...],
    blank: str = "first",
    rstrip: bool = False,
    marked: bool = True,
) -> PreTrainedTokenizerFast:
    """A BPE tokenizer that writes blanks as ▁, with one put before the `first` piece of a text or
    before `each` between control tokens. rstrip: control tokens take the blanks behind them
    along. marked: they are marked special; the tokenizer names a use for the last only."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    scheme = "always" if blank == "each" else blank
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    letters = [*map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    tokenizer.train_from_iterator([sentence(i) for i in range(50)], trainer)
    state = json.loads(tokenizer.to_str())
    for letter in letters:
        state["model"]["vocab"].setdefault(letter, len(state["model"]["vocab"]))
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokens = [AddedToken(t, special=marked, rstrip=rstrip, normalized=False) for t in control]
    (tokenizer.add_special_tokens if marked else tokenizer.add_tokens)(tokens)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=control[-1])
    fast.chat_template = template
    return fast


# As custom tokenizers on tiktoken are: no offsets, and control tokens are found in any text, even
# where that is to be split.
CUSTOM = """
from transformers import PreTrainedTokenizer

WORDS = {words}


class OwlTokenizer(PreTrainedTokenizer):
    def __init__(self, **options):
        self.words = [*map(chr, range(256)), *WORDS]
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {{word: i for i, word in enumerate(self.words)}}

    def _tokenize(self, text, **options):
        tokens = []
        while text:
            word = next((w for w in WORDS if text.startswith(w)), None)
            tokens += [word] if word else map(chr, text[0].encode())
            text = text[len(word or text[0]) :]
        return tokens

    def _convert_token_to_id(self, token):
        return self.words.index(token)

    def _convert_id_to_token(self, number):
        return self.words[number]

    def convert_tokens_to_string(self, tokens):
        text = b"".join(t.encode() if t in WORDS else bytes([ord(t)]) for t in tokens)
        return text.decode(errors="replace")

    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
"""


def make_custom_tokenizer(folder: Path, template: str, words: tuple[str, ...]) -> Path:
    """A folder whose tokenizer is Python code of its own, its control tokens marked special."""
    folder.mkdir()
    (folder / "tokenization_owl.py").write_text(CUSTOM.format(words=words))
    added = {str(256 + i): {"content": w, "special": True} for i, w in enumerate(words)}
    settings = {
        "tokenizer_class": "OwlTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_owl.OwlTokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": words[-1],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


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


def make_workflow(folder: Path, snakefile: str | None = None) -> Path:
    """The project's own workflow, or one of other rules with its profiles and common.smk."""
    root = Path(__file__).parents[1]
    for name in ("config.yaml", "configs", "rules", "scripts", "templates", "profiles", "envs"):
        (folder / name).symlink_to(root / name)
    if snakefile is None:
        (folder / "Snakefile").symlink_to(root / "Snakefile")
    else:
        (folder / "Snakefile").write_text(snakefile)
    return folder


def remade(verifier: Path, folder: Path, config: dict, **weights) -> Path:
    """The tiny verifier with another config and some weights changed; None leaves one out."""
    shutil.copytree(verifier, folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors") | weights
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
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
        {
            "question_id": i,
            "category": "ab"[i % 2],
            "turns": [sentence(n + i, 8) + "?" for n in (100, 200)],
        }
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
