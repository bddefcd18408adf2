"""The check of all hosts before a run starts on them, in a few seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerofit.doctor import compare
from zerofit.doctor.check import FAIL, OK, WARN, Check, check
from zerofit.doctor.compare import clock
from zerofit.doctor.facts import collect
from zerofit.doctor.remote import Conversation, Unreachable, ask_all, conversations
from zerofit.launch.hostfile import Host

MARK_S = 3.0  # seconds until another host's file appears here; network file systems cache names
LOOPBACK = "127.0.0.1"
SLOW_MBIT = 10_000  # with less, the steps of a model that is sharded over hosts wait for the network: docs/doctor.md


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """The values that the preflight checks; None skips a check."""

    run_folder: Path | None = None  # a folder on this machine, which must be the same folder on all hosts
    run_file: Path | None = None
    code: Path | None = None  # file or package folder of the user's own model: `software.model_code`
    checkpoint_bytes: int | None = None  # size of one checkpoint
    accelerator: str | None = None  # "cuda" or "cpu"; None: cuda if any host has a GPU
    master: str | None = None  # host name or address where ranks meet; None: the first host's best address
    master_port: int | None = None
    callback: tuple[str, int] | None = None  # address and port where the asking command already listens
    ssh_port: int | None = None
    compilers: bool = False  # also the compilers' versions


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The result of a preflight on all hosts."""

    checks: tuple[Check, ...] = ()  # in the order of the hosts, including checks that are OK
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # facts by host, of the reached hosts
    master_address: str | None = None  # the first host's address that most hosts have reached
    master_port: int | None = None  # the requested port, else a free port
    interfaces: dict[str, str] = field(default_factory=dict)  # by host: the interface on the way to the master

    @property
    def findings(self) -> tuple[Check, ...]:
        """The checks that are not OK."""
        return tuple(check for check in self.checks if check.status != OK)

    @property
    def failed(self) -> bool:
        """Whether a check failed. A run would then fail, too."""
        return any(check.status == FAIL for check in self.checks)


def preflight(hosts: Sequence[Host], asked: PreflightRequest) -> Preflight:
    """Ask all hosts at the same time, and compare them with each other and with this machine.

    Raises OSError if this machine cannot write to the run folder.
    """
    return asyncio.run(_preflight(hosts, asked))


async def _preflight(hosts: Sequence[Host], asked: PreflightRequest) -> Preflight:
    names = [host.name for host in hosts]
    with ExitStack() as stack:
        question: dict[str, object] = {
            "ask": "facts",
            "run_file": str(asked.run_file.absolute()) if asked.run_file else None,
            "code": str(asked.code.absolute()) if asked.code else None,
            "compilers": asked.compilers,
        }
        own = asyncio.create_task(asyncio.to_thread(collect, question, stack))
        if asked.run_folder is not None:
            token = asked.run_folder / f".zerofit-asks-{uuid.uuid4().hex}"  # other hosts look for this file
            token.touch(exist_ok=False)
            stack.callback(token.unlink, missing_ok=True)
            question = question | {"run_folder": str(asked.run_folder.absolute()), "token": token.name}
        async with conversations(names, asked.ssh_port) as opened:
            there = {name: one for name, one in opened.items() if isinstance(one, Conversation)}
            answers = await ask_all(there, question)
            facts = {name: answer for name, answer in answers.items() if not isinstance(answer, Unreachable)}
            missing = {n: one for n, one in {**opened, **answers}.items() if isinstance(one, Unreachable)}
            there = {name: one for name, one in there.items() if name in facts}
            seen = await _marks_seen(asked.run_folder, facts)
            found = await find_routes(names, there, facts, asked.master, asked.master_port, asked.callback)
        expected = "ssh without a prompt, and the same zerofit on the host"
        checks = [lost(name, "reachable", missing[name], expected) for name in names if name in missing]
        checks += compare.checks(hosts, facts, await own, asked.accelerator)
        if asked.run_folder is not None:
            checks += compare.folders(facts, asked.run_folder, seen)
            checks += compare.disk(facts, asked.checkpoint_bytes)
        checks += [clock(name, one.clock_s, one.clock_error_s) for name, one in there.items()]
        checks += found.checks
    order = {name: number for number, name in enumerate(names)}
    checks.sort(key=lambda check: order.get(check.host, -1))
    return replace(found, checks=tuple(checks), facts=facts)


def lost(host: str, name: str, error: Unreachable, expected: str = "") -> Check:
    """Return a failed check of a host that did not answer."""
    return check(name, host, error.message, "", expected=expected, hint=error.hint)


async def _marks_seen(folder: Path | None, facts: dict[str, dict[str, Any]]) -> set[str]:
    """Return the hosts whose files in the run folder appear on this machine within `MARK_S` seconds."""
    if folder is None:
        return set()
    marks = {name: one["run_folder"]["mark"] for name, one in facts.items() if one["run_folder"]["mark"]}
    end = asyncio.get_running_loop().time() + MARK_S
    while True:
        seen = {name for name, mark in marks.items() if (folder / mark).exists()}
        if len(seen) == len(marks) or asyncio.get_running_loop().time() > end:
            return seen
        await asyncio.sleep(0.1)


async def find_routes(
    names: list[str],
    there: dict[str, Conversation],
    facts: dict[str, dict[str, object]],
    master: str | None,
    port: int | None,
    callback: tuple[str, int] | None,
) -> Preflight:
    """Listen on the first host, and connect to it from all hosts.

    The result is empty if the first host does not answer.
    """
    first = names[0]
    if first not in there:
        return Preflight()
    heard = (await ask_all({first: there[first]}, {"ask": "listen", "port": port or 0}))[first]
    error = heard.message if isinstance(heard, Unreachable) else heard["error"]
    checks = [_master_port(first, port, error)] if port else []
    if isinstance(heard, Unreachable) or error:
        return Preflight(checks=tuple(checks))
    candidates = [master] if master else candidates_of(facts[first], alone=len(names) == 1)
    targets = [[address, heard["port"]] for address in candidates] + ([list(callback)] if callback else [])
    reached = await _reached(there, targets)
    if callback:
        checks += [_callback(name, callback, rows[-1]["error"]) for name, rows in reached.items()]
    best = _most_reached(reached, len(candidates))
    to_master = {name: rows[best] for name, rows in reached.items()}
    checks += [_to_master(name, candidates[best], heard["port"], row) for name, row in to_master.items()]
    interfaces = _interfaces(names, facts, to_master, named=bool(master))
    checks += [interface_check(name, interface, facts[name], len(names)) for name, interface in interfaces.items()]
    return Preflight(
        checks=tuple(checks), master_address=candidates[best], master_port=heard["port"], interfaces=interfaces
    )


def _most_reached(reached: dict[str, list[dict[str, object]]], count: int) -> int:
    return max(range(count), key=lambda n: sum(rows[n]["error"] is None for rows in reached.values()))


async def _reached(there: dict[str, Conversation], targets: list[list[object]]) -> dict[str, list[dict[str, Any]]]:
    """Return the results of connecting to each target, by host: `error` (None if reached), seconds, interface."""
    answers = await ask_all(there, {"ask": "reach", "targets": targets})
    return {
        name: [{"error": one.message}] * len(targets) if isinstance(one, Unreachable) else one["reached"]
        for name, one in answers.items()
    }


def candidates_of(facts: dict[str, Any], *, alone: bool) -> list[str]:
    """Return the addresses at which others may reach a host: the address that ssh has used, then the fastest."""
    if alone:
        return [LOOPBACK]
    usable = [one for one in facts["addresses"] if not one["loopback"] and not one["link_local"]]
    by_ssh = facts["asked_from"]["here"]
    usable.sort(key=lambda one: (one["address"] != by_ssh, _version(one["address"]), -(one["speed_mbit"] or 0)))
    return [one["address"] for one in usable if _version(one["address"]) == 4] or [LOOPBACK]


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _interfaces(
    names: list[str], facts: dict[str, dict[str, Any]], to_master: dict[str, dict[str, Any]], *, named: bool
) -> dict[str, str]:
    """Return each host's network interface on its route to the master.

    `named`: the user has given the master's name.
    """
    found = {name: row["interface"] for name, row in to_master.items() if not row["error"] and row["interface"]}
    first = names[0]
    if named and len(names) > 1 and first in found:  # on the host itself, its name may resolve to loopback
        rows, here = facts[first]["addresses"], facts[first]["asked_from"]["here"]
        found[first] = next((one["interface"] for one in rows if one["address"] == here), found[first])
    return found


def _master_port(host: str, port: int, error: str | None) -> Check:
    expected, hint = "a free port on the first host", "choose another one with --master-port, or stop the process"
    return check("master-port", host, error or "", f"port {port} is free", expected=expected, hint=hint)


def _to_master(host: str, address: str, port: int, row: dict[str, Any]) -> Check:
    problem = f"{address} port {port}: {row['error']}" if row["error"] else ""
    good = "" if problem else f"{address} in {row['seconds'] * 1e3:.1f} ms"
    hint = "open all TCP ports between the hosts (NCCL and gloo use any port), or use --master-addr with an address "
    hint += "that all hosts can reach"
    expected = "every host can connect to the first host"
    return check("master-reachable", host, problem, good, expected=expected, hint=hint)


def _callback(host: str, callback: tuple[str, int], error: str | None) -> Check:
    way = f"{callback[0]} port {callback[1]}"
    hint = "open that port of this machine to the hosts, or start the run on one of them"
    expected = "every host can connect to this command"
    problem = f"{way}: {error}" if error else ""
    return check("command-reachable", host, problem, f"{way}: connected", expected=expected, hint=hint)


def interface_check(host: str, interface: str, facts: dict[str, Any], hosts: int) -> Check:
    """Check the interface on a host's route to the other hosts; a slow interface is a warning."""
    rows = [one for one in facts["addresses"] if one["interface"] == interface]
    speed, mtu = (rows[0]["speed_mbit"], rows[0]["mtu"]) if rows else (None, None)
    slow = hosts > 1 and speed is not None and speed < SLOW_MBIT
    shown = f"{interface} ({f'{speed / 1000:g} Gbit/s' if speed else 'speed unknown'}, MTU {mtu})"
    expected = f"{SLOW_MBIT / 1000:g} Gbit/s or more between hosts"
    hint = "set --master-addr to an address in a faster network: in every step, this network carries the gradients"
    return check("interface", host, shown if slow else "", shown, WARN, expected, hint)
