import copy

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eyrie.shards import Rows, ShardError
from eyrie.teacher import Teacher
from eyrie.verifier import load_verifier_config


@pytest.fixture(scope="module")
def answered(inputs):
    """Greedy answers of the tiny verifier, and every layer's states of them, the last one before
    the final norm."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "verifier", dtype=torch.float32)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    ids, masks, states = [], [], []
    for prompt in range(12):
        tokens = torch.arange(5)[None] + 20 + prompt
        with torch.no_grad():
            tokens = model.generate(tokens, max_new_tokens=20, min_new_tokens=20, do_sample=False)
            out = model(tokens, output_hidden_states=True)
        ids.append(tokens[0].tolist())
        masks.append([False] * 5 + [True] * 20)
        states.append(torch.stack([*(h[0] for h in out.hidden_states[1:4]), before_norm[-1]], 1))
    rows = Rows.pack(ids, masks, [bytes([i] * 16) for i in range(12)], {})
    config = load_verifier_config(inputs / "verifier")
    return Teacher(inputs / "verifier", config, "float32"), rows, states


def write(path, states):
    save_file({"hidden_states": torch.cat(states).bfloat16().contiguous()}, path)
    return path


def test_right_states_give_the_answers_back(answered, tmp_path):
    teacher, rows, states = answered
    assert teacher.check(write(tmp_path / "right", states), rows) > 0.97


@pytest.mark.parametrize(
    "wrong",
    [
        lambda states: [s[:, [0, 1, 2, 2]] for s in states],  # a layer off by one
        lambda states: [s.roll(1, 0) for s in states],  # a token off by one
        lambda states: states[1:] + states[:1],  # the states of another row
    ],
)
def test_wrong_states_stop_the_job(answered, tmp_path, wrong):
    teacher, rows, states = answered
    path = write(tmp_path / "wrong", wrong(states))
    with pytest.raises(ShardError, match="wrong layer, norm or row"):
        teacher.check(path, rows)


@pytest.fixture(scope="module")
def told(inputs, answered):
    """What transformers says of the tokens of three rows."""
    _, rows, _ = answered
    model = AutoModelForCausalLM.from_pretrained(inputs / "verifier", dtype=torch.float32)
    found = {}
    for row in (0, 5, 11):
        ids = rows.row(row).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        found[row] = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    return found


def test_right_states_give_the_log_probabilities_back(answered, told, tmp_path):
    teacher, rows, states = answered
    assert teacher.compare(write(tmp_path / "right", states), rows, told) < 0.05


def test_products_in_bfloat16_judge_alike(answered, told, tmp_path):
    """As a verifier of bfloat16 is judged where the CPU multiplies it."""
    teacher, rows, states = answered
    rough = copy.copy(teacher)
    rough.dtype = torch.bfloat16
    right = write(tmp_path / "right", states)
    assert rough.check(right, rows) > 0.97 and rough.compare(right, rows, told) < 0.1
    wrong = write(tmp_path / "wrong", states[1:] + states[:1])
    for check in (lambda: rough.check(wrong, rows), lambda: rough.compare(wrong, rows, told)):
        with pytest.raises(ShardError):
            check()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda states: [s[:, [0, 1, 2, 2]] for s in states],
        lambda states: states[1:] + states[:1],
    ],
)
def test_wrong_log_probabilities_stop_the_job(answered, told, tmp_path, wrong):
    teacher, rows, states = answered
    path = write(tmp_path / "wrong", wrong(states))
    with pytest.raises(ShardError, match="mean log-probability"):
        teacher.compare(path, rows, told)
