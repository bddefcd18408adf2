"""What a rule is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zerofit.check.edit import Edit
from zerofit.check.finding import Finding, Severity
from zerofit.check.subject import CheckSubject

Edits = tuple[Edit, ...]
Text = str | Callable[[CheckSubject], str]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One fault: when it is there, what to say, how to mend it, and where DeepSpeed's source shows it.

    In texts `{value}` stands for the JSON of the value at `path`.
    """

    code: str
    severity: Severity = "error"
    path: str
    when: Callable[[CheckSubject], bool]
    message: Text
    why: Text  # what DeepSpeed does
    fix: Text
    edits: Edits | Callable[[CheckSubject], Edits] = ()
    source: str  # file:line below deepspeed/ in 0.19.8

    def __call__(self, subject: CheckSubject) -> Iterator[Finding]:
        """The finding, if the fault is there."""
        if not self.when(subject):
            return

        def text(of: Text) -> str:
            return (of(subject) if callable(of) else of).replace("{value}", json.dumps(subject.get(self.path)))

        yield Finding(
            code=self.code,
            severity=self.severity,
            path=self.path,
            message=text(self.message),
            why=text(self.why),
            fix=text(self.fix),
            edits=self.edits(subject) if callable(self.edits) else self.edits,
        )
