"""One line that says what is going on, on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

PLAIN_S = 10.0  # between lines where there is no terminal


class StatusLine:
    """A spinner with changing words; without a terminal a plain line every few seconds."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = Status("", console=console) if console.is_terminal else None
        self._said = 0.0

    def __enter__(self) -> StatusLine:
        if self._status:
            self._status.start()
        return self

    def show(self, text: str) -> None:
        """Say what is being done now."""
        if self._status:
            self._status.update(text)
        elif time.monotonic() - self._said > PLAIN_S:
            print(text, file=sys.stderr, flush=True)
            self._said = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._status:
            self._status.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()
