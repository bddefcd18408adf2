"""Pictures of comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLUE, GREEN, RED, SAND, GRAY = "#332288", "#117733", "#CC6677", "#DDCC77", "#999999"  # Paul Tol's "muted" scheme
MIB = 2**20
Rows = Sequence[dict[str, Any]]


def draw(kind: str, about: dict[str, Any], rows: Rows, out: Path) -> None:
    """Draw a comparison into a PNG."""
    from matplotlib.figure import Figure

    good = [row for row in rows if row["status"] == "ok"]
    heights = {"strategies": 2.4 + 0.34 * len(good), "batch-size": 7.5, "scaling": 4.2}
    figure = Figure(figsize=(11, heights[kind]), layout="constrained")
    figure.suptitle(_title(about), fontsize=11)
    if good:
        {"strategies": _strategies, "batch-size": _sizes, "scaling": _scaling}[kind](figure, about, good)
    figure.savefig(out, dpi=120)


def _title(about: dict[str, Any]) -> str:
    device, ranks = "GPU" if about["accelerator"] == "cuda" else "CPU rank", about.get("ranks", 1)
    return f"{about['model']} on {about['data']}, {ranks} {device}{'s' if ranks > 1 else ''}"


def _strategies(figure: Any, about: dict[str, Any], rows: Rows) -> None:
    """Speed, memory and traffic side by side; below them the staleness of asynchronous updates."""
    stale = [row for row in rows if row.get("staleness")]
    counted = all(row["comm_bytes_per_step"] is not None for row in rows)
    heights = [max(3.0, 0.34 * len(rows)), 1.6]
    grid = figure.add_gridspec(1 + bool(stale), 2 + counted, height_ratios=heights[: 1 + bool(stale)])
    names = [row["strategy"] for row in rows]
    places = list(range(len(rows)))[::-1]
    columns = [
        ("samples a second", [row["samples_per_s"] for row in rows], BLUE),
        ("peak memory a rank (MiB)", [row["peak_bytes_per_rank"] / MIB for row in rows], GREEN),
    ]
    if counted:
        columns.append(("sent a step, all ranks (MiB)", [row["comm_bytes_per_step"] / MIB for row in rows], RED))
    for column, (label, values, colour) in enumerate(columns):
        axes = figure.add_subplot(grid[0, column])
        bars = axes.barh(places, values, color=colour)
        axes.bar_label(bars, labels=[_short(value) for value in values], padding=2, fontsize=7)
        axes.set_yticks(places, names if column == 0 else [""] * len(names), fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.18, y=0.02)
        _plain(axes)
    if stale:
        axes = figure.add_subplot(grid[1, :])
        for row, colour in zip(stale, (SAND, RED), strict=False):
            axes.step(range(1, len(row["staleness"]) + 1), row["staleness"], where="mid", color=colour)
        axes.set(xlabel="update of the server, asynchronous parameter server", ylabel="staleness\n(updates between)")
        axes.yaxis.get_major_locator().set_params(integer=True)
        _plain(axes)


def _sizes(figure: Any, about: dict[str, Any], rows: Rows) -> None:
    """Time to the target, accuracy, time of all epochs, the gradient's noise; each against the batch size."""
    sizes = sorted({row["batch_size"] for row in rows})
    first, second = figure.subplots(2, 2)
    words = f"seconds to {about['target']:.0%} accuracy"
    _spread(first[0], sizes, rows, "seconds_to_target", words, BLUE)
    missed = [n for n in sizes if not any(r["seconds_to_target"] for r in rows if r["batch_size"] == n)]
    if missed:
        first[0].set_title("not reached: " + ", ".join(map(str, missed)), fontsize=8, loc="right")
    _spread(first[1], sizes, rows, "final_accuracy", f"accuracy after {about['epochs']} epochs", GREEN)
    _spread(second[0], sizes, rows, "seconds", f"seconds for {about['epochs']} epochs", RED)
    _spread(second[1], sizes, rows, "noise_scale", "gradient noise scale (samples)", SAND)


def _spread(axes: Any, sizes: Sequence[int], rows: Rows, key: str, label: str, colour: str) -> None:
    """Each run a dot, medians joined."""
    known = [(row["batch_size"], row[key]) for row in rows if row.get(key) is not None]
    axes.plot(*zip(*known, strict=True), "o", color=colour, alpha=0.5, markersize=5) if known else None
    there = [size for size in sizes if any(size == one for one, _ in known)]
    axes.plot(there, [statistics.median(v for s, v in known if s == size) for size in there], "-", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="batch size", ylabel=label)
    _plain(axes)


def _scaling(figure: Any, about: dict[str, Any], rows: Rows) -> None:
    """Speed-up beside the ideal, and efficiency."""
    speed, efficiency = figure.subplots(1, 2)
    counts = sorted({row["ranks"] for row in rows})
    speed.plot(counts, counts, ":", color=GRAY, label="ideal")
    for mode, colour in (("weak", BLUE), ("strong", RED)):
        mine = [row for row in rows if row["mode"] == mode and row.get("speedup")]
        speed.plot([r["ranks"] for r in mine], [r["speedup"] for r in mine], "o-", color=colour, label=mode)
        efficiency.plot([r["ranks"] for r in mine], [r["efficiency"] for r in mine], "o-", color=colour, label=mode)
    speed.set(xlabel="ranks", ylabel="speed-up", xticks=counts)
    efficiency.set(xlabel="ranks", ylabel="efficiency", xticks=counts, ylim=(0, 1.1))
    for axes in (speed, efficiency):
        axes.legend(frameon=False)
        _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
