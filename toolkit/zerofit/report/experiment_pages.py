"""Write the Markdown page of `zerofit compare all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerofit.report.page import render
from zerofit.spec.files import write_text
from zerofit.spec.local_machine import versions


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A table of measurements or forecasts, with its title, command, notes and picture."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""  # Markdown above the table
    command: str = ""  # makes only this table
    notes: Sequence[str] = ()  # a list below it
    picture: Path | None = None  # a file below the page's folder
    figures: Mapping[str, object] = field(default_factory=dict)  # the numbers, as plain data


def _table_row(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def write_laboratory(folder: Path, title: str, sections: Sequence[Evidence]) -> Path:
    """Write README.md into `folder`, which has the sections' pictures. Return its path."""
    page = folder / "README.md"
    write_text(page, render("laboratory.md.jinja", title=title, sections=sections, **evidence_values(page)))
    return page


def evidence_values(page: Path) -> dict[str, object]:
    """Return the values that the template evidence.md.jinja needs on every page."""
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {"versions": used, "home": page.parent.absolute(), "line": _table_row}
