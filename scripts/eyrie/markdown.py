"""A page of this workflow as Markdown: the same words, tables and figures, for where HTML is not
shown. What was text on the page is text here, whatever characters it holds."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

HEADINGS = {"h1": "# ", "h2": "## ", "h3": "### "}
BLOCKS = {*HEADINGS, "p", "figcaption", "summary", "pre", "details", "div"}
UNSHOWN = {"style", "script", "title", "header", "nav", "svg"}


def plain_text(text: str) -> str:
    """Text with every character escaped that Markdown or HTML in it would take for its own."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", text)


def fenced(code: str) -> str:
    """Code as a block, whose fence is longer than any in it."""
    fence = "`" * (max([2, *map(len, re.findall("`+", code))]) + 1)
    return f"{fence}\n{code.strip()}\n{fence}"


class Markdown(HTMLParser):
    """Collects `parts`, a page's blocks in their order. figures: label -> file of its picture."""

    def __init__(self, figures: dict[str, Path]):
        super().__init__()
        self.figures, self.parts, self.text = figures, [], ""
        self.hidden, self.tables, self.pre = 0, 0, False
        self.rows: list[list[str]] = []
        self.below: list[str] = []
        self.heads = self.columns = self.deep = 0

    def flush(self, before: str = "") -> None:
        text = self.text if self.pre else " ".join(self.text.split())
        self.text = ""
        if not text.strip():
            return
        self.parts.append(before + (fenced(text) if self.pre else text))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in UNSHOWN:
            if tag == "svg" and not self.hidden:
                label = values["aria-label"]
                if label in self.figures:
                    self.flush()
                    self.parts.append(f"![{plain_text(label)}]({self.figures[label]})")
            self.hidden += 1
        elif tag == "table":
            self.tables += 1
            if self.tables == 1:
                self.flush()
                self.rows, self.heads = [], 0
        elif self.tables == 1 and tag == "tr":
            # Cells of two rows are the first of their rows on these pages.
            self.rows.append(self.below)
            self.below = []
        elif self.tables == 1 and tag in ("td", "th"):
            self.text, self.columns = "", int(values.get("colspan", 1))
            self.deep = "rowspan" in values
        elif self.tables:
            self.text += " "
        elif tag in BLOCKS:
            self.flush()
            self.pre = tag == "pre"
        elif tag == "b" and not self.hidden:
            self.text += "**"

    def handle_endtag(self, tag):
        if tag in UNSHOWN:
            self.hidden -= 1
        elif tag == "table":
            self.tables -= 1
            if not self.tables:
                self.add_table()
        elif self.tables == 1 and tag == "thead":
            self.heads = len(self.rows)
        elif self.tables == 1 and tag in ("td", "th"):
            text = " ".join(self.text.split())
            self.rows[-1] += [text] * self.columns
            self.below += [text] * self.deep
            self.text = ""
        elif self.tables:
            self.text += " "
        elif tag in BLOCKS:
            self.flush(HEADINGS.get(tag, ""))
            self.pre = False
        elif tag == "b" and not self.hidden:
            self.text += "**"

    def handle_data(self, data):
        if not self.hidden:
            self.text += data if self.pre else plain_text(data)

    def add_table(self) -> None:
        # Two rows of heads become one. A table without has empty ones.
        width = max(map(len, self.rows), default=0)
        rows = [[*row, *[""] * (width - len(row))] for row in self.rows]
        columns = zip(*rows[: self.heads], strict=True) if self.heads else [""] * width
        head = [" ".join(dict.fromkeys(column)) for column in columns]
        lines = [head, ["---"] * width, *rows[self.heads :]]
        self.parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))


def to_markdown(page: str, figures: Path) -> str:
    """The page as Markdown, its figures as links to the PNGs beside the SVGs in their folder."""
    labels = {}
    for file in figures.glob("*.svg"):
        (label,) = re.findall('aria-label="([^"]*)"', file.read_text())
        labels[unescape(label)] = Path(figures.name, f"{file.stem}.png")
    reader = Markdown(labels)
    reader.feed(page)
    reader.flush()
    return "\n\n".join(reader.parts) + "\n"
