"""The way from this host to another one."""

from __future__ import annotations

import socket

import psutil


def address_to(other: str) -> str | None:
    """This host's address on the way to another one (a name or an IPv4 address); None where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_to(other: str) -> str | None:
    """Name of this host's interface on the way to another one; None where there is no way but its own loopback."""
    own = address_to(other)
    return None if own is None or own.startswith("127.") else interface_of(own)


def interface_of(address: str) -> str | None:
    """Name of the interface that has this address of this host's."""
    plain, rows = address.split("%")[0], psutil.net_if_addrs().items()
    return next((name for name, found in rows if any(one.address.split("%")[0] == plain for one in found)), None)
