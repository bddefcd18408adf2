"""The findings of `zerofit check` for people, GitHub workflows and SARIF readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.console import Console

from zerofit.cli.console import err, out, print_facts
from zerofit.spec.errors import Problem

if TYPE_CHECKING:
    from zerofit.app.checking import CheckResult
    from zerofit.check.finding import Finding

MAX_FINDINGS = 12  # of a file, without --all
MAX_PLACES = 10  # that are shown for one finding
DIFFERS = "has a different effect than you expect"
# effect of a finding -> heading
HEADINGS = {"stops": "stops the run", "changes": DIFFERS, "ignored": DIFFERS, "costs": "costs time or memory"}


@dataclass(frozen=True, kw_only=True)
class UnreadFile:
    """A file that could not be checked, and why."""

    file: str
    problem: Problem
    line: int = 1

    def to_dict(self) -> dict[str, object]:
        """Return the object that `--json` prints."""
        return {"file": self.file, "error": self.problem.as_dict()}


def show_findings(result: CheckResult, show_all: bool, on_stderr: bool) -> None:
    """Print a file's findings: those that stop a run, those that change it, then those that only cost."""
    console, printed = err() if on_stderr else out(), 0
    # The limit of MAX_FINDINGS holds for all headings together. Findings that stop the run come first.
    listed = _grouped(result.findings)
    for title in dict.fromkeys(HEADINGS.values()):
        groups = [group for group in listed if HEADINGS[group[0].effect] == title]
        groups = groups if show_all else groups[: MAX_FINDINGS - printed]
        printed += len(groups)
        if groups:
            console.print(f"\n{title}", style="bold")
        for group in groups:
            _show_group(console, result.file, group, show_all)
    if printed < len(listed):
        print_facts(console, [("", f"\n{len(listed) - printed} more findings: --all shows them")], indent=0)


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Return the findings in groups that differ only in their places, and are printed once."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.why, finding.severity), []).append(finding)
    return list(groups.values())


def _show_group(console: Console, file: str, group: Sequence[Finding], show_all: bool) -> None:
    first, most = group[0], len(group) if show_all else MAX_PLACES
    color = "red" if first.severity == "error" else "yellow"
    head = f"{file}:{first.line}:{first.column}: {first.severity}: {first.message} [{first.code}]"
    # Each different fix is printed once, with the first key that it is for.
    places = {finding.fix: finding.path for finding in reversed(group[:most])}
    fixes = [f"fix: {f'{path}: ' if len(places) > 1 and path else ''}{fix}" for fix, path in reversed(places.items())]
    print_facts(console, [("", head)], indent=0, hang=4, style=color)
    print_facts(console, [("", line) for line in (*_others(group, most), first.why, *fixes)], indent=4)


def _others(group: Sequence[Finding], most: int) -> Iterator[str]:
    """Yield lines about the places of a group's findings, after the first one."""
    others, unlisted = group[1:most], len(group[most:])
    # One line is enough for findings that differ only in the key.
    without_key = {f.message.replace(f.path, "").replace(f.path.rpartition(".")[2], "") for f in group[:most]}
    if others and len(without_key) == 1:
        rest = f", and at {unlisted} more places" if unlisted else ""
        places = (f"{f.line} ({f.path})" if f.path else str(f.line) for f in others)
        yield f"also line {', '.join(places)}{rest}"
        return
    yield from (f"also line {finding.line}: {finding.message}" for finding in others)
    if unlisted:
        yield f"and at {unlisted} more places"


def github(results: Iterable[CheckResult | UnreadFile]) -> str:
    """Return a workflow command for each finding, which GitHub shows at the changed line."""
    return "\n".join(
        workflow_command(severity, text, file=file, line=line, col=column, title=f"zerofit {code}")
        for severity, file, line, column, code, text in _rows(results)
    )


def workflow_command(kind: str, text: str, **properties: object) -> str:
    """Return a GitHub workflow command."""
    # Characters that would end a property or the line are escaped.
    listed = [f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items()]
    return f"::{kind} {','.join(listed)}::{_escaped(text)}"


def _escaped(text: str, signs: str = "") -> str:
    # "%" is first, because the escapes of the other characters contain it.
    for sign in f"%\r\n{signs}":
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def sarif(results: Iterable[CheckResult | UnreadFile]) -> str:
    """Return a SARIF 2.1.0 log, which code scanning reads."""
    logged: list[dict[str, object]] = []
    codes: set[str] = set()
    for severity, file, line, column, code, text in _rows(results):
        region = {"startLine": line, "startColumn": column}
        place = {"physicalLocation": {"artifactLocation": {"uri": file}, "region": region}}
        logged.append({"ruleId": code, "level": severity, "message": {"text": text}, "locations": [place]})
        codes.add(code)
    rules = [{"id": code} for code in sorted(codes)]
    driver = {"name": "zerofit check", "version": version("zerofit"), "rules": rules}
    # Python counts the columns of a line in code points. SARIF readers may expect UTF-16 units.
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": logged}
    return json.dumps({"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]})


def _rows(results: Iterable[CheckResult | UnreadFile]) -> Iterator[tuple[str, str, int, int, str, str]]:
    """Yield severity, file, line, column, code and text of findings.

    Equal findings at several places are yielded once.
    """
    for result in results:
        if isinstance(result, UnreadFile):
            yield "error", result.file, result.line, 1, result.problem.kind, result.problem.message
            continue
        for group in _grouped(result.findings):
            first = group[0]
            text = ". ".join((first.message, *_others(group, MAX_PLACES), first.why, first.fix))
            yield first.severity, result.file, first.line, first.column, first.code, text
