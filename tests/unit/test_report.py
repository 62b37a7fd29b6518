"""The report and the table, on small made-up results of every stage."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest

import draw
import report
import table
from eyrie import page as writing
from eyrie.benchmark_page import verdict

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "templates/report.html"
SCRIPT = "<script>alert(1)</script>"


def method(name: str, tokens_per_s: float, **more) -> dict:
    return {
        "method": name,
        "draft_tokens": 0 if name == "baseline" else 3,
        "prompts": 4,
        "new_tokens": 400,
        "seconds": 400 / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "speedup": tokens_per_s / 36.3,
        "acceptance_length": None,
        "acceptance_per_position": None,
        "drafts": 0,
        "proposed": 0,
        "accepted": 0,
        "identical": 4,
        "load_seconds": 11.0,
        "peak_rss_bytes": 1_500_000_000,
        "set": "mt-bench",
        "concurrency": 1,
        "repeats": 1,
        "failed": 0,
        "beyond": 0,
        "spread": [0.9 * tokens_per_s / 36.3, 1.1 * tokens_per_s / 36.3],
        "compared": 4,
        "rounding": 0,
        "faults": 0,
        "first_token_seconds": 0.25,
        "token_seconds": 0.0213,
        "draft_share": 0.25,
    } | more


def made_up() -> dict:
    """The content of every input, by the option that names its file."""
    drafted = {"drafts": 200, "proposed": 600}
    methods = [
        method("baseline", 36.3),
        method(
            "ngram",
            38.0,
            acceptance_length=1.1,
            acceptance_per_position=[0.06, 0.03, 0.01],
            accepted=20,
            **drafted,
        ),
        method(
            "eagle3",
            46.6,
            acceptance_length=1.52,
            acceptance_per_position=[0.36, 0.12, 0.04],
            accepted=104,
            **drafted,
        ),
    ]
    at_eight = [
        method("baseline", 240.0, speedup=1.0, concurrency=8, spread=None),
        method("eagle3", 300.0, speedup=1.25, concurrency=8, spread=None, acceptance_length=1.5),
    ]
    return {
        "shards": {
            "read": 1_012,
            "kept": 1_000,
            "rejected": 12,
            "reasons": {"empty": 9, "too long": 3},
            "sources": {"path:talks": {"read": 1_012, "kept": 1_000, "rejected": 12}},
            "answers": "verifier",
            "leading_answers_dropped": 7,
            "truncated": 5,
            "control_tokens_in_text": 4,
            "rows_split_off": 6,
            "answers_not_supervised": 3,
            "bad_files": [{"file": "<cut>.json", "rows": 8, "why": "Unterminated <string>"}],
            "shards": 4,
            "tokens": 51_234,
            "supervised_tokens": 0,
            "length_percentiles": {"0": 5, "25": 20, "50": 41, "75": 80, "95": 333, "100": 1_024},
            "tokenizer": "f00d" * 16,
            "seconds": 3.21,
            "peak_rss_bytes": 210_000_000,
        },
        "hidden": {
            "shards": 4,
            "made": 3,
            "rows": 1_000,
            "tokens": 503_000,
            "supervised_tokens": 451_766,
            "answers": 1_000,
            "cut_answers": 350,
            "bytes": 2_317_824_000,
            "header_bytes": 4_096,
            "layer_ids": [2, 15, 27, 30],
            "hidden_size": 576,
            "states": "fp8",
            "given_back": 0.9844,
            "round_trip_error": [0.021, 0.0266, 0.0258, 0.0249],
            "layer_norms": [11.2, 34.5, 80.1, 220.4],
            "halvings": [{"max_num_seqs": 2, "max_num_batched_tokens": 4_096}],
            "seconds": 174.0,
            "peak_rss_bytes": 3_400_000_000,
            "load_seconds": 12.5,
            "engine_seconds": 150.0,
        },
        "plan": {
            "trained": False,
            "run": "1k",
            "tokens": {"total": 450_000, "source": "plan.prompt_tokens <b>of</b> the config"},
            "states": {
                "kept_as": "fp8",
                "bf16_bytes": 4_000_000_000,
                "fp8_bytes": 2_000_000_000,
            },
            "memory": {"device_source": "this machine's memory", "host_bytes": {"extract": 4e9}},
            "times": [
                {"part": part, "seconds": seconds, "source": "measured in data 10"}
                for part, seconds in {
                    "load": 10.0,
                    "extract": 120.0,
                    "train": 100.0,
                    "bench": 60.0,
                    "bench loads": 30.0,
                }.items()
            ],
        },
        "vocab": {
            "draft_vocab_size": 8_192,
            "verifier_vocab_size": 49_152,
            "coverage": 0.9714,
            "held_out_coverage": 0.8751,
            "prompts_coverage": 0.7913,
            "distinct": 14_321,
            "supervised_tokens": 406_000,
            "special_tokens": 17,
            "coverage_by_size": {"256": 0.55, "1024": 0.74, "4096": 0.92, "16384": 1.0},
            "seconds": 1.5,
            "peak_rss_bytes": 400_000_000,
        },
        "check": {
            "ok": True,
            "epochs": {
                str(epoch): [
                    {
                        "check": "config.vocab_size",
                        "ok": True,
                        "found": "49152",
                        "expected": "49152",
                        "effect": "vLLM stops",
                    }
                ]
                for epoch in ("chosen", 0, 1)
            },
            "seconds": 0.4,
            "peak_rss_bytes": 800_000_000,
        },
        "bench": {
            "run": "1k",
            "verifier": "pypi:a-verifier",
            "prompt_set": {
                "name": "mt-bench",
                "prompts": 4,
                "turns": 2,
                "max_new_tokens": 100,
                "concurrency": 1,
            },
            "methods": methods,
            "cells": methods + at_eight,
            "left_out": {"suffix": "arctic-inference is not installed"},
            "partings": [],
            "sampling": [],
            "profiles": {},
            "trained_on": [],
            "prompts_left_out": [],
            "samples": [
                {
                    "prompt": 81,
                    "category": "writing",
                    "asked": "Write <b>it</b>",
                    "pieces": [["Gladly", 0], [" done", 1], ["<i>", 2], [".", 0]],
                }
            ],
            "held_out": {
                "prompts": 40,
                "drafts": 1_234,
                "estimated_per_position": [0.41, 0.15, 0.0625],
                "acceptance_per_position": [0.4, 0.14, 0.0325],
                "estimated_acceptance_length": 1.6225,
                "acceptance_length": 1.5725,
            },
            "settings": {
                "dtype": "bfloat16",
                "temperature": 0,
                "gpus": 0,
                "compile": False,
            },
            "versions": {"vllm": "0.32.0"},
            "fingerprint": {"drafts": {"eagle3": "abad1dea"}},
            "seconds": 75.0,
        },
        "manifest": {
            "verifier": {"source": "pypi:a-verifier", "files": {"config.json": "c0ffee"}},
            "data": ["fingerprint-0", "fingerprint-1"],
            "rows": {"training": 950, "held_out": 50, "cut": 3, "left_out": 2},
            "config": {
                "norms": "eagle3.1",
                "lr": 0.0001,
                "epochs": 2,
                "ttt_steps": 3,
                "held_out": 0.05,
                "layer_ids": [2, 15, 27],
                "scheduler": "linear",
            },
            "versions": {"torch": "2.13.0", "vllm": "0.32.0"},
            "seconds": 100.0,
            "wall_seconds": 130.0,
            "peak_rss_bytes": 2_000_000_000,
            "chosen_epoch": 1,
            "files": {"model.safetensors": "abad1dea", "1/model.safetensors": "abad1dea"},
        },
        "identities": {
            "verifier": {
                "source": "pypi:a-verifier",
                "sha256": "5eed",
                "files": {"config.json": "c0ffee"},
                "bytes": 270_000_000,
                "seconds": 9.0,
                "peak_rss_bytes": 900_000_000,
            },
            "prompts": {"source": "hf:a/b", "revision": "cab1e", "bytes": 9_000, "seconds": 1.0},
        },
    }


def metrics() -> pd.DataFrame:
    """Two epochs of 150 steps."""
    steps = [
        {
            "kind": "step",
            "split": "train",
            "epoch": (step - 1) // 150,
            "step": step,
            "loss": 9 - step / 100,
            "tokens": 1_000,
            "seconds": 0.5,
        }
        | {f"loss_{k}": 3 + k - step / 300 for k in range(3)}
        | {f"full_acc_{k}": step / 1000 / (k + 1) for k in range(3)}
        for step in range(1, 301)
    ]
    epochs = [
        {
            "kind": "epoch",
            "split": "held_out",
            "epoch": epoch,
            "step": 150 * (epoch + 1),
            "loss": 7.125 - epoch,
            "loss_0": 3.0,
            "loss_1": 4.0,
            "loss_2": 5.0,
            "full_acc_0": 0.31 + epoch / 10,
            "full_acc_1": 0.15,
            "full_acc_2": 0.0625,
            "acceptance_length": 1.52 + epoch / 10,
        }
        for epoch in range(2)
    ]
    return pd.DataFrame(steps + epochs)


def request(
    method: str, number: int, category: str, new: int, seconds: float, *counts, concurrency: int = 1
) -> dict:
    """A row of the benchmark's CSV; counts: drafts, accepted."""
    drafts, accepted = counts
    return {
        "set": "mt-bench",
        "prompt": number,
        "turn": 1,
        "category": category,
        "method": method,
        "kind": method,
        "draft_tokens": 0 if method == "baseline" else 3,
        "concurrency": concurrency,
        "repeat": 0,
        "group": number,
        "new_tokens": new,
        "finish": "length",
        "beyond": False,
        "group_seconds": seconds,
        "drafts": drafts,
        "proposed": 3 * drafts,
        "accepted": accepted,
        **{f"proposed_{k}": drafts for k in (1, 2, 3)},
        **{f"accepted_{k}": accepted if k == 1 else 0 for k in (1, 2, 3)},
    }


def measurements() -> pd.DataFrame:
    """The baseline writes 30 tokens/s on code and 40 on writing; eagle3 60 and 40."""
    at_eight = [
        request(method, number, "math", 100, 2.0, 0, 0, concurrency=8)
        for method in ("baseline", "eagle3")
        for number in range(4)
    ]
    return pd.DataFrame(
        [
            *at_eight,
            *(request(m, 3, "math", 10, 1.0, 0, 0) for m in ("baseline", "ngram", "eagle3")),
            request("baseline", 0, "code", 100, 3.0, 0, 0),
            request("baseline", 1, "code", 50, 2.0, 0, 0),
            request("baseline", 2, "writing", 80, 2.0, 0, 0),
            request("ngram", 0, "code", 100, 3.0, 90, 9),
            request("ngram", 1, "code", 50, 2.0, 50, 5),
            request("ngram", 2, "writing", 80, 2.0, 80, 0),
            request("eagle3", 0, "code", 100, 1.5, 50, 50),
            request("eagle3", 1, "code", 50, 1.0, 30, 20),
            request("eagle3", 2, "writing", 80, 2.0, 64, 16),
        ]
    )


def write_inputs(folder: Path, data: dict, rows: pd.DataFrame) -> list[str]:
    """Write every input, draw the figures, and return the command that makes the report of them."""
    checkpoint = folder / "ckpt_1k"
    for name in data["manifest"]["files"]:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        # A header of nothing.
        (checkpoint / name).write_bytes((4_992).to_bytes(8, "little") + b"{}".ljust(4_992))
    metrics().to_parquet(checkpoint / "metrics.parquet")
    (checkpoint / "manifest.json").write_text(json.dumps(data["manifest"]))
    rows.to_csv(folder / "bench_1k.csv", index=False)
    command = [ROOT / "scripts/report.py", "--run", "1k", "--template", TEMPLATE]
    command += ["--checkpoint", checkpoint, "--measurements", folder / "bench_1k.csv"]
    for name in ("shards", "hidden", "plan", "vocab", "check", "bench"):
        (folder / f"{name}.json").write_text(json.dumps(data[name]))
        command += [f"--{name}", folder / f"{name}.json"]
    draw_figures(folder)
    command += ["--out", folder / "report_1k.html", "--figures", folder / "report_1k"]
    command += ["--identities"]
    for name, identity in data["identities"].items():
        (folder / f"{name}.json").write_text(json.dumps(identity))
        command += [folder / f"{name}.json"]
    return [str(part) for part in command]


def draw_figures(folder: Path) -> None:
    command = ["draw.py", "--checkpoint", folder / "ckpt_1k", "--out", folder / "report_1k"]
    for name in ("vocab", "hidden", "bench"):
        command += [f"--{name}", folder / f"{name}.json"]
    with patch("sys.argv", list(map(str, command))):
        draw.main()


def write_report(folder: Path, data: dict, rows: pd.DataFrame) -> str:
    """Return the page made of the inputs, by way of files."""
    with patch("sys.argv", write_inputs(folder, data, rows)):
        report.main()
    return (folder / "report_1k.html").read_text()


class Page(HTMLParser):
    """The text of a page's elements, the rows of its tables, and every tag and attribute."""

    VOID = ("meta", "br")

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += " ".join(data.split())

    def row(self, head: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == head)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    return Page(write_report(tmp_path_factory.mktemp("results"), made_up(), measurements()))


def test_opens_with_the_verdict(page):
    assert (
        "Serving is 1.28 times as fast with the draft: 46.6 tokens/s against 36.3, at an "
        "acceptance length of 1.52 with 3 draft tokens." in page.text
    )
    assert "not identical" not in page.text
    assert "Checks of the checkpoint failed" not in page.text


def test_says_how_the_states_were_proved(page):
    text = " ".join(page.text.split())
    assert "in fp8. From its states the verifier's own head gives back 98.4% or more" in text
    assert "Rounding took 2.7% of a layer's states at most." in text
    assert "ran out of memory and went on with 2 sequences and 4,096 tokens a step." in text
    assert "log-probabilities" not in text


def test_every_element_is_closed(page):
    assert page.open == []


@pytest.mark.parametrize(
    "row",
    [
        ["baseline", "–", "–", "36.3", "1.00×", "–", "–"],
        ["ngram", "3", "1.10", "38.0", "1.05×", "0.94 to 1.15", "all 4"],
        ["eagle3", "3", "1.52", "46.6", "1.28×", "1.16 to 1.41", "all 4"],
        ["code", "2", "30.0", "1.10", "1.00×", "1.88", "2.00×"],
        ["writing", "1", "40.0", "1.00", "1.00×", "1.25", "1.00×"],
        ["0", "7.125", "31.0%", "15.0%", "6.2%", "1.52"],
        ["1, chosen", "6.125", "41.0%", "15.0%", "6.2%", "1.62"],
        ["served", "–", "36.0%", "12.0%", "4.0%", "1.52"],
        ["estimated", "41.0%", "15.0%", "6.2%", "1.62"],
        ["empty", "9", "0.9%"],
        ["rejected", "12", "1.2%"],
        ["95%", "333"],
        ["supervised tokens covered", "97.1%"],
        ["config.vocab_size", "ok", "49152", "49152", ""],
        ["fetch verifier", "9.0 s", "900.0 MB", "270.0 MB", ""],
        ["fetch prompts", "1.0 s", "–", "9.0 kB", ""],
        ["shard", "3.2 s", "210.0 MB", "–", ""],
        # Its two names are one file.
        ["train", "2 min 10 s", "2.0 GB", "5.0 kB", "1 min 40 s in training steps"],
        ["all", "6 min 34 s", "", "", ""],
        ["tokens", "450,000", "503,000", "1.12", "plan.prompt_tokens <b>of</b> the config"],
        ["states", "2.0 GB", "2.3 GB", "1.16", "plan.prompt_tokens <b>of</b> the config"],
        ["memory of extract", "4.0 GB", "3.4 GB", "0.85", "the config"],
        ["load", "10.0 s", "12.5 s", "1.25", "measured in data 10"],
        ["bench loads", "30.0 s", "33.0 s", "1.10", "measured in data 10"],
        ["config.json", "c0ffee"],
        ["prompts", "hf:a/b", "cab1e"],
        ["layer_ids", "[2, 15, 27]"],
        ["scheduler", "linear"],
        ["torch", "2.13.0"],
    ],
    ids=lambda row: row[0],
)
def test_shows_the_figures_of_its_inputs(page, row):
    assert row in page.rows


def test_states_that_were_there_already_are_not_compared(page):
    """One of the four shards was in the store, so the engine did not do all that was planned."""
    assert ["extract", "2 min 00 s", "–", "–", "measured in data 10"] in page.rows


def test_says_what_became_of_every_row(page):
    assert "1,012 conversations read = 1,000 kept + 12 rejected" in page.text
    assert "3 of 4 shards made, the rest from the store" in page.text
    assert (
        "950 rows trained on, 50 held out. 3 were cut at a turn to fit train.total_seq_len. 2 more "
        "have no supervised token and were left out. Epoch 1 is the one served." in page.text
    )


def test_rows_neither_cut_nor_left_out_are_not_told(tmp_path):
    data = made_up()
    data["manifest"]["rows"] |= {"cut": 0, "left_out": 0}
    page = Page(write_report(tmp_path, data, measurements()))
    assert "950 rows trained on, 50 held out. Epoch 1 is the one served." in page.text


def test_training_and_serving_agree(page):
    assert "40 held-out prompts were served, with 1,234 drafts." in page.text
    assert ["served", "40.0%", "14.0%", "3.2%", "1.57"] in page.rows
    assert ["gap", "-1.0%", "-1.0%", "-3.0%", "-0.05"] in page.rows
    assert "trained on 406,000 supervised tokens" in page.text
    assert "disagree" not in page.text


def test_training_and_serving_disagree(tmp_path):
    data = made_up()
    data["bench"]["held_out"]["acceptance_length"] = 1.52
    text = write_report(tmp_path, data, measurements())
    assert '<p class="note">Training and serving disagree:' in text
    assert '<tr class="bad"><th>gap</th>' in text
    assert (
        "length of 1.62 was estimated and 1.52 was served. Look at the layer ids" in Page(text).text
    )


def test_a_gap_of_few_drafts_is_no_disagreement(tmp_path):
    data = made_up()
    data["bench"]["held_out"] |= {"acceptance_length": 1.45, "drafts": 40}
    assert "disagree" not in Page(write_report(tmp_path, data, measurements())).text


def test_nothing_was_served_of_the_held_out_rows(tmp_path):
    data = made_up()
    data["bench"]["held_out"] = None
    page = Page(write_report(tmp_path, data, measurements()))
    assert "Trained against served" not in page.text


def test_says_how_to_serve(page):
    command = report.serve_command(Path("a verifier"), Path("results/ckpt_1k"), 3)
    shell = "vllm() { printf '%s\\n' \"$@\"; }; " + command
    assert subprocess.check_output(["sh", "-c", shell], text=True).splitlines() == [
        "serve",
        "a verifier",
        "--speculative-config",
        '{"method": "eagle3", "model": "results/ckpt_1k", "num_speculative_tokens": 3}',
    ]
    assert re.search(r"vllm serve \S+/verifier \\ --speculative-config", page.text)


def test_figures_hold_text_and_the_pages_colours(page):
    figures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(figures) == 7 and all(figure["aria-label"] for figure in figures)
    assert "requests at once" in page.text
    drawn = " ".join(a["style"] for _, a in page.tags if "style" in a)
    assert "var(--accent)" in drawn
    assert not set(writing.COLOURS.values()) & set(re.findall("#[0-9a-f]{6}", drawn))


def test_needs_nothing_but_itself(page):
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "base"}
    addresses = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "action", "data")
    ]
    assert all(address.startswith("#") for address in addresses)
    everything = " ".join(f"{v}" for _, attributes in page.tags for v in attributes.values())
    assert not re.search(r"https?:|url\((?!#)|@import", everything)


def test_same_inputs_same_bytes_in_another_process(tmp_path):
    once = write_report(tmp_path, made_up(), measurements())
    command = write_inputs(tmp_path, made_up(), measurements())
    subprocess.run([sys.executable, *command], check=True)
    assert (tmp_path / "report_1k.html").read_text() == once


@pytest.mark.parametrize(
    "script, name, content, message",
    [
        (draw, "bench.json", '{"methods": [', r"bench\.json: cannot be read as JSON"),
        (report, "bench.json", '{"methods": [', r"bench\.json: cannot be read as JSON"),
        (report, "bench_1k.csv", "", r"bench_1k\.csv: cannot be read as a table"),
        (draw, "ckpt_1k/metrics.parquet", "PAR1", r"metrics\.parquet: cannot be read as a table"),
    ],
)
def test_a_file_that_is_cut_off_is_named_and_the_old_page_stays(
    tmp_path, script, name, content, message
):
    once = write_report(tmp_path, made_up(), measurements())
    command = write_inputs(tmp_path, made_up(), measurements())
    (tmp_path / name).write_text(content)
    figures = sorted((tmp_path / "report_1k").iterdir())
    with pytest.raises(SystemExit, match=message):
        if script is draw:
            draw_figures(tmp_path)
        else:
            with patch("sys.argv", command):
                report.main()
    assert (tmp_path / "report_1k.html").read_text() == once
    assert sorted((tmp_path / "report_1k").iterdir()) == figures


def test_figures_take_no_other_files_folder(tmp_path):
    write_report(tmp_path, made_up(), measurements())
    draw_figures(tmp_path)  # over its own
    (tmp_path / "report_1k/notes.txt").touch()
    with pytest.raises(SystemExit, match="move it, or name another folder"):
        draw_figures(tmp_path)
    assert (tmp_path / "report_1k/notes.txt").exists()


def test_a_report_loads_nothing_that_draws():
    """Drawing takes longer than all else, and an edit of the template shall be seen at once."""
    code = "import sys; import report; print('matplotlib' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, cwd=ROOT / "scripts", text=True) == "False\n"


def test_markup_in_data_is_text(tmp_path):
    data, rows = made_up(), measurements()
    rows["category"] = rows["category"].replace("code", SCRIPT + " $x$")
    data["shards"]["reasons"][SCRIPT] = 0
    data["manifest"]["config"]["scheduler"] = SCRIPT
    data["identities"]["verifier"]["source"] = SCRIPT
    data["bench"]["prompt_set"]["name"] = SCRIPT
    data["identities"]["verifier"]["files"] = {SCRIPT: SCRIPT}
    data["check"]["ok"] = False
    data["check"]["epochs"]["1"][0] |= {"ok": False, "found": SCRIPT, "effect": SCRIPT}
    text = write_report(tmp_path, data, rows)
    assert "<script" not in text
    page = Page(text)
    assert page.text.count(SCRIPT) >= 9
    assert page.row("config.vocab_size")[1] == "ok"
    assert ["config.vocab_size", "FAIL", SCRIPT, "49152", SCRIPT] in page.rows
    assert "Checks of the checkpoint failed" in page.text


def opening(*methods: dict, **more) -> dict:
    """The verdict on a benchmark of these methods."""
    bench = made_up()["bench"]
    main = [m for m in methods if m["concurrency"] == 1]
    return verdict(bench | {"methods": main, "cells": list(methods)} | more)


def eagle3(tokens_per_s: float, **more) -> list[dict]:
    return [method("baseline", 36.3), method("eagle3", tokens_per_s, **more)]


def test_verdict_says_slower():
    said = opening(*eagle3(29.8, acceptance_length=1.2))
    assert said["sentence"].startswith(
        "Serving is slower with the draft, 0.82 times as fast: 29.8 tokens/s against 36.3"
    )


def test_verdict_says_what_cannot_be_told():
    """A range that holds 1, however large the mean."""
    said = opening(*eagle3(46.6, spread=[0.77, 2.04]))
    assert said["sentence"].startswith(
        "Serving with the draft cannot be told from serving without: 1.28 times as fast, where "
        "nine in ten lie from 0.77 to 2.04: 46.6 tokens/s"
    )


def test_verdict_says_no_faster():
    assert opening(*eagle3(36.2))["sentence"].startswith("Serving is no faster")


def test_verdict_says_where_it_is_slower():
    """Faster at one request at a time, slower at twenty: the headline is not the best case only."""
    busy = [
        method("baseline", 400.0, speedup=1.0, concurrency=20),
        method("eagle3", 280.0, speedup=0.7, concurrency=20),
    ]
    said = opening(*eagle3(46.6), *busy)
    assert said["sentence"].startswith("Serving is 1.28 times as fast")
    assert said["notes"] == ["At concurrency 20 it is slower, 0.70 times as fast."]


def test_verdict_tells_rounding_from_faults():
    notes = opening(*eagle3(46.6, identical=1, rounding=2, faults=1))["notes"]
    assert notes[0].startswith("1 of 4 outputs part from the baseline's where no rounding explains")
    assert notes[1].startswith("2 of 4 outputs part from the baseline's where its two likeliest")


def test_verdict_says_that_ngram_is_as_fast():
    notes = opening(*eagle3(46.6), method("ngram", 50.0))["notes"]
    assert notes == ["n-gram drafting, which needs no training, is 1.38 times as fast."]


def test_verdict_says_what_is_not_as_it_should_be():
    differs = {"method": "eagle3", "differs": True, "p": 1e-9}
    seen = ["mt-bench, prompt 81"]
    notes = opening(*eagle3(46.6, failed=3, beyond=5), sampling=[differs], trained_on=seen)["notes"]
    assert "not distributed as the baseline's (p = 1e-09)" in notes[0]
    assert notes[1] == "3 requests failed; no figure counts them."
    assert notes[2].startswith("5 requests reach beyond the draft's longest context")
    assert notes[3] == "The draft was trained on 1 of the prompts: mt-bench, prompt 81."


def test_says_slower_in_words_beside_every_such_figure(tmp_path):
    data = made_up()
    data["bench"]["cells"][-1] |= {"speedup": 0.7, "tokens_per_s": 168.0}
    page = Page(write_report(tmp_path, data, measurements()))
    assert "At concurrency 8 it is slower, 0.70 times as fast." in page.text
    row = next(r for r in page.rows if r[:3] == ["mt-bench", "8", "eagle3"])
    assert row[8] == "slower0.70×"


def test_shows_where_outputs_part(tmp_path):
    data = made_up()
    named = {"set": "mt-bench", "prompt": 81, "turn": 2, "method": "eagle3", "draft_tokens": 3}
    parting = named | {"concurrency": 1, "at": 6, "baseline_token": 17, "token": None, "gap": 1.5}
    data["bench"]["partings"] = [parting | {"rounding": False}]
    page = Page(write_report(tmp_path, data, measurements()))
    assert "12 outputs were compared token by token at temperature 0: 11 are identical" in page.text
    assert [
        "mt-bench",
        "81",
        "2",
        "eagle3",
        "3",
        "1",
        "7",
        "17",
        "end",
        "1.5000",
        "FAULT",
    ] in page.rows


def test_shows_shares_and_distributions(tmp_path):
    data = made_up()
    shares = {"all-reduce": 0.515, "draft": 0.1, "seconds": 2.0, "of": "kernels"}
    data["bench"]["profiles"] = {"eagle3": shares}
    test = {"method": "eagle3", "prefixes": 4, "samples": 100, "chi_squared": 3.2, "degrees": 4}
    data["bench"]["sampling"] = [test | {"p": 0.52, "differs": False}]
    page = Page(write_report(tmp_path, data, measurements()))
    assert ["eagle3", "51.5%", "10.0%"] in page.rows
    assert ["eagle3", "3.20", "4", "0.520", "as the baseline’s"] in page.rows


def test_colours_what_was_accepted(page):
    tinted = [a["style"] for tag, a in page.tags if tag == "i" and "style" in a]
    assert tinted == ["--position: 1", "--position: 2"]
    assert "Gladly done<i>." in page.text and "Write <b>it</b>" in page.text
    assert "suffix was not measured: arctic-inference is not installed." in page.text


def test_a_report_without_its_verifiers_identity_is_refused(tmp_path):
    data = made_up()
    del data["identities"]["verifier"]
    with pytest.raises(SystemExit, match=r"verifier\.json is not among them"):
        write_report(tmp_path, data, measurements())


def test_account_that_does_not_add_up_shows(tmp_path):
    data = made_up()
    data["shards"]["read"] = 1_013
    page = Page(write_report(tmp_path, data, measurements()))
    assert "1,013 conversations read ≠ 1,000 kept + 12 rejected" in page.text


def test_a_failed_report_leaves_the_old_one(tmp_path):
    old = write_report(tmp_path, made_up(), measurements())
    vocab = tmp_path / "vocab.json"
    content = json.loads(vocab.read_text())
    del content["coverage"]
    command = write_inputs(tmp_path, made_up(), measurements())
    vocab.write_text(json.dumps(content))
    with patch("sys.argv", command), pytest.raises(SystemExit, match="coverage is missing"):
        report.main()
    assert (tmp_path / "report_1k.html").read_text() == old
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(999, "999 B"), (1_000, "1.0 kB"), (547e9, "547.0 GB"), (None, "–")],
)
def test_size(value, text):
    assert writing.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.96, "1 min 00 s"), (174.2, "2 min 54 s"), (3599.7, "1 h 00 min"),
     (86_400, "24 h 00 min")],
)  # fmt: skip
def test_duration(seconds, text):
    assert writing.duration(seconds) == text


def test_table_in_plain_text(tmp_path):
    bench = tmp_path / "bench_1k.json"
    bench.write_text(json.dumps(made_up()["bench"]))
    command = [sys.executable, ROOT / "scripts/table.py", bench, "--report", "r.html"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == (
        "method    draft tokens  acceptance length  tokens/s  speed-up  identical\n"
        "baseline             -                  -      36.3     1.00x          -\n"
        "ngram                3               1.10      38.0     1.05x     4 of 4\n"
        "eagle3               3               1.52      46.6     1.28x     4 of 4\n"
        "\n"
        "report: r.html\n"
    )


@pytest.mark.parametrize("text", ["{}", '{"methods": []}', '{"methods": [{}]}', "", None])
def test_a_table_of_no_figures(tmp_path, text):
    bench = tmp_path / "bench_1k.json"
    if text is not None:
        bench.write_text(text)
    with (
        patch("sys.argv", ["table.py", str(bench), "--report", "r.html"]),
        pytest.raises(SystemExit, match=r"table: .*bench_1k\.json: "),
    ):
        table.main()


def test_table_shows_large_figures():
    text = table.table([method("baseline", 12_345.6, prompts=1_000)])
    assert text.splitlines()[1].split() == ["baseline", "-", "-", "12,345.6", "340.10x", "-"]
