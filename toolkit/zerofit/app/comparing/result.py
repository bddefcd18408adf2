"""What a comparison returns: its rows, and the files they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal

from zerofit.app.comparing.rows import AnyRow, SizeSummary
from zerofit.report.compare_files import write_comparison
from zerofit.report.compare_page import COLUMNS, FIRST, cells
from zerofit.report.compare_plot import draw
from zerofit.report.html_table import html_table
from zerofit.spec.versions import versions

Kind = Literal["strategies", "batch-size", "scaling"]


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[AnyRow]):
    """The rows of a comparison, and the files they are in."""

    kind: Kind
    about: dict[str, Any]  # what is the same for all rows
    rows: Sequence[AnyRow]
    summary: Sequence[SizeSummary] | None = None  # of batch sizes, over the seeds
    written: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit compare --json` prints; without `written` it is results.json."""
        data = {"kind": self.kind, "about": self.about, "versions": versions()}
        data["rows"] = [row.to_dict() for row in self.rows]
        if self.summary is not None:
            data["summary"] = [asdict(one) for one in self.summary]
        return {**data, "written": list(self.written)}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the column names and the cells of all rows."""
        rows = []
        for row in self.rows:
            figures = cells(self.kind, row.to_dict()) if row.status == "ok" else [row.status]
            rows.append([self.name_of(row), *figures])
        return [FIRST[self.kind].replace("_", " "), *(label for label, _, _ in COLUMNS[self.kind])], rows

    def name_of(self, row: AnyRow) -> str:
        """Return the first cell of a row."""
        return str(getattr(row, FIRST[self.kind]))

    def plot(self, path: Path | str) -> None:
        """Draw the comparison into a PNG."""
        draw(self.kind, self.about, [row.to_dict() for row in self.rows], Path(path))

    def write(self, folder: Path) -> Comparison[AnyRow]:
        """Write results.json, a CSV, a picture and a page; return the comparison with their paths."""
        return replace(self, written=write_comparison(folder, self.to_dict()))

    def _repr_html_(self) -> str:
        return html_table(f"{self.about['model']} on {self.about['data']}", *self.table())
