"""Second round: can each host reach the address that ranks meet at, and over which of its interfaces."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from zerofit.doctor.check import FAIL, OK, WARN, Check
from zerofit.doctor.remote import Conversation, Unreachable, ask_all

LOOPBACK = "127.0.0.1"
SLOW_MBIT = 10_000  # below it a step of a model that is cut over hosts waits for the network: docs/doctor.md


@dataclass(frozen=True)
class Routes:
    """The address and port of the first host that all can reach, and each host's interface on the way there."""

    checks: list[Check] = field(default_factory=list)
    master_address: str | None = None
    master_port: int | None = None
    interfaces: dict[str, str] = field(default_factory=dict)


async def find(
    names: list[str],
    there: dict[str, Conversation],
    facts: dict[str, dict[str, Any]],
    master: str | None,
    port: int | None,
    callback: tuple[str, int] | None,
) -> Routes:
    """Listen on the first host and connect from all. Nothing where the first host cannot be asked."""
    first = names[0]
    if first not in there:
        return Routes()
    heard = (await ask_all({first: there[first]}, {"ask": "listen", "port": port or 0}))[first]
    checks = [_listening(first, port, heard)] if port else []
    if isinstance(heard, Unreachable) or heard["error"]:
        return Routes(checks)
    candidates = [master] if master else candidates_of(facts[first], alone=len(names) == 1)
    targets = [[address, heard["port"]] for address in candidates] + ([list(callback)] if callback else [])
    answers = await ask_all(there, {"ask": "reach", "targets": targets})
    reached = {name: _reached(one, len(targets)) for name, one in answers.items()}
    if callback:
        checks += [_callback(name, callback, rows[-1]) for name, rows in reached.items()]
    best = max(range(len(candidates)), key=lambda n: sum(rows[n]["error"] is None for rows in reached.values()))
    checks += [_to_master(name, candidates[best], heard["port"], rows[best]) for name, rows in reached.items()]
    good = {name: rows[best] for name, rows in reached.items() if rows[best]["error"] is None}
    interfaces = {name: row["interface"] for name, row in good.items() if row["interface"]}
    if master and len(names) > 1 and first in interfaces:  # its own name may mean its loopback there
        used = [
            one["interface"]
            for one in facts[first]["addresses"]
            if one["address"] == facts[first]["asked_from"]["here"]
        ]
        interfaces[first] = used[0] if used else interfaces[first]
    checks += [_interface(name, interface, facts[name], len(names)) for name, interface in interfaces.items()]
    return Routes(checks, candidates[best], heard["port"], interfaces)


def candidates_of(facts: dict[str, Any], *, alone: bool) -> list[str]:
    """Addresses of a host that others may reach it at: the one that ssh has used first, then the fastest."""
    if alone:
        return [LOOPBACK]
    usable = [one for one in facts["addresses"] if not one["loopback"] and not one["link_local"]]
    by_ssh = facts["asked_from"]["here"]
    usable.sort(key=lambda one: (one["address"] != by_ssh, _version(one["address"]), -(one["speed_mbit"] or 0)))
    return [one["address"] for one in usable if _version(one["address"]) == 4] or [LOOPBACK]


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _reached(answer: dict[str, Any] | Unreachable, count: int) -> list[dict[str, Any]]:
    return [{"error": answer.message}] * count if isinstance(answer, Unreachable) else answer["reached"]


def _listening(host: str, port: int | None, heard: dict[str, Any] | Unreachable) -> Check:
    error = heard.message if isinstance(heard, Unreachable) else heard["error"]
    return Check(
        name="master-port",
        host=host,
        status=FAIL if error else OK,
        value=error or f"port {port} is free",
        expected="a free port on the first host",
        hint="name another one with --master-port, or end what has it" if error else "",
    )


def _to_master(host: str, address: str, port: int, row: dict[str, Any]) -> Check:
    error = row["error"]
    return Check(
        name="master-reachable",
        host=host,
        status=FAIL if error else OK,
        value=f"{address} port {port}: {error}" if error else f"{address} in {row['seconds'] * 1e3:.1f} ms",
        expected="every host can connect to the first one",
        hint="open all TCP ports between the hosts (NCCL and gloo choose theirs), or name the address that is reached "
        "from all with --master-addr"
        if error
        else "",
    )


def _callback(host: str, callback: tuple[str, int], row: dict[str, Any]) -> Check:
    error = row["error"]
    return Check(
        name="command-reachable",
        host=host,
        status=FAIL if error else OK,
        value=f"{callback[0]} port {callback[1]}: {error or 'connected'}",
        expected="every host can connect to this command",
        hint="open that port here for the hosts, or start the run on one of them" if error else "",
    )


def _interface(host: str, interface: str, facts: dict[str, Any], hosts: int) -> Check:
    rows = [one for one in facts["addresses"] if one["interface"] == interface]
    speed, mtu = (rows[0]["speed_mbit"], rows[0]["mtu"]) if rows else (None, None)
    slow = hosts > 1 and speed is not None and speed < SLOW_MBIT
    shown = f"{speed / 1000:g} Gbit/s" if speed else "speed unknown"
    return Check(
        name="interface",
        host=host,
        status=WARN if slow else OK,
        value=f"{interface} ({shown}, MTU {mtu})",
        expected=f"{SLOW_MBIT / 1000:g} Gbit/s or more between hosts",
        hint="name a faster network's address with --master-addr; gradients cross it every step" if slow else "",
    )
