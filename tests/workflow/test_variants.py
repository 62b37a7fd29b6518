"""Other data and other drafts than the tiny job's own, on its verifier."""

import itertools
import json
import shutil
import subprocess
from dataclasses import fields

import pytest
import torch
from forking import run_to_end
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from tiny_job import (
    SCRIPTS,
    check_states,
    jobs_of,
    snakemake,
    train,
)

from eyrie.batches import HiddenRows, make_loader
from eyrie.draft import DraftShape, build_model
from eyrie.hidden import HiddenStates
from eyrie.shards import read_rows
from eyrie.verifier import load_verifier_config


def test_answers_of_the_data_itself(job):
    """With `answers: dataset` the states are of the whole talks and their own answers count."""
    from transformers import AutoTokenizer

    config = ["results=results/own", "shard={answers: dataset}"]
    snakemake(job, "results/own/data/tiny/hidden.json", "--config", *config)
    total, greedy = check_states(job / "inputs/verifier", job / "results/own")
    # A random verifier would not have written these.
    assert total > 200 and greedy < 0.2 * total
    tokenizer = AutoTokenizer.from_pretrained(job / "inputs/verifier")
    rows = read_rows(job / "results/own/data/tiny/hidden/00000.safetensors")
    start, end = rows.row_offsets[:2].tolist()
    written = rows.input_ids[start:end][rows.loss_mask[start:end]]
    answers = [
        json.loads(line)["conversations"][1]["value"] + "<|im_end|>"
        for line in (job / "inputs/conversations.jsonl").read_text().splitlines()
    ]
    assert tokenizer.decode(written) in answers


def test_several_turns_are_answered_in_one_load(job):
    from transformers import AutoTokenizer

    config = ["results=results/turns", "shard={max_turns: 0, max_length: 100}"]
    snakemake(job, "results/turns/data/tiny/hidden.json", "--config", *config)
    check_states(job / "inputs/verifier", job / "results/turns")
    summary = json.loads((job / "results/turns/data/tiny/hidden.json").read_text())
    assert summary["rows"] == 24 and summary["answers"] == 48
    tokenizer = AutoTokenizer.from_pretrained(job / "inputs/verifier")
    rows = read_rows(job / "results/turns/data/tiny/hidden/00000.safetensors")
    supervised = []
    for index in range(len(rows)):
        start, end = rows.row_offsets[index : index + 2].tolist()
        mask = rows.loss_mask[start:end].int()
        text = tokenizer.decode(rows.input_ids[start:end])
        assert text.count("<|im_start|>user") == 2 and text.count("<|im_start|>assistant") == 2
        supervised.append(int((mask.diff() == 1).sum()))
    # A random verifier writes bytes that are no text, too, and of some answers nothing is left.
    assert set(supervised) <= {0, 1, 2} and sum(supervised) > 1.5 * len(rows)
    log = (job / "results/turns/logs/extract_tiny.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["answers"] for line in log) == 48


def test_two_engines_share_the_shards(finished, tmp_path):
    job = tmp_path / "job"
    subprocess.run(["cp", "-a", finished, job], check=True)
    hidden, store = job / "results/tiny/data/tiny/hidden", job / "results/tiny/.state/store"
    alone = {path.name: path.read_bytes() for path in hidden.iterdir()}
    shutil.rmtree(hidden)
    shutil.rmtree(store)
    target = "results/tiny/data/tiny/hidden.json"
    output = snakemake(job, target, "--config", "extract={nodes: 2}")
    for told in ("1 shards, 0 in the store, 1 to make", "2 shards, 0 in the store, 2 to make"):
        assert told in output
    assert "3 shards, 3 in the store, 0 to make" in output
    assert {path.name: path.read_bytes() for path in hidden.iterdir()} == alone


def test_a_map_of_other_data_or_another_size_is_refused(job, tmp_path):
    command = train(job, tmp_path)
    first = command.index("--hidden") + 1
    for arguments, message in (
        ([*command, "--draft-vocab-size", "300"], "draft_vocab_size is 384, not 300"),
        ([*command, "--held-out", "0.3"], "held_out is 0.2, not 0.3"),
        ([*command[:first], *command[first + 1 :]], "data is "),
    ):
        code, output = run_to_end(arguments, tmp_path)
        assert code == 1
        assert "vocab_tiny.safetensors: not the vocabulary map" in output
        assert message in output and "Traceback" not in output
    assert not (tmp_path / "ckpt").exists()


def test_a_draft_of_the_whole_vocabulary_with_a_window_from_another_draft(job, tmp_path):
    """Trained on the same states, checked and served."""
    copy = tmp_path / "job"
    subprocess.run(["cp", "-a", job, copy], check=True)
    shutil.copytree(copy / "results/tiny/ckpt_tiny", copy / "first")
    config = [
        "vocab={draft_vocab_size: full}",
        "draft={sliding_window: 8, rope_scaling: {rope_type: linear, factor: 2.0}}",
        "train={init_from: first, lr: 0, muon_lr: 0}",
        "bench={methods: [], draft_tokens: [3], concurrency: [1], samples: 0}",
    ]
    output = snakemake(copy, "results/tiny/bench_tiny.json", "--config", *config)
    assert "train: the draft is not as the verifier: draft.sliding_window 8" in output
    assert "train: starts from first" in output
    folder = copy / "results/tiny/ckpt_tiny"
    found = json.loads((folder / "config.json").read_text())
    assert found["draft_vocab_size"] == found["vocab_size"] == 512
    assert (found["sliding_window"], found["layer_types"]) == (8, ["sliding_attention"])
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    # Nothing was learnt, so all that is trained is the other draft's.
    weights, others = (load_file(f / "model.safetensors") for f in (folder, copy / "first"))
    assert "d2t" in others and not {"d2t", "t2d"} & weights.keys()
    assert weights["lm_head.weight"].shape == (512, 64)
    for name in weights.keys() - {"lm_head.weight"}:
        assert torch.equal(weights[name], others[name]), name
    bench = json.loads((copy / "results/tiny/bench_tiny.json").read_text())
    assert bench["methods"][1]["drafts"] > 0
    assert all(m["identical"] == m["compared"] == 16 for m in bench["methods"])


# The benchmark's own measurement of a draft, of prompts that are tokens.
SERVE = """
import argparse, json, sys
sys.path.insert(0, {scripts!r})
from eyrie import engine
from eyrie.serving import Serving
parser = argparse.ArgumentParser()
for name in ("verifier", "checkpoint", "prompts", "out"):
    parser.add_argument("--" + name)
engine.add_arguments(parser)
args = parser.parse_args()
args.traces, args.draft_gpus = None, 0
engine.prepare(0, in_process=True)
prompts = json.load(open(args.prompts))
method = dict(name="eagle3", kind="eagle3", model=args.checkpoint)
rows = Serving(method, 3, prompts, args).serve(prompts, 8, 3, 8)
names = ("drafts", "accepted_1", "accepted_2", "accepted_3")
json.dump([sum(row[name] for row in rows) for name in names], open(args.out, "w"))
"""


def test_another_run_of_the_same_data_is_looked_at_and_trained_alone(job):
    config = ["--config", "runs={tiny: {data: tiny}, other: {data: tiny, draft: {head_dim: 16}}}"]
    output = snakemake(job, "-n", "results/tiny/ckpt_other", *config)
    assert jobs_of(output) == {"preflight", "vocab", "train"}


def test_what_is_accepted_is_what_the_trained_model_drafts(job, tmp_path):
    """speculators' own model drafts from every place of the answers as training has them. Walked
    through as a server does, so much must be accepted when vLLM serves the same prompts."""
    tree = job / "results/tiny"
    # A draft that knows its rows by heart, as this verifier's answers have little else to learn.
    by_heart = {"epochs": 60, "noise": 0.0, "ttt_warmup_epochs": 0, "muon_lr": 0.02}
    code, output = run_to_end(train(job, tmp_path, **by_heart), tmp_path)
    assert code == 0, output
    settings = json.loads((tmp_path / "ckpt/manifest.json").read_text())["config"]
    shape = DraftShape(**{field.name: settings[field.name] for field in fields(DraftShape)})
    vocab = load_file(tree / "vocab_tiny.safetensors")
    d2t, t2d = vocab["d2t"], vocab["t2d"]
    verifier = load_verifier_config(tree / "verifier")
    model = build_model(
        Eagle3DraftModel, shape, verifier, tree / "verifier", [1, 2, 3], 3, len(d2t), d2t, t2d
    ).float()
    # The last epoch's; the chosen one may be an early one.
    weights = load_file(tmp_path / "ckpt/59/model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items()}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys

    token_of = torch.arange(len(d2t)) + d2t
    states = HiddenStates(sorted((tree / "data/tiny/hidden").glob("*.safetensors")))
    prompts, drafts, accepted = [], 0, [0, 0, 0]
    for shard, rows in enumerate(states.rows):
        for index in range(len(rows)):
            (batch,) = make_loader(HiddenRows(states, [(shard, index)], 128), 128, seed=0)
            batch = {k: v for k, v in batch.items() if torch.is_tensor(v)}
            loss = resolve_loss_config("kl_div", "eager")
            with torch.no_grad():
                drafted, _, _ = model(**batch, ttt_steps=3, loss_config=loss)
            ids = rows.row(index).tolist()
            first = int(rows.mask(index).nonzero()[0])
            prompts.append(ids[:first])
            last = min(len(ids), first + 8) - 1
            # The state before token `place` and that token draft the next three.
            place = first
            while place < last:
                proposed = [int(token_of[step[0, place - 1]]) for step in drafted]
                right = [t == w for t, w in zip(proposed, ids[place + 1 :], strict=False)]
                count = len(list(itertools.takewhile(bool, right)))
                for k in range(count):
                    accepted[k] += 1
                drafts += 1
                place += count + 1
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "serve.py").write_text(SERVE.format(scripts=str(SCRIPTS)))
    flat, nested = tmp_path / "ckpt/59", tmp_path / "nested"
    command = [SCRIPTS / "flatten.py", flat, "--verifier", tree / "verifier", "--out", nested]
    code, output = run_to_end([*map(str, command), "--to", "speculators"], tmp_path / "flatten")
    assert code == 0, output
    options = {"verifier": tree / "verifier", "prompts": tmp_path / "prompts.json"}
    options |= {"dtype": "float32", "max-model-len": 128, "max-num-seqs": 8}
    options |= {"kv-cache-gib": 0.1}
    found = []
    for checkpoint in (flat, nested):
        options |= {"checkpoint": checkpoint, "out": tmp_path / "served.json"}
        command = [part for name, value in options.items() for part in ("--" + name, str(value))]
        code, output = run_to_end([str(tmp_path / "serve.py"), *command], tmp_path / "serving")
        assert code == 0, output
        found.append(json.loads((tmp_path / "served.json").read_text()))
    served, of_nested = found
    assert served == of_nested
    assert accepted[0] > 0.3 * drafts
    # But for tokens that two logits are nearly level on.
    assert served == pytest.approx([drafts, *accepted], abs=3)
