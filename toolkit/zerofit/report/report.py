"""Build one page about runs and results, for `zerofit report` and the option `--html`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zerofit.explain.not_finite import Replay
from zerofit.explain.result import Explanation
from zerofit.report.answers import (
    CheckAnswer,
    PlanAnswer,
    Result,
    RolloutAnswer,
    ServingAnswer,
    ShownTrial,
    SimulationAnswer,
    TuneAnswer,
    read_saved,
    results_of,
)
from zerofit.report.forecasts import (
    cost,
    kind_blocks,
    plan_answer,
    plan_sections,
    simulation_answer,
    simulation_sections,
)
from zerofit.report.page import Answer, Bar, Bars, Block, Code, Page, Section, Table, Tone, named, table_of
from zerofit.report.plot import names_of
from zerofit.report.run_history import RunHistory, read_run, run_answer, run_sections
from zerofit.spec.errors import Problems
from zerofit.spec.foreign import refused
from zerofit.spec.units import counted, shown_bytes, shown_seconds

PHASES = {  # of a step's time
    "generate_s": "generate",
    "logprobs_s": "log-probs",
    "train_s": "train",
    "sync_s": "sync weights",
    "sleep_s": "sleep and wake",
}


def cause_answer(found: Explanation | Replay) -> Answer:
    """Return the cause of a failure, with the evidence. Its name on the page is that of its source alone."""
    unknown = "Cannot know" if isinstance(found, Explanation) else "Nothing found"
    verdict, tone = (found.cause.replace("-", " ").capitalize(), "bad") if found.is_known else (unknown, "warn")
    return Answer(name="", verdict=verdict, tone=tone, summary=found.summary, facts=list(found.facts()))


def explanation_sections(found: Explanation) -> Iterator[Section]:
    """Yield sections: what to run next, memory, lines of code, changes, the error message."""
    yield Section(title="Run next", blocks=[Code(text=found.run_next)] if found.run_next else [])
    kinds = {"in use": found.alive} if found.alive else {}
    if found.forecast and found.forecast.kinds:
        kinds["forecast"] = found.forecast.kinds
    parts = table_of({"run and forecast": part} for part in (found.forecast.parts if found.forecast else ()))
    yield Section(title="Memory in use", blocks=[*kind_blocks(kinds), *parts])
    lines = (
        {"line": r.place, "function": r.function, "kind": r.kind, "bytes": shown_bytes(r.bytes)} for r in found.lines
    )
    yield Section(title="Lines that use the most memory", blocks=table_of(lines, words=("function", "kind")))
    # An empty text in every row removes the column. "not simulated" in every row would say nothing.
    simulated = any(row.fits is not None for row in found.changes)
    changes = (
        {
            "change": row.change,
            "reserved": shown_bytes(row.reserved_bytes) if row.reserved_bytes is not None else "",
            "step time": cost(row.slowdown),
            "verdict": {True: "fits", False: "does not fit alone", None: "not simulated"}[row.fits]
            if simulated
            else "",
        }
        for row in found.changes
    )
    listed: list[Tone] = ["" if row.fits is None else "good" if row.fits else "bad" for row in found.changes]
    yield Section(
        title="Changes that make room" if found.place else "Changes that help", blocks=table_of(changes, tones=listed)
    )
    yield Section(title="The error", blocks=[Code(text=found.message)] if found.message else [])


def check_answer(found: CheckAnswer) -> Answer:
    """Return how many errors and warnings a DeepSpeed JSON has."""
    errors = sum(problem.severity == "error" for problem in found.problems)
    warnings = len(found.problems) - errors
    counts = [counted(number, noun) for number, noun in ((errors, "error"), (warnings, "warning")) if number]
    facts = [("read by", found.reader), ("note", found.note)]
    tone: Tone = "bad" if errors else "warn" if warnings else "good"
    verdict = ", ".join(counts).capitalize() or "No findings"
    return Answer(name=found.file, verdict=verdict, tone=tone, facts=facts)


def check_sections(found: CheckAnswer) -> list[Section]:
    """Return the findings as a table, errors first."""
    listed = sorted(found.problems, key=lambda problem: problem.severity != "error")
    tones: list[Tone] = ["bad" if problem.severity == "error" else "warn" for problem in listed]
    rows = (
        {
            "key": problem.path or "(the file)",
            "line": str(problem.line or ""),
            "what is wrong": problem.message,
            "effect": problem.why,
            "fix": problem.fix,
        }
        for problem in listed
    )
    blocks = table_of(rows, words=("what is wrong", "effect", "fix"), tones=tones)
    return [Section(title="Findings", blocks=blocks)]


def _answer(found: ServingAnswer | RolloutAnswer, facts: list[tuple[str, str]], summary: str = "") -> Answer:
    verdict, tone = ("Fits", "good") if found.fits else ("Does not fit", "bad")
    return Answer(name=found.title, verdict=verdict, tone=tone, summary=summary, facts=facts)


def serving_answer(found: ServingAnswer) -> Answer:
    """Return whether vLLM starts, and how many sequences it serves at once."""
    least, most = found.smallest_utilization, found.largest_utilization
    length = found.settings.get("max_model_len")
    facts = [
        ("KV cache", f"{found.cache_tokens:,} tokens on each GPU"),
        ("at once", f"{found.sequences:.3g} sequences of {length:,} tokens" if isinstance(length, int) else ""),
        ("safe", f"gpu_memory_utilization {least} to {most}; max_model_len up to {found.longest:,}"),
        *(("instead", remedy) for remedy in found.remedies),
    ]
    return _answer(found, facts, found.problem or "")


def serving_sections(found: ServingAnswer) -> Iterator[Section]:
    """Yield an engine's memory by kind, and its settings."""
    limit = f"{found.gpu}, {shown_bytes(found.device_total_bytes)}", found.device_total_bytes
    yield Section(title="Memory of a GPU", blocks=kind_blocks({"vLLM": found.breakdown}, limit))
    settings = ({"setting": key, "value": str(value)} for key, value in found.settings.items() if value is not None)
    yield Section(title="Settings of vLLM", blocks=table_of(settings, words=("value",)))


def rollout_answer(found: RolloutAnswer) -> Answer:
    """Return the best arrangement of trainer and vLLM, its step time and its highest phase."""
    best = found.arrangements[0]
    facts = [
        ("arrangement", best.name),
        ("training", best.training),
        ("highest", f"{best.highest}: {shown_bytes(best.highest_bytes)} of {shown_bytes(best.device_total_bytes)}"),
        ("step time", shown_seconds(best.time.get("step_s"))),
        ("sequences", f"{found.seq_len:,} tokens"),
        *(("note", finding.get("message", "")) for finding in found.findings),
    ]
    return _answer(found, facts)


def rollout_sections(found: RolloutAnswer) -> Iterator[Section]:
    """Yield sections: the memory of each phase, step times by phase, and all arrangements."""
    memory = [
        Bar(label=f"{row.name}: {phase}", parts=parts, text=shown_bytes(sum(parts.values())))
        for row in found.arrangements
        for phase, parts in row.phases.items()
    ]
    # All arrangements are for the same kind of GPU.
    total = found.arrangements[0].device_total_bytes
    limit = f"{found.gpu}, {shown_bytes(total)} available", total
    yield Section(title="Memory of each phase", blocks=[Bars(bars=memory, limit=limit)])
    times = [
        Bar(
            label=row.name,
            parts={label: row.time.get(key) or 0.0 for key, label in PHASES.items()},
            text=shown_seconds(row.time.get("step_s")),
        )
        for row in found.arrangements
    ]
    yield Section(title="Step time by phase", blocks=[Bars(bars=times)])
    rows = (
        {
            "arrangement": row.name,
            "training": row.training,
            "highest phase": row.highest,
            "memory": shown_bytes(row.highest_bytes),
            "verdict": "fits" if row.fits else "does not fit",
        }
        for row in found.arrangements
    )
    tones: list[Tone] = ["good" if row.fits else "bad" for row in found.arrangements]
    yield Section(
        title="Arrangements", blocks=table_of(rows, words=("training", "highest phase", "verdict"), tones=tones)
    )


def tune_answer(found: TuneAnswer) -> Answer:
    """Return the fastest measured configuration, and what untried configurations may save."""
    measured = [trial for trial in found.trials if trial.measured_step_s is not None]
    best = min(measured, key=_measured, default=None)
    facts = [("configuration", best.configuration if best else ""), ("written", ", ".join(found.written))]
    saving = f"{found.regret.untried}; none saves more than {found.regret.at_most:.1%} (95 % sure)"
    facts.append(("untried", saving if found.regret.untried else ""))
    verdict = f"Best: {shown_seconds(found.regret.best_step_s)} per step"
    return Answer(name=found.title, verdict=verdict, tone="good", facts=facts)


def _measured(trial: ShownTrial) -> float:
    return trial.measured_step_s if trial.measured_step_s is not None else float("inf")


def tune_sections(found: TuneAnswer) -> Iterator[Section]:
    """Yield measured step times with their intervals, and all trials."""
    bars = [
        Bar(
            label=trial.configuration,
            parts={"measured": measured},
            text=f"{shown_seconds(measured)} (forecast {shown_seconds(trial.forecast_step_s)})",
            low=measured * (1 - (trial.spread or 0)),
            high=measured * (1 + (trial.spread or 0)),
        )
        for trial in found.trials
        if (measured := trial.measured_step_s) is not None
    ]
    note = "The line with end marks is the 95 % interval of the mean."
    yield Section(title="Measured step times", blocks=[Bars(bars=bars)], note=note)
    # Failed trials count as infinitely slow, so the table marks only a measured trial as the best.
    best = min(map(_measured, found.trials))
    rows = [
        {
            "trial": str(number),
            "configuration": trial.configuration,
            "measured": trial.status if trial.measured_step_s is None else shown_seconds(trial.measured_step_s),
            "+-": "" if trial.spread is None else f"{trial.spread:.1%}",
            "forecast": shown_seconds(trial.forecast_step_s),
            "memory": shown_bytes(trial.peak_bytes) if trial.peak_bytes else "",
            "reason": trial.reason,
        }
        for number, trial in enumerate(found.trials, start=1)
    ]
    tones: list[Tone] = [
        "bad" if t.measured_step_s is None else "good" if t.measured_step_s == best else "" for t in found.trials
    ]
    yield Section(title="All trials", blocks=table_of(rows, words=("configuration", "reason"), tones=tones))


HINT = "give run folders, or files with the output of --json"

S = TypeVar("S")
Reported = RunHistory | Result
Sources = Mapping[str, Reported]  # name on the page, "" if there is no other -> run or result
KINDS: dict[type, tuple[str, Callable[..., Answer]]] = {  # name in `zerofit report --json`, and how it is answered
    RunHistory: ("run", run_answer),
    SimulationAnswer: ("simulation", simulation_answer),
    PlanAnswer: ("plan", plan_answer),
    ServingAnswer: ("serving", serving_answer),
    RolloutAnswer: ("rollout", rollout_answer),
    TuneAnswer: ("tune", tune_answer),
    Explanation: ("explanation", cause_answer),
    Replay: ("replay", cause_answer),
    CheckAnswer: ("check", check_answer),
}
# each result of these kinds has its own sections; the others share tables and scales
ALONE: dict[type, Callable[..., Iterable[Section]]] = {
    ServingAnswer: serving_sections,
    RolloutAnswer: rollout_sections,
    TuneAnswer: tune_sections,
    Explanation: explanation_sections,
    CheckAnswer: check_sections,
}


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read run folders and saved results. Raises UserError with all paths that are neither."""
    # A bad path does not stop the reading: one error names all of them.
    problems, found = Problems(), list[tuple[str, Reported]]()
    for path, name in zip(paths, names_of(paths), strict=True):
        if path.is_dir():
            found.append((name, read_run(path, problems)))
        else:
            contents = problems.attempt(lambda path=path: _read_file(path, problems)) or ()
            found += [(name, content) for content in contents]
    problems.raise_if_any()
    return with_names(found)


def with_names(found: Sequence[tuple[str, Reported]]) -> Sources:
    """Return each run and result by its name. Equal names are numbered."""
    if len(found) == 1:  # its name is the page's title
        return {"": found[0][1]}
    counts, named = Counter[str](), dict[str, Reported]()
    for name, content in found:
        counts[name] += 1
        named[f"{name} ({counts[name]})" if counts[name] > 1 else name] = content
    return named


def _read_file(path: Path, problems: Problems) -> Sequence[Reported]:
    """Return the results in a saved file. Raises UserError."""
    with refused(path, kind="no-result", hint=HINT, where=str(path)):
        value = read_saved(path)
        folder = value.get("run_dir")
        if isinstance(folder, str) and "train_loss" in value:  # of a training; its run folder has more
            return [read_run(Path(folder), problems)]
        return results_of(value)


def make_page(sources: Sources) -> Page:
    """Return the page: answers, differing settings, and the sections of each kind of result."""
    title = next(iter(sources.values())).title if len(sources) == 1 else f"{len(sources)} results side by side"
    answers = [_named_answer(*source) for source in sources.items()]
    return Page(title=title, answers=answers, sections=[_differences(sources), *_sections(sources)])


def _named_answer(name: str, content: Reported) -> Answer:
    """Return the answer about a source, named `name` and then by its own name. The only answer has no name."""
    answer = KINDS[type(content)][1](content)
    # A checked file is often a source of the same name, which is shown once.
    own = "" if answer.name == name else answer.name
    return replace(answer, name=named(name, own) if name and own else name)


def _sections(sources: Sources) -> Iterator[Section]:
    # What was measured comes before what was forecast.
    if runs := _of(sources, RunHistory):
        yield from run_sections(runs)
    if simulations := _of(sources, SimulationAnswer):
        yield from simulation_sections(simulations)
    if plans := _of(sources, PlanAnswer):
        yield from plan_sections(plans)
    for form, sections in ALONE.items():
        for name, content in _of(sources, form).items():
            yield from (replace(section, title=named(name, section.title)) for section in sections(content))
    settings = [block for source in sources.items() for block in _settings_blocks(*source)]
    yield Section(title="Settings", blocks=settings)


def _of(sources: Sources, form: type[S]) -> dict[str, S]:
    return {name: content for name, content in sources.items() if isinstance(content, form)}


def _settings_blocks(name: str, content: Reported) -> Iterator[Block]:
    shown: dict[str, object] = {}
    if isinstance(content, RunHistory):
        files = {"ds_config": "what DeepSpeed got", "run": "the run", "env": "versions and hardware"}
        shown = {f"{file}.json: {what}": content.files[file] for file, what in files.items()}
    elif isinstance(content, SimulationAnswer):
        shown = {"the simulated run": content.run}
    elif isinstance(content, CheckAnswer):
        shown = {"what DeepSpeed gets": content.resolved}
    for title, value in shown.items():
        if value:
            yield Code(title=named(name, title), text=json.dumps(value, indent=2))


def _differences(sources: Sources) -> Section:
    runs = {name: dict(_flat(run.settings)) for name, run in _of(sources, RunHistory).items()}
    simulated = {
        name: dict(_flat({"device": found.device, "layout": found.layout, **found.run}))
        for name, found in _of(sources, SimulationAnswer).items()
    }
    blocks = [*_differing(runs), *_differing(simulated)]
    return Section(title="Differences", blocks=blocks, note="Settings that differ.")


def _differing(settings: Mapping[str, Mapping[str, str]]) -> Iterator[Block]:
    # With one run no value can differ, so the section stays empty and the page leaves it out.
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    rows = [[key, *(values.get(key, "-") for values in settings.values())] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if rows:
        yield Table(columns=["setting", *settings], rows=rows, words=list(settings))


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(value)
