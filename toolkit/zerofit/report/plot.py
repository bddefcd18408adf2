"""Draw runs (loss, throughput, memory) and tune's trials. Check and save pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.spec.errors import Problems
from zerofit.spec.files import number_in, read_jsonl, refuse_target
from zerofit.spec.foreign import refused
from zerofit.spec.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Pictures are drawn with matplotlib's Figure class instead of pyplot: no global state, no window, any thread.
Record = dict[str, object]  # a line of metrics.jsonl or events.jsonl
PICTURES = (".png", ".pdf", ".svg")


def draw(runs: list[Path], out: Path) -> dict[str, object]:
    """Draw the runs into one picture. Return its path and each run's number of steps.

    Raises UserError if the file cannot be written, or if folders have no metrics. The error names all these folders.
    """
    problems, named = Problems(), dict(zip(names_of(runs), runs, strict=True))
    histories = {name: steps_of(run, problems) for name, run in named.items()}
    problems.attempt(lambda: refuse_target(out, "--out", PICTURES))
    problems.raise_if_any()
    save(_figure(histories, {name: evaluations(run) for name, run in named.items()}), out, "--out", dpi=120)
    return {"picture": str(out), "runs": {str(run): len(histories[name]) for name, run in named.items()}}


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last parts, as few as make all names differ."""
    # Run folders often have the same last part, such as `run/checkpoints`, so parents are added until the names differ.
    # `abspath`: the path "." has no parts. A link keeps its own name.
    for length in range(1, 5):
        names = ["/".join(Path(os.path.abspath(path)).parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def save(figure: Figure, path: Path, option: str, dpi: int) -> None:
    """Write a figure into a file, in the format of its suffix. Raises UserError."""
    with refused(path, kind="unwritable", where=option, doing="write"):
        figure.savefig(path, dpi=dpi)


def steps_of(run: Path, problems: Problems) -> list[Record]:
    """Return the records of all steps of a run folder. If there are none, add a problem."""
    path = RunFolder(run).metrics
    try:
        steps = [record for record in read_jsonl(path) if number_in(record, "step") is not None]
    except OSError as error:
        problems.add("no-metrics", f"{run} has no readable metrics.jsonl: {error}", "give run folders", str(run))
        return []
    if not steps:
        problems.add("no-metrics", f"{path} contains no steps", "give run folders", str(run))
    return steps


def evaluations(run: Path) -> list[Record]:
    """Return the records of a run folder's evaluations."""
    path, found = RunFolder(run).events, list[Record]()
    for event in read_jsonl(path) if path.is_file() else ():
        if event.get("event") == "eval":
            found.append(event)
        elif event.get("event") == "training" and (done := number_in(event, "done")) is not None:
            # a start; a resumed run repeats the steps after its checkpoint
            found = [record for record in found if (number_in(record, "step") or 0) <= done]
    return found


def points(records: Sequence[Record], value: str | Callable[[Record], float | None]) -> tuple[list[float], list[float]]:
    """Return the steps and the values of all records that have both.

    `value`: a key, or a function of the record.
    """
    read = value if callable(value) else lambda record: number_in(record, value)
    both = [(number_in(record, "step"), read(record)) for record in records]
    # JSON from Python may have NaN, which no axis shows
    complete = [(x, y) for x, y in both if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in complete], [y for _, y in complete]


def _figure(histories: dict[str, list[Record]], validated: dict[str, list[Record]]) -> Figure:
    from matplotlib.figure import Figure

    spread = any("expert_load_most" in record for steps in histories.values() for record in steps)
    figure = Figure(figsize=(9, 12 if spread else 9), layout="constrained")
    loss, rate, memory, *loads = figure.subplots(4 if spread else 3, 1, sharex=True)
    # runs on images have no tokens, and one axis needs one unit
    text = all(any(number_in(record, "tokens_per_s") for record in steps) for steps in histories.values())
    key = "tokens_per_s" if text else "samples_per_s"
    for label, steps in histories.items():
        (line,) = loss.plot(*points(steps, "loss"), label=label, linewidth=1)
        evals = points(validated[label], "loss")
        if evals[0]:
            marks = {"marker": "o", "linestyle": "--", "color": line.get_color(), "label": f"{label} (validation)"}
            loss.plot(*evals, **marks)
        rate.plot(*points(steps, key), label=label, linewidth=1)
        _draw_memory(memory, steps, label)
        for axes in loads:
            _draw_loads(axes, steps, label)
    # torch's cross entropy uses the natural logarithm.
    loss.set_ylabel("loss (nats)")
    rate.set_ylabel("tokens / s" if text else "samples / s")
    memory.set_ylabel("peak memory of a rank (GiB)\ndashed: forecast")
    (loads or [memory])[-1].set_xlabel("optimizer step")
    for axes in (loss, rate, memory, *loads):
        axes.grid(alpha=0.3)
    for axes in (rate, memory, *loads):
        axes.set_ylim(bottom=0)
    loss.legend(fontsize=8)
    return figure


def _draw_memory(axes: Axes, steps: list[Record], label: str) -> None:
    """Draw torch's reserved memory (on CPUs the private memory). A dashed line is the forecast."""

    def gib(*keys: str) -> Callable[[Record], float | None]:
        return lambda record: next((size / 2**30 for key in keys if (size := number_in(record, key))), None)

    (line,) = axes.plot(*points(steps, gib("reserved_bytes", "memory_bytes")), label=label, linewidth=1)
    forecasts = points(steps, gib("forecast_bytes"))
    if forecasts[0]:
        style = {"color": line.get_color(), "linestyle": "--", "linewidth": 1}
        axes.plot(*forecasts, label=f"{label} (forecast)", **style)


def _draw_loads(axes: Axes, steps: list[Record], label: str) -> None:
    both = [s for s in steps if None not in (number_in(s, "expert_load_least"), number_in(s, "expert_load_most"))]
    x, least = points(both, "expert_load_least")
    axes.fill_between(x, least, points(both, "expert_load_most")[1], label=label, alpha=0.4)
    axes.set_ylabel("tokens of the busiest and the least\nbusy expert, relative to an even share")


def draw_trials(trials: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw tune's trials into a PNG: forecast and measured step times, and the best speed.

    `trials` has the form of `zerofit tune --json`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    times, best = figure.subplots(1, 2)
    good = [(n, trial) for n, trial in enumerate(trials, start=1) if trial["status"] == "ok"]  # those were measured
    # The color of a point is the ZeRO stage.
    for number, trial in good:
        times.plot(trial["forecast_step_s"], trial["measured_step_s"], "o", color=f"C{trial['zero_stage']}")
        times.annotate(str(number), (trial["forecast_step_s"], trial["measured_step_s"]), fontsize=8)
    ends = [value for _, t in good for value in (t["forecast_step_s"], t["measured_step_s"])]
    times.plot([min(ends), max(ends)], [min(ends), max(ends)], ":", color="gray")
    # Step times of layouts differ by factors, so both axes are logarithmic.
    times.set(xscale="log", yscale="log", xlabel="forecast step time (s)", ylabel="measured step time (s)")
    rates = {n: t["global_batch"] / t["measured_step_s"] for n, t in good}
    # The line never falls: after each trial it shows the best speed measured up to then.
    most = [max(rate for m, rate in rates.items() if m <= n) for n in rates]
    best.step(list(rates), most, where="post")
    best.plot(list(rates), list(rates.values()), "o")
    for number, trial in enumerate(trials, start=1):
        if trial["status"] != "ok":
            best.axvline(number, color="gray", linestyle=":")
            best.annotate(trial["status"], (number, min(rates.values())), fontsize=8, rotation=90)
    best.set(xlabel="trial", ylabel="samples per second; line: best so far")
    figure.savefig(out, dpi=120)
