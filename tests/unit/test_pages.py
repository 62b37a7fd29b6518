"""The report and the sweep as headless Chromium shows them, and the report's Markdown."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from chromium import PATH, Chromium
from test_report import SCRIPT, made_up, measurements, write_inputs
from test_sweep import run, write_page

from eyrie.markdown import to_markdown

needs_chromium = pytest.mark.skipif(not PATH, reason="chromium is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report with its Markdown and figures, whose data hold markup, and a sweep."""
    folder = tmp_path_factory.mktemp("pages")
    data, rows = made_up(), measurements()
    rows["category"] = rows["category"].replace("code", SCRIPT)
    data["shards"]["reasons"][f"<img src=x onerror=alert(1)> {SCRIPT}"] = 4
    command = [*write_inputs(folder, data, rows), "--markdown", str(folder / "report_1k.md")]
    subprocess.run([sys.executable, *command], check=True)
    (folder / "sweep").mkdir()
    write_page(folder / "sweep", run("1k-classic", 1.1), run("1k", scheduler=SCRIPT))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["report_1k.html", "sweep/report_sweep.html"])
def test_pages_load_nothing_and_fit(browser, folder, name, width, dark):
    browser.requests.clear()
    browser.complaints.clear()
    browser.show(folder / name, width, dark)
    assert browser.requests == [(folder / name).as_uri()]
    assert browser.complaints == []
    assert browser.ask(WIDE) is False
    assert browser.ask("document.body.innerText").count(SCRIPT) >= 1
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(20, 24, 27)") is dark


@needs_chromium
def test_the_numbers_are_those_of_the_files(browser, folder):
    browser.show(folder / "report_1k.html", 1280)
    rows = browser.ask(
        "[...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    bench = json.loads((folder / "bench.json").read_text())
    for method in bench["methods"]:
        (row,) = [r for r in rows if r[0] == method["method"] and len(r) >= 6]
        assert f"{method['tokens_per_s']:,.1f}" in row and f"{method['speedup']:.2f}×" in row
    shards = json.loads((folder / "shards.json").read_text())
    for reason, count in shards["reasons"].items():
        assert [reason, f"{count:,}", f"{count / shards['read']:.1%}"] in rows
    metrics = pd.read_parquet(folder / "ckpt_1k/metrics.parquet")
    for epoch in metrics[metrics.kind == "epoch"].to_dict("records"):
        (row,) = [r for r in rows if r[0].split(",")[0] == str(epoch["epoch"]) and len(r) == 6]
        accuracies = [f"{epoch[f'full_acc_{k}']:.1%}" for k in range(3)]
        assert row[1:] == [
            f"{epoch['loss']:.3f}",
            *accuracies,
            f"{epoch['acceptance_length']:.2f}",
        ]
    vocab = json.loads((folder / "vocab.json").read_text())
    assert ["supervised tokens covered", f"{vocab['coverage']:.1%}"] in rows
    hidden = json.loads((folder / "hidden.json").read_text())
    for layer, norm in zip(hidden["layer_ids"], hidden["layer_norms"], strict=True):
        assert [str(layer), f"{norm:,.1f}"] in rows


@needs_chromium
def test_the_sweep_is_sorted_by_a_click(browser, folder):
    browser.show(folder / "sweep/report_sweep.html", 1280)
    first = "document.querySelector('.drafts tbody th').innerText.split('\\n')[0]"
    click = "document.querySelector('[aria-sort] button').click()"
    assert browser.ask(first) == "1k"
    browser.ask(click)
    assert browser.ask(first) == "1k-classic"


def test_every_figure_is_a_file_too(folder):
    text = (folder / "report_1k.md").read_text()
    page = (folder / "report_1k.html").read_text()
    names = sorted(path.name for path in (folder / "report_1k").iterdir())
    assert len(names) == 2 * page.count("<svg") >= 12
    for name in names:
        content = (folder / "report_1k" / name).read_bytes()
        if name.endswith(".png"):
            assert content.startswith(b"\x89PNG") and f"(report_1k/{name})" in text
        else:
            assert b"<svg" in content and b"var(--" not in content


def test_the_markdown_holds_the_tables_and_no_markup(folder):
    text = (folder / "report_1k.md").read_text()
    assert text.startswith("# Serving is")
    assert "\n## Provenance\n" in text and "\n| rejected because | rows | of those read |\n" in text
    assert "<script" not in text and "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_what_markdown_takes_for_its_own_is_text():
    page = "<main><p>*a* [b](c) `d` | $x$</p><pre>```\n&lt;b&gt;</pre></main>"
    assert to_markdown(page, Path("figures")) == (
        "\\*a\\* \\[b\\](c) \\`d\\` \\| \\$x\\$\n\n````\n```\n<b>\n````\n"
    )
