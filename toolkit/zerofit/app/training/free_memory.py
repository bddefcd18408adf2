"""The memory that ranks can use now, on this machine and on hosts examined over ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.launch.hostfile import Host
from zerofit.spec.local_machine import gpu_memory
from zerofit.spec.reservations import free_for, gpus_free_for, reserved_note, reserved_on_gpus, reserved_on_host

Facts = Mapping[str, Any]  # facts of one host: `zerofit.doctor.facts`


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The bytes that one host has for its ranks: free memory less reservations of other runs."""

    name: str  # "" for this machine
    ranks: range
    host_bytes: int
    gpu_bytes: int | None  # free memory of the GPU with the least, among these ranks' GPUs; None: unknown
    reserved_bytes: int = 0  # host memory reserved by other runs
    gpu_reserved_bytes: int = 0  # the largest reservation on one of these GPUs

    @property
    def place(self) -> str:
        """ "on this machine", or "on" and the host's name, for messages."""
        return f"on {self.name or 'this machine'}"

    def reserved_note(self, *, on_gpus: bool = False) -> str:
        """Return a phrase about the reservations of other runs, to append to the free memory."""
        return reserved_note(self.gpu_reserved_bytes if on_gpus else self.reserved_bytes)


def memory_here(ranks: range, run: Path) -> HostMemory:
    """Return this machine's free memory for `ranks` of the run in the folder `run`."""
    reserved = reserved_on_gpus(except_run=run)
    return HostMemory(
        name="",
        ranks=ranks,
        host_bytes=free_for(run),
        gpu_bytes=min(gpus_free_for(run, len(ranks)), default=None),
        reserved_bytes=reserved_on_host(except_run=run),
        gpu_reserved_bytes=max((reserved[gpu.uuid] for gpu in gpu_memory(len(ranks))), default=0) if reserved else 0,
    )


def memory_of_hosts(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> list[HostMemory]:
    """Return the free memory of these hosts, with one rank per slot."""
    memories, first = list[HostMemory](), 0
    for host in hosts:
        memory, devices = facts[host.name]["memory"], host.devices or range(host.slots)
        gpus = [gpu for gpu in facts[host.name]["gpus"] if gpu["index"] in devices and gpu["total_bytes"]]
        # Once a run has allocated what it reserved, these bytes are part of the used memory. So the larger counts.
        free = [gpu["total_bytes"] - max(gpu["used_bytes"] or 0, gpu["reserved_bytes"]) for gpu in gpus]
        memories.append(
            HostMemory(
                name=host.name,
                ranks=range(first, first + host.slots),
                host_bytes=max(0, memory["free_bytes"] - memory["reserved_bytes"]),
                gpu_bytes=max(0, min(free)) if free else None,
                reserved_bytes=memory["reserved_bytes"],
                gpu_reserved_bytes=max((gpu["reserved_bytes"] for gpu in gpus), default=0),
            )
        )
        first += host.slots
    return memories
