"""The benchmark's figures, from rows made up."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import check_tokenizer, methods_of
from eyrie import figures
from eyrie.bench_plan import HELD_OUT, plan
from eyrie.bench_prompts import BenchError
from eyrie.engines import State
from eyrie.serving import speculation


def row(method: str = "eagle3", prompt: int = 0, steps=(), tokens=(1, 2, 3), **more) -> dict:
    """A request; steps are [proposed, accepted] of each draft."""
    drafting = method != "baseline"
    counts = {
        f"{name}_{k}": sum(step[i] >= k for step in steps)
        for k in (1, 2, 3)
        for i, name in enumerate(("proposed", "accepted"))
    }
    return {
        "set": "s",
        "prompt": prompt,
        "turn": 1,
        "category": "a",
        "method": method,
        "kind": method,
        "draft_tokens": 3 if drafting else 0,
        "concurrency": 1,
        "repeat": 0,
        "group": prompt,
        "finish": "length",
        "beyond": False,
        "new_tokens": len(tokens),
        "tokens": list(tokens),
        "drafts": len(steps),
        "proposed": sum(p for p, _ in steps),
        "accepted": sum(a for _, a in steps),
        "group_seconds": 1.0,
        "group_draft_seconds": 0.25 if drafting else 0.0,
        "first_token_seconds": 0.5,
        "token_seconds": 0.1,
        **counts,
    } | more


def test_acceptance_length_counts_the_verifiers_own_token():
    """10 drafts of 30 tokens, 12 accepted."""
    steps = [(3, 2)] * 4 + [(3, 1)] * 4 + [(3, 0)] * 2
    found = figures.acceptance([row(steps=steps)], 3)
    assert (found["drafts"], found["proposed"], found["accepted"]) == (10, 30, 12)
    assert found["acceptance_length"] == 2.2 and found["acceptance_rate"] == 0.4
    assert found["acceptance_per_position"] == [0.8, 0.4, 0.0]


def test_a_position_counts_only_the_drafts_that_reach_it():
    """n-gram proposes what it finds: of three drafts one has a second token, and it is right."""
    found = figures.acceptance([row("ngram", steps=[(1, 1), (1, 0), (2, 2)])], 3)
    assert found["acceptance_per_position"] == [0.6667, 1.0, 0.0]
    assert found["acceptance_length"] == 2.0


def test_requests_beyond_the_drafts_reach_do_not_count():
    """20 short prompts of which half is accepted, and 5 long ones on whose dummy drafts nothing can
    be: they are counted apart and no mean hides them."""
    short = [row(prompt=n, steps=[(3, 3), (3, 0)]) for n in range(20)]
    long = [row(prompt=n, steps=[(3, 0)] * 9, beyond=True) for n in range(20, 25)]
    base = [row("baseline", prompt=n) for n in range(25)]
    cell = figures.cells([*short, *long, *base], [], "float32")[0]
    assert cell["acceptance_length"] == 2.5 and cell["acceptance_per_position"] == [0.5] * 3
    assert (cell["prompts"], cell["beyond"], cell["drafts"]) == (25, 5, 40)


def test_failed_requests_are_counted_apart():
    rows = [row(prompt=n, finish="length" if n < 7 else "abort") for n in range(10)]
    rows[-1]["group_seconds"] = 1000.0
    base = [row("baseline", prompt=n) for n in range(10)]
    cell = figures.cells([*rows, *base], [], "float32")[0]
    assert (cell["prompts"], cell["failed"]) == (7, 3)
    assert cell["tokens_per_s"] == 3.0 and cell["speedup"] == 1.0


def test_speed_is_of_the_same_requests():
    """The baseline answered more prompts than this setting asks."""
    rows = [row(prompt=n, group_seconds=0.5) for n in range(2)]
    base = [row("baseline", prompt=n, group_seconds=[1, 1, 100][n]) for n in range(3)]
    found = figures.speed(rows, base)
    assert found["speedup"] == 2.0 and found["baseline_tokens_per_s"] == 3.0


def test_repetitions_count_with_their_median_and_spread():
    seconds = {"eagle3": [0.5, 0.5, 50.0], "baseline": [1.0, 1.0, 1.0]}
    rows = [
        row(name, prompt=n, repeat=r, group_seconds=of[r])
        for name, of in seconds.items()
        for r in range(3)
        for n in range(2)
    ]
    found = figures.speed(rows[:6], rows[6:])
    assert found["speedup"] == 2.0 and found["new_tokens"] == 6
    low, high = found["spread"]
    assert low < 0.1 and high == 2.0


def test_the_spread_holds_what_each_repetition_gave():
    """A machine that slows between two of them slows all prompts, which must not average out."""
    rows = [
        row(name, prompt=n, repeat=r, group_seconds=1.0 if name == "baseline" else [0.5, 0.8][r])
        for name in ("eagle3", "baseline")
        for r in range(2)
        for n in range(20)
    ]
    found = figures.speed(rows[:40], rows[40:])
    assert found["speedup"] == pytest.approx(1 / 0.65, abs=1e-4)
    assert found["spread"] == [1.25, 2.0]


def test_one_measurement_has_no_spread():
    assert figures.speed([row(group_seconds=0.5)], [row("baseline")])["spread"] is None


def test_seconds_of_a_group_count_once():
    """Eight requests that were served together."""
    rows = [row(prompt=n, group=0, concurrency=8, group_seconds=2.0) for n in range(8)]
    base = [row("baseline", prompt=n, group=0, concurrency=8) for n in range(8)]
    found = figures.speed(rows, base)
    assert (found["seconds"], found["tokens_per_s"], found["speedup"]) == (2.0, 12.0, 0.5)


def test_outputs_are_compared_token_by_token():
    base = [row("baseline", prompt=n, tokens=[1, 2, 3]) for n in range(3)]
    rows = [row(prompt=0), row(prompt=1, tokens=[1, 9, 3]), row(prompt=2, tokens=[1, 2])]
    found = figures.partings([*base, *rows])
    assert [(p["prompt"], p["at"], p["baseline_token"], p["token"]) for p in found] == [
        (1, 1, 2, 9),
        (2, 2, 3, None),
    ]
    # At another concurrency the baseline may write otherwise: it is compared with its own there.
    assert figures.partings([*base, row(prompt=1, concurrency=8, tokens=[4])]) == []


@pytest.mark.parametrize(
    "token, top_two, gap, dtype, rounding",
    [
        (9, [2, 9], 0.0004, "float32", True),
        (9, [9, 2], 0.0004, "float32", True),
        (9, [2, 9], 0.3, "float32", False),
        (9, [2, 9], 0.3, "bfloat16", True),
        (9, [2, 7], 0.0004, "float32", False),
        (None, [2, 7], 0.0, "float32", False),
    ],
)
def test_a_gap_tells_rounding_from_a_fault(token, top_two, gap, dtype, rounding):
    parting = {"baseline_token": 2, "token": token, "top_two": top_two, "gap": gap}
    assert figures.is_rounding(parting, dtype) == rounding
    rows = [row("baseline"), row(tokens=[1, 9, 3])]
    apart = figures.partings(rows)[0] | parting
    cell = figures.cells(rows, [apart], dtype)[1]
    assert (cell["identical"], cell["rounding"], cell["faults"]) == (0, rounding, not rounding)


def test_speed_by_category_only_where_requests_are_alone():
    rows = [row(m, prompt=n, category="ab"[n]) for m in ("baseline", "eagle3") for n in range(2)]
    found = figures.by_category(rows)
    assert [c["category"] for c in found] == ["a", "b"] and found[0]["baseline"] == 3.0
    together = figures.by_category([r | {"concurrency": 8, "group": 0} for r in rows])
    assert together[0]["baseline"] is None
    assert together[0]["methods"]["eagle3"]["speedup"] is None


def draw(random, weights, count=400):
    return [random.choice(len(w), size=count, p=w).tolist() for w in weights]


def test_two_samples_of_one_distribution_and_of_two():
    random = np.random.default_rng(0)
    weights = [np.array([0.5, 0.3, 0.1, 0.06, 0.04]), np.array([0.9, 0.05, 0.03, 0.01, 0.01])]
    same = [
        figures.two_sample(draw(random, weights), draw(random, weights))["p"] for _ in range(200)
    ]
    # p is uniform where the distributions are the same.
    assert min(same) > 1e-4 and 0.4 < np.mean(same) < 0.6
    assert 2 <= sum(p < 0.05 for p in same) <= 20
    # Always the likeliest token, as a sampler that ignores the temperature: or a tenth more of one.
    greedy = [[0] * 400, [0] * 400]
    assert figures.two_sample(greedy, draw(random, weights))["p"] < 1e-6
    shifted = [np.array([0.38, 0.42, 0.1, 0.06, 0.04]), weights[1]]
    samples = draw(random, shifted, 2000), draw(random, weights, 2000)
    assert figures.two_sample(*samples)["p"] < figures.P_VALUE


def test_the_chi_squared_tail_is_the_tabled_one():
    for statistic, degrees, p in ((3.841, 1, 0.05), (18.307, 10, 0.05), (6.635, 1, 0.01)):
        assert figures.chi_squared_tail(statistic, degrees) == pytest.approx(p, rel=1e-3)


def test_trained_and_served_over_the_positions_of_both():
    rows = [row(steps=[(3, 3), (3, 1), (3, 0), (3, 0)])]
    found = figures.trained_and_served(rows, [0.5, 0.2])
    assert found["acceptance_per_position"] == [0.5, 0.25]
    assert found["estimated_acceptance_length"] == 1.7 and found["acceptance_length"] == 1.75
    assert figures.trained_and_served([row()], [0.5]) is None


METHODS = [{"name": n, "kind": n} for n in ("baseline", "ngram", "eagle3")]


def planned(**more) -> list[dict]:
    settings = {"repeats": 1, "turns": 2, "draft_tokens": [3, 1, 5], "concurrency": [1, 8]}
    settings |= {"prompts_elsewhere": 2, "every_pair": False, "interleave": True}
    settings |= {"held_out_methods": "drafts", "max_num_seqs": 8} | more
    sets = {"s": [{"later": ["more"]} for _ in range(8)], HELD_OUT: [{"later": []}] * 5}
    return plan(SimpleNamespace(**settings), sets, METHODS)


def settings_of(items: list[dict]) -> dict:
    found: dict = {}
    for i in items:
        key = i["set"], i["draft_tokens"], i["concurrency"]
        found.setdefault(key, {}).setdefault(i["method"]["name"], 0)
        found[key][i["method"]["name"]] += len(i["asked"])
    return found


def test_the_plan_measures_each_setting_beside_the_main_one():
    every = {"baseline": 16, "ngram": 16, "eagle3": 16}
    assert settings_of(planned()) == {
        ("s", 3, 1): every,
        ("s", 1, 1): {"ngram": 4, "eagle3": 4},
        ("s", 5, 1): {"ngram": 4, "eagle3": 4},
        # As many as are to be under way at once.
        ("s", 3, 8): {"baseline": 8, "ngram": 8, "eagle3": 8},
        (HELD_OUT, 3, 8): {"eagle3": 5},
    }
    pairs = settings_of(planned(every_pair=True, held_out_methods="all"))
    assert pairs["s", 1, 8] == {"ngram": 8, "eagle3": 8} and len(pairs) == 7
    together = settings_of(planned(concurrency=[8]))
    assert together["s", 1, 8] == {"ngram": 16, "eagle3": 16} and len(together) == 4
    assert pairs[HELD_OUT, 3, 8] == dict.fromkeys(every, 5)


def test_all_is_repeated_in_another_order_but_what_is_held_out():
    once, twice = settings_of(planned()), settings_of(planned(repeats=2))
    for key, counts in once.items():
        again = 1 if key[0] == HELD_OUT else 2
        assert twice[key] == {method: again * count for method, count in counts.items()}
    firsts = [
        next(i for i in planned(repeats=2) if (i["repeat"], i["group"]) == (repeat, 0))
        for repeat in (0, 1)
    ]
    assert [i["method"]["name"] for i in firsts] == ["baseline", "ngram"]


def test_methods_take_turns_and_none_is_always_first():
    items = [i for i in planned(draft_tokens=[3], concurrency=[1]) if i["set"] == "s"]
    order = [i["method"]["name"] for i in items]
    assert order[:6] == ["baseline", "ngram", "eagle3", "ngram", "eagle3", "baseline"]
    # Other numbers of draft tokens are measured beside the same baseline.
    items = [i for i in planned(concurrency=[1]) if i["set"] == "s" and i["group"] == 1]
    order = [(i["method"]["name"], i["draft_tokens"]) for i in items]
    assert order == [
        ("ngram", 3),
        ("eagle3", 3),
        ("ngram", 1),
        ("eagle3", 1),
        ("ngram", 5),
        ("eagle3", 5),
        ("baseline", 3),
    ]
    items = [i for i in planned(draft_tokens=[3], concurrency=[1]) if i["set"] == "s"]
    # All first turns come before the second ones, which need the baseline's answers.
    assert [i["asked"][0][1] for i in items] == [0] * 24 + [1] * 24
    alone = [i["method"]["name"] for i in planned(interleave=False)]
    assert alone == sorted(alone, key=[m["name"] for m in METHODS].index)


def test_a_killed_runs_half_line_is_measured_again(tmp_path):
    state = State(tmp_path)
    assert state.get(["a", 1], lambda: [1]) == [1]
    state.get(["b"], lambda: {"x": 2})
    file = tmp_path / "measured.jsonl"
    file.write_text(file.read_text()[:-7])
    again = State(tmp_path)
    assert again.get(["a", 1], lambda: pytest.fail("it was measured")) == [1]
    assert again.get(["b"], lambda: {"x": 3}) == {"x": 3}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        ['["a", 1]', [1]],
        ['["b"]', {"x": 3}],
    ]


def test_a_draft_of_another_tokenizer_is_refused():
    """Two of equal size, swapped."""
    manifest = {"verifier": {"files": {"tokenizer.json": "one", "model.safetensors": "a"}}}
    check_tokenizer(manifest, {"files": {"tokenizer.json": "one", "model.safetensors": "b"}}, "d")
    with pytest.raises(BenchError, match=r"d was trained with another tokenizer\.json"):
        check_tokenizer(manifest, {"files": {"tokenizer.json": "other"}}, "d")


def test_suffix_is_left_out_with_the_reason_where_it_is_not_installed(tmp_path):
    for name in ("", "0"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").touch()
    args = SimpleNamespace(
        methods=["ngram", "suffix"], checkpoint=tmp_path, epochs=[0], draft=[("mine", tmp_path)]
    )
    methods, left_out = methods_of(args)
    names = [m["name"] for m in methods]
    assert names == ["baseline", "ngram", "eagle3", "eagle3, epoch 0", "eagle3, mine"]
    assert left_out == {"suffix": "arctic-inference is not installed"}
    args.draft = [("mine", Path("/nowhere"))]
    with pytest.raises(BenchError, match="/nowhere: no draft is there"):
        methods_of(args)


def test_suffix_decoding_remembers_no_earlier_request():
    """Every prompt is asked again, of another concurrency or repetition."""
    settings = speculation({"name": "suffix", "kind": "suffix"}, 3, None)["speculative_config"]
    assert settings["suffix_decoding_max_cached_requests"] == 0
