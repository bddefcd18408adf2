"""A process that has imported what others need, from which they are forked: a start of their own takes seconds each.

It is started by its own command line and not by multiprocessing, which would run the user's script once more in each
process: this works from a script without `if __name__ == "__main__"`, from a notebook and from any thread. It reads
requests from its standard input, a line of JSON each, and ends when that is closed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO, Any

from zerofit.spec.memory_limit import end_first
from zerofit.spec.process import collector_off


class ServerProcess:
    """A running server, which ends with this process."""

    def __init__(self, module: str, answers: bool = False):
        """Start a process that runs `serve` of this module; `answers`: it writes a line of JSON for each request."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open while the server runs
        # what the server imports is found as it is here; a session of its own: Ctrl-C is this process's to answer
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def tell(self, request: Any) -> None:
        """Hand over a request."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `refuse_if_ended` says why
            self.process.stdin.write(f"{json.dumps(request)}\n".encode())
            self.process.stdin.flush()

    def ask(self, request: Any) -> Any:
        """Hand over a request and return the answer. Raises a RuntimeError where the server has ended."""
        self.tell(request)
        assert self.process.stdout
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            self.refuse_if_ended()
        return json.loads(answer)

    def refuse_if_ended(self) -> None:
        """Raise a RuntimeError where the server has ended by itself."""
        if self.process.poll() is not None:
            code, last = self.process.returncode, self.said()
            raise RuntimeError(f"the process that others are forked from has ended ({code}): {last}")

    def said(self) -> str:
        """Return the end of what the server has written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def end(self) -> None:
        """End the server, and with it what it has forked."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Be the server: `python -m zerofit.spec.server_process MODULE`."""
    end_first()  # before the command that waits for an answer
    with collector_off():
        module = importlib.import_module(sys.argv[1])
    module.serve()


if __name__ == "__main__":
    main()
