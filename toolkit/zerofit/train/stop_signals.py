"""Requests to a rank from outside while it trains: to save and stop, or to save because it is time."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

from zerofit.spec.units import Interval

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SignalNotes:
    """Notes SIGTERM and SIGUSR1, also while the main thread waits in a collective."""

    def __init__(self) -> None:
        self.asked = False
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(True)
        wake.setblocking(False)
        self._write_end = wake

    def listen(self) -> None:
        """Let these signals ask for a stop from now on instead of ending the process. Call from the main thread."""
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # Python's own handler runs late; the wake-up byte comes at once
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._note, name="signals", daemon=True).start()

    def _note(self) -> None:
        while number := self._wake.recv(1):
            if number[0] in SIGNALS:
                self.asked = True


class StopRequests:
    """This rank's part in the question whether to save or to stop, which all ranks answer together."""

    def __init__(self, save_every: str, signals: SignalNotes | None = None, file: Path | None = None):
        """Take `file`, which asks for a stop once it exists; rank 0 looks, and rank 0's clock says when to save."""
        self._every, self._signals, self._file = Interval.parse(save_every), signals, file
        self._saved = time.monotonic()

    def mine(self) -> tuple[float, float]:
        """Return 1.0 (else 0.0) where this rank was asked to stop, and where it finds that it is time to save."""
        stop = (self._signals is not None and self._signals.asked) or (self._file is not None and self._file.exists())
        seconds = self._every.seconds
        due = self._file is not None and seconds is not None and time.monotonic() - self._saved >= seconds
        return float(stop), float(due)

    def due_at(self, step: int) -> bool:
        """Return whether the number of steps done says to save."""
        return bool(self._every.steps) and step % self._every.steps == 0

    def saved(self) -> None:
        """Note that a save has just begun."""
        self._saved = time.monotonic()

    @property
    def saving(self) -> bool:
        """Whether this run saves checkpoints without being asked to."""
        return not self._every.never
