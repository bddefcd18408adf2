"""A placement as lines of text."""

from __future__ import annotations

import re

from zerofit.infer.placement import Placement
from zerofit.spec.units import shown_bytes


def table(placement: Placement) -> list[str]:
    """Lines that show which device holds what, how much that is, and what else it needs."""
    rows = [("device", "weights", "layer", "working", "needed", "allowed", "modules")]
    for row in placement.rows:
        allowed = "any" if row.allowed is None else shown_bytes(row.allowed)
        sizes = (row.weights, row.layer, row.working, row.needed)
        rows.append((str(row.device), *map(shown_bytes, sizes), allowed, ", ".join(ranges(row.modules)) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return ["  ".join([*(f"{w:>{n}}" for w, n in zip(row, widths, strict=False)), row[6]]) for row in rows]


def ranges(names: tuple[str, ...]) -> list[str]:
    """Names in their order, with runs of numbered ones as one: "model.layers.0-21"."""
    out: list[tuple[str, int | None, int | None]] = []
    for name in names:
        found = re.fullmatch(r"(.*\.)(\d+)", name)
        if not found:
            out.append((name, None, None))
        elif out and out[-1][0] == found[1] and out[-1][2] == int(found[2]) - 1:
            out[-1] = (found[1], out[-1][1], int(found[2]))
        else:
            out.append((found[1], int(found[2]), int(found[2])))
    return [p if a is None else f"{p}{a}" if a == b else f"{p}{a}-{b}" for p, a, b in out]
