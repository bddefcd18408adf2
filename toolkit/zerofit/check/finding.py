"""Findings of the checker, each about one fault, and the rules that make them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerofit.check.edit import Edit, Removal, Renaming
from zerofit.check.subject import CheckSubject

Severity = Literal["error", "warning"]
Edits = tuple[Edit, ...]
Text = str | Callable[[CheckSubject], str]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of a DeepSpeed JSON; line and column are filled in from its path where a rule leaves them 0."""

    code: str  # stable slug, as docs/checks.md lists it
    severity: Severity = "error"  # DeepSpeed refuses, or trains something else than was asked; warning: the rest
    path: str  # dotted key, "" for the whole document
    message: str  # what is wrong
    why: str  # what DeepSpeed does about it
    fix: str  # the way out, in words
    edits: Edits = ()  # the same as changes to the text; none where only the user can know
    line: int = 0
    column: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that `zerofit check --json` prints."""
        names = ("line", "column", "path", "severity", "code", "message", "why", "fix")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One fault: when it is there, what to say, how to mend it, and where DeepSpeed's source shows it.

    In texts `{value}` stands for the JSON of the value at `path`.
    """

    code: str
    severity: Severity = "error"
    path: str
    when: Callable[[CheckSubject], object]  # truth counts
    message: Text
    why: Text  # what DeepSpeed does
    fix: Text = "remove it"
    edits: Edit | Edits | Callable[[CheckSubject], Edit | Edits] | None = None  # None: the key at `path` is removed
    source: str  # file:line below deepspeed/ in 0.19.8

    def __call__(self, subject: CheckSubject) -> Iterator[Finding]:
        """Yield the finding, if the fault is there."""
        if not self.when(subject):
            return

        def text(of: Text) -> str:
            return (of(subject) if callable(of) else of).replace("{value}", json.dumps(subject.get(self.path)))

        edits = Removal(self.path) if self.edits is None else self.edits
        edits = edits(subject) if callable(edits) else edits
        yield Finding(
            code=self.code,
            severity=self.severity,
            path=self.path,
            message=text(self.message),
            why=text(self.why),
            fix=text(self.fix),
            edits=edits if isinstance(edits, tuple) else (edits,),
        )


def unknown_parameter(
    c: CheckSubject,
    path: str,
    *,
    code: str,
    owner: str,
    taken: Collection[str],
    synonyms: Mapping[str, str],
    why: str = "",
) -> Finding:
    """Return the finding about a parameter that its owner, an optimizer or scheduler, does not take."""
    parent, _, key = path.rpartition(".")
    better = near(key, taken, synonyms)
    free = better is not None and not c.has(f"{parent}.{better}") and better != "betas"  # beta1 says half of betas
    return Finding(
        code=code,
        path=path,
        message=f"{owner} takes no parameter {key!r}; it takes: {', '.join(taken)}",
        why=why or f"DeepSpeed stops once the ranks run: \"unexpected keyword argument '{key}'\"",
        fix=f"did you mean {better}?" if better else "remove it",
        edits=(Renaming(path, better),) if free and better else (Removal(path),),
    )


def near(word: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """Return the known name that a wrong one most likely means, None where nothing is close.

    That is the same name in another case, else a known synonym, else the closest spelling.
    """
    names = list(known)
    plain = {n.lower().replace("_", "").replace("-", ""): n for n in names}
    bare = word.lower().replace("_", "").replace("-", "")
    if bare in plain:
        return plain[bare]
    meant = (synonyms or {}).get(word.lower())
    if meant in names:
        return meant
    close = difflib.get_close_matches(bare, plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None
