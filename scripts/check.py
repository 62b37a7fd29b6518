"""Check a draft against its verifier: everything that vLLM would load without a word and serve
badly.

One line a check, `ok` or `FAIL` with what was found, what was expected and what it would have
done when served. Config and headers come first, so a wrong config is told before any weight is
read. Every epoch in the folder is checked.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

from eyrie.draft import expected_tensors
from eyrie.files import log_line, write_json
from eyrie.provenance import peak_rss_bytes
from eyrie.verifier import VerifierConfig, load_head, load_verifier_config
from eyrie.vocab import map_fault

COUNTS = (
    "draft_vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


def result(check: str, ok: bool, found, expected, effect: str) -> dict:
    return {
        "check": check,
        "ok": bool(ok),
        "found": str(found),
        "expected": str(expected),
        "effect": effect,
    }


def check_config(config: dict, verifier: VerifierConfig) -> list[dict]:
    """config.json against the verifier, and its copies of one fact against each other."""
    checks = []

    def same(key: str, expected, effect: str) -> None:
        found = config.get(key, "missing")
        checks.append(result(f"config.{key}", found == expected, found, expected, effect))

    same("architectures", ["LlamaForCausalLMEagle3"], "vLLM does not know the model")
    same("model_type", "llama", "vLLM reads another kind of config")
    same("dtype", "bfloat16", "weights are cast, or do not multiply with the verifier's")
    same("vocab_size", verifier.vocab_size, "draft tokens land on other verifier tokens")
    same("hidden_size", verifier.hidden_size, "the verifier's embeddings do not fit")
    same("target_hidden_size", verifier.hidden_size, "the verifier's states do not fit fc")
    same("tie_word_embeddings", False, "the draft's head is taken for its embeddings")
    for key in COUNTS:
        found = config.get(key, "missing")
        good = type(found) is int and found > 0
        effect = "a default of vLLM's takes its place"
        checks.append(result(f"config.{key}", good, found, "a positive integer", effect))
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        found = config.get(key, "missing")
        effect = "vLLM's default takes its place and trained weights are dropped"
        checks.append(result(f"config.{key}", type(found) is bool, found, "true or false", effect))
    for key in ("rms_norm_eps", "rope_theta"):
        found = config.get(key, "missing")
        good = isinstance(found, int | float) and found > 0
        effect = "other positions or norms than in training"
        checks.append(result(f"config.{key}", good, found, "a positive number", effect))

    layers, window = config.get("layer_types"), config.get("sliding_window")
    expected = ["sliding_attention"] * config.get("num_hidden_layers", 1) if window else None
    effect = "vLLM looks back further than in training, or less far"
    checks.append(result("config.layer_types", layers == expected, layers, expected, effect))

    size, whole = config.get("draft_vocab_size"), verifier.vocab_size
    good = isinstance(size, int) and 0 < size <= whole
    effect = "lm_head does not fit"
    checks.append(result("vocabulary size", good, size, f"at most {whole}", effect))

    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or []
    places = {
        "config.eagle_aux_hidden_state_layer_ids": ids,
        "config.eagle_config.eagle_aux_hidden_state_layer_ids": nested.get(
            "eagle_aux_hidden_state_layer_ids", "missing"
        ),
        "config.eagle_config.layer_ids": nested.get("layer_ids", "missing"),
    }
    effect = "vLLM takes its default layers: acceptance falls to about 1%"
    for name, found in places.items():
        checks.append(result(name, bool(ids) and found == ids, found, ids or "layer ids", effect))
    last = verifier.num_hidden_layers - 1
    good = bool(ids) and ids == sorted(set(ids)) and ids[0] >= 1 and ids[-1] <= last
    effect = "vLLM sorts and merges them: states of other layers than trained on"
    checks.append(result("layer ids", good, ids, f"ascending, between 1 and {last}", effect))
    same("num_aux_hidden_states", len(ids), "fc gets another number of states")
    found = nested.get("use_aux_hidden_state", "missing")
    checks.append(
        result("config.eagle_config.use_aux_hidden_state", found is True, found, True, "fc unused")
    )
    return checks


def check_header(path: Path, config: dict) -> list[dict]:
    """Names, dtypes and shapes of the tensors, from the file's header alone."""
    with safe_open(path, "pt") as file:
        found = {
            name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
            for name in file.keys()
        }
    expected = expected_tensors(config)
    checks = []
    for name in sorted(found.keys() | expected.keys()):
        effect = (
            "vLLM loads the draft and leaves this weight as memory was"
            if name not in found
            else "vLLM drops or refuses it"
        )
        checks.append(
            result(
                f"tensor {name}",
                found.get(name) == expected.get(name),
                found.get(name, "missing"),
                expected.get(name, "not there"),
                effect,
            )
        )
    return checks


def check_values(path: Path, config: dict, verifier_dir: Path) -> list[dict]:
    """Finite and not constant weights, the vocabulary map, and the frozen head."""
    checks = []
    tensors = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            if name in ("d2t", "t2d", "lm_head.weight"):
                tensors[name] = tensor
            if tensor.is_floating_point():
                bad = int((~tensor.isfinite()).sum())
                effect = "every draft token is garbage"
                checks.append(result(f"finite {name}", bad == 0, f"{bad} not", "all", effect))
                if tensor.ndim == 2:
                    varied = bool((tensor != tensor.flatten()[0]).any())
                    effect = "the layer passes nothing on"
                    checks.append(result(f"varied {name}", varied, "constant", "varied", effect))

    rows = torch.arange(config["vocab_size"])
    if "d2t" in tensors:
        d2t, t2d = tensors["d2t"], tensors["t2d"]
        fault = map_fault(d2t, t2d, config["draft_vocab_size"], config["vocab_size"])
        effect = "draft tokens stand for other tokens: acceptance near zero"
        expected = "i + d2t[i] are the tokens that t2d marks, ascending"
        checks.append(result("vocabulary map", not fault, fault or "right", expected, effect))
        if fault:
            return checks
        rows = rows[t2d]
    head = load_head(verifier_dir)[rows].to(torch.bfloat16)
    equal = torch.equal(tensors["lm_head.weight"], head)
    checks.append(
        result(
            "lm_head is the verifier's rows",
            equal,
            "equal" if equal else "other values",
            "equal: training keeps them frozen",
            "draft tokens stand for other tokens",
        )
    )
    return checks


def check_folder(folder: Path, verifier: VerifierConfig, verifier_dir: Path) -> list[dict]:
    """All checks of one flat checkpoint; later ones only if the earlier ones passed."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        return [result("config.json", False, error, "a JSON file", "vLLM cannot load the draft")]
    checks = check_config(config, verifier)
    weights = folder / "model.safetensors"
    for check in (
        lambda: check_header(weights, config),
        lambda: check_values(weights, config, verifier_dir),
    ):
        if not all(c["ok"] for c in checks):
            break
        try:
            checks += check()
        except Exception as error:  # safetensors raises its own for a broken or missing file
            checks.append(result("model.safetensors", False, error, "a whole file", "no weights"))
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path, help="a flat checkpoint, or a folder of epochs")
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--log", type=Path, help="gets a JSON line an epoch")
    args = parser.parse_args()

    started = time.time()
    try:
        verifier = load_verifier_config(args.verifier, args.trust_remote_code)
    except (OSError, ValueError) as error:
        sys.exit(f"check: {args.verifier}: {error}")
    if not args.draft.is_dir():
        sys.exit(f"check: {args.draft}: there is no such folder")
    epochs = sorted(
        (p for p in args.draft.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)
    )
    results = {}
    for folder in [args.draft, *epochs]:
        name = "chosen" if folder == args.draft else folder.name
        results[name] = check_folder(folder, verifier, args.verifier)
        failed = [c for c in results[name] if not c["ok"]]
        for check in failed:
            print(
                f"FAIL {name}: {check['check']}: found {check['found']}, "
                f"expected {check['expected']}. When served: {check['effect']}"
            )
        print(
            f"{'FAIL' if failed else 'ok  '} {name}: {len(results[name])} checks, "
            f"{len(failed)} failed"
        )
        log_line(args.log, epoch=name, checks=len(results[name]), failed=len(failed))
    ok = all(c["ok"] for checks in results.values() for c in checks)
    if args.json:
        write_json(
            args.json,
            {
                "ok": ok,
                "epochs": results,
                "seconds": round(time.time() - started, 2),
                "peak_rss_bytes": peak_rss_bytes(),
            },
        )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
