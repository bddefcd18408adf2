"""Compare a forecast step with a measured step, by module and kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.report.plot import check_picture, save
from zerofit.report.traces import HOST, Part, read_trace
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.files import field_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 16  # rows in the picture


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """The busy seconds of one kind of work in one module in a step, of each trace's first rank."""

    module: str  # "block" for all blocks; "" outside of the model
    kind: str
    forecast_s: float
    measured_s: float

    @property
    def off_s(self) -> float:
        """Measured minus forecast seconds."""
        return self.measured_s - self.forecast_s

    @property
    def what(self) -> str:
        """The module and the kind, as text."""
        return f"{self.module}: {self.kind}" if self.module else self.kind


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """A forecast step, and the same step measured by torch.profiler."""

    forecast_step_s: float
    measured_step_s: float
    rows: tuple[TraceRow, ...]  # largest difference first
    picture: Path

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `zerofit plot --trace --json`."""
        rows = [{**field_data(row), "off_s": row.off_s} for row in self.rows]
        return {**field_data(self, "rows", "picture"), "rows": rows, "picture": str(self.picture)}


def compare_traces(paths: Sequence[Path], out: Path) -> TraceComparison:
    """Read a forecast and a measured trace (in any order), and draw them.

    Raises UserError with all problems.
    """
    problems = Problems()
    traces = [problems.attempt(lambda path=path: read_trace(path)) for path in paths]
    check_picture(out, "--out", problems)
    problems.raise_if_any()
    read = sorted((trace for trace in traces if trace), key=lambda trace: not trace.forecast)  # the forecast first
    # False sorts before True, so a forecast comes first, whatever the order of the paths.
    if [trace.forecast for trace in read] != [True, False]:
        message = f"--trace names {len(read)} traces, {sum(trace.forecast for trace in read)} of them forecasts"
        hint = "give one from --trace of `zerofit plan` or `simulate`, and one of `zerofit train --profile`"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--trace"))
    forecast, measured = read
    left_out = {HOST} if forecast.on_device or measured.on_device else set()  # the host runs ahead of the device
    parts: dict[Part, None] = dict.fromkeys([*forecast.parts, *measured.parts])
    rows = [
        TraceRow(**part._asdict(), forecast_s=forecast.parts.get(part, 0.0), measured_s=measured.parts.get(part, 0.0))
        for part in parts
        if part.kind not in left_out
    ]
    rows.sort(key=lambda row: -abs(row.off_s))
    comparison = TraceComparison(
        forecast_step_s=forecast.step_s, measured_step_s=measured.step_s, rows=tuple(rows), picture=out
    )
    save(_figure(comparison), out, "--out", dpi=120)
    return comparison


def _figure(comparison: TraceComparison) -> Figure:
    from matplotlib.figure import Figure

    rows = comparison.rows[:MOST][::-1]  # the first row at the top
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    heights = range(len(rows))
    for shift, name, step_s in (
        (0.2, "forecast", comparison.forecast_step_s),
        (-0.2, "measured", comparison.measured_step_s),
    ):
        widths = [1e3 * getattr(row, f"{name}_s") for row in rows]
        axes.barh([height + shift for height in heights], widths, height=0.38, label=f"{name}: {step_s:.3g} s per step")
    axes.set_yticks(list(heights), [row.what for row in rows])
    axes.set_xlabel("busy milliseconds per step, largest difference first")
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    return figure
