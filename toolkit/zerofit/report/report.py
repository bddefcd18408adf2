"""One page about runs, simulations, plans, explanations and checks (`zerofit report`, and `--html` of commands)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zerofit.report.answers import (
    CheckAnswer,
    ExplanationAnswer,
    PlanAnswer,
    Result,
    SimulationAnswer,
    read_saved,
    results_of,
)
from zerofit.report.diagnoses import check_answer, check_blocks, explanation_answer, explanation_sections
from zerofit.report.forecasts import plan_answer, plan_sections, simulation_answer, simulation_sections
from zerofit.report.page import Answer, Block, Page, Section, Table
from zerofit.report.run_history import RunHistory, json_blocks, read_run, run_answer, run_sections, settings_of
from zerofit.spec.errors import Problems
from zerofit.spec.foreign import refused

HINT = "give run folders, or files with the output of --json"
MOST_DIFFERENCES = 200  # rows of a table

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class ReportedSource:
    """A run folder or a result, and its name on the page."""

    name: str  # "" if the page has no other
    content: RunHistory | Result

    @property
    def kind(self) -> str:
        """The word for it in `zerofit report --json`."""
        return KINDS[type(self.content)]


KINDS: dict[type, str] = {
    RunHistory: "run",
    SimulationAnswer: "simulation",
    PlanAnswer: "plan",
    ExplanationAnswer: "explanation",
    CheckAnswer: "check",
}


def read_sources(paths: Sequence[Path]) -> list[ReportedSource]:
    """Read run folders and saved results. Raises UserError with every path that is neither."""
    problems, found = Problems(), list[RunHistory | Result]()
    names: list[str] = []
    for path, name in zip(paths, _names(paths), strict=True):
        if path.is_dir():
            contents: Sequence[RunHistory | Result] = [read_run(path, problems)]
        else:
            contents = problems.attempt(lambda path=path: _read_file(path, problems)) or []
        found += contents
        names += [name] * len(contents)
    problems.raise_if_any()
    return [
        ReportedSource(name=name if len(found) > 1 else "", content=one) for name, one in zip(names, found, strict=True)
    ]


def _read_file(path: Path, problems: Problems) -> Sequence[RunHistory | Result]:
    """Return the results in a file; the result of a training names its run folder. Raises UserError."""
    with refused(path, kind="no-result", hint=HINT, where=str(path)):
        value = read_saved(path)
        folder = value.get("run_dir")
        if isinstance(folder, str) and "train_loss" in value:
            return [read_run(Path(folder), problems)]
        return results_of(value)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that is different from the others."""
    for length in range(1, 5):
        names = ["/".join(path.resolve().parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def make_page(sources: Sequence[ReportedSource]) -> Page:
    """Return the page: all answers, then what differs, then each kind's sections with the sources side by side."""
    title = sources[0].content.title if len(sources) == 1 else f"{len(sources)} results side by side"
    sections = [_differences(sources), *_sections(sources)]
    return Page(title=title, answers=list(map(_answer, sources)), sections=sections)


def _answer(source: ReportedSource) -> Answer:
    name, content = source.name, source.content
    if isinstance(content, RunHistory):
        return run_answer(name, content)
    if isinstance(content, SimulationAnswer):
        return simulation_answer(name, content)
    if isinstance(content, PlanAnswer):
        return plan_answer(name, content)
    if isinstance(content, ExplanationAnswer):
        return explanation_answer(name, content)
    return check_answer(name, content)


def _sections(sources: Sequence[ReportedSource]) -> Iterator[Section]:
    runs, simulations, plans = _of(sources, RunHistory), _of(sources, SimulationAnswer), _of(sources, PlanAnswer)
    if runs:
        yield from run_sections(runs)
    if simulations:
        yield from simulation_sections(simulations)
    if plans:
        yield from plan_sections(plans)
    for source in sources:
        if isinstance(source.content, ExplanationAnswer):
            for section in explanation_sections(source.content):
                yield Section(title=_named(source.name, section.title), blocks=section.blocks, note=section.note)
        elif isinstance(source.content, CheckAnswer):
            yield Section(
                title=_named(source.name and source.content.file, "Findings"), blocks=check_blocks(source.content)
            )
    blocks = [block for source in sources for block in _settings_blocks(source)]
    yield Section(title="Settings", blocks=blocks)


def _named(name: str, title: str) -> str:
    return f"{name}: {title}" if name else title


def _of(sources: Sequence[ReportedSource], form: type[S]) -> dict[str, S]:
    """Return the sources of one form by name; equal names are numbered."""
    found: dict[str, S] = {}
    for source in sources:
        if isinstance(source.content, form):
            number = sum(name == source.name or name.startswith(f"{source.name} (") for name in found)
            found[f"{source.name} ({number + 1})" if number else source.name] = source.content
    return found


def _settings_blocks(source: ReportedSource) -> list[Block]:
    content = source.content
    if isinstance(content, RunHistory):
        files = {"ds_config": "what DeepSpeed got", "run": "the run", "env": "versions and hardware"}
        return [
            block
            for file, what in files.items()
            for block in json_blocks(_named(source.name, f"{file}.json: {what}"), content.files[file])
        ]
    if isinstance(content, SimulationAnswer):
        return json_blocks(_named(source.name, "the simulated run"), content.run)
    if isinstance(content, CheckAnswer):
        return json_blocks(_named(source.name, "what DeepSpeed gets"), content.resolved)
    return []


def _differences(sources: Sequence[ReportedSource]) -> Section:
    """Return tables of the settings that differ between runs, and between simulations."""
    runs = {name: dict(_flat(settings_of(run))) for name, run in _of(sources, RunHistory).items()}
    simulated = {
        name: {"device": found.device, **dict(_flat({"layout": found.layout, **found.run}))}
        for name, found in _of(sources, SimulationAnswer).items()
    }
    blocks = [*_differing(runs), *_differing(simulated)]
    return Section(title="Differences", blocks=blocks, note="Settings that differ.")


def _differing(settings: Mapping[str, Mapping[str, str]]) -> Iterator[Block]:
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    rows = [[key, *(values.get(key, "-") for values in settings.values())] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if rows:
        yield Table(columns=["setting", *settings], rows=rows[:MOST_DIFFERENCES], words=list(settings))


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a JSON by dotted key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(value)
