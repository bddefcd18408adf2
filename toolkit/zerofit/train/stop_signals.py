"""Receive a rank's requests to stop, and decide when a checkpoint is due."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

from zerofit.spec.units import Interval

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


# Python runs signal handlers only between bytecodes of the main thread, which may wait in a collective for minutes.
# The wake-up file descriptor is written by C code at once, so a thread that reads it learns of the signal in time.
class SignalNotes:
    """Records SIGTERM and SIGUSR1, even while the main thread waits in a collective."""

    def __init__(self) -> None:
        self.received = False
        self._wake, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)  # a signal handler must never wait

    def listen(self) -> None:
        """Make these signals request a stop instead of killing the process.

        Must be called from the main thread.
        """
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # Python runs its handler late; the wake-up byte arrives at once
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._note, name="signals", daemon=True).start()

    def _note(self) -> None:
        while number := self._wake.recv(1):
            if number[0] in SIGNALS:
                self.received = True


class StopRequests:
    """This rank's requests to save or stop, which all ranks combine."""

    def __init__(self, save_every: str, signals: SignalNotes | None = None, file: Path | None = None):
        """Watch `file`, whose existence requests a stop. Only rank 0 gets one, and times the saves."""
        self._every, self._signals, self._file = Interval.parse(save_every), signals, file
        self._saved = time.monotonic()

    def of_this_rank(self) -> tuple[float, float]:
        """Return whether this rank was asked to stop, and whether a save is due: 1.0 (yes) or 0.0."""
        received = self._signals is not None and self._signals.received
        stop = received or (self._file is not None and self._file.exists())
        seconds = self._every.seconds
        due = self._file is not None and seconds is not None and time.monotonic() - self._saved >= seconds
        return float(stop), float(due)

    def due_at(self, step: int) -> bool:
        """Return whether a save is due after `step` steps."""
        return bool(self._every.steps) and step % self._every.steps == 0

    def saved(self) -> None:
        """Record that a save has begun."""
        self._saved = time.monotonic()

    @property
    def saving(self) -> bool:
        """Whether this run saves checkpoints regularly."""
        return not self._every.never
