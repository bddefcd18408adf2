"""What a comparison has found as files: results.json, a table as CSV, a picture and a page."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerofit.report.compare_page import page
from zerofit.report.compare_plot import draw
from zerofit.spec.files import write_json
from zerofit.spec.versions import versions

NESTED = (list, dict)


def write_comparison(
    folder: Path, kind: str, about: dict[str, Any], rows: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Write all of them; the answer for --json. `more`: what goes into results.json besides."""
    paths = {name: folder / name for name in ("results.json", "results.csv", "comparison.png", "comparison.html")}
    result = {"kind": kind, "about": about, "versions": versions(), "rows": list(rows), **more}
    write_json(paths["results.json"], result)
    _write_csv(paths["results.csv"], rows)
    draw(kind, about, rows, paths["comparison.png"])
    paths["comparison.html"].write_text(page(kind, about, rows, paths["comparison.png"]), encoding="utf-8")
    return {**result, "written": [str(path) for path in paths.values()]}


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line a row; curves and the like are in results.json alone."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, NESTED)))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
