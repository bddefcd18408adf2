"""The comparisons as a table, a JSON file and a scatter plot."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from zerofit.launch.host import this_machine

from .comparison import TARGETS, Comparison, percent

PACKAGES = ("zerofit", "torch", "deepspeed", "transformers", "torchvision")
COLUMNS = {
    "simulated": "simulate",
    "with_kernels": "simulate, kernels measured",
    "planned": "plan",
    "answered": "simulate without --rank",
}
MEBI = 2**20


def table(found: Sequence[Comparison]) -> Table:
    """One row a configuration: the highest peak of any rank and step, and the error that is furthest from 0."""
    made = Table("configuration", title="peak of a training step: real, and the largest error of all ranks and steps")
    made.add_column("real MiB", justify="right")
    for title in COLUMNS.values():
        made.add_column(title, justify="right")
    for one in found:
        highest = max(peak.real_bytes for peak in one.peaks if peak.step >= 0)
        made.add_row(one.name, f"{highest / MEBI:,.1f}", *(percent(one.worst(what)) for what in COLUMNS))
    return made


def summary(found: Sequence[Comparison]) -> str:
    """Median and maximum of each kind of forecast, beside their goals."""
    goals = {goal.forecast: f" (goal: {goal.median:.1%}, {goal.most:.0%})" for goal in TARGETS}
    lines = [
        f"{title}: median {figures['median']:.4%}, largest {figures['most']:.3%} of {figures['count']}"
        + goals.get(what, "")
        for what, title in COLUMNS.items()
        if (figures := errors(found, what))
    ]
    return "\n".join([f"{len(found)} configurations, each rank and step:", *lines])


def errors(found: Sequence[Comparison], forecast: str) -> dict[str, float]:
    """Median and maximum of the errors' sizes, and how many there are; empty where there are none."""
    sizes = [abs(error) for one in found for error in one.errors(forecast)]
    return {"median": statistics.median(sizes), "most": max(sizes), "count": len(sizes)} if sizes else {}


def write(found: Sequence[Comparison], path: Path) -> None:
    """All peaks, with when and on what they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {forecast: errors(found, forecast) for forecast in COLUMNS}
    everything = {**surroundings(), "errors": figures, "configurations": [one.as_dict() for one in found]}
    path.write_text(json.dumps(everything, indent=1) + "\n")


def surroundings() -> dict[str, Any]:
    """Date, hardware and versions; nothing that names a machine or a person."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = this_machine()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {
            "device": models[0].partition(":")[2].strip() if models else machine.device_name,
            "cores": machine.cores,
            "threads_a_rank": 1,
        },
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def draw(found: Sequence[Comparison], path: Path) -> None:
    """Forecasts over real peaks, and below them the errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 8), height_ratios=(2, 1), sharex=True, layout="tight")
    steps = [peak for one in found for peak in one.peaks if peak.step >= 0]
    series = {
        "simulate, every rank and step": ("o", [(p.real_bytes / MEBI, p.simulated_bytes / MEBI) for p in steps]),
        "the same, kernels' scratch measured": (
            ".",
            [(p.real_bytes / MEBI, p.with_kernels_bytes / MEBI) for p in steps],
        ),
        "plan, the rank that needs most": (
            "+",
            [(one.highest.real_bytes / MEBI, one.planned_bytes / MEBI) for one in found],
        ),
    }
    for title, (mark, pairs) in series.items():
        real, forecast = zip(*pairs, strict=True)
        above.scatter(real, forecast, marker=mark, s=24, alpha=0.6, label=title)
        below.scatter(real, [100 * (f / r - 1) for r, f in pairs], marker=mark, s=24, alpha=0.6)
    limits = [pick(peak.real_bytes / MEBI for peak in steps) for pick in (min, max)]
    above.plot(limits, limits, color="grey", linewidth=0.8)
    above.set(xscale="log", yscale="log", ylabel="forecast MiB", title="Peak memory: forecast against real runs")
    above.legend()
    below.axhline(0, color="grey", linewidth=0.8)
    below.set(xlabel="real MiB (allocator meter)", ylabel="error %")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
