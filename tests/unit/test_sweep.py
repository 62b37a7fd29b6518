"""The page of a sweep, on small made-up results of a few runs."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_report import ROOT, SCRIPT, Page, made_up, method, metrics

import sweep

TEMPLATE = ROOT / "templates/sweep.html"


def run(name: str, speedup: float = 1.28, **config) -> dict:
    """The content of a run's files; acceptance is the better, the faster it serves."""
    data = made_up()
    scale = speedup / 1.28
    data["bench"]["run"] = name
    data["bench"]["methods"][-1] = method(
        "eagle3",
        36.3 * speedup,
        acceptance_length=1 + 0.52 * scale,
        acceptance_per_position=[0.36 * scale, 0.12 * scale, 0.04 * scale],
    )
    data["manifest"]["config"] = {
        "norms": "eagle3.1",
        "epochs": 2,
        "lr": 0.005,
        "scheduler": "cosine",
        "layer_ids": [2, 15, 27],
        "norm_output": True,
        "ttt_steps": 3,
        "held_out": 0.05,
    } | config
    return data | {"metrics": metrics()}


def write_inputs(folder: Path, runs: list[dict]) -> list[str]:
    """Write every input and return the command that makes the page of them."""
    options = {"checkpoint": [], "vocab": [], "check": [], "bench": []}
    for number, data in enumerate(runs):
        checkpoint = folder / f"ckpt_{number}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        tensors = {"fc.weight": np.zeros((30, 40), "f2"), "d2t": np.zeros(7, "i8")}
        save_file(tensors, checkpoint / "model.safetensors")
        (checkpoint / "manifest.json").write_text(json.dumps(data["manifest"]))
        data["metrics"].to_parquet(checkpoint / "metrics.parquet")
        options["checkpoint"].append(checkpoint)
        for name in ("vocab", "check", "bench"):
            options[name].append(folder / f"{name}_{number}.json")
            options[name][-1].write_text(json.dumps(data[name]))
    command = [ROOT / "scripts/sweep.py", "--template", TEMPLATE]
    for name, paths in options.items():
        command += [f"--{name}", *paths]
    return [
        str(part)
        for part in [
            *command,
            "--out",
            folder / "report_sweep.html",
            "--summary",
            folder / "report_sweep.json",
        ]
    ]


def write_page(folder: Path, *runs: dict) -> str:
    with patch("sys.argv", write_inputs(folder, list(runs))):
        sweep.main()
    return (folder / "report_sweep.html").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    classic = run("1k-classic", 1.1, norm_output=False, lr=0.001)
    return Page(write_page(tmp_path_factory.mktemp("results"), classic, run("1k")))


def test_opens_with_the_verdict(page):
    assert (
        "1k is fastest: 1.28 times as fast as no draft, against 1.10 with 1k-classic; acceptance "
        "length 1.52 against 1.45." in page.text
    )
    assert "not comparable" not in page.text and "No draft makes" not in page.text


def test_every_element_is_closed(page):
    assert page.open == []


def test_has_a_row_a_draft_the_fastest_first(page):
    same = "97.1% | 1,200 | 2.6 kB | 950 | 300,000 | 1 min 40 s"
    assert [" | ".join(row) for row in page.rows[1:]] == [
        "run | lr | norm_output | estimated | served | acceptance length | acc. 1 | acc. 2 "
        "| acc. 3 | tokens/s | speed-up | identical outputs | vocabulary coverage | parameters "
        "| bytes | rows | tokens | time",
        "1k | 0.005 | true | 1.62 | 1.57 | 1.52 | 36.0% | 12.0% | 4.0% | 46.5 | 1.28× | all 4 | "
        + same,
        "1k-classic | 0.001 | false | 1.62 | 1.57 | 1.45 | 30.9% | 10.3% | 3.4% | 39.9 | 1.10× "
        "| all 4 | " + same,
    ]


def test_cells_are_sorted_by_their_numbers(page):
    values = [a["data-value"] for tag, a in page.tags if tag in ("td", "th") and "data-value" in a]
    first = values[: len(values) // 2]
    assert first[0] == "1k"
    assert float(first[first.index("1200") + 2]) == 950
    assert float(first[-1]) == 100.0


def test_draws_every_run(page):
    figures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(figures) == 3 and all(figure["aria-label"] for figure in figures)


def test_the_policy_allows_the_pages_script_alone(tmp_path):
    text = write_page(tmp_path, run("1k"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for _, a in Page(text).tags if "http-equiv" in a)
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert not re.search(r"https?:|\ssrc=|\son\w+=|@import|url\((?!#)", text)


def test_same_inputs_same_bytes_in_another_process(tmp_path):
    runs = [run("1k"), run("other", 1.1)]
    once = write_page(tmp_path, *runs)
    subprocess.run([sys.executable, *write_inputs(tmp_path, runs)], check=True)
    assert (tmp_path / "report_sweep.html").read_text() == once


def test_markup_in_data_is_text(tmp_path):
    odd = run(SCRIPT, 1.4, scheduler=SCRIPT)
    odd["manifest"]["config"][f"{SCRIPT} $x$"] = 1
    odd["bench"]["prompt_set"]["name"] = SCRIPT
    odd["bench"]["verifier"] = odd["manifest"]["verifier"]["source"] = '"><b>'
    text = write_page(tmp_path, odd, run("1k"))
    assert text.count("<script") == 1 and "<b>sweep" in text and text.count("<b>") == 1
    page = Page(text)
    assert page.row(SCRIPT)[:3] == [SCRIPT, SCRIPT, "1"]
    assert f"{SCRIPT} was benchmarked" not in page.text
    assert f"1k was benchmarked otherwise than {SCRIPT}" in page.text


def test_a_setting_that_a_run_lacks_differs(tmp_path):
    older = run("older", 1.1)
    del older["manifest"]["config"]["norm_output"]
    page = Page(write_page(tmp_path, run("1k"), older))
    assert page.row("run")[:3] == ["run", "norm_output", "estimated"]
    assert page.row("older")[1] == "–"


def test_drafts_served_otherwise_are_not_compared(tmp_path):
    other = run("other", 1.9)
    other["bench"]["prompt_set"]["prompts"] = 2
    other["bench"]["settings"]["temperature"] = 1
    page = Page(write_page(tmp_path, run("1k"), other))
    assert "1k is 1.28 times as fast as no draft; acceptance length 1.52." in page.text
    assert (
        "other was benchmarked otherwise than 1k (prompts 2, not 4; temperature 1, not 0): its "
        "served figures are not comparable." in page.text
    )
    assert "Measured on 4 prompts" in page.text
    assert page.rows[2][0] == "othernot comparable: benchmark"


@pytest.mark.parametrize("change", [{"data": ["fingerprint-9"]}, {"config": {"held_out": 0.1}}])
def test_held_out_figures_of_other_data_are_not_compared(tmp_path, change):
    other = run("other", 1.1)
    for key, value in change.items():
        old = other["manifest"][key]
        other["manifest"][key] = old | value if isinstance(value, dict) else value
    page = Page(write_page(tmp_path, run("1k"), other))
    assert (
        "other was trained on other data than 1k: its held-out figures are not comparable."
        in page.text
    )
    assert page.rows[3][0] == "othernot comparable: held-out rows"
    assert "1k is fastest" in page.text


def test_estimates_are_of_positions_that_all_trained(tmp_path):
    page = Page(write_page(tmp_path, run("1k"), run("short", 1.1, ttt_steps=1)))
    assert page.row("1k")[1:4] == ["3", "1.41", "1.40"]
    assert "the shares of 1 draft positions" in page.text


def test_nothing_was_served_of_the_held_out_rows(tmp_path):
    data = run("1k")
    data["bench"]["held_out"] = None
    assert Page(write_page(tmp_path, data)).row("1k")[1:3] == ["1.62", "–"]


def test_failed_checks_are_told(tmp_path):
    data = run("1k")
    data["check"]["ok"] = False
    assert "checks of the checkpoint failed" in Page(write_page(tmp_path, data)).text


def test_weights_that_are_cut_off_are_named(tmp_path):
    command = write_inputs(tmp_path, [run("1k")])
    weights = tmp_path / "ckpt_0/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with patch("sys.argv", command), pytest.raises(SystemExit, match=f"{weights}: .* bytes"):
        sweep.main()
    assert not (tmp_path / "report_sweep.html").exists()


def test_one_run_is_a_page(tmp_path):
    page = Page(write_page(tmp_path, run("1k")))
    assert "1k is 1.28 times as fast as no draft; acceptance length 1.52." in page.text
    assert page.row("run")[:2] == ["run", "estimated"]


def draft(name: str, speedup: float, length: float | None = 1.5) -> dict:
    return {"run": name, "speedup": speedup, "acceptance_length": length}


def test_verdict_of_several():
    drafts = [draft("a", 1.1, 1.3), draft("b", 1.2), draft("c", 0.9, 1.2)]
    assert sweep.verdict(drafts)["sentence"] == (
        "b is fastest: 1.20 times as fast as no draft, against 0.90 to 1.10 with the others; "
        "acceptance length 1.50 against 1.20 to 1.30."
    )


def test_verdict_of_drafts_as_fast():
    opening = sweep.verdict([draft("a", 1.2), draft("b", 1.2041), draft("c", 1.1, None)])
    assert opening["fastest"] == ["a", "b"]
    assert opening["sentence"].startswith("a and b are fastest: 1.20 times as fast as no draft,")
    assert opening["sentence"].endswith("acceptance length 1.50 against –.")


def test_verdict_says_that_no_draft_is_worth_it():
    assert sweep.verdict([draft("a", 0.9)])["notes"] == ["No draft makes serving faster."]
    assert sweep.verdict([draft("a", 1.1)])["notes"] == []


def test_settings_that_differ_in_their_order():
    settings = [{"a": 1, "b": [1], "c": 0}, {"c": 1, "b": [1], "a": 1, "d": 2}]
    assert sweep.differing(settings) == ["c", "d"]
