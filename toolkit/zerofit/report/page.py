"""Define the contents of a page, and write it as one HTML file that loads no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

from zerofit.spec.files import write_text
from zerofit.spec.foreign import refused

Tone = Literal["good", "bad", "warn", ""]
Unit = Literal["bytes", "seconds", "number"]
Style = Literal["area", "line", "dashed", "dots"]
LEAST = 1e-4  # of the scale; shorter parts of bars cannot be seen
ASSETS = Path(__file__).with_name("assets")

# From the bottom of a stack up: what stays through the run comes first. Colors are Paul Tol's "muted" scheme, which
# suits all kinds of color vision (https://personal.sron.nl/~pault/), with light next to dark.
COLORS = {
    "parameters": "#332288",
    "master weights": "#88CCEE",
    "optimizer state": "#117733",
    "gradients": "#DDCC77",
    "gathered parameters": "#882255",
    "communication buckets": "#44AA99",
    "activations": "#CC6677",
    "logits and loss": "#AA4499",
    "temporaries": "#999933",
    "workspaces": "#661100",
    "other": "#BBBBBB",
}
# The darkest colors are lighter on a dark page.
ON_DARK = {"#332288": "#7B6BD6", "#117733": "#3FA35E", "#882255": "#C2588C", "#661100": "#B5533C"}
SERIES = ("#332288", "#CC6677", "#117733", "#AA4499", "#44AA99", "#999933", "#88CCEE", "#882255", "#DDCC77", "#661100")
SERIES += ("#EE7733", "#0077BB", "#778899")  # for charts with more parts


def shades(color: str) -> str:
    """Return the CSS for a color and its counterpart on dark pages."""
    # The CSS function chooses by the color scheme of the reader's system.
    return f"light-dark({color}, {ON_DARK.get(color, color)})"


def color_of(name: str, number: int) -> str:
    """Return the CSS color of a kind of memory, or for another name that of series `number`."""
    return shades(COLORS.get(name) or SERIES[number % len(SERIES)])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer about one run, simulation or plan. A page begins with its answers."""

    block: ClassVar = "answer"
    name: str
    verdict: str
    tone: Tone = ""
    summary: str = ""
    facts: Sequence[tuple[str, str]] = ()  # those without a text are not shown


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, whose first column names the row."""

    block: ClassVar = "table"
    # A page with thousands of rows opens slowly. The output of --json has all of them.
    most: ClassVar = 300  # rows on a page
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()  # columns that contain text; all others contain figures
    tones: Sequence[Tone] = ()  # of each row


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar with parts. `low` and `high` are the ends of an interval around the bar's length."""

    label: str
    parts: Mapping[str, float]
    text: str
    low: float | None = None
    high: float | None = None

    @property
    def end(self) -> float:
        """The length that the scale must cover."""
        return max(self.high or 0.0, sum(size for size in self.parts.values() if size > 0))


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars on one scale. `limit` is the name and value of a line across all bars."""

    block: ClassVar = "bars"
    most: ClassVar = 40  # bars on a page
    bars: Sequence[Bar]
    limit: tuple[str, float] | None = None

    @cached_property
    def names(self) -> list[str]:
        """The names of the parts, from the left."""
        found = {name for bar in self.bars for name, size in bar.parts.items() if size > self.scale * LEAST}
        # All bars share one order, so a part has the same place and color in each of them.
        order = [*COLORS, *(name for bar in self.bars for name in bar.parts)]
        return [name for name in dict.fromkeys(order) if name in found]

    @cached_property
    def colors(self) -> dict[str, str]:
        """The color of each part."""
        # names that are no kinds of memory get colors that no kind on this page has
        taken = {COLORS.get(name) for name in self.names}
        free = [color for color in SERIES if color not in taken] or SERIES
        others = [name for name in self.names if name not in COLORS]
        return {n: shades(COLORS.get(n) or free[others.index(n) % len(free)]) for n in self.names}

    @cached_property
    def scale(self) -> float:
        """The value at the right end. A limit is ignored if it makes all bars too short to read."""
        longest = max((bar.end for bar in self.bars), default=0.0)
        limit = self.limit[1] if self.limit else 0.0
        return max(longest, limit if limit <= 3 * longest else 0.0)

    def percent(self, size: float) -> str:
        """Return the length of `size` on the scale, as a CSS percentage."""
        return f"{min(100.0, max(0.0, 100 * size / self.scale)) if self.scale > 0 else 0.0:.3f}%"


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A series of a chart. At a point without a value, `values` contains None."""

    label: str
    values: Sequence[float | None]
    style: Style = "line"
    color: str = ""  # if empty, the color of the label


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart that the reader can zoom and inspect, with mouse or keyboard. Areas are stacked."""

    block: ClassVar = "chart"
    title: str
    x: Sequence[float]
    lines: Sequence[ChartLine]
    y_unit: Unit = "number"
    x_unit: Unit = "number"
    x_label: str = ""
    hints: Sequence[str] = ()  # shown at each x
    phases: Sequence[tuple[float, str]] = ()  # where a phase begins, and its name
    limit: tuple[str, float] | None = None
    zero: bool = True  # whether the axis begins at 0

    def to_json(self) -> str:
        """Return the chart as JSON for page.js, escaped for HTML."""
        lines = [
            {**asdict(line), "color": line.color or color_of(line.label, number)}
            for number, line in enumerate(self.lines)
        ]
        # Python would write NaN and Infinity, which JSON.parse of a browser refuses.
        text = json.dumps(asdict(self) | {"lines": lines}, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c")  # so that no text can close the surrounding HTML element


@dataclass(frozen=True, kw_only=True)
class Code:
    """Text to copy: a file, or a command."""

    block: ClassVar = "code"
    most: ClassVar = 50_000  # characters on a page
    text: str
    title: str = ""  # if set, the block is closed until the reader opens it


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG image."""

    block: ClassVar = "picture"
    title: str
    base64: str


Block = Answer | Table | Bars | Chart | Code | Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with a heading. `note` is a sentence that explains the part."""

    title: str
    blocks: Sequence[Block]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page, which begins with its answers."""

    title: str
    answers: Sequence[Answer] = ()
    sections: Sequence[Section] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)  # name -> explanation at the end of the page

    def to_html(self) -> str:
        """Return the page. All text is escaped."""
        # Styles and scripts are within the page. So it is one file, which also opens without a network.
        # A kind of result has sections that many results leave empty. They get no heading.
        filled = [section for section in self.sections if section.blocks]
        charts = any(block.block == "chart" for section in filled for block in section.blocks)
        # The order must not change: page.js uses the global `uPlot` of the first script.
        scripts = [ASSETS / "uPlot.iife.min.js", ASSETS / "page.js"] if charts else []
        styles = [*([ASSETS / "uPlot.min.css"] if charts else []), ASSETS / "page.css"]
        return render(
            "page.html.jinja",
            page=self,
            sections=filled,
            styles=[path.read_text(encoding="utf-8") for path in styles],
            scripts=[path.read_text(encoding="utf-8") for path in scripts],
            # A page is often sent to others, who need to know which release made it.
            version=version("zerofit"),
        )

    def write(self, path: Path, option: str) -> None:
        """Write the page into a file. If this fails, raise a UserError that names `option`."""
        with refused(path, kind="unwritable", where=option, doing="write"):
            write_text(path, self.to_html())


def render(template: str, *folders: Path, **content: object) -> str:
    """Return a page from a template in `folders` or `templates/`. In HTML, values are escaped."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader([*folders, Path(__file__).with_name("templates")])
    # Markdown is not escaped, since its readers would see `&lt;`. jinja2 removes the last newline by default.
    environment = Environment(loader=loader, autoescape=".html" in template, keep_trailing_newline=True)
    return environment.get_template(template).render(**content)


def named(name: str, text: str) -> str:
    """Return `text` with `name` in front, if the page has several sources (`name` is not "")."""
    return f"{name}: {text}" if name else text


def table_of(rows: Iterable[Mapping[str, str]], words: Sequence[str] = (), tones: Sequence[Tone] = ()) -> list[Block]:
    """Return a table of rows that have the same keys, without empty columns; [] without rows."""
    listed = list(rows)
    columns = [key for key in (listed[0] if listed else ()) if any(row[key] for row in listed)]
    cells = [[row[key] for key in columns] for row in listed]
    return [Table(columns=columns, rows=cells, words=words, tones=tones)] if listed else []
