"""What the pages share: how their figures are drawn, their numbers written and their templates
filled."""

import base64
import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eyrie.files import atomic, log_line

# What figures are drawn in. On the page each becomes a CSS variable of its name, which the
# template sets once for light and once for dark.
COLOURS = {
    "ink": "#1b2126",
    "muted": "#5b6670",
    "rule": "#d8dde2",
    "plain": "#8b959e",
    "accent": "#0a6c8c",
    "series-2": "#b8560e",
    "series-3": "#6a4fa3",
    "series-4": "#2e7d4f",
    "series-5": "#a8325e",
}
SERIES = [COLOURS["accent"], *(COLOURS[f"series-{n}"] for n in range(2, 6))]

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "eyrie",
        # A name from the data may hold a dollar sign.
        "text.parse_math": False,
        "font.size": 10,
        "text.color": COLOURS["ink"],
        "axes.labelcolor": COLOURS["muted"],
        "axes.edgecolor": COLOURS["rule"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": COLOURS["rule"],
        "grid.linewidth": 0.6,
        "xtick.color": COLOURS["rule"],
        "ytick.color": COLOURS["rule"],
        "xtick.labelcolor": COLOURS["muted"],
        "ytick.labelcolor": COLOURS["muted"],
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.columnspacing": 1.2,
        "legend.handlelength": 1.5,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
    }
)


# Every figure that this process drew, by what is read aloud of it, and its SVG in plain colours.
DRAWN: dict[str, tuple[Figure, str]] = {}


def canvas(height: float = 3.0):
    """Return a figure, narrow enough that its text can be read on a phone, and its axes."""
    figure = Figure(figsize=(5, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure, label: str) -> Markup:
    """Return the figure as an inline SVG in the page's own colours; `label` is read aloud."""
    _, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        fitting = 76 // (4 + max(map(len, labels)))
        figure.legend(loc="outside upper left", ncols=min(4, max(1, fitting)))
    buffer = io.StringIO()
    bare = dict.fromkeys(["Date", "Creator", "Format", "Type"])
    figure.savefig(buffer, format="svg", transparent=True, metadata=bare)
    text = buffer.getvalue()
    # It is laid out; again for the PNG would take as long.
    figure.set_layout_engine("none")
    DRAWN[label] = figure, text
    text = text[text.index("<svg") :]
    # Names such as "figure_1" would be there once for each figure of the page.
    text = re.sub(r' id="[\w.]+_\d+"| xmlns(:xlink)?="[^"]*"', "", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


def write_figures(folder: Path) -> dict[str, Path]:
    """Write what was drawn as SVG and PNG; the folder appears whole or not at all.

    Returns label -> the PNG, from the folder that `folder` is in.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {}
    for label, (figure, text) in DRAWN.items():
        name = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
        (partial / f"{name}.svg").write_text(text)
        # Without matplotlib's own version the same inputs give the same bytes.
        figure.savefig(
            partial / f"{name}.png", dpi=160, facecolor="white", metadata={"Software": None}
        )
        files[label] = Path(folder.name) / f"{name}.png"
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return files


def plot_positions(series: list[tuple[str, list[float], dict]]) -> Markup:
    """Draw how often each draft position was accepted, as bars side by side: of each series its
    label, the share at each position, and what its bars are drawn in."""
    figure, axes = canvas(2.8)
    width = 0.84 / len(series)
    for number, (label, rates, style) in enumerate(series):
        x = np.arange(1, len(rates) + 1) + (number - (len(series) - 1) / 2) * width
        bars = axes.bar(x, rates, width * 0.88, label=label, **style)
        # The numbers of more would run into each other.
        if len(series) < 4:
            axes.bar_label(bars, [f"{r:.0%}" for r in rates], padding=2, color=COLOURS["muted"])
    axes.set_xlabel("draft position")
    axes.set_ylim(0)
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y")
    return svg(figure, "Acceptance of each draft position")


def count(value) -> str:
    return "–" if value is None else f"{value:,}"


def fixed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or np.isnan(value) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{value:.1%}"


def size(value: int | None) -> str:
    """Return bytes in the unit that leaves the fewest digits: 1_300_000_000 -> 1.3 GB."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000


def duration(seconds: float) -> str:
    """Return seconds as a person says them: 12.3 s, 2 min 54 s, 3 h 05 min."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02} s"
    return f"{round(seconds / 60) // 60:,} h {round(seconds / 60) % 60:02} min"


def plain(value) -> str:
    """Return a config value as it is written in JSON, strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def script_hash(script: str) -> str:
    """Return what a Content-Security-Policy names an inline script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_page(out: Path, page: str, log: Path | None) -> None:
    """Write a page, whole or not at all, and tell of it in its stage's log."""
    with atomic(out) as partial:
        partial.write_text(page)
    log_line(log, report=str(out), bytes=out.stat().st_size)


def fill(template: Path, **values) -> str:
    """Return the template filled with `values`; what they hold is text, not markup.

    Raises:
        KeyError, TypeError, jinja2.UndefinedError: `values` lack something that the page shows.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = [count, fixed, percent, size, duration, plain, script_hash]
    environment.filters |= {format.__name__: format for format in formats}
    environment.globals["colours"] = COLOURS
    return environment.get_template(template.name).render(values)
