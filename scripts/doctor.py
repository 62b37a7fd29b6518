"""Say why a draft is accepted less than it should be: which of the things that load without a
word disagrees, with the figures that show it.

Some texts of the verifier's are replayed with transformers and the draft alone, read as vLLM reads
it: with each setting as the checkpoint has it, and as it might have been meant. What the checkpoint
was trained with and on is found beside it through its manifest.json, or named by options.

Exit 0: nothing disagrees. 1: something does. 2: it could not be looked at.
"""

import argparse
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eyrie.chat import PROBE, Chat, load_tokenizer
from eyrie.checks import check_folder
from eyrie.conversations import Reject
from eyrie.draft import DraftShape, flat_config
from eyrie.errors import in_one_line
from eyrie.files import sha256_file, write_json
from eyrie.hidden import HiddenStates, split
from eyrie.prompts import read_prompts
from eyrie.reference import layer_fields
from eyrie.replay import FlatDraft, Passage, Reading, acceptance_length, gain, read_settings
from eyrie.results import read_result, read_training
from eyrie.shards import ShardError, read_rows, runs
from eyrie.sources import DataError
from eyrie.verifier import VerifierConfig, load_head, load_tensor, load_verifier_config

# Tokens of acceptance length by which another setting must be better, and standard errors.
MARGIN, ERRORS = 0.03, 3
# Between training's estimate, the replay and serving, as the report has it.
GAP = 0.1
# Relative error of a stored state. Rounding takes 0.004 in bf16 and 0.03 in fp8; the next layer's
# state is 0.1 to 0.5 away.
STATE_BOUND = 0.1
# Of the answers' tokens, how many the verifier itself thinks likeliest. Greedy answers: all but
# near ties. Sampled ones are told from another's by how surprised it is beyond its own entropy.
GREEDY, SURPRISE = 0.95, 0.3
# Runs of the loss mask that begin and rows that are rendered as the template has it.
RENDERED = 0.5
# A draft position that is accepted less often costs more than it yields.
WORTH = 0.02

OK, FAULT, SKIPPED = "ok", "FAULT", "skipped"

# The keys of config.json that each aspect is made of.
ASPECTS = {
    "layer ids": (
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
        "eagle_config.layer_ids",
        "eagle_config.use_aux_hidden_state",
    ),
    "norm flags": (
        "norm_before_residual",
        "norm_before_fc",
        "eagle_config.norm_before_fc",
        "fc_norm",
        "norm_output",
        "rms_norm_eps",
    ),
    "rope and positions": (
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
        "sliding_window",
        "layer_types",
    ),
}
# The fields of a Reading of the same aspects.
READ_BY = {
    "layer ids": ("layer_ids",),
    "norm flags": ("norm_before_residual", "norm_before_fc", "norm_output", "rms_norm_eps"),
    "rope and positions": ("rope_theta", "rope_scaling", "sliding_window"),
    "vocabulary map": ("draft_to_verifier",),
}


class Unreadable(Exception):
    """The checkpoint cannot be replayed; the message says what to do."""


def finding(check: str, status: str, says: str, **evidence) -> dict:
    return {"check": check, "status": status, "says": says, "evidence": evidence}


# What was there to be found


@dataclass
class Known:
    """The checkpoint and what is known of how it was made; None or empty where it is not."""

    folder: Path
    epoch: int | None  # of a folder of one epoch; the chosen one's if there is a manifest
    manifest: dict | None
    estimate: list[float]  # held-out accuracies of the epoch, cumulative
    hidden: list[Path]
    account: dict | None  # shards.json
    vocab: Path | None
    prompts: Path | None
    bench: dict | None


# What is gone by of the files beside it, as `misfit` takes it; DraftShape's fields are what a draft
# was trained as.
ACCOUNT = {"answers": str, "tokenizer": str}
BENCH = {
    "methods": [{"method": str, "draft_tokens": int}],
    "held_out": ({"acceptance_length": float},),
}
TRAINED = {
    "config": {field.name: object for field in fields(DraftShape)}
    | {"layer_ids": [int], "draft_vocab_size": int}
}


def read_known(path: Path | None, shape: dict) -> dict | None:
    return read_result(path, shape) if path and path.exists() else None


def trained_on(tree: Path, fingerprints: list[str]) -> list[Path]:
    """The hidden shards of a results tree that a manifest names, in its order."""
    found = {}
    for path in sorted(tree.glob("data/*/hidden/*.safetensors")):
        found.setdefault(read_rows(path).metadata["fingerprint"], path)
    return [found[f] for f in fingerprints] if {*fingerprints} <= found.keys() else []


def look_around(args) -> Known:
    """Find what lies beside the checkpoint where the workflow puts it."""
    folder = args.draft.resolve()
    if not (folder / "config.json").exists():
        raise Unreadable(f"{args.draft}: no config.json; name a checkpoint's folder")
    is_epoch = folder.name.isdecimal() and (folder.parent / "manifest.json").exists()
    run = folder.parent if is_epoch else folder
    tree, name = run.parent, run.name.removeprefix("ckpt_")
    manifest = read_known(run / "manifest.json", TRAINED)
    epoch, estimate, hidden = None, [], args.hidden
    if manifest:
        manifest, metrics = read_training(run)
        epoch = int(folder.name) if is_epoch else manifest["chosen_epoch"]
        rows = metrics[(metrics.kind == "epoch") & (metrics.epoch == epoch)]
        if rows.empty:
            raise Unreadable(f"{args.draft}: {run} was not trained for an epoch {epoch}")
        row = rows.iloc[0]
        estimate = [float(row[f"full_acc_{k}"]) for k in range(manifest["config"]["ttt_steps"])]
        hidden = hidden or trained_on(tree, manifest["data"])
    account = args.shards or (hidden[0].parents[1] / "shards.json" if hidden else None)

    def beside(given: Path | None, path: Path) -> Path | None:
        return given or (path if path.exists() else None)

    return Known(
        folder,
        epoch,
        manifest,
        estimate,
        hidden,
        read_known(account, ACCOUNT),
        beside(args.vocab, tree / f"vocab_{name}.safetensors"),
        beside(args.prompts, tree / "prompts"),
        read_known(args.bench or tree / f"bench_{name}.json", BENCH),
    )


# The verifier, by transformers


class Verifier:
    """The verifier as transformers runs it, in float32 on a CPU."""

    def __init__(self, folder: Path, trust_remote_code: bool, end_tokens: list[int]):
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"trust_remote_code": trust_remote_code}
        options["dtype"] = "auto" if self.device == "cuda" else torch.float32
        options["device_map"] = "auto" if self.device == "cuda" else None
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
        except ValueError:  # a text model inside one that sees
            model = AutoModelForImageTextToText.from_pretrained(folder, **options)
        self.model, self.end_tokens = model.eval(), end_tokens

    @torch.inference_mode()
    def read(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """ids [n] -> the states that enter each layer and, last, that of the final norm [n, H],
        and the logits [n, V]; float32 on the CPU."""
        out = self.model(ids[None].to(self.device), output_hidden_states=True, use_cache=False)
        return [h[0].float().cpu() for h in out.hidden_states], out.logits[0].float().cpu()

    @torch.inference_mode()
    def answered(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The prompt [n] and the likeliest answer to it."""
        from transformers import GenerationConfig

        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=self.end_tokens or None,
            pad_token_id=self.end_tokens[0] if self.end_tokens else 0,
        )
        ids = prompt[None].to(self.device)
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )[0].cpu()

    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        norm = self.model.get_decoder().norm
        weight = next(norm.parameters())
        with torch.inference_mode():
            return norm(states.to(weight)).float().cpu()


@dataclass
class Sample:
    """Rows of the training data, as stored and as the verifier sees them."""

    passages: list[Passage]
    likeliest: float | None = None  # of the answers' tokens
    surprise: float | None = None  # nats, beyond the verifier's own entropy
    errors: np.ndarray | None = None  # of each stored state against each layer, [n_aux + 1, L + 1]


def answers(chat: Chat, ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where each answer of a row [n] begins and ends: as its loss mask has them or, if that marks
    no answer to a prompt, as the template begins the first."""
    marked = runs(mask)
    if marked and marked[0][0]:
        return marked
    asks = headers(chat)
    for start in range(1, len(ids)):
        before = chat.tokenizer.decode(ids[:start])
        if any(header and before.endswith(header) for header in asks):
            ended = [n for n in range(start, len(ids)) if int(ids[n]) in chat.stops]
            return [(start, ended[0] + 1 if ended else len(ids))]
    return []


def sample_rows(known: Known, chat: Chat, side: str, held_out: float, count: int) -> list[tuple]:
    """(shard, row, where an answer begins and ends) of each answer in the first rows of a side."""
    shards = [read_rows(path) for path in known.hidden]
    rows = split(shards, held_out)[side == "held-out"][:count]
    return [
        (s, i, *span)
        for s, i in rows
        for span in answers(chat, shards[s].row(i), shards[s].mask(i))
    ]


def replay_rows(verifier: Verifier, known: Known, rows, layers: set[int], new: int) -> Sample:
    """Have the verifier read stored rows, each to `new` tokens behind its prompt."""
    stored = HiddenStates(known.hidden)
    sample, likeliest, surprise, errors = Sample([]), [], [], []
    for shard, index, answer, end in rows:
        row = stored.row(shard, index)
        ids = row["input_ids"][: min(answer + new, end)].long()
        states, logits = verifier.read(ids)
        wrote = torch.arange(answer, len(ids))
        log_probs = logits[wrote - 1].log_softmax(-1)
        own = log_probs.gather(1, ids[wrote, None])[:, 0]
        likeliest.append((log_probs.argmax(-1) == ids[wrote]).float())
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        surprise.append(-own - entropy)
        kept = row["hidden_states"][: len(ids)].float()
        kept_last = verifier.final_norm(kept[:, -1])
        slots = [*kept[:, :-1].unbind(1), kept_last]
        errors.append([[float((s - h).norm() / h.norm()) for h in states] for s in slots])
        chosen = {k: states[k] for k in layers}
        sample.passages.append(Passage(ids, answer, chosen))
    sample.likeliest = float(torch.cat(likeliest).mean())
    sample.surprise = float(torch.cat(surprise).mean())
    sample.errors = np.median(errors, 0)
    return sample


def answer_prompts(verifier: Verifier, prompts: list[torch.Tensor], layers, new: int) -> Sample:
    """Have the verifier answer prompts of tokens."""
    passages = []
    for prompt in prompts:
        ids = verifier.answered(prompt, new)
        states, _ = verifier.read(ids)
        passages.append(Passage(ids, len(prompt), {k: states[k] for k in layers}))
    return Sample(passages)


# Checks that need no replay


def look_at_files(known: Known, verifier: VerifierConfig, verifier_dir: Path) -> dict:
    """The checkpoint's files against its manifest, and scripts/check.py's checks."""
    changed = []
    if known.manifest:
        inner = f"{known.folder.name}/" if known.folder.name.isdecimal() else ""
        changed = [
            name
            for name in ("config.json", "model.safetensors")
            if sha256_file(known.folder / name) != known.manifest["files"].get(inner + name)
        ]
    failed = [c for c in check_folder(known.folder, verifier.text, verifier_dir) if not c["ok"]]
    parts = [f"{name} is not as training wrote it" for name in changed]
    parts += [f"{c['check']}: found {c['found']}, expected {c['expected']}" for c in failed]
    return finding(
        "files",
        FAULT if parts else OK,
        "; ".join(parts)
        or ("as training wrote them" if known.manifest else "every check of scripts/check.py"),
        changed=changed,
        failed=[c["check"] for c in failed],
    )


def look_at_verifier(known: Known, folder: Path, of_head: torch.Tensor) -> dict:
    """The verifier's files against those trained with, and the draft's head, rows of which are
    the verifier's."""
    theirs = known.manifest["verifier"]["files"] if known.manifest else {}
    rows, equal_rows = len(of_head), int((of_head >= 0).sum())
    differing = [
        name
        for name, sha in theirs.items()
        if not (folder / name).exists() or sha256_file(folder / name) != sha
    ]
    says = f"{equal_rows:,} of {rows:,} rows of the draft's head are rows of this verifier's"
    if differing:
        says = f"{', '.join(differing)}: not what the draft was trained with; {says}"
    elif theirs:
        says = f"the {len(theirs)} files that the draft was trained with; {says}"
    fault = differing or equal_rows < 0.9 * rows
    return finding(
        "verifier",
        FAULT if fault else OK,
        says + (". Serve the verifier that it was trained with" if fault else ""),
        differing=differing,
        head_rows_found=equal_rows,
        head_rows=rows,
    )


def look_at_states(sample: Sample, layer_ids: list[int]) -> dict:
    """Stored states against those that the verifier makes of the same tokens."""
    nearest = sample.errors.argmin(1).tolist()
    own = [float(sample.errors[slot][k]) for slot, k in enumerate(layer_ids)]
    fault = nearest != layer_ids or max(own) > STATE_BOUND
    says = f"those of layers {layer_ids}, at a relative error of {max(own):.4f} at most"
    if nearest != layer_ids:
        found = [float(row.min()) for row in sample.errors]
        says = (
            f"said to be of layers {layer_ids}, at a relative error of {max(own):.2f}; nearest are "
            f"layers {nearest}, at {max(found):.4f}. Id k is the state that enters layer k"
        )
    elif fault:
        says = (
            f"of another verifier than this: a relative error of {max(own):.2f} to layers "
            f"{layer_ids}, at most {STATE_BOUND} is right"
        )
    return finding(
        "stored states", FAULT if fault else OK, says, nearest=nearest, relative_error=own
    )


def headers(chat: Chat) -> set[str]:
    """What the template writes between a user turn and the answer to it, when it asks for one and
    when it repeats one."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": PROBE}
    before, asked = chat.render([user], prompt=False), chat.render([user])
    found = {asked.removeprefix(before)} if asked.startswith(before) else set()
    try:
        talk = chat.render([user, answer], prompt=False)
    except Reject:
        return found
    if talk.startswith(before):
        found.add(talk.removeprefix(before).partition(PROBE)[0])
    return found


def look_at_template(known: Known, chat: Chat, rows) -> dict:
    """Whether the rows trained on are rendered as this verifier's template renders them."""
    shards = [read_rows(path) for path in known.hidden]
    decode = chat.tokenizer.decode
    texts = [decode(shards[s].row(i)) for s, i in rows]
    bos = chat.tokenizer.bos_token_id
    starts = [shards[s].row(i)[:2].tolist() for s, i in rows]
    # A template may write two on purpose.
    hello = [{"role": "user", "content": "hi"}]
    wanted = chat.prompt(hello).ids[:2]
    doubled = sum(start == [bos, bos] != wanted for start in starts) / len(rows)
    asks = headers(chat)
    rendered = sum(any(h in text for h in asks) for text in texts) / len(rows)
    theirs = known.account and known.account["tokenizer"]
    evidence = {
        "two_bos": doubled,
        "rows_with_turns_of_the_template": rendered,
        "tokenizer_trained_with": theirs,
        "tokenizer": chat.identity(),
    }
    shown = f"{texts[0][:60]!r}..., this template {chat.render(hello)[:60]!r}..."
    if doubled:
        says = (
            f"{doubled:.0%} of the rows trained on begin with two BOS; served rows begin with one. "
            "Make the shards again with text that holds its BOS and a tokenizer that adds none"
        )
    elif rendered < RENDERED:
        says = (
            f"{rendered:.0%} of the rows trained on hold a turn as this template begins it: they "
            f"were rendered by another. They begin {shown}"
        )
    elif theirs and theirs != evidence["tokenizer"]:
        says = (
            f"the rows trained on were made with another tokenizer, template or template options "
            f"({theirs[:12]}, this verifier's are {evidence['tokenizer'][:12]}). They begin {shown}"
        )
    else:
        says = f"{rendered:.0%} of the rows trained on are as it renders them, with one BOS"
        twice = chat.tokenizer(chat.render(hello)).input_ids[:2]
        if twice == [bos, bos] != wanted:
            says += (
                ". Served by the completions route as rendered text they get a second one: "
                "send tokens, or use the chat route"
            )
        return finding("chat template", OK, says, **evidence)
    return finding("chat template", FAULT, says, **evidence)


def look_at_mask(known: Known, chat: Chat, rows) -> dict:
    """Whether what the loss mask marks are the answers, from their first token on."""
    shards = [read_rows(path) for path in known.hidden]
    asks = headers(chat)
    begun = total = marked = tokens = 0
    for s, i in rows:
        ids, mask = shards[s].row(i), shards[s].mask(i)
        marked, tokens = marked + int(mask.sum()), tokens + len(ids)
        for start, _ in runs(mask):
            # A token may be no text, so that one later looks the same.
            here, earlier = (chat.tokenizer.decode(ids[:n]) for n in (start, max(start - 1, 0)))
            begun += any(here.endswith(h) and not earlier.endswith(h) for h in asks)
            total += 1
    share = begun / max(total, 1)
    fault = not total or share < RENDERED
    says = (
        f"{marked:,} of {tokens:,} tokens are supervised, in {total} runs, {share:.0%} of which "
        "begin where the template has an answer begin"
    )
    return finding(
        "loss mask",
        FAULT if fault else OK,
        says + (". Others are learnt than the verifier writes: make the shards again" * fault),
        supervised=marked,
        tokens=tokens,
        runs=total,
        begin_at_an_answer=share,
    )


def look_at_answers(known: Known, sample: Sample) -> dict:
    """Whether the answers trained on are what the verifier itself would write."""
    fault = sample.likeliest < GREEDY and sample.surprise > SURPRISE
    source = known.account and known.account["answers"]
    says = (
        f"of the answers' tokens {sample.likeliest:.1%} are the verifier's likeliest, and it is "
        f"{sample.surprise:+.2f} nats more surprised by them than by its own"
    )
    if fault and source == "dataset":
        says += ": they are the data's. Serving is of its own: set shard.answers to verifier"
    elif fault:
        says += f": they are not its own; at most {SURPRISE} is right"
    return finding(
        "on-policy answers",
        FAULT if fault else OK,
        says,
        likeliest=sample.likeliest,
        surprise=sample.surprise,
    )


# Replays


def trained_config(known: Known, verifier: VerifierConfig) -> dict | None:
    """The config.json that training wrote, from its manifest."""
    if not known.manifest:
        return None
    config = known.manifest["config"]
    shape = DraftShape(**{f.name: config[f.name] for f in fields(DraftShape)})
    return flat_config(shape, verifier, config["layer_ids"], config["draft_vocab_size"])


def flat_keys(config: dict) -> dict:
    """A config with the keys of eagle_config beside its own."""
    nested = config.get("eagle_config") or {}
    return config | {f"eagle_config.{key}": value for key, value in nested.items()}


def same(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def taking(settings: Reading, aspect: str, other: Reading) -> Reading:
    """`settings` with one aspect of `other`."""
    return replace(settings, **{name: getattr(other, name) for name in READ_BY[aspect]})


def alternatives(settings: Reading, draft: FlatDraft, verifier: VerifierConfig, maps: dict) -> dict:
    """Of each aspect, what else the checkpoint may have been meant to say: words -> Reading."""
    last = verifier.num_hidden_layers
    ids = settings.layer_ids
    layers = {
        "one lower, as if these counted layers left": [k - 1 for k in ids],
        "one higher, as if the id were that of the layer left": [k + 1 for k in ids],
        "vLLM's default": [2, last // 2, last - 3],
    }
    flags = {
        f"{name} {not getattr(settings, name)}": {name: not getattr(settings, name)}
        for name in ("norm_before_residual", "norm_before_fc", "norm_output")
    }
    flipped = not settings.norm_output
    words = f"norm_before_fc and norm_output {flipped}"
    flags[words] = {"norm_before_fc": flipped, "norm_output": flipped}
    has_norm = "input_norm.weight" in draft.weights
    own = layer_fields(verifier.text)
    rope = {
        "the verifier's": {name: own[name] for name in ("rope_theta", "rope_scaling")},
        "rope_theta 10000": {"rope_theta": 10000.0, "rope_scaling": None},
        "no rope_scaling": {"rope_scaling": None},
        "no sliding window": {"sliding_window": None},
    }
    return {
        "layer ids": {
            f"{w}: {list(k)}": replace(settings, layer_ids=tuple(k))
            for w, k in layers.items()
            if len(k) == len(ids) and k == sorted({*k}) and k[0] >= 0 and k[-1] < last
        },
        "norm flags": {
            w: replace(settings, **changes)
            for w, changes in flags.items()
            if has_norm or not changes.get("norm_before_fc")
        },
        "vocabulary map": {w: replace(settings, draft_to_verifier=m) for w, m in maps.items()},
        "rope and positions": {w: replace(settings, **changes) for w, changes in rope.items()},
    }


def differ(one: Reading, other: Reading, aspect: str) -> bool:
    return any(not same(getattr(one, n), getattr(other, n)) for n in READ_BY[aspect])


class Replay:
    """Measures readings of one draft on the same passages."""

    def __init__(self, draft: FlatDraft, passages: list[Passage], steps: int):
        self.draft, self.steps = draft, steps
        # One that ends sooner has no position with an answer for every step.
        self.passages = [p for p in passages if len(p.ids) > p.answer + steps]
        if not self.passages:
            raise Unreadable(f"no answer has more than {steps} tokens; raise --max-new-tokens")

    def __call__(self, settings: Reading, steps: int | None = None) -> list[np.ndarray]:
        steps = steps or self.steps
        return [
            self.draft.accepted(settings, p, steps)
            for p in self.passages
            if len(p.ids) > p.answer + steps
        ]

    def search(self, settings: Reading, options) -> tuple[Reading, dict, dict]:
        """Take, one after the other, whichever alternative is accepted more than can be chance.

        options(settings) -> aspect -> words -> Reading. Returns the reading that nothing improves,
        what was taken of each aspect, and of each the acceptance length of its alternatives.
        """
        base, taken, lengths = self(settings), {}, {}
        while True:
            best = (MARGIN, None)
            for aspect, others in options(settings).items():
                lengths[aspect] = {}
                for words, other in others.items():
                    if not differ(settings, other, aspect):
                        continue
                    found = self(other)
                    lengths[aspect][words] = round(acceptance_length(found), 4)
                    more, error = gain(base, found)
                    if more > max(best[0], ERRORS * error) and aspect not in taken:
                        best = (more, (aspect, words, other, found))
            if best[1] is None:
                return settings, taken, lengths
            aspect, words, settings, base = best[1]
            taken[aspect] = words


def shown(value) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def look_at_settings(
    draft: FlatDraft, replay: Replay, verifier: VerifierConfig, config: dict | None, maps: dict
) -> tuple[list[dict], Reading]:
    """Read the checkpoint as it says, as it was trained, and as it might have been meant.

    config: what training wrote, if known. maps: words -> other maps; the one of the head's own
    rows, where it differs from d2t, is right. Returns the findings and the right reading.
    """
    said = right = draft.settings
    sure: dict[str, list[str]] = {}
    if config:
        trained = read_settings(config, said.draft_to_verifier)
        ours, theirs = flat_keys(draft.config), flat_keys(config)
        for aspect, keys in ASPECTS.items():
            wrong = [k for k in keys if ours.get(k) != theirs.get(k)]
            if wrong:
                right = taking(right, aspect, trained)
                sure[aspect] = [f"{k} is {ours.get(k)}, {theirs.get(k)} in training" for k in wrong]
    if HEAD in maps:
        right = replace(right, draft_to_verifier=maps[HEAD])
        wrong = int((maps[HEAD] != said.draft_to_verifier).sum())
        sure["vocabulary map"] = [
            f"d2t names another token than the head's row is of for {wrong:,} of "
            f"{len(maps[HEAD]):,} draft tokens"
        ]
    right, taken, lengths = replay.search(
        right, lambda settings: alternatives(settings, draft, verifier, maps)
    )
    mended = acceptance_length(replay(right))
    findings = []
    for aspect, names in READ_BY.items():
        values = ", ".join(
            f"{n} {shown(getattr(said, n))}" for n in names if n != "draft_to_verifier"
        )
        evidence = {"as_found": mended, "otherwise": lengths[aspect]}
        if aspect in sure or aspect in taken:
            as_found = acceptance_length(replay(taking(right, aspect, said)))
            evidence |= {"as_found": as_found, "mended": mended}
            what = sure.get(aspect, [])
            if aspect in taken:
                what = [*what, f"{taken[aspect]} is accepted more"]
            says = (
                f"{'; '.join(what)}. Acceptance length {as_found:.2f} as found, {mended:.2f} so"
                + ("" if mended - as_found > MARGIN else ": on these texts it makes no difference")
            )
            findings.append(finding(aspect, FAULT, says, **evidence))
            continue
        others = sorted(lengths[aspect].items(), key=lambda item: -item[1])
        against = ", ".join(f"{length:.2f} with {words}" for words, length in others[:3])
        says = f"{values or 'd2t'}: acceptance length {mended:.2f}"
        says += f"; {against}" if against else ""
        findings.append(finding(aspect, OK, says, **evidence))
    return findings, right


# The map of which the head's rows are.
HEAD = "the tokens whose rows the head has"


def map_of_head(head: torch.Tensor, draft: FlatDraft) -> torch.Tensor:
    """The verifier's token of each row of the draft's head, from the verifier's head alone.

    head bf16 [V, H] -> int64 [draft_vocab_size], -1 where no row is the same. Where several are,
    what d2t says stands.
    """
    rows = draft.weights["lm_head.weight"].to(torch.bfloat16)
    said = draft.settings.draft_to_verifier
    places: dict[bytes, int] = {}
    for number, row in enumerate(head.view(torch.uint8).numpy()):
        places.setdefault(row.tobytes(), number)
    found = torch.tensor([places.get(r.tobytes(), -1) for r in rows.view(torch.uint8).numpy()])
    inside = (said >= 0) & (said < len(head))
    right = (head[said.clamp(0, len(head) - 1)] == rows).all(1) & inside
    return torch.where(right, said, found)


def other_maps(draft: FlatDraft, of_head: torch.Tensor, vocab: Path | None) -> dict:
    """What d2t may have been meant to be: words -> int64 [draft_vocab_size]."""
    said, maps = draft.settings.draft_to_verifier, {}
    if draft.d2t is not None:
        maps["d2t as token ids, not offsets"] = draft.d2t
    if draft.t2d is not None and int(draft.t2d.sum()) == len(said):
        maps["the tokens that t2d marks"] = draft.t2d.nonzero().flatten()
    if vocab:
        with safe_open(vocab, "pt") as file:
            d2t = file.get_tensor("d2t")
        if len(d2t) == len(said):
            maps[f"{vocab.name}"] = torch.arange(len(d2t)) + d2t
    if (of_head >= 0).all() and not torch.equal(of_head, said):
        maps[HEAD] = of_head
    return maps


def look_at_draft_tokens(replay: Replay, right: Reading, setting: int, trained: int) -> dict:
    """Whether each of the draft tokens that are asked for is worth asking for."""
    steps = max(setting, trained)
    shares = np.concatenate(replay(right, steps)).mean(0).tolist()
    worth = max(sum(share >= WORTH for share in shares), 1)
    fault = setting > max(trained, worth)
    told = ", ".join(f"{share:.1%}" for share in shares)
    says = f"{setting} asked for, {trained} trained; accepted at positions 1 to {steps}: {told}"
    if fault:
        says += f". Positions past {max(trained, worth)} cost and yield nothing: ask for no more"
    return finding(
        "draft tokens",
        FAULT if fault else OK,
        says,
        setting=setting,
        trained=trained,
        accepted_per_position=shares,
    )


def look_at_whole(
    known: Known, replay: Replay, said: Reading, right: Reading, held_out: bool
) -> dict:
    """The replay against what training estimated and what was served, both of the held-out
    conversations."""
    found, steps = replay(said), replay.steps
    length, mended = acceptance_length(found), acceptance_length(replay(right))
    _, error = gain([np.zeros_like(a) for a in found], found)
    room = GAP + 2 * error
    says = f"acceptance length {length:.2f} (±{error:.2f}) as the checkpoint is"
    evidence = {"acceptance_length": length, "standard_error": error, "mended": mended}
    if mended - length > MARGIN:
        says += f", {mended:.2f} with what was found mended"
    faults = []
    if known.estimate and held_out:
        estimated = evidence["estimated"] = 1 + sum(known.estimate[:steps])
        says += f"; training estimated {estimated:.2f}"
        if estimated - length > room:
            faults.append("the draft is not read as it was trained")
    served = known.bench and known.bench.get("held_out")
    if served and held_out:
        evidence["served"] = served["acceptance_length"]
        says += f"; {served['acceptance_length']:.2f} was served"
        if length - served["acceptance_length"] > room:
            faults.append("serving differs from the replay: look at the engine's settings")
    if known.manifest:
        says += f"; trained on {known.manifest['rows']['training']:,} rows"
    if not faults and max(length, mended) < 1.2:
        says += ". A weak draft: more conversations and epochs make a better one"
    says = ". ".join([says, *faults])
    return finding("replay", FAULT if faults else OK, says, **evidence)


def look_at_data(
    known: Known, verifier: Verifier, chat: Chat, rows: list, layers: set[int], args
) -> tuple[list[dict], Sample, Sample]:
    """What rows trained on tell: findings, the rows as the verifier reads them, and texts that it
    wrote itself."""
    stored = replay_rows(verifier, known, rows, layers, args.max_new_tokens)
    whole = list(dict.fromkeys((shard, row) for shard, row, *_ in rows))
    findings = [
        look_at_states(stored, read_rows(known.hidden[0]).metadata["layer_ids"]),
        look_at_template(known, chat, whole),
        look_at_mask(known, chat, whole),
        look_at_answers(known, stored),
    ]
    own = stored
    if stored.likeliest < GREEDY:
        # Serving is of the verifier's own answers.
        prompts = [p.ids[: p.answer] for p in stored.passages]
        own = answer_prompts(verifier, prompts, layers, args.max_new_tokens)
    return findings, stored, own


def look_at_length(config: dict, verifier: VerifierConfig, served: int | None) -> dict:
    """Whether the draft has positions for the longest context that is served."""
    longest = served or verifier.max_position_embeddings
    found = config["max_position_embeddings"]
    fault = found < longest
    says = f"the draft goes to position {found:,}, contexts of {longest:,} tokens are served"
    if fault:
        says += f": beyond {found:,} nothing is drafted. Serve with --max-model-len {found}"
    return finding("context length", FAULT if fault else OK, says, draft=found, served=longest)


def examine(args) -> list[dict]:
    """All findings, the causes before what follows from them.

    Raises:
        Unreadable, ValueError, DataError, ShardError: what cannot be read, and what to do.
    """
    known = look_around(args)
    config = load_verifier_config(args.verifier, args.trust_remote_code)
    tokenizer = load_tokenizer(args.verifier, args.trust_remote_code)
    chat = Chat(tokenizer, **(known.account or {}).get("chat", {}))
    findings = [look_at_files(known, config, args.verifier)]
    try:
        draft = FlatDraft(known.folder, load_tensor(args.verifier, "embed_tokens.weight").float())
    except (SafetensorError, OSError, KeyError, AttributeError, TypeError) as error:
        raise Unreadable(
            f"{known.folder}: cannot be read ({error!r}): see scripts/check.py"
        ) from None
    of_head = map_of_head(load_head(args.verifier).to(torch.bfloat16), draft)
    trained = trained_config(known, config)
    readings = [draft.settings]
    if trained:
        readings.append(read_settings(trained, draft.settings.draft_to_verifier))
    # Other maps need no other states.
    layers = {
        k
        for reading in readings
        for options in alternatives(reading, draft, config, {}).values()
        for option in (reading, *options.values())
        for k in option.layer_ids
    }
    findings.append(look_at_verifier(known, args.verifier, of_head))
    verifier = Verifier(args.verifier, args.trust_remote_code, sorted(chat.stops))
    rows, held_out = [], args.held_out
    if known.manifest:
        held_out = known.manifest["config"]["held_out"]
    if known.hidden:
        rows = sample_rows(known, chat, args.rows, held_out, args.num_prompts)
    stored = own = None
    if rows:
        found, stored, own = look_at_data(known, verifier, chat, rows, layers, args)
        findings += found
    else:
        says = "no answer is to be found in the shards" if known.hidden else "no shards are known"
        for check in ("stored states", "chat template", "loss mask", "on-policy answers"):
            says_how = f"{says}: name those that it was trained on by --hidden"
            findings.append(finding(check, SKIPPED, says_how))
    asked = None
    template = next(f for f in findings if f["check"] == "chat template")
    if known.prompts and (not own or template["status"] == FAULT):
        prompts = read_prompts(known.prompts)[: args.num_prompts]
        ids = [torch.tensor(chat.prompt(p["messages"], p["tools"]).ids) for p in prompts]
        asked = answer_prompts(verifier, ids, layers, args.max_new_tokens)
    if not (own or asked):
        raise Unreadable("there is nothing to replay: name shards by --hidden, or --prompts")
    steps = known.manifest["config"]["ttt_steps"] if known.manifest else 3
    replay = Replay(draft, (own or asked).passages, steps)
    if own and asked:
        lengths = [
            acceptance_length(r(draft.settings))
            for r in (replay, Replay(draft, asked.passages, steps))
        ]
        template["evidence"]["acceptance_length"] = lengths
        template["says"] += (
            f". Acceptance length {lengths[0]:.2f} on the rows, {lengths[1]:.2f} on prompts as "
            "this template renders them"
        )
    maps = other_maps(draft, of_head, known.vocab)
    settings, right = look_at_settings(draft, replay, config, trained, maps)
    findings += settings
    findings.append(look_at_length(draft.config, config, args.max_model_len))
    eagle = [m for m in (known.bench or {}).get("methods", []) if m["method"] == "eagle3"]
    setting = args.draft_tokens or max((m["draft_tokens"] for m in eagle), default=steps)
    findings.append(look_at_draft_tokens(replay, right, setting, steps))
    compared = bool(stored) and args.rows == "held-out"
    findings.append(look_at_whole(known, replay, draft.settings, right, compared))
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path, help="a flat checkpoint")
    parser.add_argument("--verifier", type=Path, required=True, help="as it is served")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--hidden", type=Path, nargs="+", default=[], help="shards trained on")
    parser.add_argument("--shards", type=Path, help="their shards.json")
    parser.add_argument("--vocab", type=Path, help="the map trained with")
    parser.add_argument("--prompts", type=Path, help="to answer, where there are no shards")
    parser.add_argument("--bench", type=Path, help="bench_RUN.json")
    parser.add_argument("--rows", choices=["held-out", "training"], default="held-out")
    parser.add_argument("--held-out", type=float, default=0.05, help="fraction; a manifest's first")
    parser.add_argument("--num-prompts", type=int, default=24, help="rows or prompts to replay")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--draft-tokens", type=int, help="as served; the benchmark's if not given")
    parser.add_argument("--max-model-len", type=int, help="as served; the verifier's if not given")
    parser.add_argument("--json", type=Path, help="write the findings here")
    args = parser.parse_args()

    try:
        findings = examine(args)
    except (Unreadable, ValueError, OSError, DataError, ShardError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        sys.exit(2)
    faults = [f["check"] for f in findings if f["status"] == FAULT]
    for f in findings:
        print(f"{f['status']:<7} {f['check']}: {f['says']}")
    print(f"doctor: {', '.join(faults) + ': see above' if faults else 'nothing disagrees'}")
    if args.json:
        write_json(args.json, {"ok": not faults, "faults": faults, "findings": findings})
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    with in_one_line("doctor"):
        main()
