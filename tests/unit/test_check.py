"""A good draft damaged in every way that we have heard of: scripts/check.py names each, and vLLM
accepts most of them without a word."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from test_draft_model import IDS, model_of, shape
from test_vocab import BAD_MAPS

import check
import doctor
from eyrie import loads
from eyrie.checkpoint import read_header
from eyrie.checks import check_light, read_reference
from eyrie.draft import flat_config, flat_tensors, write_flat
from eyrie.files import sha256_file, write_json
from eyrie.verifier import load_verifier_config, text_sizes

SCRIPT = Path(check.__file__)
# As the verifier's own; `shape` has it otherwise.
POSITIONS = {"max_position_embeddings": 512}


@pytest.fixture(scope="module", autouse=True)
def environment():
    """vLLM's settings are of this process; the scripts of other tests make their own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def write_draft(folder: Path, inputs: Path, size: int = 200, **changes) -> Path:
    """A flat checkpoint of an untrained draft, with the manifest of a training."""
    draft_shape = shape(**POSITIONS | changes)
    model = model_of(Eagle3DraftModel, inputs, draft_shape, size)
    config = flat_config(draft_shape, load_verifier_config(inputs / "verifier"), IDS, size)
    write_flat(folder, config, flat_tensors(model))
    trained = {**vars(draft_shape), "layer_ids": IDS, "draft_vocab_size": size}
    write_json(folder / "manifest.json", {"config": trained, "files": {}})
    return folder


@pytest.fixture(scope="module")
def good(inputs, tmp_path_factory) -> Path:
    return write_draft(tmp_path_factory.mktemp("good"), inputs, norms="eagle3.1")


def failed(folder: Path, inputs: Path, **options) -> list[str]:
    """The names of the checks that fail, as scripts/check.py makes them one after the other."""
    args = Namespace(draft=folder, verifier=inputs / "verifier", layout=None, reference=None)
    args.max_model_len, args.trained_head = 128, False
    vars(args).update(options)
    manifest = json.loads((folder / "manifest.json").read_text())
    checks, config = check.light(args, "", text_sizes(args.verifier), manifest)
    if check.passed(checks):
        checks += check.weights(args, "", config, {})
        checks += loads.check_loads(folder, config, args.verifier, False)
    return [c["check"] for c in checks if not c["ok"]]


@pytest.mark.parametrize("size", [200, 512])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms": "eagle3.1", "sliding_window": 8},
        {"num_hidden_layers": 2, "norm_before_residual": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_a_right_draft(inputs, tmp_path, size, changes):
    assert failed(write_draft(tmp_path, inputs, size, **changes), inputs) == []


def without(*keys):
    return lambda config: {k: v for k, v in config.items() if k not in keys}


def inner(**changes):
    """Changes in eagle_config."""
    return lambda config: config | {"eagle_config": config["eagle_config"] | changes}


def ids(*numbers):
    """Other layer ids, everywhere."""
    ids = list(numbers)
    more = {"eagle_aux_hidden_state_layer_ids": ids, "layer_ids": ids}
    return lambda config: inner(**more)(config) | {"eagle_aux_hidden_state_layer_ids": ids}


# Name: (what becomes of the config, the check that must fail, whether vLLM loads it all the same;
# None where it is known to fail, and tries again for seconds).
CONFIGS = {
    "no architectures": (without("architectures"), "config.architectures", False),
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "config.architectures", True),
    "another model type": ({"model_type": "qwen3"}, "config.model_type", True),
    "no draft_vocab_size": (without("draft_vocab_size"), "config.draft_vocab_size", False),
    "a draft vocabulary too large": ({"draft_vocab_size": 513}, "vocabulary size", False),
    "another vocabulary": ({"vocab_size": 640}, "config.vocab_size", True),
    "no layer ids": (
        lambda config: without("eagle_aux_hidden_state_layer_ids", "eagle_config")(config),
        "layer ids",
        True,
    ),
    "layer ids of the V1 runner alone": (
        lambda config: without("eagle_aux_hidden_state_layer_ids")(inner(layer_ids=None)(config)),
        "layer ids",
        True,
    ),
    "layer ids of the V2 runner alone": (
        lambda config: without("eagle_aux_hidden_state_layer_ids")(
            inner(eagle_aux_hidden_state_layer_ids=None)(config)
        ),
        "layer ids",
        True,
    ),
    "no eagle_config": (without("eagle_config"), "config.eagle_config.layer_ids", True),
    "other ids in eagle_config": (
        inner(layer_ids=[0, 1, 2]),
        "config.eagle_config.layer_ids",
        True,
    ),
    "ids that descend": (ids(3, 2, 1), "layer ids", True),
    "ids twice": (ids(1, 1, 3), "layer ids", True),
    "an id that no layer has": (ids(1, 2, 9), "layer ids", True),
    "the last state among the ids": (ids(1, 2, 4), "layer ids", True),
    "other layers than trained on": (
        ids(1, 2),
        "config.num_aux_hidden_states",
        True,
    ),
    "a state more": (
        {"num_aux_hidden_states": 4},
        "config.num_aux_hidden_states",
        False,
    ),
    "states unused": (
        inner(use_aux_hidden_state=False),
        "config.eagle_config.use_aux_hidden_state",
        False,
    ),
    "no norm_before_fc": (
        lambda config: without("norm_before_fc")(inner(norm_before_fc=None)(config)),
        "config.norm_before_fc",
        True,
    ),
    "norm_before_fc off": (
        lambda config: inner(norm_before_fc=False)(config) | {"norm_before_fc": False},
        "tensor input_norm.weight",
        True,
    ),
    "norm_before_fc off where vLLM looks first": (
        inner(norm_before_fc=False),
        "config.eagle_config.norm_before_fc",
        True,
    ),
    "a second norm": ({"fc_norm": True}, "norms before fc", True),
    "no norm_before_residual": (
        without("norm_before_residual"),
        "config.norm_before_residual",
        True,
    ),
    "norm_before_residual on": (
        {"norm_before_residual": True},
        "trained norm_before_residual",
        True,
    ),
    "norm_output off": ({"norm_output": False}, "trained norm_output", True),
    "another epsilon": ({"rms_norm_eps": 1e-3}, "trained rms_norm_eps", True),
    "another rope theta": ({"rope_theta": 500000.0}, "trained rope_theta", True),
    "no rope theta": (without("rope_theta"), "config.rope_theta", True),
    "a rope theta beside it": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "config.rope_parameters",
        True,
    ),
    "a rope that no one has": (
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        "config.rope_scaling",
        False,
    ),
    "a rope without its factor": (
        {"rope_scaling": {"rope_type": "linear"}},
        "config.rope_scaling",
        None,
    ),
    "scaled angles": (
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "trained rope_scaling",
        True,
    ),
    "a window that vLLM would not see": ({"sliding_window": 8}, "config.layer_types", True),
    "a window without its size": (
        {"layer_types": ["sliding_attention"]},
        "config.layer_types",
        False,
    ),
    "a window that was not trained": (
        {"sliding_window": 8, "layer_types": ["sliding_attention"]},
        "trained sliding_window",
        True,
    ),
    "too few positions": ({"max_position_embeddings": 127}, "positions", True),
    "another hidden size": ({"hidden_size": 48}, "config.hidden_size", False),
    "another target": ({"target_hidden_size": 48}, "config.target_hidden_size", False),
    "another dtype": ({"dtype": "float32"}, "config.dtype", True),
    "two dtypes": ({"torch_dtype": "float16"}, "config.torch_dtype", True),
    "tied embeddings": ({"tie_word_embeddings": True}, "config.tie_word_embeddings", True),
    "another activation": ({"hidden_act": "gelu"}, "config.hidden_act", False),
    "biases": ({"attention_bias": True}, "config.attention_bias", True),
    "scaled logits": ({"logit_scale": 0.1}, "config.logit_scale", True),
    "null": ({"use_cache": None}, "no nulls", False),
    "no head_dim": (without("head_dim"), "config.head_dim", True),
    "a head_dim of text": ({"head_dim": "32"}, "config.head_dim", None),
    "a smaller head_dim": ({"head_dim": 16}, "tensor midlayer.self_attn.q_proj.weight", True),
    "a larger head_dim": ({"head_dim": 64}, "tensor midlayer.self_attn.q_proj.weight", False),
    "heads that do not divide": ({"num_key_value_heads": 3}, "heads", False),
    "a layer more": ({"num_hidden_layers": 2}, "tensor layers.1.mlp.up_proj.weight", True),
    "a wider MLP": ({"intermediate_size": 128}, "tensor midlayer.mlp.up_proj.weight", False),
    "a path of this machine": ({"_name_or_path": "/models/owl"}, "no local path", True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_damaged_config(good, inputs, tmp_path, name):
    change, wanted, silent = CONFIGS[name]
    folder = shutil.copytree(good, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    config = change(config) if callable(change) else config | change
    (folder / "config.json").write_text(json.dumps(config))
    assert wanted in failed(folder, inputs)
    assert silent is None or accepts(folder, inputs) == silent


def accepts(folder: Path, inputs: Path) -> bool:
    """Whether vLLM loads the draft without an error."""
    try:
        loads.load(folder, inputs / "verifier")
    except Exception:
        return False
    return True


def drop(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def filled(name, value):
    return lambda tensors: tensors | {name: torch.full_like(tensors[name], value)}


def one(name, value):
    def change(tensors):
        tensors[name].view(-1)[7] = value
        return tensors

    return change


def renamed(old, new):
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


def moved_map(tensors):
    """Offsets of the tokens beside those whose rows the head has."""
    return tensors | {"d2t": tensors["d2t"] + 1, "t2d": tensors["t2d"].roll(1)}


TENSORS = {
    **{
        f"no {name}": (drop(name), f"tensor {name}", True)
        for name in (
            "fc.weight",
            "norm.weight",
            "lm_head.weight",
            "input_norm.weight",
            "midlayer.self_attn.q_proj.weight",
            "midlayer.mlp.gate_proj.weight",
            "midlayer.hidden_norm.weight",
            "d2t",
            "t2d",
        )
    },
    "NaN": (one("fc.weight", float("nan")), "finite fc.weight", True),
    "an infinity": (
        one("midlayer.mlp.up_proj.weight", float("inf")),
        "finite midlayer.mlp.up_proj.weight",
        True,
    ),
    "zeros": (filled("fc.weight", 0), "varied fc.weight", True),
    "a norm of zeros": (filled("norm.weight", 0), "varied norm.weight", True),
    "a head of other tokens": (moved_map, "lm_head.weight is the verifier's", True),
    "a head in another order": (
        lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"].flip(0)},
        "lm_head.weight is the verifier's",
        True,
    ),
    "embeddings of noise": (
        lambda tensors: tensors | {"embed_tokens.weight": torch.randn(512, 64).bfloat16()},
        "embed_tokens.weight is the verifier's",
        True,
    ),
    "embeddings of another vocabulary": (
        lambda tensors: tensors | {"embed_tokens.weight": torch.randn(500, 64).bfloat16()},
        "tensor embed_tokens.weight",
        False,
    ),
    "float32 weights": (
        lambda tensors: {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()},
        "tensor fc.weight",
        True,
    ),
    "a layer's own name": (
        renamed("midlayer.", "layers.0."),
        "tensor midlayer.mlp.up_proj.weight",
        True,
    ),
    "a prefix": (
        renamed("midlayer.", "model.midlayer."),
        "tensor model.midlayer.mlp.up_proj.weight",
        False,
    ),
    "a weight too many": (
        lambda tensors: tensors | {"extra.weight": torch.ones(3, 3).bfloat16()},
        "tensor extra.weight",
        False,
    ),
    "another shape": (
        lambda tensors: tensors | {"fc.weight": tensors["fc.weight"][:, :128].contiguous()},
        "tensor fc.weight",
        False,
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_damaged_weights(good, inputs, tmp_path, name):
    change, wanted, silent = TENSORS[name]
    folder = shutil.copytree(good, tmp_path / "draft")
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    assert wanted in failed(folder, inputs)
    assert accepts(folder, inputs) == silent


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_bad_map(good, inputs, tmp_path, name):
    folder = shutil.copytree(good, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    d2t, t2d = BAD_MAPS[name](tensors["d2t"], tensors["t2d"])
    save_file(
        tensors | {"d2t": d2t.contiguous(), "t2d": t2d.contiguous()}, folder / "model.safetensors"
    )
    found = failed(folder, inputs)
    assert found and {*found} <= {"vocabulary map", "tensor d2t", "tensor t2d"}


def test_a_map_where_none_is_wanted(inputs, tmp_path):
    folder = write_draft(tmp_path, inputs, 512)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = torch.zeros(512, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors")
    assert failed(folder, inputs) == ["tensor d2t"]
    assert not accepts(folder, inputs)


def test_weights_beside_the_drafts(good, inputs, tmp_path):
    """vLLM reads those, too, and over the draft's own."""
    folder = shutil.copytree(good, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    save_file({"fc.weight": -tensors["fc.weight"]}, folder / "other.safetensors")
    assert failed(folder, inputs) == ["weights beside model.safetensors"]
    assert accepts(folder, inputs)


@pytest.mark.parametrize("length", [0, 5, 3000, -1])
def test_weights_cut_off(good, inputs, tmp_path, length):
    folder = shutil.copytree(good, tmp_path / "draft")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert failed(folder, inputs) == ["files"]
    assert not accepts(folder, inputs)


JUNK = [None, 5, 10**9, float("nan"), "x", True, [], [5], [{}], {}, {"a": 5}, {"rope_type": []}]


def test_whatever_a_config_holds_is_told(good, inputs, tmp_path):
    """A check that fails, and at once, whatever stands where a number or an object must be."""
    folder, verifier = shutil.copytree(good, tmp_path / "draft"), text_sizes(inputs / "verifier")
    flat = json.loads((folder / "config.json").read_text())
    parts = {"speculators_config": {"proposal_methods": []}, "transformer_layer_config": flat}
    for config in (flat, flat | parts):
        for key in config:
            for value in JUNK:
                odd = config | {"sliding_window": 8, key: value}
                (folder / "config.json").write_text(json.dumps(odd))
                assert not check.passed(check_light(folder, verifier)[0])
    for inner in (*flat["eagle_config"], "rope_parameters"):
        for value in JUNK[1:]:
            layer = flat | {inner: value}
            odd = flat | {"eagle_config": flat["eagle_config"] | {inner: value}}
            odd |= parts | {"transformer_layer_config": layer}
            (folder / "config.json").write_text(json.dumps(odd))
            assert not check.passed(check_light(folder, verifier)[0])


@pytest.mark.parametrize(
    "header",
    [b"[]", b"5", b'{"a": {}}', b'{"a": 5}', b'{"a": {"data_offsets": []}}', b"\xff", 9**5 * b"[",
     b'{"a": {"data_offsets": [0, 0], "dtype": "BF16", "shape": [null]}}',
     b'{"a": {"data_offsets": [0, Infinity], "dtype": "BF16", "shape": [1]}}'],
)  # fmt: skip
def test_a_header_of_something_else_is_named(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"model\.safetensors: its header is not that of"):
        read_header(path)


@pytest.mark.parametrize("manifest", ["{}", "[]", '{"config": {}, "files": {}}', '{"files": {}}'])
def test_a_manifest_that_tells_of_no_training(good, inputs, tmp_path, monkeypatch, manifest):
    """Without it the checks of content and of what was trained would be left out."""
    folder = shutil.copytree(good, tmp_path / "draft")
    (folder / "manifest.json").write_text(manifest)
    argv = ["check.py", str(folder), "--verifier", str(inputs / "verifier")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=r"check: .*manifest\.json: "):
        check.main()


@pytest.mark.parametrize("place", ["/proc/x/y", "."])
def test_where_the_results_go_is_told_first(good, inputs, monkeypatch, place):
    argv = ["check.py", str(good), "--verifier", str(inputs / "verifier"), "--json", place]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=f"check: --json {place}: cannot be written"):
        check.main()


def test_a_draft_narrower_than_its_verifier(inputs, tmp_path):
    """With embeddings and a head of its own, which vLLM needs; fc takes the verifier's width."""
    folder = write_draft(tmp_path, inputs)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    narrow = {}
    for name, tensor in tensors.items():
        cut = tuple(
            slice(0, {64: 32, 128: 64}.get(size)) if name != "fc.weight" else slice(0, None)
            for size in tensor.shape
        )
        keep = name in ("d2t", "t2d") or "mlp" in name
        narrow[name] = tensor if keep else tensor[cut].contiguous()
    hidden = 32
    narrow["fc.weight"] = tensors["fc.weight"][:hidden].contiguous()
    for name in ("gate_proj", "up_proj"):
        key = f"midlayer.mlp.{name}.weight"
        narrow[key] = tensors[key][:, :hidden].contiguous()
    narrow["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"][:hidden]
    for name in "qkv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        narrow[key] = tensors[key][:, : 2 * hidden].contiguous()
    narrow["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"][
        :hidden
    ]
    narrow["embed_tokens.weight"] = torch.randn(512, hidden).bfloat16()
    narrow = {name: tensor.contiguous() for name, tensor in narrow.items()}
    save_file(narrow, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": hidden}))
    assert failed(folder, inputs) == []
    del narrow["embed_tokens.weight"]
    save_file(narrow, folder / "model.safetensors")
    assert "config.hidden_size" in failed(folder, inputs)
    # It would take the verifier's, of 64, or leave them as memory was.
    assert accepts(folder, inputs)


def test_a_trained_head_is_not_compared(good, inputs, tmp_path):
    folder = shutil.copytree(good, tmp_path / "draft")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2}, path)
    assert failed(folder, inputs) == ["lm_head.weight is the verifier's"]
    assert failed(folder, inputs, trained_head=True) == []


def test_a_reference_is_held_beside_it(good, inputs, tmp_path):
    config = json.loads((good / "config.json").read_text())
    names = {torch.bfloat16: "bfloat16", torch.int64: "int64", torch.bool: "bool"}
    tensors = {
        n: [names[t.dtype], list(t.shape)] for n, t in load_file(good / "model.safetensors").items()
    }
    reference = tmp_path / "reference.json"
    write_json(reference, {"config": config, "tensors": tensors})
    assert failed(good, inputs, reference=reference) == []
    del tensors["norm.weight"]
    other = config | {"head_dim": 64, "rope_theta": 1.0}
    write_json(reference, {"config": other, "tensors": tensors | {"fc.weight": ["float16", [3]]}})
    assert failed(good, inputs, reference=reference) == [
        "reference fc.weight",
        "reference norm.weight",
        "reference rope_theta",
        "reference head_dim",
    ][:2] + [f"reference {key}" for key in config if key in ("rope_theta", "head_dim")]
    for text in ("{", "[]", "{}", '{"config": {}, "tensors": {"a": ["int3", [1]]}}'):
        reference.write_text(text)
        with pytest.raises(ValueError, match=r"cannot be read|no JSON object|not of the form"):
            read_reference(reference)


def test_the_script_tells_every_epoch(good, inputs, tmp_path, monkeypatch, capsys):
    """One that is damaged is told, whichever it is, and the others are read to the end."""
    folder = shutil.copytree(good, tmp_path / "draft")
    (folder / "²").mkdir()  # a digit, and no number
    for epoch in "01":
        shutil.copytree(good, folder / epoch, ignore=shutil.ignore_patterns("manifest.json"))
    path = folder / "1/model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    files = {
        str(p.relative_to(folder)): sha256_file(p)
        for p in (*folder.rglob("config.json"), *folder.rglob("*.safetensors"))
    }
    files["1/model.safetensors"] = files["0/model.safetensors"]
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", manifest | {"files": files})
    command = ["check.py", folder, "--verifier", inputs / "verifier", "--max-model-len", 128]
    command += ["--json", tmp_path / "check.json"]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    (fault,) = [line for line in lines if line.startswith("FAIL 1: ") and "sha256" in line]
    assert "expected" in fault and "When served: not the draft that was trained" in fault
    assert lines[-1].startswith("FAIL 1: ") and lines[-1].endswith("1 failed")
    assert "ok   all: every parameter is written: all" in lines
    found = json.loads((tmp_path / "check.json").read_text())
    assert not found["ok"] and found["epochs"].keys() == {"chosen", "0", "1"}
    assert [sum(not c["ok"] for c in found["epochs"][e]) for e in ("chosen", "0", "1")] == [0, 0, 1]


def test_a_wrong_config_is_told_before_anything_is_imported(good, inputs, tmp_path):
    folder = shutil.copytree(good, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    command = [sys.executable, "-X", "importtime", SCRIPT, folder]
    done = subprocess.run(
        [*command, "--verifier", inputs / "verifier"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "FAIL tensor midlayer.self_attn.q_proj.weight" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "vllm", "numpy"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", "[]", r"config\.json: holds no JSON object"),
        ("config.json", "{}", r"cannot be read \(KeyError"),
        ("manifest.json", "{}", r"manifest\.json: config is missing"),
        ("manifest.json", '{"config": 5}', r"manifest\.json: config is 5, not an object"),
    ],
)
def test_doctor_tells_what_it_cannot_read_from_what_disagrees(
    good, inputs, tmp_path, monkeypatch, capsys, name, content, message
):
    folder = shutil.copytree(good, tmp_path / "draft")
    (folder / "manifest.json").unlink()
    (folder / name).write_text(content)
    argv = ["doctor.py", str(folder), "--verifier", str(inputs / "verifier")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    assert ended.value.code == 2 and re.search(message, capsys.readouterr().err)
