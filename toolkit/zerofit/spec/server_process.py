"""A server process that imports libraries once, then forks processes without these imports.

The server reads requests as lines of JSON from standard input, and ends when standard input is closed.
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

# The server has its own command line. multiprocessing would run the user's script again in each process. So
# multiprocessing would not work in a script without `if __name__ == "__main__"`, in a notebook or in a thread.


class ServerProcess:
    """A running server, which ends when this process ends."""

    def __init__(self, module: str, answers: bool = False):
        """Start a process that runs `serve` of `module`.

        `answers`: it writes a JSON line for each request.
        """
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open while the server runs
        # the same import path as here; a new session, so only this process gets Ctrl-C
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self.process = subprocess.Popen(
            # -P: a module in the working directory must not replace one of a library.
            [sys.executable, "-P", "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def tell(self, request: object) -> None:
        """Send a request."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # see `refuse_if_ended`
            self.process.stdin.write(f"{json.dumps(request)}\n".encode())
            self.process.stdin.flush()

    def ask(self, request: object) -> Any:
        """Send a request and return the answer. Raises RuntimeError if the server has ended."""
        self.tell(request)
        assert self.process.stdout
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            self.refuse_if_ended()
        return json.loads(answer)

    def refuse_if_ended(self) -> None:
        """Raise RuntimeError if the server has ended."""
        if self.process.poll() is not None:
            code, last = self.process.returncode, self.last_output()
            raise RuntimeError(f"the server process has ended (status {code}): {last}")

    def last_output(self) -> str:
        """Return the last output on the server's standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def end(self) -> None:
        """End the server and its children."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Run the server: `python -m zerofit.spec.server_process MODULE`."""
    end_first()  # when memory runs out, the kernel ends this process before the command that waits for it
    with collector_off():
        module = importlib.import_module(sys.argv[1])
    module.serve()


if __name__ == "__main__":
    main()
