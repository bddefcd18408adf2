"""Rules about values and their combinations: the entries of check/rules/*.yaml, whose README.md describes them.

A rule's condition is an expression in Python's syntax, for example `stage == 3 and off('fp16.enabled')`. It can use
`path`, `value`, all attributes of `CheckSubject`, and the terms and functions of `zerofit.check.rules.terms`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import CodeType
from typing import Any, TypedDict

import yaml

from zerofit.check.catalog import LOADER, read_data
from zerofit.check.edit import Assignment, Edit, Removal
from zerofit.check.finding import Finding, Severity
from zerofit.check.rules.terms import FUNCTIONS, TERMS
from zerofit.check.subject import CheckSubject
from zerofit.features.optimizers import ENTRIES

PLACE = re.compile(r"\$\{(.+?)\}")  # an expression in a text


class RuleEdits(TypedDict, total=False):
    """A rule's fix, if the fix has one clear meaning."""

    set: dict[str, str]  # dotted path -> expression of its new value
    remove: list[str]  # dotted paths
    # and "if": an expression that must be true for the fix; optional


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One fault: its condition, its texts, its edits, and its place in DeepSpeed's source."""

    code: str
    severity: Severity = "error"
    path: str  # the dotted key that the finding is about, "" for the whole file
    when: str  # the condition
    message: str  # `${EXPRESSION}` in a text is replaced by its value
    why: str  # what DeepSpeed does
    fix: str = "remove it"
    edits: Mapping[str, Any] = field(default_factory=RuleEdits)
    source: str  # file:line below deepspeed/ in 0.19.8
    ignored: bool = False  # whether DeepSpeed ignores the key, as --explain shows

    def __call__(self, subject: CheckSubject) -> Iterator[Finding]:
        """Yield the finding if the condition is true. Raises UnclearValue if the condition reads a wrong value."""
        names = _Names(subject, self.path)
        if not names.value_of(self.when):
            return
        yield Finding(
            code=self.code,
            severity=self.severity,
            path=self.path,
            message=names.text(self.message),
            why=names.text(self.why),
            fix=names.text(self.fix),
            edits=tuple(self._edits(names)),
        )

    def _edits(self, names: _Names) -> Iterator[Edit]:
        if self.edits and names.value_of(self.edits.get("if", "True")):
            yield from (Removal(path) for path in self.edits.get("remove", ()))
            for path, expression in self.edits.get("set", {}).items():
                yield Assignment(path, names.value_of(expression))


class _Names(dict[str, Any]):
    """The values of names in a rule's expressions. Each value is computed when an expression uses the name."""

    def __init__(self, subject: CheckSubject, path: str):
        super().__init__(path=path)
        self._subject = subject

    def __missing__(self, name: str) -> object:
        if name == "value":
            return self._subject.get(self["path"])
        if name in TERMS:
            return TERMS[name](self._subject)
        try:
            return getattr(self._subject, name)
        except AttributeError:
            raise KeyError(name) from None

    def value_of(self, expression: str) -> Any:
        return eval(_compiled(expression), {"__builtins__": FUNCTIONS}, self)

    def text(self, template: str) -> str:
        """Return a text with its expressions replaced; `${value}` becomes JSON."""

        def replaced(found: re.Match[str]) -> str:
            value = self.value_of(found[1])
            return json.dumps(value) if found[1] == "value" else str(value)

        return PLACE.sub(replaced, template)


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<rule>", "eval")


@dataclass(frozen=True, kw_only=True)
class DefaultNote:
    """A default of DeepSpeed that may surprise users, and its value in older releases. See data/defaults.yaml."""

    key: str
    when: str = "True"
    text: str
    old: object = None
    old_when: str = ""
    change: str = ""  # "" if the default did not change

    def shown(self, subject: CheckSubject) -> str:
        """Return the text with its expressions replaced."""
        return _Names(subject, self.key).text(self.text)

    def matters(self, subject: CheckSubject) -> bool:
        """Return whether the default applies; False if the condition reads a value that DeepSpeed does not allow."""
        return subject.holds(lambda c: _Names(c, self.key).value_of(self.when))

    def mattered(self, subject: CheckSubject) -> bool:
        """Return whether the change of the default affects a file written for an older release."""
        return bool(self.change) and subject.holds(lambda c: _Names(c, self.key).value_of(self.old_when or self.when))


@cache
def defaults() -> tuple[DefaultNote, ...]:
    """Return the entries of data/defaults.yaml."""
    return tuple(DefaultNote(**entry) for entry in read_data("defaults.yaml"))


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules: those in check/rules/*.yaml, and those of the entries in zerofit.features."""
    folder = files("zerofit.check") / "rules"
    texts = (file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".yaml"))
    optimizers = (Rule(**rule.fields()) for entry in ENTRIES for rule in entry.rules)
    return (*optimizers, *(rule for text in texts for rule in rules_of(text)))


def rules_of(text: str) -> Iterator[Rule]:
    """Yield the rules of a YAML text: one rule per entry, or one rule per item of the entry's `for`."""
    for entry in yaml.load(text, LOADER):
        for item in entry.pop("for", [{}]):
            # an item overrides fields of the entry and gives values for its <names>
            fields = {**entry, **{name: item[name] for name in item if name in Rule.__dataclass_fields__}}
            yield Rule(**{name: _filled(field, item) for name, field in fields.items()})


def _filled(field: object, item: Mapping[str, object]) -> Any:
    if isinstance(field, str):
        for name, text in item.items():
            field = field.replace(f"<{name}>", str(text))
    return field
