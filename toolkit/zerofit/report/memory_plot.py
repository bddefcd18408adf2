"""Plot the memory of one simulated rank over its run, stacked by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.report.page import COLORS
from zerofit.report.plot import PICTURES, save
from zerofit.spec.files import refuse_target
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DARK, _RED = "#222222", "#B00020"
_BEHIND = {"boxstyle": "square,pad=0.2", "facecolor": "white", "alpha": 0.85, "linewidth": 0}  # behind text over areas


# The live bytes after an allocation or a release, as `zerofit simulate --json` has it: t (how many came before), phase,
# step, bytes (by kind)
Point = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """The timeline to draw."""

    points: Sequence[Point]  # in order of time
    title: str = ""
    device: str = "device"
    device_total_bytes: int = 0  # 0: unknown
    peak_at: str = ""  # module and line of code
    measured: Sequence[int] = ()  # peak bytes of each phase of a real run, drawn over the forecast

    @cached_property
    def phases(self) -> list[tuple[str, int, int]]:
        """The name of each phase, with the first and the last `t` of its points."""
        groups = groupby(self.points, key=lambda point: (point["phase"], point["step"]))
        moments = [(name, [point["t"] for point in points]) for (name, _), points in groups]
        return [(name, of[0], of[-1]) for name, of in moments]

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first and the last `t`. The length is at least 1, because callers divide by it."""
        start, end = self.points[0]["t"], self.points[-1]["t"]
        return start, max(end, start + 1)


def draw(timeline: MemoryTimeline, path: Path) -> None:
    """Draw a timeline into a file, in the format of its suffix. Raises UserError."""
    refuse_target(path, "--plot", PICTURES)
    save(_figure(timeline), path, "--plot", dpi=150)


def _figure(timeline: MemoryTimeline) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    areas, strip = figure.subplots(2, 1, sharex=True, height_ratios=(11, 1))
    peak = max(timeline.points, key=lambda point: sum(point["bytes"].values()))
    # One unit for the axis, the line of the device and all peaks, so that they can be compared.
    unit, word = (2**30, "GiB") if sum(peak["bytes"].values()) >= 2**30 else (2**20, "MiB")
    _stack(areas, timeline, peak, unit)
    for _, start, _ in timeline.phases:
        areas.axvline(start, color=_DARK, linewidth=0.4, alpha=0.35)
    top = _capacity(areas, timeline, peak, unit)
    areas.set_ylim(0, top)
    _peak(areas, timeline, peak, unit)
    for number, ((_, start, end), size) in enumerate(zip(timeline.phases, timeline.measured, strict=False)):
        label = "peaks of a real run" if number == 0 else None
        areas.hlines(size / unit, start, end, colors="black", linewidth=2, label=label)
    areas.set_xlim(timeline.span)
    areas.set_ylabel(f"device memory ({word})")
    areas.set_title(timeline.title, loc="left", fontsize=11)
    areas.tick_params(axis="x", labelbottom=False, length=0)
    areas.spines[["top", "right"]].set_visible(False)
    # The legend lists kinds from top to bottom, as they are stacked. matplotlib would begin with the lowest.
    handles, labels = areas.get_legend_handles_labels()
    above = f"{_device(timeline)},\nabove this plot\n\n" if timeline.device_total_bytes / unit > top else ""
    style = {"title": f"{above}at the peak", "title_fontsize": 8, "fontsize": 8, "frameon": False, "alignment": "left"}
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", **style)
    _phases(figure, strip, timeline)
    return figure


def _bytes_of(point: Point, kind: str) -> int:
    if kind != "other":
        return point["bytes"].get(kind, 0)
    # A kind without a color of its own counts here, so that the top of the stack is the total.
    return sum(size for name, size in point["bytes"].items() if name == "other" or name not in COLORS)


def _stack(areas: Axes, timeline: MemoryTimeline, peak: Point, unit: int) -> None:
    # stackplot draws a step from each point to the next one, so the last level needs an end.
    moments = [point["t"] for point in timeline.points] + [timeline.span[1]]
    points = [*timeline.points, timeline.points[-1]]  # the last point is valid to the end
    seen = {kind if kind in COLORS else "other" for point in points for kind in point["bytes"]}
    kinds = [kind for kind in COLORS if kind in seen]
    heights = [[_bytes_of(point, kind) / unit for point in points] for kind in kinds]
    labels = [f"{kind}  {shown_bytes(_bytes_of(peak, kind))}" for kind in kinds]
    colors = [COLORS[kind] for kind in kinds]
    if kinds:
        areas.stackplot(moments, heights, labels=labels, colors=colors, step="post", linewidth=0)


def _capacity(areas: Axes, timeline: MemoryTimeline, peak: Point, unit: int) -> float:
    """Draw the device's capacity as a line, and return the axis's upper end."""
    highest = max(1, sum(peak["bytes"].values())) / unit
    total = timeline.device_total_bytes / unit
    # the top fifth of the plot stays free for the text at the peak
    if not 0 < total <= 3 * highest:  # the line would flatten the plot
        return highest * 1.25
    start, end = timeline.span
    right = peak["t"] < (start + end) / 2  # the side opposite to the peak's text
    areas.axhline(total, color=_RED, linewidth=1.2, linestyle="--")
    areas.annotate(
        _device(timeline),
        xy=(0.995 if right else 0.005, total),
        xycoords=areas.get_yaxis_transform(),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
        color=_RED,
        bbox=_BEHIND,
    )
    return max(total, highest) * 1.25


def _device(timeline: MemoryTimeline) -> str:
    return f"{timeline.device}: {shown_bytes(timeline.device_total_bytes)}"


def _peak(areas: Axes, timeline: MemoryTimeline, peak: Point, unit: int) -> None:
    start, end = timeline.span
    # In the left third of the axes the text begins at the peak; in the right third it ends there. So it stays inside.
    share = (peak["t"] - start) / (end - start)  # of the axis, left of the peak
    total = sum(peak["bytes"].values())
    side = "left" if share < 0.33 else "right" if share > 0.67 else "center"
    words = f"peak {shown_bytes(total)} in {peak['phase']}"
    words += f"\n{timeline.peak_at}" if timeline.peak_at else ""
    areas.annotate(
        words,
        xy=(peak["t"], total / unit),
        xytext=(min(max(share, 0.01), 0.99), 0.99),
        textcoords="axes fraction",
        ha=side,
        va="top",
        fontsize=8,
        bbox=_BEHIND,
        arrowprops={
            "arrowstyle": "-|>",
            "color": _DARK,
            "linewidth": 0.8,
            "shrinkB": 1,
            "relpos": ({"left": 0.02, "center": 0.5, "right": 0.98}[side], 0),
        },
    )


def _phases(figure: Figure, strip: Axes, timeline: MemoryTimeline) -> None:
    start, end = timeline.span
    strip.set_ylim(0, 1)
    strip.set_axis_off()
    # Whether a name fits into its band is known only after the layout has given the axes their final size.
    figure.draw_without_rendering()  # computes widths
    width = strip.get_window_extent().width
    for number, (name, first, last) in enumerate(timeline.phases):
        shade = ("#E8E8E8", "#D2D2D2")[number % 2]
        strip.axvspan(first, last, color=shade, linewidth=0)
        band = (last - first) / (end - start) * width
        text = strip.text((first + last) / 2, 0.5, name, ha="center", va="center", fontsize=7)
        extent = text.get_window_extent()
        if extent.width > band and extent.height < band:
            text.set(rotation=90)
        elif extent.width > band:
            text.remove()
