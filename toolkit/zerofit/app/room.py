"""Memory that is free for ranks now: of this machine, and of hosts that were asked over ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.launch.hostfile import Host
from zerofit.spec.reservations import free_for, gpus_free_for

Facts = Mapping[str, Any]  # of one host: `zerofit.doctor.facts`


@dataclass(frozen=True, kw_only=True)
class HostRoom:
    """The memory of one host that its ranks may take, in bytes: what is free less what other runs have reserved."""

    name: str  # "" for this machine
    ranks: range
    host_bytes: int
    gpu_bytes: int | None  # the least of the GPUs that these ranks use; None: not known

    @property
    def place(self) -> str:
        """`on this machine`, or the host's name."""
        return f"on {self.name or 'this machine'}"


def room_here(ranks: range, run: Path) -> HostRoom:
    """Return what this machine has for the ranks of a run."""
    gpus = gpus_free_for(run, len(ranks))
    return HostRoom(name="", ranks=ranks, host_bytes=free_for(run), gpu_bytes=min(gpus, default=None))


def rooms_of(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> list[HostRoom]:
    """Return what each of these hosts has, each with ranks in all its slots."""
    rooms, first = list[HostRoom](), 0
    for host in hosts:
        found, ranks = facts[host.name], range(first, first + host.slots)
        memory, devices = found["memory"], host.devices or range(host.slots)
        gpus = [_gpu_room(gpu) for gpu in found["gpus"] if gpu["index"] in devices and gpu["total_bytes"]]
        free = max(0, memory["free_bytes"] - memory["reserved_bytes"])
        rooms.append(HostRoom(name=host.name, ranks=ranks, host_bytes=free, gpu_bytes=min(gpus, default=None)))
        first += host.slots
    return rooms


def _gpu_room(gpu: Mapping[str, Any]) -> int:
    return max(0, gpu["total_bytes"] - max(gpu["used_bytes"] or 0, gpu["reserved_bytes"]))
