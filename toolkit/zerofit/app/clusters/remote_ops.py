"""DeepSpeed's C++ ops on all hosts of a run, before its ranks start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zerofit.doctor.examine import BUILD_S
from zerofit.doctor.remote import INSIDE, Conversation, Unreachable, ask_all, conversations
from zerofit.spec.errors import Problem, RunFailed


def build_on(hosts: Sequence[str], ops: list[str], ssh_port: int | None, show: Callable[[str], None]) -> None:
    """Compile the ops (or find them compiled) on all hosts at the same time. Raises RunFailed with the first failure.

    Hosts that share a home folder take turns, and the second finds the work done.
    """
    if ops:
        asyncio.run(_build_on(hosts, ops, ssh_port, show))


async def _build_on(hosts: Sequence[str], ops: list[str], ssh_port: int | None, show: Callable[[str], None]) -> None:
    async with conversations(hosts, ssh_port, INSIDE) as opened:
        there = {name: one for name, one in opened.items() if isinstance(one, Conversation)}
        answers = await ask_all(there, {"ask": "build", "ops": ops}, BUILD_S, show)
    for host, answer in {**opened, **answers}.items():
        if isinstance(answer, Unreachable):
            message = f"{host} was lost while compiling DeepSpeed's ops: {answer.message}"
            raise RunFailed(Problem(kind="op-build", message=message, hint=answer.hint, where=host))
        for failed in answer["failed"].values():
            problem = Problem(**failed)
            raise RunFailed(Problem(kind=problem.kind, message=f"{host}: {problem.message}", hint=problem.hint))
