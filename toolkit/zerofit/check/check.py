"""All checks of one DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerofit.check.catalog import catalog
from zerofit.check.document import Document, parse
from zerofit.check.edit import apply
from zerofit.check.finding import Finding
from zerofit.check.keys import keys
from zerofit.check.rules.table import FUNCTIONS, RULES
from zerofit.check.subject import CheckSubject, TargetHardware


def check(document: Document, setting: TargetHardware) -> list[Finding]:
    """Everything that is wrong, by line; errors before warnings of the same place. Starts no rank, imports no torch."""
    found = [_placed(f, document) for f in _found(document, setting)]
    return sorted(found, key=lambda f: (f.line, f.column, f.severity, f.code))


def _found(document: Document, setting: TargetHardware) -> Iterator[Finding]:
    known = catalog()
    yield from keys(document, known)
    if isinstance(document.config, dict):
        subject = CheckSubject(config=document.config, catalog=known, setting=setting)
        for rule in (*RULES, *FUNCTIONS):
            yield from rule(subject)


def _placed(finding: Finding, document: Document) -> Finding:
    if finding.line:
        return finding
    place = document.place(finding.path)
    return replace(finding, line=place.line, column=place.column)


def mend(document: Document, setting: TargetHardware, rounds: int = 5) -> str:
    """The text with every fix applied that needs no decision of the user; fixes may uncover further ones."""
    for _ in range(rounds):
        edits = [edit for finding in check(document, setting) for edit in finding.edits]
        text = apply(document, edits)
        if text == document.text:
            break
        document = parse(text)
    return document.text
