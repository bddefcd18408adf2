"""The sections of a page about run folders: result, curves, forecast against measured, faults, and the JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from zerofit.report.page import (
    Answer,
    Bar,
    Bars,
    Block,
    Chart,
    ChartLine,
    Code,
    Section,
    Table,
    Tone,
    Unit,
    colour_of,
    table_of,
)
from zerofit.report.plot import Record, evaluations, points, steps_of
from zerofit.spec.errors import Problems
from zerofit.spec.files import number_in, read_jsonl
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.run_folder import RunFolder
from zerofit.spec.units import shown_bytes

POINTS = 800  # of a curve in a page
FIGURES = {  # figures of a step, and what each is called
    "memory_bytes": "memory",
    "reserved_bytes": "reserved",
    "outside_bytes": "outside torch",
    "host_bytes": "host memory",
    "step_s": "step time",
}


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What a run folder tells. A file that is missing or damaged is empty here."""

    folder: str
    steps: list[Record]
    evaluations: list[Record]
    faults: list[Record]
    files: Mapping[str, Record] = field(default_factory=dict)  # "result", "plan", "run", "ds_config", "env", "stopped"
    errors: Mapping[str, str] = field(default_factory=dict)  # rank -> why it failed

    @property
    def title(self) -> str:
        """The model and the folder."""
        return f"{self.files['run'].get('model', 'run')} in {self.folder}"


def read_run(path: Path, problems: Problems) -> RunHistory:
    """Read a run folder. Adds a problem if it has neither steps nor the description of a run."""
    folder = RunFolder(path)
    names = ("result", "plan", "run", "ds_config", "env", "stopped")
    files = {name: _content(getattr(folder, name)) for name in names}
    without = Problems() if files["run"] else problems  # a run that failed before its first step has no metrics
    return RunHistory(
        folder=path.name or str(path.resolve()),
        steps=steps_of(path, without),
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
    for path in sorted(folder.logs.glob("rank-*.error.json")):
        listed = _content(path).get("problems")
        first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
        yield path.name.removeprefix("rank-").removesuffix(".error.json"), str(first.get("message", "no reason given"))


def run_answer(name: str, run: RunHistory) -> Answer:
    """Return how the run ended, and its last figures."""
    result, last = run.files["result"], run.steps[-1] if run.steps else {}
    total = number_in(run.files["plan"], "steps")
    done = number_in(last, "step") or 0
    of = f" of {total:,.0f}" if total else ""
    verdict, tone, summary = _ending(run, f"{done:,.0f}{of} steps")
    loss = number_in(result, "train_loss") or number_in(last, "loss")
    scores = result.get("eval")
    facts = [("training loss", f"{loss:.4f}" if loss is not None else "")]
    facts += (
        [(f"validation {n}", f"{v:.4f}") for n, v in scores.items() if isinstance(v, int | float)]
        if isinstance(scores, dict)
        else []
    )
    facts += [("speed", _speed(result) or _speed(last)), ("layout", _layout(run.files["plan"].get("layout")))]
    facts += [
        ("resumed from", str(result.get("resumed_from") or "")),
        ("faults", str(len(run.faults)) if run.faults else ""),
    ]
    return Answer(
        name=name and f"{name}: {run.title}",
        verdict=verdict,
        tone=tone,
        summary=summary,
        facts=[(label, text) for label, text in facts if text],
    )


def _ending(run: RunHistory, done: str) -> tuple[str, Tone, str]:
    """Return the verdict on a run, its tone, and why."""
    if run.files["result"]:
        return f"Done: {done}", "good", ""
    if run.files["stopped"]:
        return f"Stopped on request: {done}", "warn", "A checkpoint is saved. The same command resumes."
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


def _layout(layout: object) -> str:
    if not isinstance(layout, dict):
        return ""
    axes = [f"{axis} {size}" for axis, size in layout.items() if axis != "zero_stage" and size not in (1, None)]
    return ", ".join([f"ZeRO-{layout.get('zero_stage', 0)}", *axes])


def run_sections(runs: Mapping[str, RunHistory]) -> Iterator[Section]:
    """Yield the curves, forecast against measured, stages, faults and the effective JSON."""
    rate = (
        "tokens_per_s"
        if all(any(number_in(s, "tokens_per_s") for s in r.steps) for r in runs.values())
        else "samples_per_s"
    )
    yield Section(title="Training", blocks=list(_curves(runs, rate)))
    yield Section(title="Forecast against measured", blocks=[*_against(runs), *_phases(runs)])
    yield Section(title="Pipeline stages", blocks=_stages(runs))
    yield Section(title="Faults and restarts", blocks=_faults(runs))


def _curves(runs: Mapping[str, RunHistory], rate: str) -> Iterator[Chart]:
    memory = ("reserved_bytes", "memory_bytes")  # on CPUs a rank reserves nothing
    memory_lines = {"": _first_of(*memory), "forecast": _first_of("forecast_bytes")}
    words = rate.replace("_per_s", " per second")
    yield from _chart(runs, "loss (nats)", {"": _first_of("loss")}, zero=False, validation=True)
    yield from _chart(runs, words, {"": _first_of(rate)})
    yield from _chart(runs, "memory of a rank", memory_lines, "bytes")
    planned = {name: number_in(run.files["plan"], "step_s") for name, run in runs.items()}
    yield from _chart(runs, "step time", {"": _first_of("step_s")}, "seconds", levels=planned)
    loads = {"most loaded expert": _first_of("expert_load_most"), "least loaded expert": _first_of("expert_load_least")}
    yield from _chart(runs, "tokens of an expert / even share", loads)
    yield from _chart(runs, "gradient norm", {"": _first_of("grad_norm")})


Read = Callable[[Record], float | None]


def _first_of(*keys: str) -> Read:
    return lambda record: next((value for key in keys if (value := number_in(record, key)) is not None), None)


def _chart(
    runs: Mapping[str, RunHistory],
    title: str,
    series: Mapping[str, Read],
    unit: Unit = "number",
    *,
    zero: bool = True,
    validation: bool = False,
    levels: Mapping[str, float | None] | None = None,
) -> Iterator[Chart]:
    """Yield a chart over the steps, if a run has these values. `levels`: a forecast for all steps of a run."""
    found: list[tuple[str, str, dict[float, float]]] = []
    for number, (name, run) in enumerate(runs.items()):
        drawn = [(label, _at_steps(run.steps, read)) for label, read in series.items()]
        drawn += [("validation", _at_steps(run.evaluations, _first_of("loss")))] if validation else []
        level = (levels or {}).get(name)
        drawn += [("forecast", dict.fromkeys(drawn[0][1], level))] if level else []
        found += [
            (colour_of("", number), " ".join(filter(None, (name or (title if not label else ""), label))), values)
            for label, values in drawn
            if values
        ]
    steps = sorted({step for _, _, values in found for step in values})
    if len(steps) < 2:
        return
    dashed = ("validation", "forecast", "least loaded expert")
    lines = [
        ChartLine(
            label=label,
            values=[values.get(step) for step in steps],
            colour=colour,
            style="dashed" if label.endswith(dashed) else "line",
        )
        for colour, label, values in found
    ]
    yield Chart(title=title, x=steps, x_label="step", y_unit=unit, lines=lines, zero=zero)


def _at_steps(records: Sequence[Record], read: Read) -> dict[float, float]:
    """Return finite values by step, at most POINTS of them and the last."""
    x, y = points(records, read)
    every = -(-len(x) // POINTS) or 1
    return {step: value for n, (step, value) in enumerate(zip(x, y, strict=True)) if n % every == 0 or n == len(x) - 1}


def _against(runs: Mapping[str, RunHistory]) -> list[Block]:
    """Return measured figures with their forecasts."""
    rows, tones = [], list[Tone]()
    for name, run in runs.items():
        pairs = run.files["result"].get("against_forecast")
        listed = pairs if isinstance(pairs, dict) and pairs else _measured(run)
        for key, pair in listed.items():
            measured, forecast = (
                number_in(pair, which) if isinstance(pair, dict) else None for which in ("measured", "forecast")
            )
            if measured is None:
                continue
            off = measured / forecast - 1 if forecast else None
            rows.append(
                {
                    "figure": f"{name}: {FIGURES.get(key, key)}" if name else FIGURES.get(key, str(key)),
                    "measured": _figure(str(key), measured),
                    "forecast": _figure(str(key), forecast) if forecast else "not forecast",
                    "difference": f"{off:+.1%}" if off is not None else "",
                }
            )
            tones.append("warn" if off is not None and off > 0.1 else "")
    return table_of(rows, tones=tones)


def _figure(key: str, value: float) -> str:
    return f"{value:.3g} s" if key.endswith("_s") else shown_bytes(value)


def _measured(run: RunHistory) -> dict[str, dict[str, float | None]]:
    """Return the same figures of a run without a result, from its steps."""
    memory = [value for step in run.steps if (value := _first_of("reserved_bytes", "memory_bytes")(step)) is not None]
    forecast = next((value for step in reversed(run.steps) if (value := number_in(step, "forecast_bytes"))), None)
    times = [value for step in run.steps if (value := number_in(step, "step_s")) is not None]
    found = {}
    if memory:
        found["memory_bytes"] = {"measured": max(memory), "forecast": forecast}
    if times:
        found["step_s"] = {"measured": median(times), "forecast": number_in(run.files["plan"], "step_s")}
    return found


def _phases(runs: Mapping[str, RunHistory]) -> list[Block]:
    """Return bars with the forecast peak of each phase."""
    bars = []
    for name, run in runs.items():
        forecast = run.files["plan"].get("forecast")
        phases = forecast.get("phases") if isinstance(forecast, dict) else None
        for phase in phases if isinstance(phases, dict) else ():
            size = number_in(phases, phase) if isinstance(phases, dict) else None
            label = f"{name}: forecast of {phase}" if name else f"forecast of {phase}"
            bars += [Bar(label=label, parts={"tensors": size}, text=shown_bytes(size))] if size else []
    return [Bars(bars=bars)] if bars else []


def _stages(runs: Mapping[str, RunHistory]) -> list[Block]:
    rows = []
    for name, run in runs.items():
        stages = run.files["result"].get("stages")
        listed = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        rows += [
            {"run": name or run.folder, **{str(key): str(value) for key, value in stage.items()}} for stage in listed
        ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(
        columns=columns, rows=[[row.get(key, "") for key in columns] for row in rows], words=range(len(columns))
    )
    return [table] if rows else []


def _faults(runs: Mapping[str, RunHistory]) -> list[Block]:
    rows = []
    for name, run in runs.items():
        for fault in run.faults:
            at, after, seen = (number_in(fault, key) for key in ("time_s", "restarting_after_s", "seen_after_s"))
            ranks = fault.get("ranks")
            rows.append(
                {
                    "when": _moment(at) if at else "then",
                    "run": name or run.folder,
                    "what": str(fault.get("kind", "restarted")),
                    "ranks": ", ".join(map(str, ranks)) if isinstance(ranks, list) else "",
                    "host": str(fault.get("host") or ""),
                    "why": str(fault.get("message") or fault.get("cause") or ""),
                    "after": f"{after or seen:.3g} s" if after or seen else "",
                }
            )
        rows += [
            {
                "when": "at the end",
                "run": name or run.folder,
                "what": "error",
                "ranks": rank,
                "host": "",
                "why": why,
                "after": "",
            }
            for rank, why in run.errors.items()
        ]
    return table_of(rows, words=(0, 1, 2, 3, 4, 5))


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return ""


def settings_of(run: RunHistory) -> dict[str, object]:
    """Return the run's settings and the JSON that DeepSpeed got, as one object."""
    given = {key: value for key, value in run.files["run"].items() if value is not None and key != "ds_config"}
    return {**given, "deepspeed": run.files["ds_config"]}


def json_blocks(title: str, value: object) -> list[Block]:
    """Return a JSON that the reader can open and copy; [] for an empty one."""
    return [Code(title=title, text=json.dumps(value, indent=2))] if value else []
