"""What the pages share: how their figures are shown, their numbers written and their templates
filled."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

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
# A curve of training steps has this many points, each the mean of as many steps as that takes.
CURVE_POINTS = 100


def positions(metrics: pd.DataFrame) -> int:
    return sum(column.startswith("full_acc_") for column in metrics)


def smoothing(steps: pd.DataFrame) -> int:
    """Return how many training steps one point of a curve is the mean of."""
    return -(-len(steps) // CURVE_POINTS)


def inline(svg: str) -> Markup:
    """Return an SVG file's text as an element of a page, in the page's own colours."""
    text = svg[svg.index("<svg") :]
    # Names such as "figure_1" would be there once for each figure of the page.
    text = re.sub(r' id="[\w.]+_\d+"| xmlns(:xlink)?="[^"]*"', "", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return Markup(text)


def count(value) -> str:
    return "–" if value is None else f"{value:,}"


def fixed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.1%}"


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
