"""Write a draft's model card, README.md in its checkpoint: how to serve it, what it gains, and what
it was trained on. No path of this machine is in it.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import yaml

from eyrie.checkpoint import is_nested, read_config, sglang_faults, sglang_since
from eyrie.errors import in_one_line
from eyrie.files import atomic, link_or_copy, log_line
from eyrie.layouts import hub_name
from eyrie.markdown import fenced, plain_text
from eyrie.results import CHECK, MANIFEST, SHARDS, VOCAB, read_bench, read_result

# What of a flat config the card goes by.
FLAT = {
    "num_hidden_layers": int,
    "num_aux_hidden_states": int,
    "norm_before_fc": bool,
    "norm_output": bool,
    "fc_norm": bool,
    "eagle_aux_hidden_state_layer_ids": [int],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [int]},
}


def front_matter(fields: dict, base_model: str | None) -> str:
    """The block by which the Hub files a model."""
    values = {key: value for key, value in fields.items() if value}
    values |= {"base_model": base_model} if base_model else {}
    values |= {"library_name": "transformers", "tags": ["eagle3", "speculative-decoding"]}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def cell(value) -> str:
    """A value as text, in a table's cell too, whatever signs of Markdown's own it holds."""
    text = "–" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
    return " ".join(plain_text(text).split())


def table(names: list[str], rows: list[list]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def serving(config: dict, verifier: str, tokens: int) -> str:
    """How the draft is served in vLLM, and in SGLang or why not there."""
    speculative = {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": tokens}
    verifier = shlex.quote(verifier)
    vllm = f"vllm serve {verifier} --speculative-config \\\n  '{json.dumps(speculative)}'"
    text = f"`DRAFT` is the folder of this file.\n\n{fenced(vllm)}\n\n"
    nested = is_nested(config)
    if nested or (faults := sglang_faults(config)):
        reason = "it reads no nested checkpoint" if nested else cell("; ".join(faults))
        return text + f"SGLang does not serve it: {reason}.\n"
    if since := sglang_since(config):
        text += f"SGLang needs {since}:\n\n"
    sglang = (
        f"python -m sglang.launch_server --model-path {verifier} \\\n"
        "  --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT \\\n"
        f"  --speculative-num-steps {tokens} --speculative-eagle-topk 1 \\\n"
        f"  --speculative-num-draft-tokens {tokens + 1}"
    )
    return f"{text}{fenced(sglang)}\n"


def card(run: str, fields: dict, config: dict, data: dict) -> str:
    """data: bench, check, manifest, shards and vocab, as their stages wrote them."""
    bench, manifest, account = data["bench"], data["manifest"], data["shards"]
    source = manifest["verifier"]["source"]
    base = fields.pop("base_model") or hub_name(source)
    drafts = [m for m in bench["methods"] if m["method"] == "eagle3"]
    best = max(drafts, key=lambda method: method["speedup"] or 0)
    prompts = bench["prompt_set"]
    measured = [
        [m["method"], m["draft_tokens"] or None, m["acceptance_length"], m["tokens_per_s"],
         m["speedup"]]
        for m in bench["methods"]
    ]  # fmt: skip
    rows, trained = manifest["rows"], manifest["config"]
    checks = data["check"]["epochs"]["chosen"]
    sources = [[name, *(s[key] for key in ("read", "kept", "rejected"))]
               for name, s in account["sources"].items()]  # fmt: skip
    answers = "the verifier's own" if account["answers"] == "verifier" else "the data's own"
    return "\n".join(
        [
            front_matter(fields, base),
            f"# EAGLE-3 draft for {cell(base or source)}: {cell(run)}\n",
            f"A draft model for speculative decoding with {cell(base or source)}, whose states "
            f"enter layers {', '.join(map(str, trained['layer_ids']))}. Its output is the "
            "verifier's; a draft only makes it faster, where it does.\n",
            "## Serve it\n",
            serving(config, base or "VERIFIER", best["draft_tokens"]),
            "## What it gains\n",
            f"{prompts['prompts']} prompts of {cell(prompts['name'])}, "
            f"{prompts['max_new_tokens']} new tokens each, {prompts['concurrency']} at a time, "
            f"temperature {bench['settings']['temperature']:g}, "
            f"{cell(bench['settings']['dtype'])}, "
            f"{bench['settings']['gpus'] or 'no'} GPUs.\n",
            table(
                ["method", "draft tokens", "acceptance length", "tokens/s", "speed-up"], measured
            ),
            f"{best['identical']} of {best['compared']} outputs are identical to the baseline's.\n",
            "## What it was trained on\n",
            table(["conversations", "read", "kept", "rejected"], sources),
            f"Answers are {answers}. {rows['training']:,} rows were trained on and "
            f"{rows['held_out']:,} held out; the draft's {data['vocab']['draft_vocab_size']:,} "
            f"tokens cover {data['vocab']['coverage']:.1%} of those supervised. Epoch "
            f"{manifest['chosen_epoch']} of {trained['epochs']} was chosen. "
            f"{sum(c['ok'] for c in checks)} of {len(checks)} checks of the checkpoint passed.\n",
            "Made by Eyrie with "
            + ", ".join(cell(f"{name} {v}") for name, v in manifest["versions"].items())
            + "; `manifest.json` has every setting and the sha256 of each file.\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--fields", type=json.loads, required=True, help="the config's card block")
    parser.add_argument("--checkpoint", type=Path, required=True, help="gets it as README.md")
    for name in ("bench", "check", "shards", "vocab"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()
    try:
        manifest = read_result(args.checkpoint / "manifest.json", MANIFEST)
        data = {
            "manifest": manifest,
            "bench": read_bench(args.bench, manifest, args.run),
            "check": read_result(args.check, CHECK),
            "shards": read_result(args.shards, SHARDS),
            "vocab": read_result(args.vocab, VOCAB),
        }
        config = read_config(args.checkpoint)
        if not is_nested(config):
            config = read_result(args.checkpoint / "config.json", FLAT)
    except ValueError as error:
        sys.exit(f"card: {error}")
    text = card(args.run, args.fields, config, data)
    with atomic(args.out) as partial:
        partial.write_text(text)
    link_or_copy(args.out, args.checkpoint / "README.md")
    log_line(args.log, card=args.out.name, bytes=len(text))


if __name__ == "__main__":
    with in_one_line("card"):
        main()
