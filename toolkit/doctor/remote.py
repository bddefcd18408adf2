"""Conversations with many hosts at once, over ssh without a prompt.

Only the interpreter's path stands in the remote command, quoted; questions go over standard input. What ssh is told
about host keys and users is the user's own configuration (~/.ssh/config), as for pdsh; whatever would ask is an error.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from zerofit.doctor import network
from zerofit.doctor.facts import MARK
from zerofit.doctor.unreachable import Unreachable, why
from zerofit.launch.hostfile import NAME

CONNECT_S = 5  # of one attempt of ssh's
PATIENCE_S = 20.0  # of one answer; a cold network file system takes seconds to start Python
END_S = 2.0
LINE_BYTES = 2**22
HERE = ("localhost", "127.0.0.1", "::1")


def is_here(host: str) -> bool:
    """Whether this is a name or an address of this machine, as far as that is known without asking a name server."""
    names = {*HERE, socket.gethostname(), socket.gethostname().split(".")[0]}
    return host in names or any(one["address"] == host for one in network.addresses())


def command(host: str, module: str, ssh_port: int | None) -> list[str]:
    """The argument vector that starts a module of ours on a host, with this environment's interpreter."""
    assert NAME.fullmatch(host), host
    argv = [
        "ssh",
        "-T",
        "-x",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={CONNECT_S}",
        "-o",
        "ClearAllForwardings=yes",
    ]
    argv += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    argv += ["-p", str(ssh_port)] if ssh_port else []
    return [*argv, "--", host, shlex.join([sys.executable, "-P", "-m", module])]


@dataclass
class Conversation:
    """One process on one host that answers questions."""

    host: str
    process: asyncio.subprocess.Process
    noise: asyncio.Task[bytes]  # its standard error
    clock_s: float = 0.0  # its clock minus ours at the last answer
    clock_error_s: float = 0.0  # at most

    async def ask(self, question: dict[str, Any], patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The answer. Raises Unreachable."""
        sent = time.time()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            await self.process.stdin.drain()
            answer = await asyncio.wait_for(self._line(), patience_s)
        except (TimeoutError, OSError) as error:
            raise await self._failure(error) from None
        got, (heard, answered) = time.time(), answer["clock"]
        self.clock_s = ((heard - sent) + (answered - got)) / 2  # as in NTP
        self.clock_error_s = max(0.0, (got - sent) - (answered - heard)) / 2
        return answer

    async def greeting(self) -> None:
        """Wait until it is there. Raises Unreachable."""
        try:
            await asyncio.wait_for(self._line(), PATIENCE_S)
        except (TimeoutError, OSError) as error:
            raise await self._failure(error) from None

    async def _line(self) -> dict[str, Any]:
        """The next line that is ours: a shell there may print what it likes. Raises ConnectionResetError at the end."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(MARK.encode()):
                return json.loads(line[len(MARK) :])
        raise ConnectionResetError

    async def _failure(self, error: Exception) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable("timeout", f"no answer in {PATIENCE_S:.0f} s", "look whether it is overloaded or hangs")
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)
        said = (await self.noise).decode(errors="replace") if self.process.returncode is not None else ""
        return why(self.host, self.process.returncode, said)

    async def close(self) -> None:
        """Let it end, or end it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            await asyncio.wait_for(self.process.wait(), END_S)
        finally:
            if self.process.returncode is None:
                self.process.kill()
            self.noise.cancel()


async def start(host: str, module: str, ssh_port: int | None, *, local: bool = False) -> Conversation:
    """Start a module that answers questions; `local`: on this machine, without ssh. Raises Unreachable."""
    argv = [sys.executable, "-P", "-m", module] if local else command(host, module, ssh_port)
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES, start_new_session=True
        )
    except OSError as error:
        raise Unreachable("ssh", f"{argv[0]} does not start here: {error.strerror}", "install openssh-client") from None
    assert process.stderr is not None
    return Conversation(host, process, asyncio.create_task(process.stderr.read()))


@asynccontextmanager
async def conversations(
    hosts: Sequence[str], ssh_port: int | None = None
) -> AsyncIterator[dict[str, Conversation | Unreachable]]:
    """A conversation with each host that can be reached, started all at once; ended with the block.

    One host alone that is this machine is not asked over ssh, since nothing else will go there over ssh either.
    """
    local = len(hosts) == 1 and is_here(hosts[0])
    started = await asyncio.gather(*(_started(host, ssh_port, local) for host in hosts))
    try:
        yield dict(zip(hosts, started, strict=True))
    finally:
        open_ones = [one for one in started if isinstance(one, Conversation)]
        await asyncio.gather(*(one.close() for one in open_ones), return_exceptions=True)


async def _started(host: str, ssh_port: int | None, local: bool) -> Conversation | Unreachable:
    if not NAME.fullmatch(host):
        return Unreachable("name", f"{host!r} is no host name", "give users and ports in ~/.ssh/config")
    try:
        found = await start(host, "zerofit.doctor.facts", ssh_port, local=local)
    except Unreachable as error:
        return error
    try:
        await found.greeting()
    except Unreachable as error:
        await asyncio.gather(found.close(), return_exceptions=True)
        return error
    except BaseException:
        found.process.kill()
        raise
    return found


async def ask_all(
    open_ones: dict[str, Conversation], question: dict[str, Any]
) -> dict[str, dict[str, Any] | Unreachable]:
    """One question to all at the same time."""

    async def ask(one: Conversation) -> dict[str, Any] | Unreachable:
        try:
            return await one.ask(question)
        except Unreachable as error:
            return error

    answers = await asyncio.gather(*(ask(one) for one in open_ones.values()))
    return dict(zip(open_ones, answers, strict=True))
