"""The check of all hosts before a run starts on them, in a few seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, cast

from zerofit.doctor import compare
from zerofit.doctor.check import OK, WARN, Check, check
from zerofit.doctor.compare import clock
from zerofit.doctor.facts import HostFacts, collect
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
    master: str | None = None  # host name or address where ranks meet; None: the first host's best address
    master_port: int | None = None
    callback: tuple[str, int] | None = None  # address and port where the asking command already listens
    ssh_port: int | None = None
    compilers: bool = False  # also the compilers' versions


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The result of a preflight on all hosts."""

    checks: tuple[Check, ...] = ()  # in the order of the hosts, including checks that are OK
    facts: dict[str, HostFacts] = field(default_factory=dict)  # by host, of the reached hosts
    master_address: str | None = None  # the first host's address that most hosts have reached
    master_port: int | None = None  # the requested port, else a free port
    interfaces: dict[str, str] = field(default_factory=dict)  # by host: the interface on the way to the master

    @property
    def findings(self) -> tuple[Check, ...]:
        """The checks that are not OK."""
        return tuple(check for check in self.checks if check.status != OK)


class Connection(TypedDict):
    """A host's attempt to connect to a target. If it fails, it has only the error."""

    error: str | None
    seconds: float
    address: str  # this host's address on the route
    interface: str | None


def preflight(hosts: Sequence[Host], request: PreflightRequest) -> Preflight:
    """Ask all hosts at the same time, and compare them with each other and with this machine.

    Raises OSError if this machine cannot write to the run folder.
    """
    return asyncio.run(_preflight(hosts, request))


async def _preflight(hosts: Sequence[Host], request: PreflightRequest) -> Preflight:
    # All hosts answer at the same time, so the preflight takes as long as the slowest host. Its steps depend on each
    # other: facts, then marks in the run folder, then connections to the first host.
    names = [host.name for host in hosts]
    with ExitStack() as stack:
        question: dict[str, object] = {
            "ask": "facts",
            "run_file": str(request.run_file.absolute()) if request.run_file else None,
            "code": str(request.code.absolute()) if request.code else None,
            "compilers": request.compilers,
        }
        # This machine's facts need no run folder: only the hosts look for the token, which does not exist yet.
        own = asyncio.create_task(asyncio.to_thread(collect, question, stack))
        if request.run_folder is not None:
            token = request.run_folder / f".zerofit-asks-{uuid.uuid4().hex}"  # other hosts look for this file
            token.touch(exist_ok=False)
            stack.callback(token.unlink, missing_ok=True)
            question = question | {"run_folder": str(request.run_folder.absolute()), "token": token.name}
        async with conversations(names, request.ssh_port) as opened:
            reached = {name: host for name, host in opened.items() if isinstance(host, Conversation)}
            answers = {name: _checked(name, facts) for name, facts in (await ask_all(reached, question)).items()}
            missing = {name: host for name, host in {**opened, **answers}.items() if isinstance(host, Unreachable)}
            reached = {name: host for name, host in reached.items() if name not in missing}
            facts = {name: cast(HostFacts, answers[name]) for name in reached}
            seen = await _marks_seen(request.run_folder, facts)
            routes = await find_routes(names, reached, facts, request)
        expected = "ssh without a prompt, and the same zerofit on the host"
        checks = [no_answer(name, "reachable", missing[name], expected) for name in names if name in missing]
        checks += compare.checks(hosts, facts, await own)
        if request.run_folder is not None:
            checks += compare.folders(facts, request.run_folder, seen)
        checks += [clock(name, host.clock_s, host.clock_error_s) for name, host in reached.items()]
        checks += routes.checks
    # by host; the sort keeps the order of a host's checks
    order = {name: number for number, name in enumerate(names)}
    checks.sort(key=lambda check: order.get(check.host, -1))
    return replace(routes, checks=tuple(checks), facts=facts)


def _checked(host: str, facts: dict[str, object] | Unreachable) -> dict[str, object] | Unreachable:
    """Return the facts, or an error if another release of zerofit has collected them, under other names."""
    if isinstance(facts, Unreachable) or facts.keys() >= HostFacts.__required_keys__ - {"compilers"}:
        return facts
    return Unreachable("zerofit", "its zerofit is another version", f"install the same zerofit on {host}")


def no_answer(host: str, name: str, error: Unreachable, expected: str = "") -> Check:
    """Return a failed check of a host that did not answer."""
    return check(name, host, error.message, "", expected=expected, hint=error.hint)


async def _marks_seen(folder: Path | None, facts: dict[str, HostFacts]) -> set[str]:
    """Return the hosts whose files in the run folder appear on this machine in `MARK_S` seconds."""
    if folder is None:
        return set()
    folders = {name: host["run_folder"] for name, host in facts.items()}
    marks = {name: found["mark"] for name, found in folders.items() if found and found["mark"]}
    end = asyncio.get_running_loop().time() + MARK_S
    while True:  # a network file system shows another host's file after some time
        seen = {name for name, mark in marks.items() if (folder / mark).exists()}
        if len(seen) == len(marks) or asyncio.get_running_loop().time() > end:
            return seen
        await asyncio.sleep(0.1)


async def find_routes(
    names: list[str], hosts: dict[str, Conversation], facts: dict[str, HostFacts], request: PreflightRequest
) -> Preflight:
    """Listen on the first host, and connect to it from all hosts.

    `names`: all hosts; `hosts`: those that answer. The result is empty if the first host does not answer.
    """
    first, master, port, callback = names[0], request.master, request.master_port, request.callback
    if first not in hosts:
        return Preflight()
    # The real ranks will connect to a port of the first host. So this port is tried before they start. A firewall that
    # blocks it would otherwise show only after the time limit of torch's store.
    listener = (await ask_all({first: hosts[first]}, {"ask": "listen", "port": port or 0}))[first]
    error = listener.message if isinstance(listener, Unreachable) else listener["error"]
    checks = []
    if port:
        expected, hint = "a free port on the first host", "choose another one with --master-port, or stop the process"
        checks += [check("master-port", first, error or "", f"port {port} is free", expected=expected, hint=hint)]
    if isinstance(listener, Unreachable) or error:
        return Preflight(checks=tuple(checks))
    candidates = [master] if master else candidates_of(facts[first], alone=len(names) == 1)
    targets = [[address, listener["port"]] for address in candidates] + ([list(callback)] if callback else [])
    routes = await _connections(hosts, targets)
    if callback:
        checks += [_callback(name, callback, rows[-1]["error"]) for name, rows in routes.items()]
    # the address of the first host that most hosts have reached
    best = max(range(len(candidates)), key=lambda n: sum(rows[n]["error"] is None for rows in routes.values()))
    to_master = {name: rows[best] for name, rows in routes.items()}
    checks += [_to_master(name, candidates[best], listener["port"], row) for name, row in to_master.items()]
    interfaces = {name: row["interface"] for name, row in to_master.items() if not row["error"] and row["interface"]}
    if master and len(names) > 1 and first in interfaces:
        # on the first host itself, the name that the user has given may resolve to loopback
        here = facts[first]
        by_ssh = (row["interface"] for row in here["addresses"] if row["address"] == here["ssh_address"])
        interfaces[first] = next(by_ssh, interfaces[first])
    checks += [interface_check(name, interface, facts[name], len(names)) for name, interface in interfaces.items()]
    return Preflight(
        checks=tuple(checks), master_address=candidates[best], master_port=listener["port"], interfaces=interfaces
    )


async def _connections(hosts: dict[str, Conversation], targets: list[list[object]]) -> dict[str, list[Connection]]:
    """Return each host's attempts to connect to the targets (address, port), by host."""
    answers = await ask_all(hosts, {"ask": "reach", "targets": targets})
    return {
        name: [cast(Connection, {"error": answer.message})] * len(targets)
        if isinstance(answer, Unreachable)
        else answer["reached"]
        for name, answer in answers.items()
    }


def candidates_of(facts: HostFacts, *, alone: bool) -> list[str]:
    """Return the IPv4 addresses at which others may reach a host: ssh's, then the fastest first."""
    if alone:
        return [LOOPBACK]
    addresses = [(row, ipaddress.ip_address(row["address"])) for row in facts["addresses"]]
    usable = [row for row, ip in addresses if ip.version == 4 and not ip.is_loopback and not ip.is_link_local]
    # This machine has just reached the host at ssh's address. Faster interfaces may belong to another network.
    by_ssh = facts["ssh_address"]
    usable.sort(key=lambda row: (row["address"] != by_ssh, -(row["speed_mbit"] or 0)))
    return [row["address"] for row in usable] or [LOOPBACK]


def _to_master(host: str, address: str, port: int, row: Connection) -> Check:
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


def interface_check(host: str, interface: str, facts: HostFacts, hosts: int) -> Check:
    """Check the interface on a host's route to the other hosts; a slow interface is a warning."""
    rows = [row for row in facts["addresses"] if row["interface"] == interface]
    speed, mtu = (rows[0]["speed_mbit"], rows[0]["mtu"]) if rows else (None, None)
    slow = hosts > 1 and speed is not None and speed < SLOW_MBIT
    shown = f"{interface} ({f'{speed / 1000:g} Gbit/s' if speed else 'speed unknown'}, MTU {mtu})"
    expected = f"{SLOW_MBIT / 1000:g} Gbit/s or more between hosts"
    hint = "set --master-addr to an address in a faster network: in every step, this network carries the gradients"
    return check("interface", host, shown if slow else "", shown, WARN, expected, hint)
