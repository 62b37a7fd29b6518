"""scripts/train.py by hand, on states of a tiny verifier."""

import itertools
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from forking import run_to_end
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import remade
from transformers import AutoModelForCausalLM

from eyrie.files import write_json
from eyrie.shards import HiddenShardWriter, Rows, read_rows
from eyrie.vocab import made_of, save_map
from vocab import choose

SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS = {
    "draft-vocab-size": 300,
    "norms": "eagle3",
    "num-hidden-layers": 1,
    "num-attention-heads": 4,
    "num-key-value-heads": 2,
    "head-dim": 32,
    "intermediate-size": 128,
    "rope-theta": 10000.0,
    "max-position-embeddings": 512,
    "rms-norm-eps": 1e-5,
    "epochs": 3,
    "optimizer": "muon",
    "lr": 0.005,
    "muon-lr": 0.01,
    "weight-decay": 0.01,
    "scheduler": "cosine",
    "warmup-ratio": 0.1,
    "ttt-steps": 3,
    "ttt-decay": 1.0,
    "ttt-warmup-epochs": 1,
    "noise": 0.2,
    "total-seq-len": 64,
    "held-out": 0.2,
    "seed": 0,
    "checkpoint-every": 3,
}


def states_of(verifier: Path, ids: list[list[int]]) -> list[torch.Tensor]:
    """The states entering layers 1, 2, 3 and the final norm, bf16 [n, 4, hidden], of each row."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    states = []
    for row in ids:
        with torch.no_grad():
            hidden = model(torch.tensor([row]), output_hidden_states=True).hidden_states
        states.append(torch.stack([*(hidden[k][0] for k in (1, 2, 3)), last[-1]], 1).bfloat16())
    return states


def write_shard(path: Path, ids, masks, states, metadata=None, row_ids=None) -> None:
    path.touch()
    starts = [0, *itertools.accumulate(map(len, ids))]
    for start, row in zip(starts, states, strict=False):
        HiddenShardWriter.write_states(path, start, row)
    if row_ids is None:
        row_ids = [random.Random(str(row)).randbytes(16) for row in ids]
    else:
        row_ids = [row_id.numpy().tobytes() for row_id in row_ids]
    metadata = metadata or {"fingerprint": str(hash(str(ids))), "layer_ids": [1, 2, 3, 4]}
    rows = Rows.pack(ids, masks, row_ids, metadata)
    HiddenShardWriter.finish(path, rows, (4, states[0].shape[-1]), torch.bfloat16)


def write_map(folder: Path, size: int = 300) -> Path:
    """A vocabulary map of a folder's hidden shards, and the identity of their verifier."""
    identity = {"source": "path:here", "files": {}}
    write_json(folder / "verifier.json", identity)
    rows = [read_rows(path) for path in sorted(folder.glob("[0-9]*.safetensors"))]
    counts, real = torch.arange(512), torch.ones(512, dtype=torch.bool)
    path = folder / f"vocab_{size}.safetensors"
    save_map(path, *choose(counts, [], size, real), made_of(identity, rows, 0.2, size))
    return path


@pytest.fixture(scope="module")
def inputs(inputs, tmp_path_factory) -> Path:
    """A verifier whose head is its embeddings: its tensors are the draft's, whose vocabulary is
    another, in every resume, too."""
    folder = tmp_path_factory.mktemp("tied")
    config = json.loads((inputs / "verifier/config.json").read_text())
    config |= {"tie_word_embeddings": True}
    remade(inputs / "verifier", folder / "verifier", config, **{"lm_head.weight": None})
    return folder


@pytest.fixture(scope="module")
def data(inputs, tmp_path_factory) -> Path:
    """Two hidden shards of 24 rows, one of which has nothing supervised, and a vocabulary map."""
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(0)
    ids = [[chance.randrange(300) for _ in range(chance.randrange(12, 40))] for _ in range(48)]
    masks = [[i > 5 for i in range(len(row))] for row in ids]
    masks[3] = [False] * len(ids[3])
    states = states_of(inputs / "verifier", ids)
    for number in range(2):
        part = slice(number * 24, number * 24 + 24)
        write_shard(folder / f"{number}.safetensors", ids[part], masks[part], states[part])
    write_map(folder)
    return folder


def command(data: Path, inputs: Path, folder: Path, **options) -> list[str]:
    given = OPTIONS | {
        "vocab": data / "vocab_300.safetensors",
        "verifier": inputs / "verifier",
        "identity": data / "verifier.json",
        "state": folder / "state",
        "out": folder / "ckpt",
        "tensorboard": folder / "curves",
    }
    given |= {name.replace("_", "-"): value for name, value in options.items()}
    parts = [SCRIPTS / "train.py", "--layer-ids", 1, 2, 3]
    parts += ["--hidden", *sorted(data.glob("[0-9]*.safetensors"))]
    parts += [part for name, value in given.items() for part in ("--" + name, value)]
    return [str(part) for part in parts]


@pytest.fixture(scope="module")
def whole(data, inputs, tmp_path_factory) -> Path:
    """A training that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = run_to_end(command(data, inputs, folder), folder)
    assert code == 0, output
    assert "1 left out, which have no supervised token" in output
    return folder


def same_weights(one: Path, other: Path) -> None:
    for name in ("0", "1", "2", "."):
        path = Path("ckpt") / name / "model.safetensors"
        assert (one / path).read_bytes() == (other / path).read_bytes(), name


def history(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "ckpt/metrics.parquet").drop(columns="seconds")


# A signal to itself at the start of a step.
STRIKE = """
import os
from eyrie.trainer import DraftTrainer
plain = DraftTrainer.train_step
def step(self, *args):
    if self.global_step == {step}:
        os.kill(os.getpid(), {signal})
    return plain(self, *args)
DraftTrainer.train_step = step
"""


def test_struck_at_five_steps_it_ends_with_the_same_weights(data, inputs, whole, tmp_path):
    steps = int(history(whole)["step"].max())
    chance = random.Random(1)
    at = sorted(chance.sample(range(1, steps), 5))
    kills = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGTERM]
    saved = 0
    for step, kill in zip(at, kills, strict=True):
        strike = STRIKE.format(step=step, signal=int(kill))
        code, output = run_to_end(command(data, inputs, tmp_path), tmp_path, strike)
        assert code not in (0, None), output
        assert not (tmp_path / "ckpt").exists()
        if saved:
            assert f", step {saved}\n" in output
        # A signal that can be handled loses nothing, the other at most `checkpoint_every` steps.
        states = sorted((tmp_path / "state").glob("*/state-*.safetensors"))
        saved = int(states[-1].name.split("-")[1]) if states else 0
        assert saved == step + 1 if kill != signal.SIGKILL else step - 3 < saved <= step
        assert len(states) <= 2
    code, output = run_to_end(command(data, inputs, tmp_path), tmp_path)
    assert code == 0 and f", step {saved}\n" in output
    same_weights(whole, tmp_path)
    assert not json.loads((tmp_path / "ckpt/config.json").read_text())["tie_word_embeddings"]
    # The learning rates, the losses and all else, too.
    pd.testing.assert_frame_equal(history(whole), history(tmp_path))


def test_a_damaged_state_is_told_of_and_the_one_before_is_used(data, inputs, whole, tmp_path):
    strike = STRIKE.format(step=11, signal=int(signal.SIGKILL))
    code, _ = run_to_end(command(data, inputs, tmp_path), tmp_path, strike)
    assert code
    before, newest = sorted((tmp_path / "state").glob("*/state-*.safetensors"))
    with open(newest, "r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    code, output = run_to_end(command(data, inputs, tmp_path), tmp_path)
    assert code == 0, output
    assert f"{newest} is damaged and not used" in output
    assert f"step {int(before.name.split('-')[1])}\n" in output
    same_weights(whole, tmp_path)


def test_other_settings_data_or_vocabulary_start_afresh(data, inputs, whole, tmp_path):
    state = whole / "state"
    other = {"vocab": write_map(data, 200), "draft_vocab_size": 200}
    for number, options in enumerate([{"lr": 0.004}, {"intermediate_size": 96}, other]):
        options |= {"state": state, "epochs": 1, "out": tmp_path / str(number)}
        code, output = run_to_end(command(data, inputs, tmp_path, **options), tmp_path)
        assert code == 0 and "goes on" not in output, output
    # Another layout is no other draft.
    options = {"state": state, "out": tmp_path / "same", "layout": "speculators"}
    code, output = run_to_end(command(data, inputs, tmp_path, **options), tmp_path)
    assert code == 0 and "goes on at epoch 3" in output
    nested = json.loads((tmp_path / "same/1/config.json").read_text())
    assert nested["transformer_layer_config"]["head_dim"] == 32
    weights = load_file(tmp_path / "same/1/model.safetensors")
    flat = load_file(whole / "ckpt/1/model.safetensors")
    assert torch.equal(weights["layers.0.mlp.up_proj.weight"], flat["midlayer.mlp.up_proj.weight"])
    manifest = json.loads((tmp_path / "same/manifest.json").read_text())
    assert manifest["files"]["model.safetensors"] in {
        manifest["files"][f"{epoch}/model.safetensors"] for epoch in range(3)
    }


def test_curves_are_written_for_each_step_and_epoch(whole):
    curves = EventAccumulator(str(whole / "curves"))
    curves.Reload()
    table = history(whole)
    steps = table[table.kind == "step"]
    for name in ("loss", "loss_2", "full_acc_0", "acceptance_length", "lr", "grad_norm"):
        written = curves.Scalars(f"train/{name}")
        known = steps.dropna(subset=[name])
        assert [s.step for s in written] == known.step.tolist()
        assert [s.value for s in written] == pytest.approx(known[name].tolist(), rel=1e-5)
    assert len(curves.Scalars("held_out/acceptance_length")) == 3
    assert (steps.supervised_tokens > 0).all() and (steps.grad_norm > 0).all()


def test_two_processes_take_the_steps_of_one(data, inputs, tmp_path):
    """Over gloo, against one process that accumulates two batches a step. The last step of an
    epoch has one batch only, so that one of the processes has none of its own."""
    options = {"epochs": 2, "optimizer": "adamw"}
    one, two = tmp_path / "one", tmp_path / "two"
    code, output = run_to_end(command(data, inputs, one, gradient_accumulation=2, **options), one)
    assert code == 0, output
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = [sys.executable, *launch, *command(data, inputs, two, **options)]
    done = subprocess.run(together, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("chose epoch") == 1
    first, second = history(one), history(two)
    for name in ("tokens", "supervised_tokens", "epoch", "step"):
        assert first[name].equals(second[name])
    assert second["loss"].tolist() == pytest.approx(first["loss"].tolist(), rel=1e-4)
    weights = [load_file(f / "ckpt/model.safetensors") for f in (one, two)]
    for name, tensor in weights[0].items():
        if tensor.is_floating_point():
            difference = (tensor.float() - weights[1][name].float()).norm() / tensor.float().norm()
            assert difference < 2e-3, name


def test_a_state_that_is_no_number_stops_and_names_the_row(data, inputs, tmp_path):
    ids = [[i + 1] * 20 for i in range(8)]
    states = states_of(inputs / "verifier", ids)
    states[5][9] = float("nan")
    write_shard(tmp_path / "0.safetensors", ids, [[True] * 20] * 8, states)
    write_map(tmp_path)
    options = {"total_seq_len": 20, "noise": 0}
    code, output = run_to_end(command(tmp_path, inputs, tmp_path, **options), tmp_path)
    assert code == 1 and "Traceback" not in output
    assert "the loss is nan on " in output and f"(row 5 of {tmp_path / '0.safetensors'})" in output
    assert not (tmp_path / "ckpt").exists()
    for path in (tmp_path / "state").glob("*/state-*.safetensors"):
        assert all(t.isfinite().all() for t in load_file(path).values() if t.is_floating_point())


def test_training_ends_when_held_out_rows_gain_nothing(data, inputs, tmp_path):
    options = {"epochs": 9, "lr": 0.0, "muon_lr": 0.0, "patience": 2}
    code, output = run_to_end(command(data, inputs, tmp_path, **options), tmp_path)
    assert code == 0 and "2 epochs without a better one" in output
    manifest = json.loads((tmp_path / "ckpt/manifest.json").read_text())
    assert manifest["chosen_epoch"] == 0
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir() if p.is_dir()) == ["0", "1", "2"]


def test_every_token_of_an_answer_is_learnt(data, inputs, tmp_path):
    """Two rows, one held out; the mask goes with the token that is drafted, so that after
    enough steps each of the six answer tokens is right, the first and the last, too."""
    ids = [[7, 8, 9, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26]]
    states = states_of(inputs / "verifier", ids)
    # The verifier itself must want these tokens: its last state becomes the head's row of them.
    head = load_file(inputs / "verifier/model.safetensors")["model.embed_tokens.weight"].float()
    for row, state in zip(ids, states, strict=True):
        state[:-1, 3] = (head[row[1:]] * 1e3).bfloat16()
    masks = [[i > 3 for i in range(len(row))] for row in ids]
    write_shard(tmp_path / "0.safetensors", ids, masks, states)
    write_map(tmp_path)
    options = {"epochs": 120, "optimizer": "adamw", "noise": 0, "ttt_warmup_epochs": 0}
    options |= {"scheduler": "none", "checkpoint_every": 1000}
    code, output = run_to_end(command(tmp_path, inputs, tmp_path, **options), tmp_path)
    assert code == 0, output
    last = history(tmp_path).query("kind == 'step'").iloc[-1]
    tokens = int(last.supervised_tokens)
    assert tokens in (3, 6) and last.full_acc_0 == 1
    # The last two tokens have no third one after them.
    assert last.full_acc_2 == pytest.approx((tokens - 2) / tokens, abs=1e-5)


def test_no_row_to_train_on_is_an_error(data, inputs, tmp_path):
    ids = [[n, 2, 3, 4] for n in range(3)]
    states = states_of(inputs / "verifier", ids)
    write_shard(tmp_path / "0.safetensors", ids, [[False] * 4] * 3, states)
    write_map(tmp_path)
    code, output = run_to_end(command(tmp_path, inputs, tmp_path), tmp_path)
    assert code == 1 and "rows have a supervised token" in output
    assert not (tmp_path / "ckpt").exists()
