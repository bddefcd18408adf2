"""The page about the teaching documents, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerofit.app.comparing.laboratory import Evidence, evidence_values
from zerofit.report.page import render
from zerofit.spec.files import write_text
from zerofit.spec.local_machine import usable_cores


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a document and ours. `theirs` is "-" if the document has none."""

    name: str
    theirs: str
    ours: str
    why: str = ""  # reason for the difference


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


def write_documents(page: Path, documents: Sequence[TeachingDocument]) -> None:
    """Write the page, with pictures linked relative to it."""
    content = {"documents": documents, "cores": usable_cores(), "name": page.name, **evidence_values(page)}
    write_text(page, render("documents.md.jinja", Path(__file__).parent, **content))


def draw_epochs(lines: Mapping[str, Sequence[Sequence[float]]], label: str, out: Path) -> None:
    """Draw each run's values over the epochs into a PNG. Runs of one name share a color. `label`: the axis label."""
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
