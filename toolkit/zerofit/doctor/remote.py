"""Conversations with many hosts at once, over ssh without a prompt.

Only the interpreter's path stands in the remote command, quoted; questions go over standard input. What ssh is told
about host keys and users is the user's own configuration (~/.ssh/config), as for pdsh; whatever would ask is an error.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from zerofit.doctor import network
from zerofit.doctor.conversation import PATIENCE_S, Conversation
from zerofit.doctor.unreachable import Unreachable
from zerofit.launch.hostfile import NAME

CONNECT_S = 5  # of one attempt of ssh's
LINE_BYTES = 2**22
FACTS, INSIDE = "zerofit.doctor.facts", "zerofit.doctor.torch_probe"  # without torch, and with it
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
    hosts: Sequence[str], ssh_port: int | None = None, module: str = FACTS
) -> AsyncIterator[dict[str, Conversation | Unreachable]]:
    """A conversation with each host that can be reached, started all at once; ended with the block.

    One host alone that is this machine is not asked over ssh, since nothing else will go there over ssh either.
    """
    local = len(hosts) == 1 and is_here(hosts[0])
    started = await asyncio.gather(*(_started(host, module, ssh_port, local) for host in hosts))
    try:
        yield dict(zip(hosts, started, strict=True))
    finally:
        open_ones = [one for one in started if isinstance(one, Conversation)]
        await asyncio.gather(*(one.close() for one in open_ones), return_exceptions=True)


async def _started(host: str, module: str, ssh_port: int | None, local: bool) -> Conversation | Unreachable:
    if not NAME.fullmatch(host):
        return Unreachable("name", f"{host!r} is no host name", "give users and ports in ~/.ssh/config")
    try:
        found = await start(host, module, ssh_port, local=local)
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
    open_ones: dict[str, Conversation],
    question: dict[str, Any] | dict[str, dict[str, Any]],
    patience_s: float = PATIENCE_S,
    say: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any] | Unreachable]:
    """One question to all at the same time, or one for each by host."""

    async def ask(one: Conversation) -> dict[str, Any] | Unreachable:
        try:
            return await one.ask(question if "ask" in question else question[one.host], patience_s, say)
        except Unreachable as error:
            return error

    answers = await asyncio.gather(*(ask(one) for one in open_ones.values()))
    return dict(zip(open_ones, answers, strict=True))
