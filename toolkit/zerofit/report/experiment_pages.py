"""Write pages of experiments in Markdown, for the teaching documents and for a laboratory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofit.report.page import render
from zerofit.spec.files import write_text
from zerofit.spec.local_machine import usable_cores, versions


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a document and ours. `theirs` is "-" if the document has none."""

    name: str
    theirs: str
    ours: str
    why: str = ""  # reason for the difference


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A table of our measurements or forecasts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""  # Markdown above the table
    command: str = ""  # makes only this table
    notes: Sequence[str] = ()  # a list below it
    picture: Path | None = None  # a file below the page's folder
    figures: Mapping[str, Any] = field(default_factory=dict)  # the numbers, for `--json`


@dataclass(frozen=True, kw_only=True)
class TeachingDocument:
    """One document's network and experiment, its figures and our figures, and the tables with our measurements."""

    number: str
    title: str
    network: str
    experiment: str
    figures: Sequence[Figure]
    evidence: Sequence[Evidence]

    def to_dict(self) -> dict[str, Any]:
        """Return the document as plain data."""
        data = asdict(self)
        for evidence in data["evidence"]:
            evidence["picture"] = str(evidence["picture"]) if evidence["picture"] else None
        return data


def _line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def write_documents(page: Path, documents: Sequence[TeachingDocument]) -> None:
    """Write the page, with pictures linked relative to it."""
    _write(page, "documents.md.jinja", documents=documents, cores=usable_cores(), name=page.name)


def write_laboratory(folder: Path, title: str, sections: Sequence[Evidence]) -> Path:
    """Write README.md into the folder of the sections' pictures; return its path."""
    _write(folder / "README.md", "laboratory.md.jinja", title=title, sections=sections)
    return folder / "README.md"


def _write(page: Path, template: str, **content: Any) -> None:
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    write_text(page, render(template, **content, versions=used, home=page.parent.absolute(), line=_line))


def draw_epochs(lines: Mapping[str, Sequence[Sequence[float]]], label: str, out: Path) -> None:
    """Draw each run's values over the epochs into a PNG. Runs of one name share a colour. `label`: the axis label."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    canvas = Canvas(figsize=(7, 3.6), layout="constrained")
    axes, shades = canvas.subplots(), colormaps["viridis"]
    for number, (name, runs) in enumerate(lines.items()):
        for first, values in zip((name, *[None] * len(runs)), runs, strict=False):
            axes.plot(range(1, len(values) + 1), values, color=shades(0.75 * number), marker=".", label=first)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    canvas.savefig(out, dpi=100)
