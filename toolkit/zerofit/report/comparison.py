"""Write a comparison as files: JSON, a CSV table, a picture, and an offline HTML page."""

from __future__ import annotations

import base64
import csv
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from zerofit.report.page import Answer, Page, Picture, Section, Table, Tone
from zerofit.spec.files import write_json
from zerofit.spec.foreign_yaml import read_yaml
from zerofit.spec.units import counted, shown_bytes, shown_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREEN, RED, SAND, GRAY = "#332288", "#117733", "#CC6677", "#DDCC77", "#999999"  # Paul Tol's "muted" scheme
MIB = 2**20
SIDES = ["top", "right"]  # of a plot, without a line
MISSING = {"epochs_to_target": "not reached", "seconds_to_target": "not reached"}
Rows = Sequence[dict[str, Any]]  # by column
FORMATS: dict[str, Callable[[float], str]] = {"rate": shown_rate, "bytes": lambda value: shown_bytes(round(value))}


class ComparisonTable(TypedDict):
    """The table of a kind of comparison."""

    first: str  # key of the row's name
    columns: list[tuple[str, str, str]]  # name, key of the row, format
    meanings: dict[str, str]


@cache
def description(kind: str) -> ComparisonTable:
    """Return the entry of a kind of comparison in comparison.yaml."""
    kinds = read_yaml(Path(__file__).with_name("comparison.yaml"))[0]
    return cast(ComparisonTable, kinds[kind])


def labels(kind: str) -> list[str]:
    """Return the names of all columns but the first."""
    return [label for label, _, _ in description(kind)["columns"]]


def write_comparison(folder: Path, result: dict[str, Any]) -> list[str]:
    """Write all files from the result of `zerofit compare --json`. Return their paths."""
    paths = {name: folder / name for name in ("results.json", "results.csv", "comparison.png", "comparison.html")}
    kind, about, rows = result["kind"], result["about"], result["rows"]
    write_json(paths["results.json"], {name: value for name, value in result.items() if name != "written"})
    with paths["results.csv"].open("w", newline="", encoding="utf-8") as file:
        # lists and dictionaries (such as curves) are only in results.json
        flat = [name for row in rows for name, value in row.items() if not isinstance(value, list | dict)]
        writer = csv.DictWriter(file, dict.fromkeys(flat), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    draw(kind, about, rows, paths["comparison.png"])
    paths["comparison.html"].write_text(page(kind, about, rows, paths["comparison.png"]), encoding="utf-8")
    return [str(path) for path in paths.values()]


def cells(kind: str, row: dict[str, Any]) -> list[str]:
    """Return the figures of `row` as text, one for each column of this kind of comparison."""

    def cell(key: str, form: str) -> str:
        value = row.get(key)
        if value is None:
            return MISSING.get(key, "-")
        return FORMATS[form](value) if form in FORMATS else f"{value:{form}}"

    return [cell(key, form) for _, key, form in description(kind)["columns"]]


def page(kind: str, about: dict[str, Any], rows: Rows, picture: Path) -> str:
    """Return the HTML page of a comparison."""
    # The title has the model and the data, so the facts leave them out. Columns without any value are left out, too.
    named = {name: value for name, value in about.items() if value not in (None, {}) and name not in ("model", "data")}
    if "hosts" in named:
        named["hosts"] = " + ".join(f"{host} x {slots}" for host, slots in named["hosts"])
    first = description(kind)["first"]
    good = [row for row in rows if not row["reason"]]
    filled = [any(row.get(key) is not None for row in good) for _, key, _ in description(kind)["columns"]]
    listed = [[str(row[first]), *compress(cells(kind, row), filled)] for row in good]
    columns = [first.replace("_", " "), *compress(labels(kind), filled)]
    others = [[str(row[first]), row["status"].replace("-", " "), row["reason"]] for row in rows if row["reason"]]
    tones: list[Tone] = ["" if row["status"] == "not-here" else "bad" for row in rows if row["reason"]]
    title = f"{about['model']} on {about['data']}: {kind.replace('-', ' ')}"
    # The picture is within the page, so that the page can be moved alone.
    measured = Picture(title=f"{title}, drawn", base64=base64.b64encode(picture.read_bytes()).decode())
    unmeasured = Table(columns=[columns[0], "status", "reason"], rows=others, words=("status", "reason"), tones=tones)
    tables = [
        Section(title="Measured", blocks=[Table(columns=columns, rows=listed), measured] if listed else [measured]),
        Section(title="Not measured", blocks=[unmeasured] if others else []),
    ]
    facts = []
    for name, value in named.items():
        items = ", ".join(f"{key}: {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
        facts.append((name.replace("_", " "), items))
    answer = Answer(name="", verdict=f"{len(good)} of {len(rows)} measured", facts=facts)
    meanings = {str(row[first]): row["title"] for row in rows if row.get("title")} | description(kind)["meanings"]
    return Page(title=title, answers=[answer], sections=tables, meanings=meanings).to_html()


def draw(kind: str, about: dict[str, Any], rows: Rows, out: Path) -> None:
    """Draw a comparison into a PNG file."""
    from matplotlib.figure import Figure

    # Failed measurements have no figures. The table lists them, the picture does not.
    good = [row for row in rows if row["status"] == "ok"]
    heights = {"strategies": 2.4 + 0.34 * len(good), "batch-size": 10.5, "scaling": 4.2}
    figure = Figure(figsize=(11, heights[kind]), layout="constrained")
    device, ranks = "GPU" if about["accelerator"] == "cuda" else "CPU rank", about.get("ranks", 1)
    devices = counted(ranks, device)
    if about.get("per_rank"):
        devices = f"one {device} for every {about['per_rank']} samples of a step"
    figure.suptitle(f"{about['model']} on {about['data']}, {devices}", fontsize=11)
    if good:
        {"strategies": _strategies, "batch-size": _sizes, "scaling": _scaling}[kind](figure, about, good)
    figure.savefig(out, dpi=120)


def _strategies(figure: Figure, about: dict[str, object], rows: Rows) -> None:
    from matplotlib.ticker import MaxNLocator

    # Only asynchronous strategies have a staleness. Only strategies whose collectives were counted have bytes.
    stale = [row for row in rows if row.get("staleness")]
    has_traffic = all(row["comm_bytes_per_step"] is not None for row in rows)
    # one bar per strategy needs the same height everywhere, so the picture grows with the number of rows
    heights = [max(3.0, 0.34 * len(rows)), 1.6]
    grid = figure.add_gridspec(1 + bool(stale), 2 + has_traffic, height_ratios=heights[: 1 + bool(stale)])
    names = [row["strategy"] for row in rows]
    bar_heights = list(range(len(rows)))[::-1]  # the first row at the top
    columns = [
        ("samples per second", [row["samples_per_s"] for row in rows], BLUE),
        ("peak memory per rank (MiB)", [row["peak_bytes_per_rank"] / MIB for row in rows], GREEN),
    ]
    if has_traffic:
        columns.append(("sent per step, all ranks (MiB)", [row["comm_bytes_per_step"] / MIB for row in rows], RED))
    for column, (label, values, color) in enumerate(columns):
        axes = figure.add_subplot(grid[0, column])
        bars = axes.barh(bar_heights, values, color=color)
        axes.bar_label(bars, labels=[FORMATS["rate"](value) for value in values], padding=2, fontsize=7)
        axes.set_yticks(bar_heights, names if column == 0 else [""] * len(names), fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.18, y=0.02)
        axes.spines[SIDES].set_visible(False)
    if stale:
        axes = figure.add_subplot(grid[1, :])
        # Two strategies have a staleness: the asynchronous one, and the one that bounds it.
        for row, color in zip(stale, (SAND, RED), strict=False):
            updates = range(1, len(row["staleness"]) + 1)
            axes.step(updates, row["staleness"], where="mid", color=color, label=row["strategy"])
        axes.set(xlabel="update of the server", ylabel="staleness\n(updates between)")
        axes.legend(frameon=False, fontsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[SIDES].set_visible(False)


def _sizes(figure: Figure, about: dict[str, Any], rows: Rows) -> None:
    from matplotlib import colormaps

    sizes = sorted({row["batch_size"] for row in rows})
    # Runs with different batch sizes are comparable in samples, not in steps. None means that the target was not
    # reached.
    rows = [{**row, "samples_to_target": (row["steps_to_target"] or 0) * row["batch_size"] or None} for row in rows]
    first, second, third = figure.subplots(3, 2)
    _spread(first[0], sizes, rows, "seconds_to_target", f"seconds to {about['target']:.0%} accuracy", BLUE)
    _spread(first[1], sizes, rows, "samples_to_target", f"samples to {about['target']:.0%} accuracy", BLUE)
    missed = [n for n in sizes if not any(r["seconds_to_target"] for r in rows if r["batch_size"] == n)]
    if missed:
        first[0].set_title("not reached: " + ", ".join(map(str, missed)), fontsize=8, loc="right")
    # Each size has several runs with different seeds. The curve shows the first of them; the other plots show all.
    for number, size in enumerate(sizes):
        curve = next(row["curve"] for row in rows if row["batch_size"] == size)
        color = colormaps["viridis"](0.9 * number / max(1, len(sizes) - 1))
        second[0].plot([p["epoch"] for p in curve], [p["accuracy"] for p in curve], "-", color=color, label=str(size))
    second[0].set(xlabel="epoch", ylabel="accuracy")
    second[0].legend(fontsize=8, title="batch size", title_fontsize=8)
    second[0].spines[SIDES].set_visible(False)
    _spread(second[1], sizes, rows, "test_accuracy", "accuracy on the test samples, best epoch", GREEN, "linear")
    _spread(third[0], sizes, rows, "seconds_per_epoch", "seconds per epoch", RED)
    if len({row["batch_size"] for row in rows if row["noise_scale"]}) > 1:
        _spread(third[1], sizes, rows, "noise_scale", "gradient noise scale (samples)", SAND)
    else:  # noise is measured only with one rank
        third[1].set_axis_off()


def _spread(axes: Axes, sizes: Sequence[int], rows: Rows, key: str, label: str, color: str, scale: str = "log") -> None:
    from matplotlib.ticker import LogFormatter

    points = [(row["batch_size"], row[key]) for row in rows if row.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=color, alpha=0.5, markersize=5)
        axes.set_yscale(scale)
    measured = [size for size in sizes if any(size == point_size for point_size, _ in points)]
    axes.plot(measured, [statistics.median(v for s, v in points if s == size) for size in measured], "-", color=color)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45)  # the last two may be close together
    axes.xaxis.minorticks_off()
    if scale == "log":
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(LogFormatter(labelOnlyBase=False))  # plain numbers, also between powers of ten
    axes.set(xlabel="batch size", ylabel=label)
    axes.spines[SIDES].set_visible(False)


def _scaling(figure: Figure, about: dict[str, object], rows: Rows) -> None:
    speed, efficiency = figure.subplots(1, 2)
    counts = sorted({row["ranks"] for row in rows})
    speed.plot(counts, counts, ":", color=GRAY, label="ideal")
    for mode, color in (("weak", BLUE), ("strong", RED)):
        measured = [row for row in rows if row["mode"] == mode and row.get("speedup")]
        for axes, name in ((speed, "speedup"), (efficiency, "efficiency")):
            ranks, values = [row["ranks"] for row in measured], [row[name] for row in measured]
            axes.plot(ranks, values, "o-", color=color, label=mode)
    speed.set(xlabel="ranks", ylabel="speed-up", xticks=counts)
    efficiency.set(xlabel="ranks", ylabel="efficiency", xticks=counts, ylim=(0, 1.1))
    for axes in (speed, efficiency):
        axes.legend(frameon=False)
        axes.spines[SIDES].set_visible(False)
