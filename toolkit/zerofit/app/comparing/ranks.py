"""Ranks of this machine, all forked from one process during a comparison."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from zerofit.spec.server_process import ServerProcess

MODULE = "zerofit.app.comparing.rank_server"


class Rank:
    """A running rank; `poll`, `kill`, `wait` and `returncode` behave as in subprocess.Popen."""

    def __init__(self, server: ServerProcess, pid: int):
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the rank runs."""
        return self._ask("poll")

    def kill(self) -> None:
        """Kill the rank if it runs."""
        self._ask("end")

    def wait(self) -> int | None:
        """Return the exit code of a killed rank."""
        return self.returncode

    def _ask(self, what: str) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._server.ask({what: self.pid})
            except RuntimeError:  # the server has died, and its ranks with it
                self.returncode = -signal.SIGKILL
        return self.returncode


class RankServer:
    """The process from which ranks are forked, started with the first rank."""

    def __init__(self) -> None:
        self._process: ServerProcess | None = None

    def start(self, *request: Any) -> Rank:
        """Start a rank."""
        if self._process is None or self._process.process.poll() is not None:
            self._process = ServerProcess(MODULE, answers=True)
        return Rank(self._process, self._process.ask({"start": request}))

    def end(self) -> None:
        """End the process and with it all ranks."""
        if self._process is not None:
            self._process.end()


_SERVER: ContextVar[RankServer | None] = ContextVar("server", default=None)


@contextmanager
def one_server() -> Iterator[None]:
    """Fork all ranks started within from one process, which ends with the outermost of these blocks."""
    if _SERVER.get() is not None:
        yield
        return
    server = RankServer()
    token = _SERVER.set(server)
    try:
        yield
    finally:
        _SERVER.reset(token)
        server.end()


def start_rank(folder: Path, env: Mapping[str, str], log: Path) -> Rank:
    """Start a rank of the job in a folder with this environment, inside a `one_server` block."""
    server = _SERVER.get()
    assert server
    return server.start(str(folder), dict(env), str(log))
