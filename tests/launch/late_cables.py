"""Cables that hand on a host's frames after a while, for kernels that have no netem.

python late_cables.py SECONDS HOST:WIRE ... makes these TAP devices (root), says "ready", and carries frames between the
two of each cable: from HOST to WIRE so many seconds later, from WIRE to HOST at once.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress

SET, TAP, PLAIN = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h: TUNSETIFF, IFF_TAP, IFF_NO_PI
FRAME = 1 << 16  # bytes, more than any
FULL = 100_000  # frames on the way; more are lost, as in a router


def end(name: str) -> int:
    """Return the file of a new TAP device."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET, struct.pack("16sH22x", name.encode(), TAP | PLAIN))
    return file


def carry(delay_s: float, cables: list[tuple[int, int]]) -> None:
    """Write what is read from each end to the other one."""
    late, at_once = dict(cables), {wire: host for host, wire in cables}
    ready, on_the_way = selectors.DefaultSelector(), deque[tuple[float, int, bytes]]()
    for file in (*late, *at_once):
        ready.register(file, selectors.EVENT_READ)
    while True:
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            write(*on_the_way.popleft()[1:])
        for key, _ in ready.select(max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None):
            frame = os.read(key.fd, FRAME)
            if key.fd in at_once:
                write(at_once[key.fd], frame)
            elif len(on_the_way) < FULL:
                on_the_way.append((time.monotonic() + delay_s, late[key.fd], frame))


def write(file: int, frame: bytes) -> None:
    """Hand on a frame; one to an end that is down is lost."""
    with suppress(OSError):
        os.write(file, frame)


def main() -> None:
    """Lay the cables that are named on the command line."""
    cables = [(end(host), end(wire)) for host, wire in (cable.split(":") for cable in sys.argv[2:])]
    print("ready", flush=True)
    carry(float(sys.argv[1]), cables)


if __name__ == "__main__":
    main()
