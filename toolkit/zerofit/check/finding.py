"""What the checker says about one fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zerofit.check.edit import Edit

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of a DeepSpeed JSON; line and column are filled in from its path where a rule leaves them 0."""

    code: str  # stable slug, as docs/checks.md lists it
    severity: Severity  # error: DeepSpeed refuses, or trains something else than was asked; warning: the rest
    path: str  # dotted key, "" for the whole document
    message: str  # what is wrong
    why: str  # what DeepSpeed does about it
    fix: str  # the way out, in words
    edits: tuple[Edit, ...] = ()  # the same as changes to the text; none where only the user can know
    line: int = 0
    column: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The keys that `zerofit check --json` prints."""
        names = ("line", "column", "path", "severity", "code", "message", "why", "fix")
        return {name: getattr(self, name) for name in names}
