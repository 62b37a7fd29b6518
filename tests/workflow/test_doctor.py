"""scripts/doctor.py on a draft that was trained until it knows its conversations, right and damaged
in each of the ways that load without a word."""

import itertools
import json
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from templates import LLAMA3
from test_training import OPTIONS, states_of, write_shard
from transformers import AutoModelForCausalLM

import doctor
import train
from eyrie.chat import Chat, load_tokenizer
from eyrie.files import sha256_file, write_json
from eyrie.hidden import HiddenStates, split
from eyrie.replay import FlatDraft, Passage
from eyrie.shards import read_rows
from eyrie.verifier import load_tensor
from eyrie.vocab import made_of, save_map
from vocab import choose, pinned

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
    counts = torch.bincount(torch.tensor([*itertools.chain(*ids)]), minlength=512)
    always = pinned(tokenizer, [], 512)
    map_of = made_of(identity, [read_rows(shard)], 0.1, 400)
    vocab = tree / "vocab_tiny.safetensors"
    save_map(vocab, *choose(counts, always, 400, torch.ones(512, dtype=torch.bool)), map_of)
    options = OPTIONS | {
        "draft-vocab-size": 400,
        "norms": "eagle3.1",
        "epochs": 12,
        # As it is replayed, wherever training would take bfloat16.
        "dtype": "float32",
        "noise": 0.0,
        "ttt-warmup-epochs": 0,
        "total-seq-len": 128,
        "held-out": 0.1,
        "checkpoint-every": 1000,
        "hidden": shard,
        "vocab": vocab,
        "verifier": verifier,
        "identity": tree / "verifier.json",
        "state": tree / ".state",
        "out": tree / "ckpt_tiny",
    }
    words = ["train", "--layer-ids", "1", "2", "3"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(signal, "signal", lambda *_: None)
        train.main()
    return tree


@pytest.fixture
def copy(tree, tmp_path) -> Path:
    """The tree again, to be damaged."""
    shutil.copytree(tree, tmp_path / "results", ignore=shutil.ignore_patterns(".state"))
    return tmp_path / "results"


@pytest.fixture
def examined(monkeypatch, capsys):
    """Runs the doctor as from the command line; returns its findings by check, and its code."""

    def run(tree: Path, *options: str) -> tuple[dict, int]:
        out = tree / "doctor.json"
        given = [tree / "ckpt_tiny", "--verifier", tree / "verifier", "--json", out]
        given += ["--rows", "training", "--num-prompts", "10", "--max-new-tokens", "16"]
        given += ["--max-model-len", "512"]
        monkeypatch.setattr(sys, "argv", ["doctor", *map(str, given), *options])
        with pytest.raises(SystemExit) as stop:
            doctor.main()
        report = json.loads(out.read_text())
        printed = capsys.readouterr().out
        for finding in report["findings"]:
            assert f"{finding['status']:<7} {finding['check']}: {finding['says']}" in printed
        return {f["check"]: f for f in report["findings"]}, stop.value.code

    return run


def faults(findings: dict) -> list[str]:
    return [check for check, found in findings.items() if found["status"] == "FAULT"]


def change_config(tree: Path, **changes) -> None:
    path = tree / "ckpt_tiny/config.json"
    config = json.loads(path.read_text())
    nested = config["eagle_config"]
    if ids := changes.get("eagle_aux_hidden_state_layer_ids"):
        nested |= {"eagle_aux_hidden_state_layer_ids": ids, "layer_ids": ids}
    if "norm_before_fc" in changes:
        nested["norm_before_fc"] = changes["norm_before_fc"]
    path.write_text(json.dumps(config | changes))


def forget(tree: Path) -> None:
    (tree / "ckpt_tiny/manifest.json").unlink()


def change_weights(tree: Path, change) -> None:
    path = tree / "ckpt_tiny/model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    save_file({k: v.contiguous() for k, v in change(tensors).items()}, path)


def rewrite(tree: Path, change) -> None:
    """Change the shard: ids and mask of each row; its states are made to fit."""
    path = tree / "data/tiny/hidden/00000.safetensors"
    rows = read_rows(path)
    pairs = [change(rows.row(i).tolist(), rows.mask(i).tolist()) for i in range(len(rows))]
    ids, masks = map(list, zip(*pairs, strict=True))
    states = states_of(tree / "verifier", ids)
    path.unlink()
    write_shard(path, ids, masks, states, metadata=rows.metadata, row_ids=rows.row_ids)


HIDDEN = "data/tiny/hidden/00000.safetensors"


def test_nothing_is_wrong_with_the_draft_as_it_was_trained(tree, examined):
    findings, code = examined(tree)
    assert faults(findings) == [] and code == 0
    assert {f["status"] for f in findings.values()} == {"ok"}
    assert findings["replay"]["evidence"]["acceptance_length"] > 1.5
    assert findings["verifier"]["evidence"]["head_rows_found"] == 400
    assert findings["on-policy answers"]["evidence"]["likeliest"] > 0.98


def test_the_replay_is_what_training_measured(tree):
    """On held-out rows, of which training told how many draft tokens were right."""
    known_tree = tree / "ckpt_tiny"
    metrics = pd.read_parquet(known_tree / "metrics.parquet")
    chosen = json.loads((known_tree / "manifest.json").read_text())["chosen_epoch"]
    epoch = metrics[(metrics.kind == "epoch") & (metrics.epoch == chosen)].iloc[0]
    draft = FlatDraft(known_tree, load_tensor(tree / "verifier", "embed_tokens.weight").float())
    stored = HiddenStates([tree / HIDDEN])
    right, total = np.zeros(3), np.zeros(3)
    for shard, index in split(stored.rows, 0.1)[1]:
        row = stored.row(shard, index)
        ids, answer = row["input_ids"].long(), int(row["loss_mask"].int().argmax())
        states = dict(zip((1, 2, 3), row["hidden_states"].float().unbind(1), strict=False))
        drafted = draft.drafted(draft.settings, Passage(ids, answer, states), 3)
        # Training compares with the verifier's likeliest token of the draft's vocabulary, which
        # these greedy answers are, and counts the answer's first, drafted from the prompt.
        for step in range(3):
            for p in range(answer - 1 - 1, len(ids) - 2 - step):
                wrote = ids[p + 2 : p + 3 + step]
                right[step] += bool((drafted[p, : step + 1] == wrote).all())
                total[step] += 1
    expected = [epoch[f"full_acc_{k}"] for k in range(3)]
    assert (right / total).tolist() == pytest.approx(expected, abs=0.06)


SETTINGS = {
    "ids one lower": ("layer ids", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    "norm_before_fc": ("norm flags", {"norm_before_fc": False}),
    "norm_before_residual": ("norm flags", {"norm_before_residual": True}),
    "rope": ("rope and positions", {"rope_scaling": {"rope_type": "linear", "factor": 16.0}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_training_had_otherwise(copy, examined, name):
    check, changes = SETTINGS[name]
    change_config(copy, **changes)
    findings, code = examined(copy)
    assert check in faults(findings) and code == 1
    assert {*faults(findings)} <= {check, "files"}
    evidence = findings[check]["evidence"]
    assert f"{evidence['as_found']:.2f} as found" in findings[check]["says"]


def test_a_setting_that_only_the_replay_tells(copy, examined):
    check, changes = SETTINGS["ids one lower"]
    change_config(copy, **changes)
    forget(copy)
    options = ["--hidden", str(copy / HIDDEN), "--held-out", "0.1", "--num-prompts", "30"]
    findings, code = examined(copy, *options)
    # Id 0 is one that no draft is trained on, which scripts/check.py knows.
    assert faults(findings) == ["files", check] and code == 1
    evidence = findings[check]["evidence"]
    assert evidence["mended"] > evidence["as_found"] + doctor.MARGIN


def test_positions_that_end_before_what_is_served(copy, examined):
    change_config(copy, max_position_embeddings=128)
    findings, code = examined(copy)
    assert {"context length", "rope and positions"} <= {*faults(findings)} and code == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ids for offsets", lambda t: t | {"d2t": t["d2t"] + torch.arange(len(t["d2t"]))}),
        ("offsets of another", lambda t: t | {"d2t": t["d2t"].flip(0)}),
        (
            "another vocabulary",
            lambda t: t | {"d2t": torch.arange(400) * 0 + 112, "t2d": torch.arange(512) >= 112},
        ),
    ],
)
def test_another_vocabulary_map(copy, examined, name, change):
    change_weights(copy, change)
    findings, code = examined(copy)
    assert faults(findings) == ["files", "vocabulary map"] and code == 1
    evidence = findings["vocabulary map"]["evidence"]
    assert evidence["mended"] > evidence["as_found"] + doctor.MARGIN


MASKS = {
    "one token early": lambda mask: [*mask[1:], True],
    "one token late": lambda mask: [False, *mask[:-1]],
    "what is not the answers": lambda mask: [not m for m in mask],
    "everything": lambda mask: [True] * len(mask),
    "nothing": lambda mask: [False] * len(mask),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_marks_something_else(copy, name):
    rewrite(copy, lambda ids, mask: (ids, MASKS[name](mask)))
    chat = Chat(load_tokenizer(copy / "verifier", False))
    known = doctor.Known(None, None, None, [], [copy / HIDDEN], None, None, None, None)
    rows = [(s, i) for s, i, *_ in doctor.sample_rows(known, chat, "training", 0.1, 16)]
    found = doctor.look_at_mask(known, chat, rows)
    assert found["status"] == "FAULT" and found["evidence"]["begin_at_an_answer"] == 0


def test_a_mask_alone_is_told(copy, examined):
    rewrite(copy, lambda ids, mask: (ids, MASKS["everything"](mask)))
    findings, code = examined(copy)
    assert faults(findings) == ["loss mask"] and code == 1


def test_two_bos_in_the_rows_trained_on(copy, examined):
    rewrite(copy, lambda ids, mask: ([ids[0], *ids], [False, *mask]))
    findings, code = examined(copy)
    assert "chat template" in faults(findings) and code == 1
    assert findings["chat template"]["evidence"]["two_bos"] == 1


@pytest.mark.parametrize("rendered", [True, False])
def test_another_chat_template(copy, examined, rendered):
    """The verifier served with a template that was changed after the rows were made; or rows of
    another template whose account is lost."""
    path = copy / "verifier/chat_template.jinja"
    path.write_text(path.read_text() + " " if rendered else LLAMA3)
    findings, code = examined(copy)
    assert {"verifier", "chat template"} <= {*faults(findings)} and code == 1
    assert "chat_template.jinja" in findings["verifier"]["says"]
    assert len(findings["chat template"]["evidence"]["acceptance_length"]) == 2


def test_answers_that_the_verifier_did_not_write(copy, examined):
    chance = random.Random(0)

    def foreign(ids, mask):
        return [chance.randrange(32, 300) if m else i for i, m in zip(ids, mask, strict=True)], mask

    rewrite(copy, foreign)
    findings, code = examined(copy)
    assert faults(findings) == ["on-policy answers"] and code == 1
    assert findings["on-policy answers"]["evidence"]["likeliest"] < 0.5


def test_states_of_another_layer(copy, examined):
    """Rows whose states are those that enter the layers before the ones they are said to enter."""
    path = copy / HIDDEN
    rows, states = read_rows(path), load_file(path)["hidden_states"]
    starts = rows.row_offsets.tolist()
    path.unlink()
    parts = [states[a:b][:, [0, 0, 1, 3]] for a, b in itertools.pairwise(starts)]
    ids = [rows.row(i).tolist() for i in range(len(rows))]
    masks = [rows.mask(i).tolist() for i in range(len(rows))]
    write_shard(path, ids, masks, parts, metadata=rows.metadata, row_ids=rows.row_ids)
    findings, code = examined(copy)
    assert faults(findings) == ["stored states"] and code == 1
    assert findings["stored states"]["evidence"]["nearest"] == [1, 1, 2, 4]


@pytest.mark.parametrize("part", ["weights", "tokenizer"])
def test_another_revision_of_the_verifier(copy, examined, part):
    folder = copy / "verifier"
    if part == "weights":
        path = folder / "model.safetensors"
        tensors = load_file(path)
        torch.manual_seed(1)
        changed = {
            k: v + 0.3 * v.std() * torch.randn_like(v) if "layers" in k and v.ndim == 2 else v
            for k, v in tensors.items()
        }
        save_file(changed, path, {"format": "pt"})
    else:
        # As many tokens, two of them in each other's place.
        path = folder / "tokenizer.json"
        state = json.loads(path.read_text())
        words = state["model"]["vocab"]
        one, other = [word for word in words if len(word) == 1][40:42]
        words[one], words[other] = words[other], words[one]
        path.write_text(json.dumps(state))
    findings, code = examined(copy)
    assert "verifier" in faults(findings) and code == 1
    assert path.name in findings["verifier"]["says"]
    wanted = "stored states" if part == "weights" else "chat template"
    assert wanted in faults(findings)


def test_more_draft_tokens_than_were_trained(tree, examined):
    findings, code = examined(tree, "--draft-tokens", "12")
    assert faults(findings) == ["draft tokens"] and code == 1
    shares = findings["draft tokens"]["evidence"]["accepted_per_position"]
    assert len(shares) == 12 and shares[-1] < doctor.WORTH < shares[0]


def test_what_serving_and_training_say_of_the_same_rows(copy, examined):
    """Training estimated, or serving accepted, what the replay does not."""
    bench = {"methods": [], "held_out": {"acceptance_length": 1.02}}
    write_json(copy / "bench_tiny.json", bench)
    findings, _ = examined(copy, "--rows", "held-out")
    assert "serving differs" in findings["replay"]["says"]
    assert faults(findings) == ["replay"]


def test_a_draft_without_anything_beside_it(copy, examined, capsys, monkeypatch):
    """A checkpoint alone is replayed on prompts that are named."""
    forget(copy)
    shutil.rmtree(copy / "data")
    findings, code = examined(copy)
    assert faults(findings) == [] and code == 0
    skipped = [check for check, f in findings.items() if f["status"] == "skipped"]
    assert skipped == ["stored states", "chat template", "loss mask", "on-policy answers"]
    (copy / "prompts").unlink()
    arguments = ["doctor", str(copy / "ckpt_tiny"), "--verifier", str(copy / "verifier")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        doctor.main()
    assert "--prompts" in capsys.readouterr().err
