"""Document 001: batch sizes from 1 to all samples, and the training time of large image sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.documents.document import DocumentRun
from benchmarks.documents.page import TeachingDocument
from zerofit.app.comparing.laboratory import Evidence
from zerofit.app.comparing.rows import SizeRow

TARGETS = ("0.99", "0.97")  # the document's target, and a target that most sizes reach here
EPOCHS = 200
VALID = 180  # validation digits
IMAGE_SETS = {"COCO": (115_000, 40.0), "Open Images": (1_740_000, 40.0 * 24)}  # images; the document's hours


def repeat(document: DocumentRun) -> TeachingDocument:
    """Train with each size at one learning rate and at tuned learning rates, and forecast the large sets."""
    rows = {name: document.compare(name).compared.rows for name in document.entry["experiments"]}
    fixed = [row for name in rows if name.startswith("fixed") for row in rows[name]]
    tried = [row for some in rows.values() for row in some]
    tuned = [soonest([row for row in tried if row.batch_size == size]) for size in (row.batch_size for row in fixed)]
    plans = document.plans()
    evidence = [_size_table(document, "fixed", fixed), _size_table(document, "tuned", tuned)]
    evidence.append(document.plan_table(plans, _plan_cells))
    return document.page(_values(fixed, tuned, plans["resnet152-fp32-800"]["samples_per_s"]), evidence)


def _values(fixed: Sequence[SizeRow], tuned: Sequence[SizeRow], images_per_s: float) -> dict[str, Any]:
    """Return the values of the document's figures."""
    first = {target: first_size(fixed, float(target)) for target in TARGETS}
    first_tuned = {target: first_size(tuned, float(target)) for target in TARGETS}
    moved = first["0.97"].split()[0] != first_tuned["0.97"].split()[0]
    epochs = {}
    for name, (images, hours) in IMAGE_SETS.items():
        count = epochs_within(hours, images, images_per_s)
        epochs[name] = f"{hours / count:.2f} h an epoch: {count:,.0f} epochs"
    return {
        "first": first,
        "first_tuned": first_tuned,
        "right": round(VALID * max(row.best_accuracy or 0.0 for row in fixed)),
        "moved": "The fastest size depends on the learning rate: with tuned rates another size is the fastest." * moved,
        "step_cost": _step_cost(fixed),
        "epochs": epochs,
    }


def reached(row: SizeRow, target: float) -> tuple[int, float] | None:
    """Return the epoch in which a score was reached, and the training time until then in seconds."""
    points = ((point["epoch"], point["seconds"]) for point in row.curve or () if point["accuracy"] >= target)
    return next(points, None)


def soonest(rows: Sequence[SizeRow]) -> SizeRow:
    """Return the row that reached 0.97 in the fewest seconds; if no row reached it, the row with the best score."""

    def rank(row: SizeRow) -> tuple[float, float]:
        moment = reached(row, 0.97)
        return (moment[1] if moment else float("inf"), -(row.best_accuracy or 0.0))

    return min(rows, key=rank)


def first_size(rows: Sequence[SizeRow], target: float) -> str:
    """Return the size that reached a score in the fewest seconds."""
    moments = {row.batch_size: moment for row in rows if (moment := reached(row, target))}
    if not moments:
        return "none"
    size = min(moments, key=lambda size: moments[size][1])
    return f"{size} ({moments[size][1]:.2g} s, epoch {moments[size][0]})"


def _size_table(document: DocumentRun, name: str, rows: Sequence[SizeRow]) -> Evidence:
    cells = []
    for row in rows:
        first = [str(row.batch_size), f"{row.lr:.3g}"]
        if not row.curve:
            cells.append([*first, row.reason or row.status])
            continue
        epochs = len(row.curve)
        seconds = f"{'~' * (epochs < EPOCHS)}{(row.seconds_per_epoch or 0.0) * EPOCHS:.1f}"
        moments = [reached(row, float(target)) for target in TARGETS]
        when = [cell for moment in moments for cell in ([str(moment[0]), f"{moment[1]:.2f}"] if moment else "--")]
        best = f"{row.best_accuracy:.4f} ({row.best_epoch})"
        cells.append([*first, str(epochs), f"{row.steps:,}", seconds, *when, best, f"{row.test_accuracy:.4f}"])
    return document.table(name, rows=cells, figures={"rows": [row.to_dict() for row in rows]})


def epochs_within(hours: float, samples: int, samples_per_s: float) -> float:
    """Return the number of epochs of `samples` samples in `hours` hours."""
    return hours * 3600 * samples_per_s / samples


def _plan_cells(plan: Mapping[str, Any]) -> list[str]:
    """Return images per second, minutes of an epoch, and epochs in the document's hours."""
    speed = plan["samples_per_s"]
    minutes = [f"{images / speed / 60:.1f} min" for images, _ in IMAGE_SETS.values()]
    epochs = [f"{epochs_within(hours, images, speed):,.0f}" for images, hours in IMAGE_SETS.values()]
    return [f"{speed:,.0f}", *minutes, *epochs]


def _step_cost(rows: Sequence[SizeRow]) -> str:
    """Return a sentence that explains why the smallest size does not reach the target first."""
    # A small batch does not fill the processor, so 64 samples cost far less than 64 times one sample.
    seconds = {row.batch_size: row.seconds / row.steps for row in rows if row.seconds and row.steps}
    if not {1, 64} <= seconds.keys():
        return ""
    return f"A step of 64 samples takes {seconds[64] / seconds[1]:.1f} times as long as one of 1. "
