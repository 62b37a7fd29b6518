"""Every stored layer against transformers' own forward, through scripts/extract.py and the real
engine: prompts prefilled in chunks, prompts whose beginning is cached, and generated tokens.
"""

import json
import subprocess
from pathlib import Path

import pytest
import tiny
import torch
from forking import python
from safetensors.torch import load_file, save_file
from tiny_kimi import make_tiny_kimi
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from eyrie.hidden import HiddenStates
from eyrie.shards import Rows, write_tokens
from eyrie.verifier import load_verifier_config

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN, NEW_TOKENS = 384, 12

# extract.py as it is, of one case after the other so that vLLM is imported once, but for the dtype
# that states are stored in: bf16's own rounding, 4e-3, would hide an error of 1e-4, so an engine of
# fp32 is compared in fp32. How many tokens of prompts it took from its prefix cache is told, too.
RUNNER = """
import json, os, sys
sys.path.insert(0, {scripts!r})
from eyrie import engine
engine.prepare(gpus=0, in_process=True)
import torch
import extract
from eyrie import shards
from vllm.distributed import cleanup_dist_env_and_memory

run = extract.Extraction.run

def watched(self):
    step = self.llm.llm_engine.step
    def counted():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs
    self.llm.llm_engine.step = counted
    run(self)

extract.Extraction.run = watched
cases, found = json.load(open(sys.argv[1])), []
for case in cases:
    cached = []
    shards.STATES_DTYPES["bf16"] = getattr(torch, case["dtype"])
    os.environ["VLLM_MLA_DISABLE"] = str(1 - case["mla"])
    if case["mla"]:
        # Where there is AMX, vLLM's MLA is one that takes no fp32, and bf16 would hide the error.
        torch.cpu._is_amx_tile_supported = lambda: False
    sys.argv[1:] = case["arguments"]
    extract.main()
    found.append(sum(cached))
    cleanup_dist_env_and_memory()
json.dump(found, open("cached.json", "w"))
"""

# Verifier, dtype, tokens a step, MLA, and the most that a row's states may be off, and a token's.
CASES = {
    "llama bf16": (LlamaConfig, "bfloat16", 64, 0, 1e-2, 3e-2),
    "qwen3 bf16": (Qwen3Config, "bfloat16", 64, 0, 1e-2, 3e-2),
    "llama fp32": (LlamaConfig, "float32", 64, 0, 1e-4, 1e-4),
    "qwen3 fp32": (Qwen3Config, "float32", 64, 0, 1e-4, 1e-4),
    "kimi fp32": (None, "float32", 64, 0, 1e-4, 1e-4),
    # vLLM's MLA on a CPU has neither chunked prefill nor prefix caching.
    "kimi fp32 by MLA": (None, "float32", MAX_MODEL_LEN, 1, 1e-4, 1e-4),
}


def prompts() -> list[list[int]]:
    """Rows of 2 tokens to as many as fit. Two pairs share 200 and 290; a cache block has 128."""
    generator = torch.Generator().manual_seed(1)
    lengths = (MAX_MODEL_LEN - NEW_TOKENS, 2, 65, 220, 64, 17)
    rows = [torch.randint(3, 380, (n,), generator=generator) for n in lengths]
    rows.append(torch.cat([rows[0][:290], rows[4][:9]]))
    rows.append(torch.cat([rows[3][:200], rows[5]]))
    return [row.tolist() for row in rows]


def arguments(folder: Path, verifier: Path, dtype: str, chunk: int) -> list[str]:
    """extract.py's arguments that answer `prompts` and take their states of every layer."""
    rows = prompts()
    masks = [[False] * len(row) for row in rows]
    shard = folder / "tokens.safetensors"
    write_tokens(shard, Rows.pack(rows, masks, [bytes([i] * 16) for i in range(len(rows))], {}))
    (folder / "identity.json").write_text('{"source": "test", "files": {}}')
    options = {
        "shards": shard,
        "out": folder / "hidden.safetensors",
        "store": folder / "store",
        "verifier": verifier,
        "identity": folder / "identity.json",
        "summary": folder / "summary.json",
        "log": folder / "log.jsonl",
        "answers": "verifier",
        "max-new-tokens": NEW_TOKENS,
        "dtype": dtype,
        "max-model-len": MAX_MODEL_LEN,
        # Fewer than the rows: the last find the beginning of the first in the cache.
        "max-num-seqs": 3,
        "max-num-batched-tokens": chunk,
        "kv-cache-gib": 0.1,
    }
    layers = load_verifier_config(verifier).num_hidden_layers
    return ["--layer-ids", *map(str, range(1, layers))] + [
        str(part) for name, value in options.items() for part in ("--" + name, value)
    ]


def make_verifier(folder: Path, config_class) -> Path:
    """tiny's, with embeddings three times as large as what a layer adds to them.

    In bf16 two engines differ by one or two percent in what a layer adds, so that of the state they
    differ by less than one, and a layer off by one is still off by 13% or more.
    """
    tiny.make_verifier(folder, config_class=config_class)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 24
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def references(verifier: Path, dtype: torch.dtype, states: HiddenStates) -> list[torch.Tensor]:
    """Of each row, transformers' states [tokens, L + 1, H] in fp32.

    They are the inputs of the L layers, and the last layer's output before the final norm.
    """
    kimi = "KimiK25" in (verifier / "config.json").read_text()
    kind = AutoModelForImageTextToText if kimi else AutoModelForCausalLM
    model = kind.from_pretrained(verifier, dtype=dtype)
    # The text model alone: before it, transformers takes a placeholder's token for an image.
    text = model.model.language_model if kimi else model.model
    before_norm = []
    text.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    found = []
    for index in range(len(states.rows[0])):
        ids = states.rows[0].row(index).long()[None]
        with torch.no_grad():
            inputs = text(ids, output_hidden_states=True).hidden_states[:-1]
        found.append(torch.stack([*(h[0] for h in inputs), before_norm[-1]], 1).float())
    return found


def check(found: torch.Tensor, expected: torch.Tensor, row_limit: float, token_limit: float):
    """Compare a row's states [tokens, layers, H]; each layer's, and each token's of each layer."""
    difference = found.float() - expected
    assert (difference.norm(dim=(0, 2)) / expected.norm(dim=(0, 2))).max() < row_limit
    assert (difference.norm(dim=-1) / expected.norm(dim=-1)).max() < token_limit


@pytest.fixture(scope="module")
def extracted(tmp_path_factory) -> dict:
    """Of each case its verifier, HiddenStates, and the tokens found in the prefix cache."""
    top = tmp_path_factory.mktemp("states")
    verifiers, cases = [], []
    for number, (config_class, dtype, chunk, mla, *_) in enumerate(CASES.values()):
        verifier = top / str(number) / "verifier"
        if config_class:
            make_verifier(verifier, config_class)
        else:
            make_tiny_kimi(verifier)
        verifiers.append(verifier)
        options = arguments(verifier.parent, verifier, dtype, chunk)
        cases.append({"arguments": options, "dtype": dtype, "mla": mla})
    (top / "cases.json").write_text(json.dumps(cases))
    (top / "runner.py").write_text(RUNNER.format(scripts=str(ROOT / "scripts")))
    done = subprocess.run(
        [python(), "runner.py", "cases.json"],
        cwd=top,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    states = [HiddenStates([v.parent / "hidden.safetensors"]) for v in verifiers]
    cached = json.loads((top / "cached.json").read_text())
    return dict(zip(CASES, zip(verifiers, states, cached, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_each_layer_is_the_verifiers(extracted, name):
    _, dtype, chunk, _, *limits = CASES[name]
    verifier, states, cached = extracted[name]
    rows = states.rows[0]
    # The engine did what the case is about: the longest prompt takes six steps of 64 tokens, and
    # of each pair's second prompt the whole blocks that it shares came from the cache.
    assert cached == (256 + 128 if chunk == 64 else 0)
    assert len(rows) == len(prompts()) and int(rows.loss_mask.sum()) > 60
    for index, expected in enumerate(references(verifier, getattr(torch, dtype), states)):
        found = states.row(0, index)["hidden_states"]
        assert found.dtype == getattr(torch, dtype) and found.shape[1] == expected.shape[1] - 1
        check(found, expected[:, 1:], *limits)
        # Ids one too low, and one too high: every layer of every token shows it.
        for other, right in ((found, expected[:, :-1]), (found[:, :-1], expected[:, 2:])):
            off = (other.float() - right).norm(dim=-1) / right.norm(dim=-1)
            assert off.min() > 0.1
            with pytest.raises(AssertionError):
                check(other, right, *limits)


def test_a_model_that_hands_over_no_states_is_refused_before_the_load(tmp_path):
    """Only the config of the verifier is there, so a load would fail otherwise."""
    verifier = tmp_path / "verifier"
    MixtralConfig(architectures=["MixtralForCausalLM"]).save_pretrained(verifier)
    script = ROOT / "scripts/extract.py"
    command = [python(), str(script), *arguments(tmp_path, verifier, "float32", 64)]
    # Its states and keys are large.
    command += ["--kv-cache-gib", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "extract: verifier of type mixtral: vLLM's MixtralForCausalLM does not" in done.stderr
    assert "Traceback" not in done.stderr
