"""The benchmark's figures, from its rows alone.

A row is a request: {set, prompt, turn, category, method, kind, draft_tokens, concurrency, repeat,
group} say of what; `eyrie.serving` what the others mean. Rows of one group were served together
and share its seconds.
"""

import math
import statistics
from collections import Counter, defaultdict

import numpy as np

# How far apart the baseline's two likeliest logits may be where another order of the same sums
# gives another token. Two right engines' states differ by 0.5% in bfloat16, which is some tenths
# of a logit; float16 and float32 have 3 and 16 bits more.
ROUNDING = {"bfloat16": 0.5, "float16": 0.0625, "float32": 0.001}
# Resamples of the prompts; more do not move the second digit.
RESAMPLES = 1000
# A sampled distribution this unlikely under the null hypothesis is said to differ.
P_VALUE = 0.001
# Cells of a contingency table with fewer expected counts are pooled (Cochran, 1954).
EXPECTED = 5


def cell_of(row: dict) -> tuple:
    return row["set"], row["method"], row["draft_tokens"], row["concurrency"]


def request_of(row: dict) -> tuple:
    """What the same request to another method has in common."""
    return row["set"], row["prompt"], row["turn"], row["concurrency"]


def failed(row: dict) -> bool:
    """Whether a request ended otherwise than by a stop token or the limit."""
    return row["finish"] not in ("stop", "length")


def acceptance(rows: list[dict], draft_tokens: int) -> dict:
    """Acceptance over the drafts that there were: length = 1 + accepted / drafts, the tokens that
    a verification yields; of each position, the share of the drafts that reach it in which it and
    all before it were accepted. Requests beyond the draft's reach do not count: there vLLM
    verifies drafts that nobody made.
    """
    rows = [row for row in rows if not row["beyond"]]
    drafts, proposed, accepted = (
        sum(row[name] for row in rows) for name in ("drafts", "proposed", "accepted")
    )
    reached = [sum(row[f"proposed_{k}"] for row in rows) for k in range(1, draft_tokens + 1)]
    right = [sum(row[f"accepted_{k}"] for row in rows) for k in range(1, draft_tokens + 1)]
    shares = [round(n / of, 4) if of else 0.0 for n, of in zip(right, reached, strict=True)]
    return {
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
        "acceptance_rate": round(accepted / proposed, 4) if proposed else None,
        "acceptance_per_position": shares if drafts else None,
        "drafts": drafts,
        "proposed": proposed,
        "accepted": accepted,
    }


def group_of(row: dict) -> tuple:
    return row["set"], row["concurrency"], row["group"]


def groups(rows: list[dict]) -> dict[tuple, list[dict]]:
    """What was served together: {(set, concurrency, group): one row of each repetition}."""
    found = defaultdict(dict)
    for row in rows:
        found[group_of(row)][row["repeat"]] = row
    return {key: [of[r] for r in sorted(of)] for key, of in found.items()}


def written(rows: list[dict]) -> Counter:
    """The new tokens of each group, in one repetition."""
    tokens = Counter()
    for row in rows:
        tokens[group_of(row)] += row["new_tokens"] if row["repeat"] == 0 else 0
    return tokens


def speed(rows: list[dict], baseline: list[dict]) -> dict:
    """Tokens/s over the requests that the baseline served, too, and how many times its own that
    is. Of repetitions each group counts with its median. `spread` is the range of nine in ten
    speed-ups when the groups are drawn anew with replacement, and one repetition for all: a
    machine's drift moves what was measured in the same minutes together. None where there is but
    one measurement.
    """
    ours, theirs = groups(rows), groups(baseline)
    keys = sorted(ours.keys() & theirs.keys(), key=str)
    tokens, base_tokens = written(rows), written(baseline)

    def seconds(of: dict, pick) -> float:
        return sum(pick([r["group_seconds"] for r in of[key]]) for key in keys)

    new, base_new = (sum(of[key] for key in keys) for of in (tokens, base_tokens))
    took, base_took = seconds(ours, statistics.median), seconds(theirs, statistics.median)
    rate, base_rate = new / took, base_new / base_took
    spread = None
    if len(keys) > 1 or len(ours[keys[0]]) > 1:
        # [groups, repetitions], from the same places for both: they were measured side by side.
        a = np.array([[r["group_seconds"] for r in ours[key]] for key in keys])
        b = np.array([[r["group_seconds"] for r in theirs[key]] for key in keys])
        n, m = (np.array([of[key] for key in keys]) for of in (tokens, base_tokens))
        random = np.random.default_rng(0)
        drawn = random.integers(len(keys), size=(RESAMPLES, len(keys)))
        repeat = random.integers(a.shape[1], size=(RESAMPLES, 1))
        ratios = n[drawn].sum(1) / a[drawn, repeat].sum(1)
        ratios /= m[drawn].sum(1) / b[drawn, repeat].sum(1)
        spread = [round(float(x), 4) for x in np.quantile(ratios, [0.05, 0.95])]
    return {
        "new_tokens": new,
        "seconds": round(took, 3),
        "tokens_per_s": round(rate, 3),
        "baseline_tokens_per_s": round(base_rate, 3),
        "speedup": round(rate / base_rate, 4),
        "spread": spread,
    }


def first_difference(tokens: list[int], baseline: list[int]) -> int | None:
    """The place of the first token that is not the baseline's; None where all are."""
    if tokens == baseline:
        return None
    pairs = zip(tokens, baseline, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(baseline)))


def partings(rows: list[dict]) -> list[dict]:
    """The requests whose output is not the baseline's, each with the place `at` where they part
    and the tokens there, None where an output ends."""
    base = {(*request_of(r), r["repeat"]): r for r in rows if r["kind"] == "baseline"}
    found = []
    for row in rows:
        other = base.get((*request_of(row), row["repeat"]))
        if row["kind"] == "baseline" or other is None:
            continue
        at = first_difference(row["tokens"], other["tokens"])
        if at is not None:
            ends = [r["tokens"][at] if at < len(r["tokens"]) else None for r in (other, row)]
            named = ("set", "prompt", "turn", "method", "draft_tokens", "concurrency", "repeat")
            found.append(
                {key: row[key] for key in named}
                | {"at": at, "baseline_token": ends[0], "token": ends[1]}
            )
    return found


def is_rounding(parting: dict, dtype: str) -> bool:
    """Whether another order of the same sums explains that an output parts from the baseline's:
    both tokens are its two likeliest there, and their logits are level but for rounding."""
    pair = {parting["baseline_token"], parting["token"]}
    return set(parting["top_two"]) == pair and parting["gap"] <= ROUNDING[dtype]


def median(rows: list[dict], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return round(statistics.median(values), 5) if values else None


def cells(rows: list[dict], parted: list[dict], dtype: str) -> list[dict]:
    """The figures of each method at each setting on each set of prompts, in the rows' order."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(cell_of(row), []).append(row)
    result = []
    for (name, method, draft_tokens, concurrency), every in found.items():
        mine = [row for row in every if not failed(row)]
        asked = {request_of(row) for row in mine}
        base = [
            row
            for row in rows
            if row["kind"] == "baseline" and request_of(row) in asked and not failed(row)
        ]
        apart = [p for p in parted if cell_of(p) == (name, method, draft_tokens, concurrency)]
        level = sum(is_rounding(p, dtype) for p in apart)
        # Held-out conversations may be served by the drafts alone.
        alone = dict.fromkeys(["baseline_tokens_per_s", "speedup", "spread"])
        taken = [of[0] for of in groups(mine).values()]
        result.append(
            {
                "set": name,
                "method": method,
                "draft_tokens": draft_tokens,
                "concurrency": concurrency,
                "prompts": len(asked),
                "repeats": len({row["repeat"] for row in mine}),
                "failed": len(every) - len(mine),
                "beyond": sum(row["beyond"] for row in mine),
                **(speed(mine, base) if base else speed(mine, mine) | alone),
                **acceptance(mine, draft_tokens),
                # Of the requests that were compared, in every repetition.
                "identical": len(mine) - len(apart) if base else None,
                "compared": len(mine) if base else 0,
                "rounding": level,
                "faults": len(apart) - level,
                "first_token_seconds": median(mine, "first_token_seconds"),
                "token_seconds": median(mine, "token_seconds"),
                "draft_share": round(
                    sum(r["group_draft_seconds"] for r in taken)
                    / sum(r["group_seconds"] for r in taken),
                    4,
                ),
            }
        )
    return result


def by_category(rows: list[dict]) -> list[dict]:
    """The rows of one set, at one setting of each method: a dict a category, with acceptance
    length and speed-up of each method, the latter where requests were served one at a time."""
    categories: dict[str, list[dict]] = {}
    alone = all(row["concurrency"] == 1 for row in rows)
    for row in rows:
        categories.setdefault(row["category"], []).append(row)
    result = []
    for category in sorted(categories):
        of = categories[category]
        base = [row for row in of if row["method"] == "baseline"]
        methods = {}
        for method in dict.fromkeys(row["method"] for row in of if row["method"] != "baseline"):
            mine = [row for row in of if row["method"] == method]
            methods[method] = acceptance(mine, mine[0]["draft_tokens"])
            methods[method]["speedup"] = speed(mine, base)["speedup"] if alone else None
        asked = {request_of(row) for row in base}
        rate = speed(base, base)["tokens_per_s"] if alone else None
        result.append(
            {"category": category, "prompts": len(asked), "baseline": rate, "methods": methods}
        )
    return result


def two_sample(ours: list[list[int]], theirs: list[list[int]]) -> dict:
    """Whether two samples of tokens, each of several prefixes, are of the same distributions.

    Pearson's chi-squared test of homogeneity: a 2 x tokens table for each prefix, whose statistics
    and degrees of freedom add, the prefixes being independent. Tokens with fewer than 5 expected
    in either sample are pooled (W. G. Cochran, Some methods for strengthening the common
    chi-squared tests, Biometrics 10, 1954). Returns chi_squared, degrees and p, the probability of
    as much or more where the distributions are the same.
    """
    statistic, degrees = 0.0, 0
    for a, b in zip(ours, theirs, strict=True):
        left, right = Counter(a), Counter(b)
        share = min(len(a), len(b)) / (len(a) + len(b))
        columns, rest = [], [0, 0]
        for token in sorted(left.keys() | right.keys()):
            pair = [left[token], right[token]]
            if sum(pair) * share >= EXPECTED:
                columns.append(pair)
            else:
                rest = [rest[0] + pair[0], rest[1] + pair[1]]
        columns += [rest] if sum(rest) else []
        table = np.array(columns, float).T
        expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
        statistic += float(((table - expected) ** 2 / expected).sum())
        degrees += table.shape[1] - 1
    return {
        "chi_squared": round(statistic, 3),
        "degrees": degrees,
        "p": round(chi_squared_tail(statistic, degrees), 6),
    }


def chi_squared_tail(statistic: float, degrees: int) -> float:
    """The probability that a chi-squared variable of so many degrees of freedom is as large."""
    if not degrees:
        return 1.0
    import torch

    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def trained_and_served(rows: list[dict], estimated: list[float]) -> dict | None:
    """What training estimated of the held-out conversations, {accuracy of position k}, beside what
    was accepted there, over as many positions as both have; None where nothing was drafted."""
    served = acceptance(rows, rows[0]["draft_tokens"]) if rows else {"drafts": 0}
    if not served["drafts"]:
        return None
    positions = range(1, min(len(estimated), rows[0]["draft_tokens"]) + 1)
    reached = [row for row in rows if not row["beyond"]]
    accepted = [sum(row[f"accepted_{k}"] for row in reached) for k in positions]
    shares = [n / served["drafts"] for n in accepted]
    estimated = estimated[: len(shares)]
    return {
        "prompts": len(rows),
        "drafts": served["drafts"],
        "estimated_per_position": estimated,
        "acceptance_per_position": [round(share, 4) for share in shares],
        "estimated_acceptance_length": round(1 + math.fsum(estimated), 4),
        "acceptance_length": round(1 + math.fsum(shares), 4),
    }
