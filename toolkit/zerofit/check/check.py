"""Checks of one DeepSpeed JSON: its text, its keys and types, and the rules about values.

```
 text ──► syntax ─────────────────────────────────────────► findings
   └────► effective_config: keys ──► findings                  ▲
              └─► correct, rename, fill "auto" ──► rules ──────┘  with the file's own names and lines
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from zerofit.check.catalog import catalog
from zerofit.check.document import Document
from zerofit.check.edit import apply
from zerofit.check.effective import effective_config
from zerofit.check.finding import EFFECTS, Finding
from zerofit.check.neox import unknown_arguments
from zerofit.check.rule import rules
from zerofit.check.rules.batch import batch
from zerofit.check.rules.optimizer import optimizer, scheduler, scheduler_values
from zerofit.check.subject import CheckSubject, TargetHardware, UnclearValue
from zerofit.check.syntax import text_findings

FUNCTIONS: tuple[Callable[[CheckSubject], Iterator[Finding]], ...] = (batch, optimizer, scheduler, scheduler_values)


def check(document: Document, setting: TargetHardware) -> list[Finding]:
    """Return all findings, the worst first.

    Errors come before warnings, and faults that stop a run before those that change it. This starts no rank and does
    not import torch.
    """
    findings = list(text_findings(document, setting.reader))
    if isinstance(document.config, dict):
        effective = effective_config(document.config, catalog(), setting)
        findings += effective.key_findings
        findings += unknown_arguments(document.config) if setting.reader == "neox" else ()
        # A rule that depends on a wrong value is skipped, since the user meant another value.
        for rule in (*rules(), *FUNCTIONS):
            with suppress(UnclearValue):
                findings += map(effective.in_file, rule(effective.subject))
        findings += map(effective.in_file, effective.findings)
    # Rules know only paths. Find their lines, and drop edits of texts that cannot be edited in place.
    for n, finding in enumerate(findings):
        if not finding.line:
            place = document.place(finding.path)
            edits = finding.edits if document.editable else ()
            findings[n] = replace(finding, line=place.line, column=place.column, edits=edits)
    return sorted(findings, key=lambda f: (f.severity, EFFECTS.index(f.effect), f.line, f.column, f.code))


def mend(document: Document, setting: TargetHardware, rounds: int = 5) -> str:
    """Return the text after fixing every error that has only one possible fix.

    This is repeated up to `rounds` times, since a fix may uncover another error.
    """
    # The edits of a round are independent. Faults within a renamed section are found in the next round.
    for _ in range(rounds):
        edits = [edit for f in check(document, setting) if f.severity == "error" for edit in f.edits]
        text = apply(document, edits)
        if text == document.text:
            break
        document = document.reread(text)
    return document.text
