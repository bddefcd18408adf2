"""Document 001: batch sizes from 1 to all samples, and what large image sets cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerofit.app.comparing.rows import SizeRow
from zerofit.app.documents.bench import Bench
from zerofit.app.documents.forecast import planned
from zerofit.report.documents import Evidence, Figure, TeachingDocument

MODEL, DATA, SAMPLES = "mlp", "digits", 1438
PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10
SIZES = [1, 4, 16, 64, 256, 1024, SAMPLES]
EPOCHS, LR = 200, 0.01
FEWER = {1: 40}  # epochs of a size of which 200 take minutes
FIRST, LOWER = 0.99, 0.97  # the document's target; one that most sizes reach here
SMALL, FEW = [1, 4], 10  # sizes that are tuned over fewer epochs
LEAST_RATES = [0.001, 0.002, 0.004]  # of one sample; a size's grows with its root
HOURS = {"COCO": (115_000, 40.0), "Open Images": (1_740_000, 40.0 * 24)}  # samples; the document's hours
GPU, GPUS = "v100-16gb", 8
TEXT = f"""`{MODEL}` ({PARAMETERS:,} parameters) on scikit-learn's {SAMPLES:,} training digits of 8x8 pixels, SGD
with momentum 0.9. Of the remaining digits 180 are for validation and 179 for the test. The test score is from the
epoch with the best validation score. Seconds are for one rank, without evaluation. A time with "~" is
extrapolated from the epochs that were trained. All sizes have the learning rate {LR}."""
TUNED_TEXT = f"""Each size was run with {LR} and with {LEAST_RATES} times its square root. Its row shows the
learning rate that reached {LOWER} in the fewest seconds. The sizes {SMALL} were tuned over {FEW} epochs."""
LARGE_TEXT = f"""Forecasts by `zerofit plan` for {GPUS} V100, the oldest GPUs of the catalogue; the document's are not
given. The last columns are the epochs that 40 hours (COCO) and 40 days (Open Images) would then mean."""
LARGE_NOTE = """Open Images has 15 times the images of COCO, and the document trained 24 times as long. Its two
trainings had different epochs or settings."""


def document(bench: Bench) -> TeachingDocument:
    """Train with each size at one learning rate and at tuned ones, and forecast the large sets."""
    fixed: list[SizeRow] = []
    for epochs in dict.fromkeys(FEWER.get(size, EPOCHS) for size in SIZES):
        sizes = [size for size in SIZES if FEWER.get(size, EPOCHS) == epochs]
        fixed += _rows(bench, f"001-fixed-{epochs}", sizes=sizes, epochs=epochs, lr=LR)
    tried: list[Sequence[SizeRow]] = [fixed]
    for number, least in enumerate(LEAST_RATES):
        for name, sizes, epochs in (("small", SMALL, FEW), ("large", [s for s in SIZES if s not in SMALL], EPOCHS)):
            lr = least * min(sizes) ** 0.5
            options = {"sizes": sizes, "epochs": epochs, "lr": lr, "scale_lr": "sqrt"}
            tried.append(_rows(bench, f"001-tuned-{name}-{number}", **options))
    tuned = [soonest([row for rows in tried for row in rows if row.batch_size == size]) for size in SIZES]
    large = _large_sets(bench)
    return TeachingDocument(
        number="001",
        title="the batch size",
        network=f"The document does not name its network. Ours is `{MODEL}` (two linear layers), whose steps are the "
        "fastest.",
        experiment=f"Batch sizes from 1 to all samples, {EPOCHS} epochs each; which reaches a score of 0.99 first?",
        figures=_figures(fixed, tuned, large),
        evidence=[
            _table("One learning rate", TEXT, fixed),
            _table("Tuned learning rates", TUNED_TEXT, tuned),
            _large_table(large),
        ],
    )


def _rows(bench: Bench, name: str, **options: Any) -> Sequence[SizeRow]:
    done = bench.compare(name, MODEL, "batch-size", data=DATA, target=LOWER, seeds=1, **options)
    return done.compared.rows


def reached(row: SizeRow, target: float) -> tuple[int, float] | None:
    """Return the epoch after which a score was reached, and the seconds that it took."""
    points = ((point["epoch"], point["seconds"]) for point in row.curve or () if point["accuracy"] >= target)
    return next(points, None)


def soonest(rows: Sequence[SizeRow]) -> SizeRow:
    """Return the row that reached the target in the fewest seconds, or else has the best score."""

    def rank(row: SizeRow) -> tuple[float, float]:
        found = reached(row, LOWER)
        return (found[1] if found else float("inf"), -(row.best_accuracy or 0.0))

    return min(rows, key=rank)


def first_size(rows: Sequence[SizeRow], target: float) -> str:
    """Return the size that reached a score in the fewest seconds."""
    found = {row.batch_size: moment for row in rows if (moment := reached(row, target))}
    if not found:
        return "none"
    size = min(found, key=lambda one: found[one][1])
    return f"{size} ({found[size][1]:.2g} s, epoch {found[size][0]})"


def _table(title: str, text: str, rows: Sequence[SizeRow]) -> Evidence:
    columns = [
        "batch size",
        "learning rate",
        "epochs",
        "iterations",
        "seconds",
        "best validation (epoch)",
        "test score",
    ]
    columns[5:5] = [f"{what}{target}" for target in (FIRST, LOWER) for what in ("epoch of ", "seconds to ")]
    cells = []
    for row in rows:
        if not row.curve:
            cells.append([str(row.batch_size), f"{row.lr:.3g}", row.reason or row.status])
            continue
        moments = [reached(row, target) or ("-", None) for target in (FIRST, LOWER)]
        shown = [cell for epoch, s in moments for cell in (str(epoch), "-" if s is None else f"{s:.2f}")]
        epochs = len(row.curve)
        seconds = f"{'~' * (epochs < EPOCHS)}{(row.seconds_per_epoch or 0.0) * EPOCHS:.1f}"
        first = [str(row.batch_size), f"{row.lr:.3g}", str(epochs), f"{row.steps:,}", seconds]
        best = f"{row.best_accuracy:.4f} ({row.best_epoch})"
        cells.append([*first, *shown, best, f"{row.test_accuracy:.4f}"])
    figures = {"rows": [row.to_dict() for row in rows]}
    return Evidence(title=title, text=text, columns=columns, rows=cells, figures=figures)


def _large_sets(bench: Bench) -> dict[str, dict[str, Any]]:
    """Plan ResNet-152 at the sizes and precisions that the document may have had."""
    found = {}
    for precision, side, batch in (("fp16", 224, 256), ("fp32", 224, 256), ("fp32", 800, 64)):
        options = {"precision": precision, "image": f"image:3x{side}x{side}", "global_batch": batch}
        name = f"001-resnet152-{precision}-{side}"
        found[f"{precision}, {side} pixels"] = planned(bench, name, "resnet152", GPU, GPUS, **options)
    return found


def epochs_within(hours: float, samples: int, samples_per_s: float) -> float:
    """Return the number of epochs of `samples` samples in `hours` hours."""
    return hours * 3600 * samples_per_s / samples


def _large_table(large: dict[str, dict[str, Any]]) -> Evidence:
    rows = []
    for name, found in large.items():
        speed = found["samples_per_s"]
        minutes = [f"{samples / speed / 60:.1f} min" for samples, _ in HOURS.values()]
        epochs = [f"{epochs_within(hours, samples, speed):,.0f}" for samples, hours in HOURS.values()]
        rows.append([name, found["layout"], f"{speed:,.0f}", *minutes, *epochs, f"`{found['command']}`"])
    columns = ["ResNet-152", "best layout", "images/s", *(f"an epoch of {name}" for name in HOURS)]
    columns += ["epochs in 40 h (COCO)", "epochs in 40 days (Open Images)", "command"]
    about = {"title": "ResNet-152 on large image sets", "text": LARGE_TEXT, "notes": [LARGE_NOTE]}
    return Evidence(**about, columns=columns, rows=rows, figures=large)


def _step_costs(rows: Sequence[SizeRow]) -> str:
    """Return why neither the smallest nor the largest size is first."""
    seconds = {row.batch_size: row.seconds / row.steps for row in rows if row.seconds and row.steps}
    words = "Larger sizes make fewer steps an epoch, and need more epochs. One seed."
    if not {1, 64} <= seconds.keys():
        return words
    return f"A step of 64 samples takes {seconds[64] / seconds[1]:.1f} times as long as one of 1. {words}"


def _figures(fixed: Sequence[SizeRow], tuned: Sequence[SizeRow], large: dict[str, dict[str, Any]]) -> list[Figure]:
    best = max(fixed, key=lambda row: row.best_accuracy or 0.0)
    right = round(180 * (best.best_accuracy or 0.0))
    before, after = first_size(fixed, LOWER), first_size(tuned, LOWER)
    why = f"0.99 is 179 of 180 validation digits; with one learning rate the best size has {right}. "
    moved = before.split()[0] != after.split()[0]
    why += "The fastest size depends on the learning rate: with tuned rates it is another one." if moved else ""
    figures = [
        Figure(
            name="first size to 0.99",
            theirs="256",
            ours=f"{first_size(fixed, FIRST)}; tuned {first_size(tuned, FIRST)}",
            why=why,
        ),
        Figure(name="first size to 0.97", theirs="-", ours=f"{before}; tuned {after}", why=_step_costs(fixed)),
    ]
    plan = large["fp32, 800 pixels"]
    other = "Forecast for V100 in fp32 at 800 pixels. GPUs, image size and epochs of the document are not given."
    for name, (samples, hours) in HOURS.items():
        epochs = epochs_within(hours, samples, plan["samples_per_s"])
        ours = f"{hours / epochs:.2f} h an epoch: {epochs:,.0f} epochs"
        shown = f"{hours:.0f} h" if hours < 100 else f"{hours / 24:.0f} days"
        figures.append(Figure(name=f"ResNet-152 on {name}, {samples:,} images", theirs=shown, ours=ours, why=other))
    return figures
