"""Memory that is free for ranks now, on this machine and on hosts examined over ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.launch.hostfile import Host
from zerofit.spec.local_machine import gpu_memory
from zerofit.spec.reservations import beside_reserved, free_for, gpu_claims, gpus_free_for, host_claims

Facts = Mapping[str, Any]  # facts of one host: `zerofit.doctor.facts`


@dataclass(frozen=True, kw_only=True)
class HostRoom:
    """The memory of one host for its ranks, in bytes: free memory less reservations of other runs."""

    name: str  # "" for this machine
    ranks: range
    host_bytes: int
    gpu_bytes: int | None  # the least of the GPUs of these ranks; None: unknown
    reserved_bytes: int = 0  # host memory reserved by other runs
    gpu_reserved_bytes: int = 0  # the most reserved on one of those GPUs

    @property
    def place(self) -> str:
        """`on this machine`, or the host's name."""
        return f"on {self.name or 'this machine'}"

    def beside_reserved(self, *, on_gpus: bool = False) -> str:
        """Return the phrase about reservations of other runs that follows the free memory in a message."""
        return beside_reserved(self.gpu_reserved_bytes if on_gpus else self.reserved_bytes)


def room_here(ranks: range, run: Path) -> HostRoom:
    """Return this machine's free memory for the ranks of a run."""
    gpus = gpus_free_for(run, len(ranks))
    claims = gpu_claims(but=run)
    taken = max((claims[gpu.uuid] for gpu in gpu_memory(len(ranks))), default=0) if claims else 0
    reserved = {"reserved_bytes": host_claims(but=run), "gpu_reserved_bytes": taken}
    return HostRoom(name="", ranks=ranks, host_bytes=free_for(run), gpu_bytes=min(gpus, default=None), **reserved)


def rooms_of(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> list[HostRoom]:
    """Return the free memory of these hosts, with ranks in all their slots."""
    rooms, first = list[HostRoom](), 0
    for host in hosts:
        found, ranks = facts[host.name], range(first, first + host.slots)
        memory, devices = found["memory"], host.devices or range(host.slots)
        used = [gpu for gpu in found["gpus"] if gpu["index"] in devices and gpu["total_bytes"]]
        gpus, taken = list(map(_gpu_room, used)), max((gpu["reserved_bytes"] for gpu in used), default=0)
        free = max(0, memory["free_bytes"] - memory["reserved_bytes"])
        reserved = {"reserved_bytes": memory["reserved_bytes"], "gpu_reserved_bytes": taken}
        least = min(gpus, default=None)
        rooms.append(HostRoom(name=host.name, ranks=ranks, host_bytes=free, gpu_bytes=least, **reserved))
        first += host.slots
    return rooms


def _gpu_room(gpu: Mapping[str, Any]) -> int:
    return max(0, gpu["total_bytes"] - max(gpu["used_bytes"] or 0, gpu["reserved_bytes"]))
