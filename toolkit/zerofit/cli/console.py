"""Answers of commands (tables, facts, verdicts), and their events on standard error."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from zerofit.cli.answer import R, answer
from zerofit.cli.report import ENDINGS, write_page
from zerofit.cli.terminal import SafeText, safe_output, visible
from zerofit.doctor.check import FAIL, OK, WARN, Check
from zerofit.spec.events import Event
from zerofit.spec.files import refuse_target
from zerofit.spec.units import first_names

STATUS_EVERY_S = 10.0  # seconds between status lines without a terminal
PHASE_EVERY_S = 14.0  # seconds between lines of one phase
TASK_EVERY_S = 5.0  # seconds between lines of one task
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
MAX_HOSTS = 4  # that a line names
GAP = 2  # blanks between columns of a table
WRAPPED = 40  # minimum width of the column that may wrap
_UNIT = re.compile(r"(\d) ((?:[KMGT]i)?B\b|s\b|%)")  # a figure and its unit stay on one line


class SafeConsole(Console):
    """A console that prints control characters as visible text."""

    # Styles and live lines still work.
    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        # rich has no hook for the text that it writes. This method is the last place where text and styles are still
        # apart. Control segments move the cursor for live lines and have no text of others.
        plain = (segment if segment.control else Segment(visible(segment.text), segment.style) for segment in buffer)
        return SafeText(super()._render_buffer(plain))


def out() -> Console:
    """Return the console for answers."""
    # Text is never parsed as markup: "[batch, seq]" stays unchanged.
    return SafeConsole(markup=False, highlight=False)


def err() -> Console:
    """Return the console for standard error, which gets all output except answers."""
    return SafeConsole(stderr=True, markup=False, highlight=False)


def fitting_table(
    console: Console,
    rows: Sequence[Mapping[str, str]],
    right: Collection[str],
    keep: Sequence[str],
    wraps: str,
    styles: Sequence[str | None] | None = None,
) -> Table:
    """Return a table that is at most as wide as the console.

    Columns are left out, since rich would cut cells: first those that are "-" in all rows, then those that are not in
    `keep`, then those of `keep` from its end, except the first four. If the column named `wraps`, whose text may take
    several lines, has a long word, three of these four may go, too. `styles`: a style for each row.
    """
    names = [name for name in rows[0] if name in ("", wraps) or any(row[name] != "-" for row in rows)]
    # Measure each column by its longest cell. The column that may wrap counts at most WRAPPED letters, but never less
    # than its longest word.
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    longest_word = max(len(word) for row in rows for word in (wraps, *row[wraps].split()))
    widths[wraps] = max(longest_word, min(widths[wraps], WRAPPED))
    # Order the columns that may go, the least important first, and remove them until the rest fits.
    expendable = [name for name in names if name not in keep] + [name for name in keep[:3:-1] if name in names]
    if longest_word > WRAPPED // 2:  # a line break cannot make a word narrower
        expendable += [name for name in keep[3:0:-1] if name in names and name != wraps]
    while sum(widths[name] + GAP for name in names) - GAP > console.width and expendable:
        names.remove(expendable.pop(0))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != wraps)
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*(row[name] for name in names), style=style)
    return table


def print_facts(
    console: Console, facts: Iterable[tuple[str, str]], indent: int = 14, hang: int = 0, style: str | None = None
) -> None:
    """Print one line per fact, with the label first.

    Long lines wrap between words, indented by `hang` more columns. A figure stays on one line with its unit.
    """
    for label, text in facts:
        # soft_wrap: rich would break words that are wider than the console, such as paths, so nobody could copy them.
        console.print(_wrapped(console, label, text, indent, hang), soft_wrap=True, style=style, markup=False)


def _wrapped(console: Console, label: str, text: str, indent: int, hang: int) -> str:
    joined = _UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)
    wrapped = textwrap.fill(
        joined,
        max(console.width, indent + hang + 20),
        initial_indent=f"{label:<{indent}}",
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace("\N{NO-BREAK SPACE}", " ")


def labelled(facts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the facts; of consecutive ones with the same label, only the first has it."""
    former = ""
    for label, text in facts:
        yield "" if label == former else label, text
        former = label


def print_next(console: Console, commands: Iterable[Sequence[str]]) -> None:
    """Print the commands to run next, one per line."""
    console.print("next")
    for words in commands:
        # A long command continues after a backslash, so it can be copied. No line break within a quoted word.
        joined = " ".join(shlex.quote(word).replace(" ", "\N{NO-BREAK SPACE}") for word in words)
        lines = textwrap.wrap(joined, max(console.width - 6, 20), break_long_words=False, break_on_hyphens=False)
        console.print("  " + " \\\n    ".join(lines).replace("\N{NO-BREAK SPACE}", " "), soft_wrap=True)


def print_verdict(console: Console, verdict: str, text: str, good: bool = True) -> None:
    """Print the first line of an answer: the verdict in capitals, then the subject."""
    line = Text(_wrapped(console, verdict, text, indent=len(verdict) + 2, hang=0))
    line.stylize("bold green" if good else "bold red", 0, len(verdict))
    console.print(line, soft_wrap=True)


def stage_table(console: Console, stages: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the pipeline's stages, with their ranks and layers."""
    rows = []
    for stage in stages:
        first, last = stage["ranks"][0], stage["ranks"][-1]
        ranks = str(first) if first == last else f"{first}-{last}"
        # A stage of DualPipeV has two parts of the layers: a line each, with the first and the last layer's name.
        parts = (f"{len(names)}: " + " .. ".join(dict.fromkeys((names[0], names[-1]))) for names in stage["parts"])
        cells = {"stage": str(stage["stage"]), "ranks": ranks, "layers": "\n".join(parts)}
        rows.append({**cells, "parameters": f"{stage['parameters']:,}"})
    return fitting_table(console, rows, ("parameters",), tuple(rows[0]), "layers")


class EventConsole:
    """Shows events on standard error: live lines and bars at a terminal, plain lines elsewhere."""

    def __init__(self, log_every: int = 10) -> None:
        self.console = err()
        self.live = self.console.is_terminal
        self._log_every = log_every  # steps between lines of metrics without a terminal
        self._status_shown_s = self._phase_shown_s = -inf
        self._phase = self._ranks = ""
        self._tasks: dict[str, _PlainTask] = {}
        self._bars: dict[str, TaskID] = {}
        self._output = ExitStack()
        self._main: TaskID | None = None  # the line of statuses, and of the run
        # One line shows the spinner, the run's steps and time left; tasks (downloads, files) get bars of their own.
        # It disappears at the end, because the answer follows on standard output.
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Amount(),
            TimeRemainingColumn(compact=True),  # empty without a total
            _Bar(bar_width=10),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[ranks]}", style="yellow", markup=False),
            console=self.console,
            transient=True,
            disable=not self.live,
        )

    def __enter__(self) -> EventConsole:
        self._progress.start()
        if self.live:
            self._output.enter_context(safe_output())  # rich's streams would parse others' codes as styles
        return self

    def __exit__(self, *error: object) -> None:
        # in the reverse order of __enter__, because both replace sys.stdout
        self._output.close()
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.kind == "note" and (rows := event.data.get("rows")):
            self.say(f"note: {event.text.splitlines()[0]}")
            names = tuple(rows[0])
            numbers = [name for name in names if rows[0][name][:1].isdigit()]
            self.console.print(fitting_table(self.console, rows, numbers, names, names[3]))
        elif event.kind in ("note", "warning"):
            where = event.data.get("where")
            self.say(f"{event.kind}: {event.text}" + (f"\n     at: {where}" if where else ""))
        elif event.kind in ("result", "saved"):
            self.say(event.text)
        elif event.kind == "evaluated":
            self.say(event.text)
            self._update(description="training")
        elif event.kind == "task":
            self._show_task(event)
        elif event.kind == "status":
            self._show_status(event.text)
        elif event.kind == "phase":
            self._show_phase(event.text)
        elif event.kind == "ranks":
            self._show_ranks(event.text)
        elif event.kind == "training":
            done = {"completed": event.data["done"]} if "done" in event.data else {}
            self._update(description="training", total=event.data["steps"], unit="steps", **done)
        elif event.kind == "metrics":
            self._update(completed=event.done, figures=event.text.partition(": ")[2])
            if not self.live and (event.done == 1 or event.done % self._log_every == 0):
                self.say(_step_line(event))
        elif event.kind == "stages":
            self.console.print(stage_table(self.console, event.data["stages"]))
        elif event.kind == "checks":
            show_checks(event.data["checks"], event.data["hosts"], self.console)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        # rich would break a line at the width of the console, also within a path.
        self.console.print(text, soft_wrap=True)

    def _update(self, **fields: Any) -> None:
        if self.live:
            # The line is created with its first text. A command without statuses shows none.
            if self._main is None:
                self._main = self._progress.add_task("", total=None, unit="", figures="", ranks="")
            self._progress.update(self._main, **fields)

    def _show_status(self, text: str) -> None:
        self._update(description=text)
        if not self.live and time.monotonic() - self._status_shown_s > STATUS_EVERY_S:
            self._status_shown_s = time.monotonic()
            self.say(text)

    def _show_phase(self, text: str) -> None:
        # Phases report their seconds every second. A log file gets a line only for a new phase, or after PHASE_EVERY_S.
        self._update(description=text)
        if not self.live and (_topic(text) != self._phase or time.monotonic() - self._phase_shown_s > PHASE_EVERY_S):
            self._phase, self._phase_shown_s = _topic(text), time.monotonic()
            self.say(f"{text} ...")

    def _show_ranks(self, text: str) -> None:
        self._update(ranks=text)
        if not self.live and text and _topic(text) != self._ranks:
            self.say(text)
        self._ranks = _topic(text)

    def _show_task(self, event: Event) -> None:
        """Show a download or another task with an amount, until it ends."""
        if not self.live:
            if event.text not in self._tasks:
                self._tasks[event.text] = _PlainTask(event)
            self._tasks[event.text].show(event)
            if event.ended:
                del self._tasks[event.text]
            return
        if event.text not in self._bars:
            self._bars[event.text] = self._progress.add_task(
                event.text, total=event.total, unit=event.unit, figures="", ranks=""
            )
        self._progress.update(self._bars[event.text], completed=event.done, total=event.total)
        if event.ended:
            self._progress.remove_task(self._bars.pop(event.text))


def answer_watched(
    work: Callable[[EventConsole], R],
    as_json: bool,
    show: Callable[[R], None],
    interrupted: str = "",
    html: Path | None = None,
) -> R:
    """Call `work`, show its events while it runs, write its page to `html`, and print its answer."""

    def watched() -> R:
        refuse_target(html, "--html", ENDINGS)  # before the work, which may take minutes
        with EventConsole() as console:
            result = work(console)
        if html:
            write_page(result if isinstance(result, Mapping) else result.to_dict(), html)
        return result

    return answer(watched, as_json, show, interrupted)


def _topic(text: str) -> str:
    """Return a phase without the figures in parentheses at its end."""
    return text.partition(" (")[0]


class _PlainTask:
    """The lines about a task without a terminal: at its start, sometimes on the way, at its end."""

    def __init__(self, event: Event) -> None:
        self._started_s = self._shown_s = time.monotonic()
        of = f" ({_amount(event.total, event.unit)})" if event.total else ""
        self._say(f"{event.text}{of} ...")

    def show(self, event: Event) -> None:
        now = time.monotonic()
        if event.ended:
            done = f", {_amount(event.done, event.unit)}" if event.done else ""
            self._say(f"{event.text}: done{done} in {now - self._started_s:.1f} s")
        elif now - self._shown_s >= TASK_EVERY_S:
            self._shown_s = now
            self._say(f"{event.text}: {_share(event.done, event.total, event.unit)}, {now - self._started_s:.0f} s")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Bar(BarColumn):
    """A bar for tasks with an amount."""

    def render(self, task: Task) -> object:  # type: ignore[override]
        return super().render(task) if task.fields["unit"] else ""


class _Amount(ProgressColumn):
    """A column that shows how many units are done, and of how many; bytes are shown in MB."""

    def render(self, task: Task) -> Text:
        unit, total = task.fields["unit"], None if task.total is None else int(task.total)
        return Text(_share(int(task.completed), total, unit) if unit else "")


def _step_line(event: Event) -> str:
    """Return a line such as "step 7 of 90, 3:05 left: loss ..."."""
    step, _, figures = event.text.partition(": ")
    seconds = event.data.get("step_s")
    if event.total:
        step += f" of {event.total}"
    # The remaining steps are expected to take as long as this one.
    if event.total and seconds is not None:
        # timedelta prints 0:03:05. Without its hours, and without a leading zero, this is 3:05.
        remaining = timedelta(seconds=round(seconds * (event.total - event.done)))
        step += f", {str(remaining).removeprefix('0:').removeprefix('0')} left"
    return f"{step}: {figures}"


def _share(done: int, total: int | None, unit: str) -> str:
    """Return "7 of 90 steps" or "1.2 MB of 4.0 MB", and "7 steps" if the total is not known."""
    if not total:
        return _amount(done, unit)
    return f"{_amount(done, unit if unit == 'bytes' else '')} of {_amount(total, unit)}"


def _amount(n: int, unit: str) -> str:
    return f"{n / 1e6:.1f} MB" if unit == "bytes" else f"{n:,} {unit}".rstrip()


def show_checks(checks: Sequence[Check], hosts: int, console: Console) -> None:
    """Print the findings on `hosts` hosts, the worst first, with their fixes."""
    groups: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.status, check.name, check.value, check.hint), []).append(check)
    # One line for all hosts with the same finding. Equally bad findings keep their order.
    worst = (FAIL, WARN, OK)
    ordered = sorted(groups.values(), key=lambda group: worst.index(group[0].status))
    indent = 2 + max((len(f"{group[0].status:4} {group[0].name}") for group in ordered), default=0)
    for group in ordered:
        first = group[0]
        names = [check.host for check in group]
        where = f"all {hosts} hosts" if len(names) == hosts else first_names(names, MAX_HOSTS)
        expected = f" (expected: {first.expected})" if first.expected and first.status != OK else ""
        text = first.value + expected + (f"; on {where}" if hosts > 1 else "")
        print_facts(console, [(f"{first.status:4} {first.name}", text)], indent, style=STYLES[first.status])
        print_facts(console, [("", f"try: {first.hint}")] if first.hint else [], indent)
