"""How figures are drawn, on every page."""

import io

import matplotlib
import numpy as np
from markupsafe import escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eyrie.page import COLOURS

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


def canvas(height: float = 3.0):
    """Return a figure, narrow enough that its text can be read on a phone, and its axes."""
    figure = Figure(figsize=(5, height), layout="constrained")
    return figure, figure.subplots()


def finish(figure: Figure, label: str) -> Figure:
    """Give a figure its legend, and what is read aloud of it."""
    _, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        fitting = 76 // (4 + max(map(len, labels)))
        figure.legend(loc="outside upper left", ncols=min(4, max(1, fitting)))
    figure.set_label(label)
    return figure


def svg(figure: Figure) -> str:
    """Return the figure as SVG, in plain colours."""
    buffer = io.StringIO()
    bare = dict.fromkeys(["Date", "Creator", "Format", "Type"])
    figure.savefig(buffer, format="svg", transparent=True, metadata=bare)
    label = escape(figure.get_label())
    return buffer.getvalue().replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def plot_positions(series: list[tuple[str, list[float], dict]]) -> Figure:
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
    return finish(figure, "Acceptance of each draft position")
