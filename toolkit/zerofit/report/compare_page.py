"""A comparison as one HTML file that needs no network: the table, the picture, what each row means."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerofit.spec.units import shown_bytes

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 78rem; padding: 1rem; color: #222; }
h1 { font-size: 1.25rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td.reason { text-align: left; white-space: normal; min-width: 18rem; color: #555; }
tr.failed td:first-child { color: #b00020; }
tr.not-here td:first-child { color: #777; }
img { max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; color: #555; }
@media (max-width: 40rem) { body { padding: .5rem; } th, td { padding: .25rem .35rem; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ words }}</p>
<div class="wide"><table>
<thead><tr>{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows -%}
<tr class="{{ row.status }}"><td title="{{ row.title }}">{{ row.name }}</td>
{%- if row.reason %}<td class="reason" colspan="{{ columns | length - 1 }}">{{ row.reason }}</td>
{%- else %}{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}{% endif %}</tr>
{% endfor -%}
</tbody></table></div>
<p><img alt="{{ title }}, drawn" src="data:image/png;base64,{{ picture }}"></p>
<dl>{% for name, meaning in meanings %}<dt>{{ name }}</dt><dd>{{ meaning }}</dd>{% endfor %}</dl>
</body>
</html>
"""
Column = tuple[str, str, Callable[[Any], str]]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{value:.1%}"


COLUMNS: dict[str, list[Column]] = {
    "strategies": [
        ("samples/s", "samples_per_s", _rate),
        ("tokens/s", "tokens_per_s", _rate),
        ("speed-up", "speedup", lambda v: f"{v:.2f}"),
        ("efficiency", "efficiency", _share),
        ("memory a rank", "peak_bytes_per_rank", shown_bytes),
        ("process", "host_bytes_per_rank", shown_bytes),
        ("sent a step", "comm_bytes_per_step", lambda v: shown_bytes(round(v))),
        ("loss", "loss", lambda v: f"{v:.4f}"),
        ("accuracy", "accuracy", _share),
        ("weights differ by", "max_weight_difference", lambda v: f"{v:.1e}"),
        ("lines", "lines", str),
    ],
    "batch-size": [
        ("seed", "seed", str),
        ("lr", "lr", lambda v: f"{v:.3g}"),
        ("seconds", "seconds", lambda v: f"{v:.1f}"),
        ("epochs to target", "epochs_to_target", str),
        ("seconds to target", "seconds_to_target", lambda v: f"{v:.1f}"),
        ("final accuracy", "final_accuracy", _share),
        ("best accuracy", "best_accuracy", _share),
        ("noise scale", "noise_scale", _rate),
    ],
    "scaling": [
        ("ranks", "ranks", str),
        ("batch", "global_batch", str),
        ("samples/s", "samples_per_s", _rate),
        ("speed-up", "speedup", lambda v: f"{v:.2f}"),
        ("efficiency", "efficiency", _share),
        ("sent a step", "comm_bytes_per_step", lambda v: shown_bytes(round(v))),
    ],
}
FIRST = {"strategies": "strategy", "batch-size": "batch_size", "scaling": "mode"}
MISSING = {"epochs_to_target": "not reached", "seconds_to_target": "not reached"}
MEANINGS = {
    "strategies": [
        ("speed-up, efficiency", "against one device; efficiency is the speed-up by the number of ranks"),
        ("memory a rank", "on a GPU what torch had allocated at most, on a CPU by how much the process grew at most"),
        ("process", "the most host memory that a process had, libraries included"),
        ("sent a step", "by all processes together, as the kernel counts bytes of their connections; not with NCCL"),
        ("ranks", "one for those that take one device"),
        ("weights differ by", "the largest difference of any weight to the single device's after the same samples"),
        ("lines", "code of the strategy's own file, without imports and docstrings"),
    ],
    "batch-size": [
        ("seconds", "of training, without evaluations"),
        ("noise scale", "the batch size at which a gradient's noise is as large as the gradient (McCandlish 2018)"),
    ],
    "scaling": [
        ("weak", "the batch grows with the ranks"),
        ("strong", "the batch stays the same, each rank gets a smaller share"),
    ],
}


def cells(kind: str, row: dict[str, Any]) -> list[str]:
    """A row's figures in the columns of its kind."""
    return [show(row[key]) if row.get(key) is not None else MISSING.get(key, "-") for _, key, show in COLUMNS[kind]]


def page(kind: str, about: dict[str, Any], rows: Sequence[dict[str, Any]], picture: Path) -> str:
    """The whole file."""
    from jinja2 import Environment

    named = {name: value for name, value in about.items() if value not in (None, {}) and name not in ("model", "data")}
    template = Environment(autoescape=True).from_string(PAGE)
    return template.render(
        title=f"{about['model']} on {about['data']}: {kind.replace('-', ' ')}",
        words=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items()),
        columns=[FIRST[kind].replace("_", " "), *(label for label, _, _ in COLUMNS[kind])],
        rows=[
            {
                "name": row[FIRST[kind]],
                "title": row.get("title", ""),
                "status": row["status"],
                "reason": row["reason"],
                "cells": cells(kind, row),
            }
            for row in rows
        ],
        picture=base64.b64encode(picture.read_bytes()).decode(),
        meanings=MEANINGS[kind],
    )
