"""Build the page sections about run folders: result, curves, forecasts and faults."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from zerofit.report.page import Answer, Block, Chart, ChartLine, Section, Table, Tone, Unit, color_of, named, table_of
from zerofit.report.plot import Record, evaluations, points, steps_of
from zerofit.spec.errors import Problems
from zerofit.spec.files import number_in, read_jsonl
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.run_folder import RunFolder, layout_words
from zerofit.spec.units import shown_bytes, shown_score, shown_seconds

MORE = 0.1  # a measured figure that exceeds its forecast by more than this share is marked
POINTS = 3000  # of all runs' curves in a chart
LOSS, MEMORY, TIME = "loss (nats)", "memory of a rank", "step time"  # titles of charts
UNITS: dict[str, Unit] = {MEMORY: "bytes", TIME: "seconds"}
FIGURES = {  # figures of a step, and their labels
    "memory_bytes": "memory",
    "reserved_bytes": "reserved",
    "outside_bytes": "outside torch",
    "host_bytes": "host memory",
    "step_s": "step time",
}


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The contents of a run folder. A missing or damaged file counts as empty."""

    folder: str
    steps: list[Record]
    evaluations: list[Record]
    faults: list[Record]
    files: Mapping[str, Record] = field(default_factory=dict)  # "result", "plan", "run", "ds_config", "env", "stopped"
    errors: Mapping[str, str] = field(default_factory=dict)  # rank -> why it failed

    @property
    def title(self) -> str:
        """The title: model and run folder."""
        return f"{self.files['run'].get('model', 'run')} in {self.folder}"

    @property
    def settings(self) -> Record:
        """The run's settings, and the JSON that DeepSpeed read."""
        own = {key: value for key, value in self.files["run"].items() if value is not None and key != "ds_config"}
        return {**own, "deepspeed": self.files["ds_config"]}


def read_run(path: Path, problems: Problems) -> RunHistory:
    """Read a run folder. If it has neither steps nor a description of a run, add a problem."""
    folder = RunFolder(path)
    names = ("result", "plan", "run", "ds_config", "env", "stopped")
    files = {name: _content(getattr(folder, name)) for name in names}
    # a run that failed before its first step has no metrics, so missing metrics are then no problem
    missing_steps = Problems() if files["run"] else problems
    return RunHistory(
        folder=path.name or str(path.resolve()),
        steps=steps_of(path, missing_steps),
        evaluations=evaluations(path),
        faults=read_jsonl(folder.faults) if folder.faults.is_file() else [],
        files=files,
        errors=dict(_errors(folder)),
    )


def _content(path: Path) -> Record:
    try:
        return read_json(path)
    except (OSError, Unreadable):
        return {}


def _errors(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield rank and message of each error."""
    found = []
    for rank, failure in folder.errors():
        problems = failure.get("problems")
        first = problems[0] if isinstance(problems, list) and problems and isinstance(problems[0], dict) else {}
        found.append((first.get("kind") == "peer-lost", rank, str(first.get("message", "no reason given"))))
    # errors about a lost peer come last, because they are consequences of other errors
    yield from ((rank, message) for _, rank, message in sorted(found))


def run_answer(run: RunHistory) -> Answer:
    """Return how the run ended, and its last figures."""
    result, last = run.files["result"], run.steps[-1] if run.steps else {}
    total = number_in(run.files["plan"], "steps")
    done = number_in(last, "step") or 0
    of = f" of {total:,.0f}" if total else ""
    verdict, tone, summary = _ending(run, f"{done:,.0f}{of} steps")
    loss = number_in(result, "train_loss") or number_in(last, "loss")
    facts = [("training loss", shown_score(loss) if loss is not None else "")]
    scores = _inner(result, "eval")
    facts += [
        (f"validation {name}", shown_score(score)) for name in scores if (score := number_in(scores, name)) is not None
    ]
    layout = _inner(run.files["plan"], "layout")
    facts += [("speed", _speed(result) or _speed(last)), ("layout", layout_words(layout) if layout else "")]
    facts += [("resumed from", str(result.get("resumed_from") or "")), ("faults", str(len(run.faults) or ""))]
    return Answer(name=run.title, verdict=verdict, tone=tone, summary=summary, facts=facts)


def _ending(run: RunHistory, done: str) -> tuple[str, Tone, str]:
    """Return the verdict on a run, the verdict's tone, and the reason."""
    # The order matters: a run that was restarted after a fault can still have a result.
    if run.files["result"]:
        return f"Done: {done}", "good", ""
    if run.files["stopped"]:
        return f"Stopped on request: {done}", "warn", "A checkpoint is saved. Run the same command again to resume."
    if run.errors:
        rank, message = next(iter(run.errors.items()))
        return f"Failed: {done}", "bad", f"rank {rank}: {message}"
    last = run.faults[-1] if run.faults else {}
    if "message" in last:
        return f"Failed: {done}", "bad", str(last["message"])
    return f"No result yet: {done}", "warn", "The run is still training, or it was killed."


def _speed(figures: Record) -> str:
    rates = ((number_in(figures, f"{unit}_per_s"), unit) for unit in ("tokens", "samples"))
    return next((f"{rate:,.4g} {unit}/s" for rate, unit in rates if rate), "")


def run_sections(runs: Mapping[str, RunHistory]) -> Iterator[Section]:
    """Yield sections: curves, measurements with forecasts, stages, and faults."""
    # All runs share the points, so the page's size does not grow with the number of runs.
    curves = {name: _curves(run, max(100, POINTS // len(runs))) for name, run in runs.items()}
    titles = dict.fromkeys(title for found in curves.values() for title in found)
    charts = (
        _chart(title, {name: found[title] for name, found in curves.items() if title in found}) for title in titles
    )
    yield Section(title="Training", blocks=[chart for chart in charts if len(chart.x) > 1])
    yield Section(title="Forecast against measured", blocks=_forecasts(runs))
    yield Section(title="Pipeline stages", blocks=_stages(runs))
    yield Section(title="Faults and restarts", blocks=_faults(runs))


Curves = dict[str, dict[float, float]]  # label, "" for the run itself -> value by step


def _curves(run: RunHistory, most: int) -> dict[str, Curves]:
    # Without steps the stride would be 0, which Python refuses.
    steps = run.steps[:: -(-len(run.steps) // most) or 1] + run.steps[-1:]  # every nth step, and the last one
    times = _at_steps(steps, "step_s")
    planned = number_in(run.files["plan"], "step_s") or 0.0
    unit = "tokens" if any(number_in(step, "tokens_per_s") for step in steps) else "samples"
    return {
        LOSS: {"": _at_steps(steps, "loss"), "validation": _at_steps(run.evaluations, "loss")},
        f"{unit} per second": {"": _at_steps(steps, f"{unit}_per_s")},
        # on CPUs a rank reserves nothing
        MEMORY: {
            "": _at_steps(steps, "reserved_bytes") or _at_steps(steps, "memory_bytes"),
            "forecast": _at_steps(steps, "forecast_bytes"),
        },
        # A plan.json may contain Infinity, which no chart can show (`Chart.to_json`).
        TIME: {"": times, "forecast": dict.fromkeys(times, planned) if 0 < planned < math.inf else {}},
        "tokens of an expert, relative to an even share": {
            "most loaded": _at_steps(steps, "expert_load_most"),
            "least loaded": _at_steps(steps, "expert_load_least"),
        },
        "gradient norm": {"": _at_steps(steps, "grad_norm")},
    }


def _at_steps(records: Sequence[Record], key: str) -> dict[float, float]:
    return dict(zip(*points(records, key), strict=True))


def _chart(title: str, runs: Mapping[str, Curves]) -> Chart:
    # Runs log different steps, but a chart has one x axis: it has all steps, and a curve has None at steps without a
    # value.
    steps = sorted({step for curves in runs.values() for values in curves.values() for step in values})
    lines = [
        ChartLine(
            label=" ".join(filter(None, (name or (title if not label else ""), label))),
            values=[values.get(step) for step in steps],
            color=color_of("", number),
            style="dashed" if label else "line",
        )
        for number, (name, curves) in enumerate(runs.items())
        for label, values in curves.items()
        if values
    ]
    return Chart(
        title=title, x=steps, x_label="step", y_unit=UNITS.get(title, "number"), lines=lines, zero=title != LOSS
    )


def _inner(record: Record, *path: str) -> Record:
    for key in path:
        value = record.get(key)
        record = value if isinstance(value, dict) else {}
    return record


def _forecasts(runs: Mapping[str, RunHistory]) -> list[Block]:
    rows, tones = [], list[Tone]()
    for name, run in runs.items():
        # Only a finished run has the comparison in its result. For other runs it is computed from the logged steps.
        pairs = _inner(run.files["result"], "against_forecast") or _measured(run)
        for key in pairs:
            measured, forecast = (number_in(_inner(pairs, key), which) for which in ("measured", "forecast"))
            if measured is None:
                continue
            off = measured / forecast - 1 if forecast else 0.0
            rows.append(
                {
                    "figure": named(name, FIGURES.get(key, key)),
                    "measured": _figure(key, measured),
                    "forecast": _figure(key, forecast) if forecast else "not forecast",
                    "difference": f"{off:+.1%}" if forecast else "",
                }
            )
            tones.append("warn" if off > MORE else "")
    return table_of(rows, tones=tones)


def _figure(key: str, value: float) -> str:
    return shown_seconds(value) if key.endswith("_s") else shown_bytes(value)


def _measured(run: RunHistory) -> Record:
    """Return measured and forecast figures from a run's steps, for a run without a result."""
    found, curves = Record(), _curves(run, len(run.steps) or 1)
    for key, title, middle in (("memory_bytes", MEMORY, max), ("step_s", TIME, median)):
        if measured := curves[title][""]:
            forecast = list(curves[title]["forecast"].values())
            found[key] = {"measured": middle(measured.values()), "forecast": forecast[-1] if forecast else None}
    return found


def _stages(runs: Mapping[str, RunHistory]) -> list[Block]:
    listed = ((name or run.folder, run.files["result"].get("stages")) for name, run in runs.items())
    rows = [(name, stage) for name, stages in listed if isinstance(stages, list) for stage in stages]
    rows = [{"run": name, **stage} for name, stage in rows if isinstance(stage, dict)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(key, "")) for key in columns] for row in rows]
    return [Table(columns=columns, rows=cells, words=columns)] if rows else []


def _faults(runs: Mapping[str, RunHistory]) -> list[Block]:
    rows = []
    for name, run in runs.items():
        errors = [{"kind": "error", "ranks": [rank], "message": message} for rank, message in run.errors.items()]
        for fault in (*run.faults, *errors):
            ranks = fault.get("ranks")
            row = {
                "when": _moment(number_in(fault, "time_s")),
                "run": name or run.folder,
                # The line of a restart has a cause, but no kind.
                "what": str(fault.get("kind", "restarted")),
                "ranks": ", ".join(map(str, ranks)) if isinstance(ranks, list) else "",
                "host": str(fault.get("host") or ""),
                "why": str(fault.get("message") or fault.get("cause") or ""),
                "detected after": shown_seconds(number_in(fault, "seen_after_s")),
                "restarted after": shown_seconds(number_in(fault, "restarting_after_s")),
            }
            rows.append(row)
    return table_of(rows, words=("run", "what", "ranks", "host", "why"))


def _moment(seconds: float | None) -> str:
    try:
        # A damaged file may have any number, and not every number is a date.
        return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "-"
