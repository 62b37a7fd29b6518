"""The checks of a draft's checkpoint, each a dict: check, ok, found, expected, effect.

`effect` is what serving the draft would come to: vLLM's loader says nothing of most faults.
Config and header are checked from a few kilobytes; weights are read after both are right.
"""

import math
import sys
from pathlib import Path

from eyrie.checkpoint import (
    ARCHITECTURE,
    WEIGHTS,
    as_flat,
    expected_tensors,
    flat_name,
    is_nested,
    layer_id_fields,
    read_config,
    read_header,
    sglang_faults,
    sglang_since,
)
from eyrie.files import read_json, sha256_file
from eyrie.misfit import misfit
from eyrie.reference import rope_problems
from eyrie.verifier import find_tensor, tensor_shape

COUNTS = (
    "draft_vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
# Fields that may be null; transformers refuses null where a type is declared.
NULLABLE = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rope_scaling",
    "sliding_window",
    "layer_types",
}
# What each field of the config's draft block is called in a flat config.
TRAINED = {
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
    "norm_before_residual": "norm_before_residual",
    "draft_vocab_size": "draft_vocab_size",
    "layer_ids": "eagle_aux_hidden_state_layer_ids",
}


def result(check: str, ok: bool, found, expected, effect: str) -> dict:
    return {
        "check": check,
        "ok": bool(ok),
        "found": str(found),
        "expected": str(expected),
        "effect": effect,
    }


def passed(checks: list[dict]) -> bool:
    return all(c["ok"] for c in checks)


def tell(results: dict[str, list[dict]], told: dict[str, int]) -> None:
    """Print the checks that are new; one line for all epochs of which it says the same."""
    lines: dict[tuple, list[str]] = {}
    for name, checks in results.items():
        for check in checks[told.get(name, 0) :]:
            lines.setdefault(tuple(check.values()), []).append(name)
        told[name] = len(checks)
    for (check, ok, found, expected, effect), names in lines.items():
        where = "" if len(results) == 1 else "all: " if len(names) == len(results) else (
            f"{', '.join(names)}: ")  # fmt: skip
        if ok:
            print(f"ok   {where}{check}: {found}")
        else:
            print(f"FAIL {where}{check}: found {found}, expected {expected}. When served: {effect}")
    sys.stdout.flush()


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def strings(value):
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if type(value) is list else ():
        yield from strings(part)


def check_config(
    config: dict,
    verifier: dict,
    own_embeddings: bool = False,
    length: int | None = None,
    layout: str | None = None,
) -> list[dict]:
    """A flat config against the verifier's text config, and its copies of one fact against each
    other. length: tokens that are to be served, the verifier's own limit if None."""
    checks = []
    get = config.get

    def check(name: str, ok, found, expected, effect: str) -> None:
        checks.append(result(name, ok, found, expected, effect))

    def same(key: str, expected, effect: str) -> None:
        found = get(key, "missing")
        ok = type(found) is type(expected) and found == expected
        check(f"config.{key}", ok, found, expected, effect)

    same("architectures", [ARCHITECTURE], "vLLM fails, or loads the draft as another model")
    same("model_type", "llama", "vLLM reads another kind of config")
    same("dtype", "bfloat16", "weights are cast, or do not multiply with the verifier's")
    if "torch_dtype" in config:
        same("torch_dtype", "bfloat16", "older readers cast the weights")
    same("vocab_size", verifier["vocab_size"], "draft tokens land on other verifier tokens")
    same("target_hidden_size", verifier["hidden_size"], "the verifier's states do not fit fc")
    if own_embeddings:
        size = get("hidden_size")
        check("config.hidden_size", type(size) is int, size, "an integer", "no layer can be made")
    else:
        same("hidden_size", verifier["hidden_size"], "the verifier's embeddings do not fit")
    same("tie_word_embeddings", False, "SGLang takes the draft's embeddings for its head")
    same("hidden_act", "silu", "vLLM refuses the draft")
    for key in ("attention_bias", "mlp_bias"):
        same(key, False, "vLLM makes biases that no tensor fills")
    for key in COUNTS:
        found = get(key, "missing")
        good = type(found) is int and found > 0
        effect = "a default of vLLM's takes its place, or it does not load"
        check(f"config.{key}", good, found, "a positive integer", effect)
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        found = get(key, "missing")
        effect = "vLLM's default takes its place and trained weights are dropped"
        check(f"config.{key}", type(found) is bool, found, "true or false", effect)
    both = get("norm_before_fc") is True and get("fc_norm") is True
    expected = "at most one of norm_before_fc and fc_norm"
    check("norms before fc", not both, "both" if both else "at most one", expected, "normed twice")
    for key in ("rms_norm_eps", "rope_theta"):
        found = get(key, "missing")
        effect = "other positions or norms than in training"
        check(f"config.{key}", is_number(found) and found > 0, found, "a positive number", effect)
    problems = "; ".join(rope_problems(get("rope_scaling"))) or None
    effect = "vLLM fails, or turns positions otherwise than training"
    check(
        "config.rope_scaling", not problems, problems or get("rope_scaling"), "a known one", effect
    )
    for key, expected in {
        "rope_parameters": None,
        "logit_scale": 1.0,
        "quantization_config": None,
    }.items():
        if key in config:
            effect = "it goes over what the other fields say"
            check(f"config.{key}", get(key) == expected, get(key), f"{expected}, or none", effect)
    nulls = sorted(key for key, value in config.items() if value is None and key not in NULLABLE)
    effect = "transformers, and so vLLM, refuses the config"
    check(
        "no nulls", not nulls, ", ".join(nulls) or "none", "none where a type is declared", effect
    )

    heads, keys = get("num_attention_heads"), get("num_key_value_heads")
    whole = all(type(n) is int and n > 0 for n in (heads, keys, get("hidden_size")))
    good = whole and not heads % keys and not get("hidden_size") % heads
    expected = "key/value heads divide heads, and heads the hidden size"
    check("heads", good, f"{heads} and {keys}, hidden size {get('hidden_size')}", expected,
          "vLLM and transformers refuse the config")  # fmt: skip

    layers, window, depth = map(get, ("layer_types", "sliding_window", "num_hidden_layers"))
    good = layers is None
    if window:
        slides = type(layers) is list and all(kind == "sliding_attention" for kind in layers)
        good = slides and len(layers) == depth
    expected = f"sliding_attention, {depth} times" if window else None
    effect = "vLLM looks back further than in training, or less far"
    check("config.layer_types", good, layers, expected, effect)

    size, all_tokens = get("draft_vocab_size"), verifier["vocab_size"]
    good = type(size) is int and 0 < size <= all_tokens
    check("vocabulary size", good, size, f"at most {all_tokens}", "lm_head does not fit")

    positions = get("max_position_embeddings")
    wanted = length or verifier.get("max_position_embeddings") or 1
    good = type(positions) is int and positions >= wanted
    effect = "past its last position the draft drafts nothing, or what it was not trained on"
    check("positions", good, positions, f"at least {wanted:,}", effect)

    inner = get("eagle_config") if isinstance(get("eagle_config"), dict) else {}
    ids = get("eagle_aux_hidden_state_layer_ids")
    whole = type(ids) is list and ids and all(type(k) is int for k in ids)
    last = verifier["num_hidden_layers"] - 1
    good = whole and ids == sorted(set(ids)) and ids[0] >= 1 and ids[-1] <= last
    effect = "vLLM sorts and merges them: states of other layers than trained on"
    check("layer ids", good, ids, f"ascending, between 1 and {last}", effect)
    ids = ids if whole else []
    effect = "one of vLLM's model runners takes its default layers: acceptance falls to about 1%"
    for key, expected in layer_id_fields(ids, False, layout)["eagle_config"].items():
        if key.endswith("layer_ids"):
            found = inner.get(key, "missing")
            check(f"config.eagle_config.{key}", whole and found == expected, found,
                  expected or "layer ids", effect)  # fmt: skip
    same("num_aux_hidden_states", len(ids), "fc gets another number of states")
    found = inner.get("use_aux_hidden_state", "missing")
    check("config.eagle_config.use_aux_hidden_state", found is True, found, True, "fc is unused")
    found = inner.get("norm_before_fc", get("norm_before_fc"))
    effect = "vLLM takes this one: a norm is dropped, or left as memory was"
    expected = get("norm_before_fc")
    check("config.eagle_config.norm_before_fc", found == expected, found, expected, effect)

    paths = [text for text in strings(config) if text.startswith(("/", "~"))]
    effect = "the checkpoint tells of this machine, and looks for a model there on another"
    check("no local path", not paths, ", ".join(paths) or "none", "none", effect)
    return checks


def check_trained(config: dict, trained: dict) -> list[dict]:
    """A flat config against what the draft was trained as, of which nothing else tells: a norm's
    place, angles and layers that another draft might have are loaded without a word.

    trained: `config` of the checkpoint's manifest.json.
    """
    wanted = {field: trained[name] for name, field in TRAINED.items()}
    # A window is written only where there is one.
    wanted |= {key: trained["norms"] == "eagle3.1" for key in ("norm_before_fc", "norm_output")}
    effect = "the weights are run as another model than they were trained as"
    return [
        result(f"trained {key}", config.get(key) == value, config.get(key), value, effect)
        for key, value in wanted.items()
    ]


def check_header(
    header: dict, config: dict, vocab_size: int, own_embeddings: bool = False
) -> list[dict]:
    """Names, dtypes and shapes of a flat checkpoint's tensors."""
    depth = config["num_hidden_layers"]
    if depth > len(header):
        effect = "vLLM makes layers that no weights fill"
        return [result("layers", False, f"{len(header)} tensors", f"{depth} layers", effect)]
    expected = expected_tensors(config)
    if own_embeddings:
        expected["embed_tokens.weight"] = ("BF16", [vocab_size, config["hidden_size"]])
    checks = []
    for name in sorted(header.keys() | expected.keys()):
        found, wanted = header.get(name), expected.get(name)
        effect = "vLLM drops it, or refuses the draft"
        if name not in header:
            effect = "vLLM loads the draft and leaves this weight as memory was"
            if name in ("d2t", "t2d"):
                effect = "draft token i is taken for verifier token i: acceptance near zero"
        elif name in expected:
            effect = "vLLM refuses the draft, or casts the weight"
        checks.append(
            result(f"tensor {name}", found == wanted, found or "missing", wanted or "none", effect)
        )
    return checks


def check_files(folder: Path) -> list[dict]:
    """vLLM reads every .safetensors of the folder, one over the other."""
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.name != WEIGHTS and path.suffix in (".safetensors", ".bin", ".pt", ".pth")
    )
    effect = "vLLM reads these weights over those of the draft"
    found = ", ".join(others) or "none"
    return [result("weights beside model.safetensors", not others, found, "none", effect)]


def check_sglang(config: dict, required: bool) -> dict:
    """Whether SGLang serves the draft. A fault only where that is `required`, told otherwise."""
    faults = "; ".join(sglang_faults(config))
    found = f"not by SGLang: {faults}" if faults else "yes"
    if not faults and (since := sglang_since(config)):
        found = f"yes, with {since}"
    effect = "SGLang drafts from other states or with another norm than in training"
    expected = "yes" if required else "told"
    return result("served by SGLang", not (faults and required), found, expected, effect)


def check_head(folder: Path, vocab_size: int, hidden_size: int) -> list[dict]:
    """The verifier's own embeddings, norm and head, which a draft shares or is trained on, by the
    headers of its files alone."""
    checks = []
    for name, shape in (
        ("embed_tokens.weight", [vocab_size, hidden_size]),
        ("model.norm.weight", [hidden_size]),
        ("lm_head.weight", [vocab_size, hidden_size]),
    ):
        found = find_tensor(folder, name)
        dims = tensor_shape(*found) if found else "none"
        # A tied verifier has no head of its own.
        good = dims == shape or (name.startswith("lm_head") and not found)
        effect = "a draft cannot be trained on this verifier"
        checks.append(result(f"verifier {name}", good, dims, shape, effect))
    return checks


def check_nested(config: dict) -> list[dict]:
    """What a nested config has beside its fields that `as_flat` reads."""
    inner = config.get("speculators_config") or {}
    methods = inner.get("proposal_methods") or [{}]
    tokens = None if misfit(methods, [{}]) else methods[0].get("speculative_tokens")
    kind = config.get("speculators_model_type")
    effect = "vLLM takes the checkpoint for another model"
    checks = [
        result("config.speculators_model_type", kind == "eagle3", kind, "eagle3", effect),
        result(
            "config.speculators_config.proposal_methods",
            type(tokens) is int and tokens > 0,
            tokens,
            "a number of speculative_tokens",
            "vLLM does not know how many tokens to draft",
        ),
    ]
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        found = config.get(key, "missing")
        effect = "speculators and vLLM have different defaults for it"
        good = type(found) is bool
        checks.append(result(f"nested {key}", good, found, "true or false", effect))
    return checks


def check_values(path: Path, config: dict, verifier_dir: Path | None) -> list[dict]:
    """Weights that are finite and not constant, the vocabulary map, and what is the verifier's.

    verifier_dir: None compares nothing with it: the head was trained.
    """
    import torch
    from safetensors import safe_open

    from eyrie.vocab import map_fault

    checks, kept = [], {}
    with safe_open(path, "pt") as file:
        for name in file.keys():
            tensor, name = file.get_tensor(name), flat_name(name)
            if name in ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight"):
                kept[name] = tensor
            if not tensor.is_floating_point():
                continue
            bad = int((~tensor.isfinite()).sum())
            effect = "every draft token is garbage"
            checks.append(result(f"finite {name}", bad == 0, f"{bad} not", "all", effect))
            # A norm begins as ones and may stay so where little is learnt.
            constant = bool((tensor == tensor.flatten()[0]).all())
            wrong = constant and (tensor.ndim == 2 or float(tensor.flatten()[0]) == 0)
            found = f"all {float(tensor.flatten()[0])}" if constant else "varied"
            effect = "the layer passes nothing on"
            checks.append(result(f"varied {name}", not wrong, found, "varied", effect))

    whole, size = config["vocab_size"], config["draft_vocab_size"]
    rows = torch.arange(whole)
    if "d2t" in kept:
        fault = map_fault(kept["d2t"], kept["t2d"], size, whole)
        effect = "draft tokens stand for other tokens: acceptance near zero"
        expected = "i + d2t[i] are the tokens that t2d marks, ascending"
        checks.append(result("vocabulary map", not fault, fault or "right", expected, effect))
        if fault:
            return checks
        rows = rows[kept["t2d"]]
    if verifier_dir is None:
        return checks
    from eyrie.verifier import load_head, load_tensor

    shared = {"lm_head.weight": lambda: load_head(verifier_dir)[rows]}
    if "embed_tokens.weight" in kept:
        shared["embed_tokens.weight"] = lambda: load_tensor(verifier_dir, "embed_tokens.weight")
    for name, load in shared.items():
        # A draft of another width has its own.
        if config["hidden_size"] != config["target_hidden_size"]:
            continue
        equal = torch.equal(kept[name], load().to(torch.bfloat16))
        effect = (
            "draft tokens stand for other tokens"
            if name.startswith("lm_head")
            else "vLLM drafts from these and SGLang from the verifier's: acceptance near zero"
        )
        found = "equal" if equal else "other values"
        expected = "equal: training keeps them frozen"
        checks.append(result(f"{name} is the verifier's", equal, found, expected, effect))
    return checks


def check_content(folder: Path, manifest: dict, name: str) -> list[dict]:
    """The files of an epoch are those that training wrote, by manifest.json."""
    checks = []
    for file in ("config.json", WEIGHTS):
        wanted = manifest["files"].get(str(Path(name) / file))
        found = sha256_file(folder / file)
        effect = "not the draft that was trained and reported of"
        checks.append(result(f"sha256 {file}", found == wanted, found, wanted, effect))
    return checks


# torch's names of dtypes and safetensors' own.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "bool": "BOOL"}


def read_reference(path: Path) -> tuple[dict, dict]:
    """(config, {name: (dtype as safetensors names it, shape)}) of a draft that is known to serve,
    from JSON of the form {config, tensors: {name: [dtype, shape]}}.

    Raises:
        ValueError: naming the file, if it is not of that form.
    """
    reference = read_json(path)
    try:
        tensors = reference["tensors"].items()
        return dict(reference["config"]), {n: (DTYPES[kind], dims) for n, (kind, dims) in tensors}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not of the form {{config: {{...}}, tensors: {{name: [dtype, shape]}}}} with "
            f"dtypes of {', '.join(DTYPES)} ({error!r})"
        ) from None


def check_reference(header: dict, config: dict, path: Path) -> list[dict]:
    """Names, shapes and config fields side by side with those of a draft that is known to serve.

    path: as `read_reference` takes it. Fields that only one of them has are of their writers.
    """
    checks = []
    effect = "not the shape of a draft that is known to serve"
    reference, wanted = read_reference(path)
    for name in sorted(header.keys() | wanted.keys()):
        found, expected = header.get(name), wanted.get(name)
        checks.append(result(f"reference {name}", found == expected, found, expected, effect))
    for key, expected in reference.items():
        if key in config:
            found = config[key]
            if isinstance(expected, dict) and isinstance(found, dict):
                found = {inner: found.get(inner) for inner in expected}
            checks.append(result(f"reference {key}", found == expected, found, expected, effect))
    return checks


def check_light(
    folder: Path, verifier: dict, length: int | None = None, layout: str | None = None
) -> tuple[list[dict], dict]:
    """All checks of one checkpoint that read no weights, and its config as a flat one.

    verifier: its text config. layout: flat, sglang or speculators, or None: as it looks.
    """
    try:
        config = read_config(folder)
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        effect = "vLLM cannot load the draft"
        return [result("files", False, error, "a config.json and whole weights", effect)], {}
    checks = check_files(folder)
    nested = is_nested(config)
    if layout:
        found, wanted = ("nested" if n else "flat" for n in (nested, layout == "speculators"))
        checks.append(result("layout", found == wanted, found, wanted, "read as another model"))
    if nested:
        checks += check_nested(config)
        config = as_flat(config)
        header = {flat_name(name): entry for name, entry in header.items()}
    own = "embed_tokens.weight" in header
    checks += check_config(config, verifier, own, length, layout)
    if passed(checks):
        checks.append(check_sglang(config, required=layout == "sglang"))
    if passed(checks):
        checks += check_header(header, config, verifier["vocab_size"], own)
    return checks, config


def check_folder(folder: Path, verifier: dict, verifier_dir: Path) -> list[dict]:
    """Every check of one checkpoint but what vLLM makes of it; weights where all else is right."""
    checks, config = check_light(folder, verifier)
    if passed(checks):
        checks += check_values(folder / WEIGHTS, config, verifier_dir)
    return checks
