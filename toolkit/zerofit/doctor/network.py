"""Addresses and routes of this host, and whether others can be reached from it."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from zerofit.launch.route import interface_of

CONNECT_S = 4.0


def addresses() -> list[dict[str, Any]]:
    """One object for each address of an interface that is up: interface, address, prefix, mtu, speed (Mbit/s)."""
    states = psutil.net_if_stats()
    found = []
    for name, rows in psutil.net_if_addrs().items():
        state = states.get(name)
        for row in rows:
            if row.family not in (socket.AF_INET, socket.AF_INET6) or state is None or not state.isup:
                continue
            address = row.address.split("%")[0]
            found.append(
                {
                    "interface": name,
                    "address": address,
                    "prefix": _prefix(row.netmask),
                    "mtu": state.mtu,
                    "speed_mbit": state.speed or None,
                    "loopback": address.startswith("127.") or address == "::1",
                    "link_local": address.lower().startswith(("fe80:", "169.254.")),
                }
            )
    return found


def infiniband() -> list[str]:
    """Names of the InfiniBand and RoCE adapters."""
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


def _prefix(netmask: str | None) -> int | None:
    """Leading ones of a netmask."""
    if not netmask:
        return None
    family = socket.AF_INET6 if ":" in netmask else socket.AF_INET
    return int.from_bytes(socket.inet_pton(family, netmask), "big").bit_count()


def asked_from() -> dict[str, str | None]:
    """Both ends of the ssh connection that this process was started over, as SSH_CONNECTION has them."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return {"there": words[0], "here": words[2]} if len(words) == 4 else {"there": None, "here": None}


def listen(port: int) -> socket.socket:
    """A socket that listens on all addresses of this host, as torch's rendezvous store does. Raises OSError."""
    return socket.create_server(("", port), family=socket.AF_INET, backlog=256)


def listening(port: int) -> dict[str, Any]:
    """What was said about listening: `port` where it is free, else `error` and the process that has it."""
    holders = [c.pid for c in _connections() if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]
    names = []
    for pid in {one for one in holders if one}:
        try:
            names.append(f"{psutil.Process(pid).name()} (process {pid})")
        except psutil.Error:
            continue
    return {"error": f"port {port} is taken" + (" by " + ", ".join(names) if names else "")}


def _connections() -> list[Any]:
    try:
        return psutil.net_connections("tcp")
    except psutil.Error:
        return []


def reach(host: str, port: int) -> dict[str, Any]:
    """Connect and close: seconds, own address and interface on the way, or the error in words."""
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            own = connection.getsockname()[0]
    except TimeoutError:
        return {"error": f"no answer in {CONNECT_S:.0f} s"}
    except OSError as error:
        words = {errno.ECONNREFUSED: "refused", errno.EHOSTUNREACH: "no route", errno.ENETUNREACH: "no route"}
        return {"error": words.get(error.errno or 0, str(error))}
    return {"error": None, "seconds": time.monotonic() - start, "address": own, "interface": interface_of(own)}
