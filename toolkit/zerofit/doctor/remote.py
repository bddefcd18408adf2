"""Questions to many hosts at once, over ssh without a prompt.

The remote command has only the quoted path of the interpreter; questions go over standard input. Host keys and users
come from the user's ~/.ssh/config, as for pdsh. If ssh would prompt, that is an error.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from zerofit.doctor.serve import MARK, Say
from zerofit.doctor.system import addresses
from zerofit.launch.hostfile import NAME

SSH_FAILED = 255  # man ssh, EXIT STATUS
# a pattern in the standard error, the kind of failure, a hint. Only the last two come from the remote command.
FAILURES = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "host-key", "if you know why its key is new: ssh-keygen -R {host}"),
    (r"Host key verification failed", "host-key", "its key is not known: run `ssh {host} true` once and accept it"),
    (r"Permission denied|Too many authentication failures", "password", "copy your key to it: ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known", "name", "correct the name, or add it to /etc/hosts"),
    (r"Connection refused", "refused", "start sshd on {host}, or give its port with --ssh-port"),
    (
        r"timed out|No route to host|Network is unreachable",
        "unreachable",
        "check that {host} is running and that its ssh port is open to this machine",
    ),
    (
        r"Connection closed by|Connection reset|kex_exchange_identification",
        "refused",
        "sshd closed the connection: see its log on {host}",
    ),
    (r"No module named", "zerofit", "install the same zerofit on {host}, in the same place ({python})"),
    (
        r"No such file or directory|not found|Permission denied.*python",
        "python",
        "install Python on {host} in the same place: {python}",
    ),
)
PATIENCE_S = 20.0  # seconds for one answer; on a cold network file system the start of Python takes seconds
END_S = 2.0
CONNECT_S = 5  # seconds for one attempt of ssh
LINE_BYTES = 2**22
FACTS, INSIDE = "zerofit.doctor.facts", "zerofit.doctor.torch_probe"  # seconds to start, without and with torch
HERE = ("localhost", "127.0.0.1", "::1")


class Unreachable(Exception):
    """A host that does not answer. `kind` is a stable slug, and `hint` describes the remedy."""

    def __init__(self, kind: str, message: str, hint: str):
        self.kind, self.message, self.hint = kind, message, hint
        super().__init__(message)


def why(host: str, code: int | None, stderr: str) -> Unreachable:
    """Return why ssh failed, from its exit code (255: its own failure) and its standard error."""
    lines = [line.strip() for line in stderr.splitlines()]
    for pattern, kind, hint in FAILURES[:-2] if code == SSH_FAILED else FAILURES[-2:]:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is not None:
            return Unreachable(kind, line[:300], hint.format(host=host, python=sys.executable))
    last = [line for line in lines if line][-1:]
    words = f"the process ended with exit code {code}" + (f": {last[0][:300]}" if last else "")
    return Unreachable("ssh", words, f"try: ssh -o BatchMode=yes {host} true")


@dataclass
class Conversation:
    """One process on one host that answers questions."""

    host: str
    process: asyncio.subprocess.Process
    stderr: asyncio.Task[bytes]
    clock_s: float = 0.0  # the host's clock minus this machine's, at the last answer
    clock_error_s: float = 0.0  # at most
    lost: Unreachable | None = None  # after the first failure: a late answer is not that of the next question

    async def ask(self, question: object, patience_s: float = PATIENCE_S, say: Say | None = None) -> dict[str, Any]:
        """Return the answer; `say` gets lines of progress. Raises Unreachable, now and ever after."""
        if self.lost:
            raise self.lost
        sent = time.time()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            await self.process.stdin.drain()
            # One limit holds for all lines of an answer: progress does not extend it.
            async with asyncio.timeout(patience_s):
                while "progress" in (answer := await self._line()):
                    if say:
                        say(answer["progress"])
        except (TimeoutError, OSError, ValueError) as error:
            self.lost = await self._failure(error, patience_s)
            raise self.lost from None
        got, (received, answered) = time.time(), answer["clock"]
        # As in NTP: with equal delays in both directions, the mean of the two differences is the clocks' difference.
        # It is wrong by half of the time on the network at most.
        self.clock_s = ((received - sent) + (answered - got)) / 2
        self.clock_error_s = max(0.0, (got - sent) - (answered - received)) / 2
        return answer

    async def greeting(self) -> None:
        """Wait for the process's greeting. Raises Unreachable."""
        try:
            await asyncio.wait_for(self._line(), PATIENCE_S)
        except (TimeoutError, OSError, ValueError) as error:
            raise await self._failure(error, PATIENCE_S) from None

    async def _line(self) -> dict[str, Any]:
        """Return the next line with our mark. Raises ConnectionResetError, and ValueError if it cannot be read."""
        assert self.process.stdout is not None
        # the host's shell may print other lines
        while line := await self.process.stdout.readline():
            _, mark, answer = line.partition(MARK.encode())
            if mark:
                return json.loads(answer)
        raise ConnectionResetError

    async def _failure(self, error: Exception, patience_s: float) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable("timeout", f"no answer in {patience_s:.0f} s", "check whether it is overloaded or hangs")
        if isinstance(error, ValueError):  # of json, or of asyncio for a line over LINE_BYTES
            message = f"its answer is no JSON line of at most {LINE_BYTES >> 20} MiB"
            return Unreachable("answer", message, f"check what its shell prints: ssh {self.host} true")
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)
        await asyncio.wait([self.stderr], timeout=END_S)  # a child process of ssh may keep the pipe open
        words = self.stderr.result().decode(errors="replace") if self.stderr.done() else ""
        return why(self.host, self.process.returncode, words)

    async def close(self) -> None:
        """End the process and close its pipes."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            await asyncio.wait_for(self.process.wait(), END_S)
        finally:
            self.stderr.cancel()
            # kills what still runs; a child process may keep the pipes open, which asyncio can close only while its
            # event loop runs
            self.process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]


def is_here(host: str) -> bool:
    """Return whether `host` is a name or address of this machine, without asking a name server."""
    names = {*HERE, socket.gethostname(), socket.gethostname().split(".")[0]}
    return host in names or any(row["address"] == host for row in addresses())


def command(host: str, module: str, ssh_port: int | None) -> list[str]:
    """Return the ssh command that starts a module on a host, with this interpreter."""
    assert NAME.fullmatch(host), host
    # The user's ~/.ssh/config may forward a port that is in use, and ssh may exit for that reason.
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ClearAllForwardings=yes"]
    # A host that loses power closes no connection. Without these messages ssh would wait for it.
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
    argv = ["ssh", "-T", "-x", *(word for option in options for word in ("-o", option))]
    argv += ["-p", str(ssh_port)] if ssh_port else []
    return [*argv, "--", host, shlex.join([sys.executable, "-P", "-m", module])]


@asynccontextmanager
async def conversations(
    hosts: Sequence[str], ssh_port: int | None = None, module: str = FACTS
) -> AsyncIterator[dict[str, Conversation | Unreachable]]:
    """Start a conversation with each host. Yield it, or the reason of its failure, by host.

    The conversations are closed at the end of the block.
    """
    local = len(hosts) == 1 and is_here(hosts[0])  # a run on this machine alone does not use ssh either
    started = await asyncio.gather(*(_started(host, module, ssh_port, local) for host in hosts))
    try:
        yield dict(zip(hosts, started, strict=True))
    finally:
        opened = [conversation for conversation in started if isinstance(conversation, Conversation)]
        await asyncio.gather(*(conversation.close() for conversation in opened), return_exceptions=True)


async def _started(host: str, module: str, ssh_port: int | None, local: bool) -> Conversation | Unreachable:
    if not NAME.fullmatch(host):
        return Unreachable("name", f"{host!r} is not a valid host name", "give users and ports in ~/.ssh/config")
    argv = [sys.executable, "-P", "-m", module] if local else command(host, module, ssh_port)
    pipe = asyncio.subprocess.PIPE
    try:
        # In its own session ssh does not get Ctrl-C from the terminal, so this command can still end the conversations.
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES, start_new_session=True
        )
    except OSError as error:
        return Unreachable(
            "ssh", f"{argv[0]} does not start on this machine: {error.strerror}", "install openssh-client"
        )
    assert process.stderr is not None
    found = Conversation(host, process, asyncio.create_task(process.stderr.read()))
    try:
        await found.greeting()
    except Unreachable as error:
        await asyncio.gather(found.close(), return_exceptions=True)
        return error
    except BaseException:
        process.kill()
        raise
    return found


async def ask_all(
    hosts: dict[str, Conversation],
    question: Mapping[str, object],
    patience_s: float = PATIENCE_S,
    say: Say | None = None,
) -> dict[str, dict[str, Any] | Unreachable]:
    """Ask all hosts one question, or a question by host. Return the answers by host."""

    # An exception would make `gather` drop the answers of the other hosts.
    async def ask(host: Conversation) -> dict[str, Any] | Unreachable:
        try:
            return await host.ask(question if "ask" in question else question[host.host], patience_s, say)
        except Unreachable as error:
            return error

    answers = await asyncio.gather(*(ask(host) for host in hosts.values()))
    return dict(zip(hosts, answers, strict=True))
