"""One rank of a script to be measured or simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ScriptTask:
    """A command as a user types it, and the folder to run it in."""

    command: tuple[str, ...]
    folder: str
    ranks: int = 2
    rank: int = 0
    steps: int = 2
    received: dict[str, Any] | None = None  # by a later stage of a pipeline (`record.SentTensors`)
    kernels: bool = False  # simulate each kernel with the scratch that it takes on this machine

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)
