"""What a comparison has found as files: results.json, a table as CSV, a picture and a page."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerofit.report.compare_page import page
from zerofit.report.compare_plot import draw
from zerofit.spec.files import write_json

NESTED = (list, dict)


def write_comparison(folder: Path, result: dict[str, Any]) -> list[str]:
    """Write all of them from the answer of `zerofit compare --json`; return their paths."""
    paths = {name: folder / name for name in ("results.json", "results.csv", "comparison.png", "comparison.html")}
    kind, about, rows = result["kind"], result["about"], result["rows"]
    write_json(paths["results.json"], {name: value for name, value in result.items() if name != "written"})
    _write_csv(paths["results.csv"], rows)
    draw(kind, about, rows, paths["comparison.png"])
    paths["comparison.html"].write_text(page(kind, about, rows, paths["comparison.png"]), encoding="utf-8")
    return [str(path) for path in paths.values()]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line a row; curves and the like are in results.json alone."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, NESTED)))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
