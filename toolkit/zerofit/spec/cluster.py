"""The hardware that a run is for: how many of which device, in which nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from zerofit.spec.devices import DEVICES, Device, by_name, cpu_device, find_device
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.local_machine import amd_gpus, cpu_ranks, memory_bytes, nvidia_gpus, usable_cores
from zerofit.spec.units import MOST_RANKS, parse_bytes, shown_bytes


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes with `gpus` devices each, one rank a device.

    Sizes are bytes, or text with a unit ("80GiB", "2TB"). Raises UserError with everything that is wrong.

    >>> cluster = Cluster("h100-80gb", gpus=4, nodes=2, nvme="8TB")
    >>> cluster.ranks
    8
    >>> cluster.device.name, cluster.device.link_name
    ('H100', 'NVLink 4')
    >>> Cluster("h100")
    Traceback (most recent call last):
    zerofit.spec.errors.UserError: no GPU kind 'h100' (did you mean h100-80gb or h100-pcie-80gb?)
    """

    # of the catalogue, a cloud's instance type, a YAML file, "cpu" (this machine's), or a device of one's own
    kind: str | Device
    gpus: int  # devices of one node; not given: as many as the kind's usual node has, or all ranks that suit this CPU
    nodes: int
    host_memory: int | None  # bytes of one node; None: the devices' share of their usual node, or this machine's
    device_memory: int | None  # bytes of one device, in place of the catalogue's
    nvme: int | None  # bytes of one node's disks that offloading may fill
    network: int | None  # bytes a second to other nodes, for each device, in place of the usual node's
    origin: str  # where the figures come from, if they were read from a machine
    notes: tuple[str, ...] = field(init=False, compare=False, repr=False)  # what was assumed

    def __init__(
        self,
        kind: str | Device,
        *,
        gpus: int | None = None,
        nodes: int | None = None,
        host_memory: str | int | None = None,
        device_memory: str | int | None = None,
        nvme: str | int | None = None,
        network: str | int | None = None,
        origin: str = "",
    ):
        problems = Problems()
        for name, count in (("gpus", gpus), ("nodes", nodes)):
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                message = f"{name}: got {count!r}, and whole numbers from 1 are allowed"
                problems.add("bad-value", message, "take 1 or more", f"--{name}")
        sizes = {"host_memory": host_memory, "device_memory": device_memory, "nvme": nvme, "network": network}
        parsed = dict.fromkeys(sizes)
        for name, size in sizes.items():
            if size is not None:
                where = f"--{name.replace('_', '-')}"
                parsed[name] = problems.attempt(lambda size=size, where=where: parse_bytes(str(size), where))
        device = None if isinstance(kind, str) else kind
        if isinstance(kind, str) and kind != "cpu":
            name = kind
            device = problems.attempt(lambda: find_device(name))
        problems.raise_if_any()
        if device and device.kind not in DEVICES:
            kind = device  # a file is read once
        usual = device.node.gpus if device else cpu_ranks(usable_cores())
        if (gpus or usual) * (nodes or 1) > MOST_RANKS:
            message = f"{nodes or 1} nodes of {gpus or usual} devices, and {MOST_RANKS:,} devices in all are the most"
            raise UserError(Problem(kind="bad-value", message=message, hint="take fewer", where="--gpus, --nodes"))
        values = {"kind": kind, "gpus": gpus or usual, "nodes": nodes or 1, **parsed, "origin": origin}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "notes", self._notes(gpus_given=gpus is not None))

    @classmethod
    def here(cls) -> Cluster:
        """Return this machine: its GPUs (torch is not imported for NVIDIA's), or its CPU where there are none.

        Raises UserError for a GPU that is not in the catalogue.

        >>> Cluster.here().nodes
        1
        """
        names = nvidia_gpus() or amd_gpus()
        if not names:
            return cls("cpu")
        name, total_bytes = names[0]
        device = by_name(name, total_bytes)
        if device is None:
            hint = "name the nearest with --gpu KIND and its size with --device-memory"
            raise UserError(Problem(kind="unknown-gpu", message=f"{name!r} is not in the catalogue", hint=hint))
        origin = f"this machine: {len(names)} x {name}"
        return cls(device.kind, gpus=len(names), host_memory=memory_bytes(), origin=origin)

    @property
    def label(self) -> str:
        """The device's kind, with the instance type where that was named: "h100-80gb (p5.48xlarge)"."""
        asked = self.kind if isinstance(self.kind, str) else self.device.kind
        return self.device.kind if asked == self.device.kind else f"{self.device.kind} ({asked})"

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.gpus * self.nodes

    @property
    def on_cpu(self) -> bool:
        """Whether devices are host processes."""
        return self.device.kind == "cpu"

    @property
    def accelerator(self) -> Literal["cpu", "cuda"]:
        """What torch calls the devices."""
        return "cpu" if self.on_cpu else "cuda"

    @cached_property
    def device(self) -> Device:
        """One device, with this cluster's own memory and network where those are given."""
        on_cpu = self.kind == "cpu"
        device = cpu_device(usable_cores(), self.host_bytes, self.gpus) if on_cpu else _device_of(self.kind)
        if self.network:
            device = replace(device, node=replace(device.node, network=float(self.network)))
        return replace(device, memory_bytes=self.device_memory) if self.device_memory else device

    @cached_property
    def host_bytes(self) -> int:
        """Memory of one node."""
        if self.host_memory:
            return self.host_memory
        if self.kind == "cpu":
            return memory_bytes()
        node = _device_of(self.kind).node
        return node.host_bytes * self.gpus // node.gpus

    @property
    def nvme_bytes(self) -> int:
        """What offloading may fill of one node's disks; 0: nothing."""
        return self.nvme or 0

    def _notes(self, gpus_given: bool) -> tuple[str, ...]:
        if self.kind == "cpu":
            memory = shown_bytes(self.host_bytes)
            return (self.origin or f"this machine's CPU: {usable_cores()} cores, {memory}, {self.gpus} ranks",)
        notes, node = [self.origin] if self.origin else [], self.device.node
        if not gpus_given:
            notes.append(f"--gpus: {self.gpus} a node, as in {node.name}")
        if not self.host_memory:
            notes.append(f"--host-memory: {shown_bytes(self.host_bytes)} a node, its share of {node.name}")
        if not self.network and self.nodes > 1:
            each = node.network / 1e9
            notes.append(f"--network: {each:.3g} GB/s a device between nodes, as {node.name} ({node.source})")
        return tuple(notes)


def _device_of(kind: str | Device) -> Device:
    return find_device(kind) if isinstance(kind, str) else kind
