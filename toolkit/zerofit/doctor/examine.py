"""`zerofit doctor`: all checks of this machine or of all hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerofit.doctor import host_checks
from zerofit.doctor.check import FAIL, OK, WARN, Check
from zerofit.doctor.facts import HostFacts
from zerofit.doctor.measured import MeasurementJob, joined_figures
from zerofit.doctor.preflight import Preflight, PreflightRequest, no_answer, preflight
from zerofit.doctor.remote import INSIDE, Conversation, Unreachable, ask_all, conversations
from zerofit.doctor.serve import Say
from zerofit.launch.hostfile import Host
from zerofit.launch.ops import TRAINING

MEASURE_S = 400.0
SECONDS = 0.4  # seconds for each measurement
ALONE = ("versions", "slots", "processes")  # checks of the preflight that are also shown for a single machine
IMPORT_S, BUILD_S = 180.0, 3000.0
NONE = "NotImplementedBuilder"  # DeepSpeed's placeholder for an op that the accelerator lacks


@dataclass(frozen=True, kw_only=True)
class ExamineOptions:
    """Options of `examine`: whether it compiles ops, and whether it measures speeds."""

    ssh_port: int | None = None
    build_ops: bool = False
    measure: bool = True


def examine(hosts: Sequence[Host], options: ExamineOptions, say: Say) -> list[Check]:
    """Return all checks of these hosts. An unreachable host gives a failed check."""
    say(f"asking {len(hosts)} host(s)")
    first = preflight(hosts, PreflightRequest(ssh_port=options.ssh_port, compilers=True))
    # On a single machine, comparisons between hosts mean nothing, so they are only shown if they fail.
    checks = [check for check in first.checks if len(hosts) > 1 or check.status != OK or check.name in ALONE]
    for name, facts in first.facts.items():
        checks += host_checks.checks(name, facts, many=len(hosts) > 1)
    reached = [host for host in hosts if host.name in first.facts]
    return checks + asyncio.run(_with_torch(reached, first, options, say))


async def _with_torch(hosts: list[Host], first: Preflight, options: ExamineOptions, say: Say) -> list[Check]:
    """Return the checks that need torch on the hosts: DeepSpeed's ops, and measured speeds."""
    async with conversations([host.name for host in hosts], options.ssh_port, INSIDE) as opened:
        reached = {name: host for name, host in opened.items() if isinstance(host, Conversation)}
        checks = [no_answer(name, "torch", host) for name, host in opened.items() if isinstance(host, Unreachable)]
        checks += await examine_ops(reached, say, build=options.build_ops)
        if options.measure:
            checks += await _measured([host for host in hosts if host.name in reached], reached, first, say)
        return checks


async def _measured(hosts: list[Host], reached: dict[str, Conversation], first: Preflight, say: Say) -> list[Check]:
    questions = {}
    for host in hosts:
        ranks = _ranks(host, first.facts[host.name])
        questions[host.name] = _question(first.facts[host.name], ranks, ranks=ranks)
    answers = await ask_all({h.name: reached[h.name] for h in hosts}, questions, MEASURE_S, say)
    checks: list[Check] = []
    for host in hosts:
        answer, facts = answers[host.name], first.facts[host.name]
        if isinstance(answer, Unreachable):
            checks.append(no_answer(host.name, "measurement", answer))
        elif answer["error"]:
            checks.append(Check(name="measurement", host=host.name, status=FAIL, value=answer["error"]))
        else:
            ranks = len(answer["ranks"])
            checks += host_checks.speeds(host.name, facts, joined_figures(answer["ranks"]), ranks)
            checks += host_checks.nvme_speeds(host.name, answer["nvme"])
    # The collectives need ranks on all hosts. If one host fails, the others would wait until the time limit.
    failed = any(check.status == FAIL for check in checks)
    if len(hosts) > 1 and first.master_address and not failed:
        checks += await _across(hosts, reached, first, say)
    return checks


def _ranks(host: Host, facts: HostFacts) -> int:
    return min(host.slots, len(facts["gpus"]) or facts["cores"]["usable"])


def _question(facts: HostFacts, local: int, interface: str | None = None, **job: Any) -> dict[str, object]:
    threads = max(1, facts["cores"]["usable"] // local)
    first = MeasurementJob(threads=threads, seconds=SECONDS, **job)
    return {"ask": "measure", "job": asdict(first), "local": local, "interface": interface}


async def _across(hosts: list[Host], reached: dict[str, Conversation], first: Preflight, say: Say) -> list[Check]:
    """Measure the collectives of all ranks of all hosts together."""
    local = [_ranks(host, first.facts[host.name]) for host in hosts]
    questions = {}
    common = {"store": (first.master_address or "", first.master_port or 0), "collectives_only": True}
    for number, host in enumerate(hosts):
        facts, interface = first.facts[host.name], first.interfaces.get(host.name)
        numbers = {"rank": sum(local[:number]), "ranks": sum(local)}
        questions[host.name] = _question(facts, local[number], interface, **numbers, **common)
    answers = await ask_all({h.name: reached[h.name] for h in hosts}, questions, MEASURE_S, say)
    figures = []
    for host in hosts:
        answer = answers[host.name]
        if isinstance(answer, Unreachable) or answer["error"]:
            error = answer.message if isinstance(answer, Unreachable) else answer["error"]
            hint = "open all TCP ports between the hosts; NCCL_DEBUG=INFO shows where it stops"
            return [Check(name="all-reduce between hosts", host=host.name, status=FAIL, value=error, hint=hint)]
        figures += answer["ranks"]
    # A collective ends when its slowest rank ends, so the worst figures of all ranks count.
    slowest = {"link": min(f["link"] for f in figures), "link_latency_s": max(f["link_latency_s"] for f in figures)}
    name = hosts[0].name
    return list(host_checks.speeds_across(name, first.facts[name], slowest, first.interfaces.get(name)))


async def examine_ops(hosts: dict[str, Conversation], say: Say, *, build: bool) -> list[Check]:
    """Check each op of each host. With `build`, first compile the ops that training can need."""
    answers = await ask_all(hosts, {"ask": "ops"}, IMPORT_S, say)
    checks = []
    if build:
        questions = {}
        for name, answer in answers.items():
            known = [] if isinstance(answer, Unreachable) else answer["ops"]
            ops = [op["builder"] for op in known if op["builder"] in TRAINING and op["compatible"]]
            questions[name] = {"ask": "build", "ops": ops}
        for host, answer in (await ask_all(hosts, questions, BUILD_S, say)).items():
            if isinstance(answer, Unreachable):
                checks.append(no_answer(host, "ops", answer))
                continue
            for op, problem in answer["failed"].items():
                message, hint = problem["message"], problem["hint"]
                checks.append(Check(name=f"build {op}", host=host, status=FAIL, value=message, hint=hint))
        # After a build, the ops are read again: they now count as built.
        answers = await ask_all(hosts, {"ask": "ops"}, IMPORT_S, say)
    return checks + [check for name, answer in answers.items() for check in _ops(name, answer)]


def _ops(host: str, answer: dict[str, Any] | Unreachable) -> Iterator[Check]:
    """Yield a failed check for each import that fails, and a check of each op."""
    if isinstance(answer, Unreachable):
        yield no_answer(host, "ops", answer)
        return
    reinstall = "reinstall it; install torch and torchvision together from one index"
    for name, error in answer["imports"].items():
        hint = "pip install 'zerofit[train]'" if error.endswith(f"No module named '{name}'") else reinstall
        yield Check(name=f"import {name}", host=host, status=FAIL, value=error, hint=hint)
    for op in answer["ops"]:
        if op["builder"] == NONE:
            continue
        used, can = op["builder"] in TRAINING, op["compatible"]
        yield Check(
            name=f"op {op['name']}",
            host=host,
            status=WARN if used and not can else OK,
            value="built" if op["built"] else "can be built" if can else f"cannot be built: {op['reason']}",
            expected="can be built: runs with offload or fused optimizers need it" if used else "",
            hint="zerofit doctor --build-ops" if used and can and not op["built"] else "",
        )
