"""Build one page about runs and results, for `zerofit report` and the option `--html`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zerofit.report.answers import (
    CheckAnswer,
    ExplanationAnswer,
    PlanAnswer,
    ReplayAnswer,
    Result,
    RolloutAnswer,
    ServingAnswer,
    SimulationAnswer,
    TuneAnswer,
    read_saved,
    results_of,
)
from zerofit.report.diagnoses import (
    check_answer,
    check_sections,
    explanation_answer,
    explanation_sections,
    replay_answer,
)
from zerofit.report.forecasts import plan_answer, plan_sections, simulation_answer, simulation_sections
from zerofit.report.page import Answer, Block, Code, Page, Section, Table, named
from zerofit.report.plot import names_of
from zerofit.report.run_history import RunHistory, read_run, run_answer, run_sections
from zerofit.report.searches import (
    rollout_answer,
    rollout_sections,
    serving_answer,
    serving_sections,
    tune_answer,
    tune_sections,
)
from zerofit.spec.errors import Problems
from zerofit.spec.foreign import refused

HINT = "give run folders, or files with the output of --json"

S = TypeVar("S")
Reported = RunHistory | Result
Sources = Mapping[str, Reported]  # name on the page, "" if there is no other -> run or result
KINDS: dict[type, str] = {  # in `zerofit report --json`
    RunHistory: "run",
    SimulationAnswer: "simulation",
    PlanAnswer: "plan",
    ServingAnswer: "serving",
    RolloutAnswer: "rollout",
    TuneAnswer: "tune",
    ExplanationAnswer: "explanation",
    ReplayAnswer: "replay",
    CheckAnswer: "check",
}
ANSWERS: dict[type, Callable[..., Answer]] = {
    RunHistory: run_answer,
    SimulationAnswer: simulation_answer,
    PlanAnswer: plan_answer,
    ServingAnswer: serving_answer,
    RolloutAnswer: rollout_answer,
    TuneAnswer: tune_answer,
    ExplanationAnswer: explanation_answer,
    ReplayAnswer: replay_answer,
    CheckAnswer: check_answer,
}
# each result of these kinds has its own sections; the others share tables and scales
ALONE: dict[type, Callable[..., Iterable[Section]]] = {
    ServingAnswer: serving_sections,
    RolloutAnswer: rollout_sections,
    TuneAnswer: tune_sections,
    ExplanationAnswer: explanation_sections,
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
    answers = [ANSWERS[type(content)](name, content) for name, content in sources.items()]
    return Page(title=title, answers=answers, sections=[_differences(sources), *_sections(sources)])


def _sections(sources: Sources) -> Iterator[Section]:
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
