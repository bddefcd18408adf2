"""Rules about values and their combinations, read from check/rules/*.yaml.

README.md in that folder describes the entries. A rule's condition is an expression in Python's syntax, for example
`stage == 3 and off('fp16.enabled')`. It can use `path`, `value`, all attributes of `CheckSubject`, and the terms and
functions of `zerofit.check.rules.terms`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import CodeType
from typing import TypedDict

from zerofit.check.catalog import read_data
from zerofit.check.edit import Assignment, Edit, Removal
from zerofit.check.finding import Effect, Finding, Severity
from zerofit.check.rules.terms import FUNCTIONS, TERMS
from zerofit.check.subject import CheckSubject
from zerofit.features.optimizers import ENTRIES
from zerofit.features.zero import ZERO_FEATURES
from zerofit.spec.files import packaged_yaml

PLACE = re.compile(r"\$\{(.+?)\}")  # an expression in a text


# a rule's fix, if the fix has one clear meaning
RuleEdits = TypedDict(
    "RuleEdits",
    {
        "set": dict[str, str],  # dotted path -> expression of its new value
        "remove": list[str],  # dotted paths
        "if": str,  # an expression that must be true for the fix
    },
    total=False,
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One fault: its condition, its texts, its edits, and its place in DeepSpeed's source."""

    code: str
    severity: Severity = "error"
    effect: Effect | None = None  # None: see `usual_effect`
    path: str  # the dotted key that the finding is about, "" for the whole file
    when: str  # the condition
    message: str  # `${EXPRESSION}` in a text is replaced by its value
    why: str  # what DeepSpeed does
    fix: str = "remove it"
    edits: RuleEdits = field(default_factory=RuleEdits)
    source: str  # file:line below deepspeed/ in 0.19.8
    ignored: bool = False  # whether DeepSpeed ignores the key, as --explain shows

    def __call__(self, subject: CheckSubject) -> Iterator[Finding]:
        """Yield the finding if the condition is true.

        Raises UnclearValue if the condition reads a wrong value.
        """
        names = _Names(subject, self.path)
        if not names.value_of(self.when):
            return
        yield Finding(
            code=self.code,
            severity=self.severity,
            effect=self.effect or self.usual_effect,
            path=self.path,
            message=names.text(self.message),
            why=names.text(self.why),
            fix=names.text(self.fix),
            edits=tuple(self._edits(names)),
        )

    @property
    def usual_effect(self) -> Effect:
        """The effect of a rule that names none: an error stops the run, and a warning changes it."""
        return "ignored" if self.ignored else "stops" if self.severity == "error" else "changes"

    def _edits(self, names: _Names) -> Iterator[Edit]:
        if self.edits and names.value_of(self.edits.get("if", "True")):
            yield from (Removal(path) for path in self.edits.get("remove", ()))
            for path, expression in self.edits.get("set", {}).items():
                yield Assignment(path, names.value_of(expression))


class _Names(dict[str, object]):
    """The values of the names in a rule's expressions, computed when an expression uses them."""

    def __init__(self, subject: CheckSubject, path: str):
        super().__init__(path=path)
        self._subject, self._path = subject, path

    def __missing__(self, name: str) -> object:
        if name == "value":
            return self._subject.get(self._path)
        if name in TERMS:
            return TERMS[name](self._subject)
        try:
            return getattr(self._subject, name)
        except AttributeError:
            raise KeyError(name) from None

    def value_of(self, expression: str) -> object:
        # eval looks names up here first, and calls __missing__ for those that are not here yet.
        # Without `__builtins__` in the globals, eval would add all of Python's functions.
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
    """A default of DeepSpeed that may surprise users, see data/defaults.yaml."""

    key: str
    when: str = "True"
    text: str
    old: object = None  # the value in older releases
    old_when: str = ""
    change: str = ""  # "" if the default did not change

    def shown(self, subject: CheckSubject) -> str:
        """Return the text with its expressions replaced."""
        return _Names(subject, self.key).text(self.text)

    def matters(self, subject: CheckSubject) -> bool:
        """Return whether the default applies; False if the condition reads a wrong value."""
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
    """Return all rules: those of zerofit.features, then those in check/rules/*.yaml."""
    folder = files("zerofit.check") / "rules"
    texts = (file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".yaml"))
    of_features = (Rule(**rule.fields()) for entry in (*ENTRIES, *ZERO_FEATURES) for rule in entry.rules)
    return (*of_features, *(rule for text in texts for rule in rules_of(text)))


def rules_of(text: str) -> Iterator[Rule]:
    """Yield the rules of a YAML text: one for each entry, or for each item of an entry's `for`."""
    for entry in packaged_yaml(text):
        for item in entry.pop("for", [{}]):
            # An item overrides fields of the entry and gives values for its <names>.
            fields = {**entry, **{name: item[name] for name in item if name in Rule.__dataclass_fields__}}
            for placeholder, value in item.items():
                for name, template in fields.items():
                    if isinstance(template, str):
                        fields[name] = template.replace(f"<{placeholder}>", str(value))
            yield Rule(**fields)
