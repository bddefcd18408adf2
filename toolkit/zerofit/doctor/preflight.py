"""Everything that can be known of all hosts before a run starts on them, in a few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.doctor import compare, routes, run_folder
from zerofit.doctor.check import FAIL, OK, Check
from zerofit.doctor.compare import clock
from zerofit.doctor.facts import collect
from zerofit.doctor.remote import Conversation, Unreachable, ask_all, conversations
from zerofit.doctor.run_folder import left_token
from zerofit.launch.hostfile import Host

MARK_S = 3.0  # for a file of another host's to be seen here; network file systems hold names back for a while


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """What the hosts are asked about; None leaves that check out."""

    run_folder: Path | None = None  # exists on the asking side; has to be the same folder everywhere
    run_file: Path | None = None
    code: Path | None = None  # file or package folder of the user's own model: see `software.model_code`
    checkpoint_bytes: int | None = None  # that one checkpoint will take
    accelerator: str | None = None  # "cuda" or "cpu"; None: what the hosts have
    master: str | None = None  # host name or address that ranks meet at; None: the best one of the first host's
    master_port: int | None = None
    callback: tuple[str, int] | None = None  # address and port where the asking command listens already
    ssh_port: int | None = None
    compilers: bool = False  # ask for their versions too


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found."""

    checks: tuple[Check, ...]  # in the order of the hosts, those that are well too
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by host; without those that were not reached
    master_address: str | None = None  # of the first host, that all others have reached
    master_port: int | None = None  # the one that was asked about, else one that was free
    interfaces: dict[str, str] = field(default_factory=dict)  # by host: the one that leads to the master

    @property
    def findings(self) -> tuple[Check, ...]:
        """What is wrong or worth knowing."""
        return tuple(check for check in self.checks if check.status != OK)

    @property
    def failed(self) -> bool:
        """Whether a run would fail."""
        return any(check.status == FAIL for check in self.checks)


def preflight(hosts: Sequence[Host], asked: PreflightRequest) -> Preflight:
    """Ask all hosts at the same time and compare them with each other and with this side.

    Raises OSError where the run folder cannot be written on this side.
    """
    return asyncio.run(_preflight(hosts, asked))


async def _preflight(hosts: Sequence[Host], asked: PreflightRequest) -> Preflight:
    names = [host.name for host in hosts]
    with ExitStack() as stack:
        question: dict[str, Any] = {
            "ask": "facts",
            "run_file": str(asked.run_file.absolute()) if asked.run_file else None,
            "code": str(asked.code.absolute()) if asked.code else None,
            "compilers": asked.compilers,
        }
        own = asyncio.create_task(asyncio.to_thread(collect, question, stack))
        if asked.run_folder is not None:
            token = left_token(asked.run_folder)
            stack.callback(token.unlink, missing_ok=True)
            question = question | {"run_folder": str(asked.run_folder.absolute()), "token": token.name}
        async with conversations(names, asked.ssh_port) as opened:
            there = {name: one for name, one in opened.items() if isinstance(one, Conversation)}
            answers = await ask_all(there, question)
            facts = {name: answer for name, answer in answers.items() if not isinstance(answer, Unreachable)}
            lost = {n: one for n, one in {**opened, **answers}.items() if isinstance(one, Unreachable)}
            there = {name: one for name, one in there.items() if name in facts}
            seen = await _marks_seen(asked.run_folder, facts)
            found = await routes.find(names, there, facts, asked.master, asked.master_port, asked.callback)
        checks = [_unreached(name, lost[name]) for name in names if name in lost]
        checks += compare.checks(hosts, facts, await own, asked.accelerator)
        if asked.run_folder is not None:
            checks += run_folder.folders(facts, asked.run_folder, seen)
            checks += run_folder.disk(facts, asked.checkpoint_bytes)
        checks += [clock(name, one.clock_s, one.clock_error_s) for name, one in there.items()]
        checks += found.checks
    order = {name: number for number, name in enumerate(names)}
    checks.sort(key=lambda check: order.get(check.host, -1))
    return Preflight(
        checks=tuple(checks),
        facts=facts,
        master_address=found.master_address,
        master_port=found.master_port,
        interfaces=found.interfaces,
    )


def _unreached(host: str, error: Unreachable) -> Check:
    return Check(
        name="reachable",
        host=host,
        status=FAIL,
        value=error.message,
        expected="ssh without a prompt, and the same zerofit there",
        hint=error.hint,
    )


async def _marks_seen(folder: Path | None, facts: dict[str, dict[str, Any]]) -> set[str]:
    """Hosts whose files in the run folder are seen on this side; the hosts take them away themselves."""
    if folder is None:
        return set()
    marks = {name: one["run_folder"]["mark"] for name, one in facts.items() if one["run_folder"]["mark"]}
    end = asyncio.get_running_loop().time() + MARK_S
    while True:
        seen = {name for name, mark in marks.items() if (folder / mark).exists()}
        if len(seen) == len(marks) or asyncio.get_running_loop().time() > end:
            return seen
        await asyncio.sleep(0.1)
