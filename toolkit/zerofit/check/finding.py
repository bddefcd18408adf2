"""Findings of the checker, and guesses of the name that a user meant."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from zerofit.check.edit import Edit, Renaming
from zerofit.check.subject import CheckSubject

# One wrong letter in a word of five or more is above it ("stag" for stage: 0.89). Two different keys are below it
# (warmup_min_lr and warmup_max_lr: 0.82).
SLIP = 0.87  # difflib ratio from which a wrong name is a typo

Severity = Literal["error", "warning"]
# on a run: it stops, trains or saves something else, ignores the key, or only needs more time or memory
Effect = Literal["stops", "changes", "ignored", "costs"]
EFFECTS: tuple[Effect, ...] = ("stops", "changes", "ignored", "costs")
Edits = tuple[Edit, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of a DeepSpeed JSON."""

    code: str  # stable slug; the documentation site lists all (docs/site.py, checks_page)
    severity: Severity = "error"  # error: DeepSpeed stops, or trains differently than intended
    effect: Effect = "stops"
    path: str  # dotted key, "" for the whole document
    message: str  # what is wrong
    why: str  # effect of the fault in DeepSpeed
    fix: str  # what to do
    other_place: str = ""  # "run.sh:12": the other file's line that differs
    edits: Edits = ()  # only if the meaning is clear: a move, a new name, a corrected type
    line: int = 0  # 0: filled in later from the path
    column: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return the keys that `zerofit check --json` prints."""
        # Scripts read the older name "beside", and the three older effects.
        names = ("line", "column", "path", "severity", "effect", "code", "message", "why", "fix")
        values: dict[str, object] = {**{name: getattr(self, name) for name in names}, "beside": self.other_place}
        return values | {"effect": "changes"} if self.effect == "costs" else values


def unknown_parameter(
    c: CheckSubject,
    path: str,
    *,
    code: str,
    owner: str,
    allowed: Collection[str],
    synonyms: Mapping[str, str],
    dropped: bool = False,
) -> Finding:
    """Return the finding about a parameter that an optimizer or scheduler does not have."""
    parent, _, key = path.rpartition(".")
    better = near(key, allowed, synonyms)
    # beta1 is only half of betas, so renaming it is no fix
    free = better is not None and not c.has(f"{parent}.{better}") and better != "betas"
    return Finding(
        code=code,
        path=path,
        message=f"{owner} has no parameter {key!r}; allowed: {', '.join(allowed)}",
        effect="ignored" if dropped else "stops",
        why="DeepSpeed silently drops it"
        if dropped
        else f"DeepSpeed stops after the ranks have started: \"unexpected keyword argument '{key}'\"",
        fix=f"did you mean {better}?" if better else "remove it",
        edits=(Renaming(path, better),) if free and better and plainly(key, better, synonyms) else (),
    )


def plainly(word: str, name: str, synonyms: Mapping[str, str] | None = None) -> bool:
    """Return whether the wrong name `word` clearly means `name`."""
    # It is a synonym, or one or two letters are wrong.
    bare, meant = (w.lower().replace("_", "").replace("-", "") for w in (word, name))
    known = (synonyms or {}).get(word.lower()) == name
    return bare == meant or known or difflib.SequenceMatcher(None, bare, meant).ratio() >= SLIP


def near(word: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """Return the known name that a wrong name most likely means; None if there is none."""
    # First a name that differs only in case, "_" or "-", then a synonym, then the closest spelling.
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


def as_number(text: str) -> float | int | None:
    """Parse a finite number, or return None."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value
