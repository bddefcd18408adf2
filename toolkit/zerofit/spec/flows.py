"""Bytes that have gone through this process's TCP connections, as the kernel counts them. Linux only."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_COUNTS = struct.Struct("QQ")  # linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received
_COUNTS_AT, _RETRANSMITS_AT = 120, 2  # bytes into tcp_info; tcpi_retransmits: since the last acknowledgement


class Flow(NamedTuple):
    """One connection."""

    sent: int  # bytes that the other end has acknowledged
    received: int
    resending: bool  # what was lost is being sent again


def flows() -> dict[str, Flow]:
    """All connections by the kernel's name for their socket; empty where the kernel does not tell."""
    found: dict[str, Flow] = {}
    if socket.getdefaulttimeout() is not None:
        return found  # a socket object would make the connection itself non-blocking
    for name in _listed("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS_AT + _COUNTS.size)
        except OSError:
            continue  # closed meanwhile, or no TCP
        if len(info) >= _COUNTS_AT + _COUNTS.size:
            sent, received = _COUNTS.unpack_from(info, _COUNTS_AT)
            found[link] = Flow(sent, received, info[_RETRANSMITS_AT] > 0)
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no Linux, or no descriptor left
        return []
