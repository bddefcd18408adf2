"""The hardware of a run: devices and nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from zerofit.spec.devices import DEVICES, INSTANCES, Device, by_name, cpu_device, find_device
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.local_machine import amd_gpus, cpu_ranks, memory_bytes, nvidia_gpus, usable_cores
from zerofit.spec.units import MOST_RANKS, counted, parse_bytes, shown_bytes


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes with `gpus` devices each; one rank per device.

    Sizes are bytes, or text with a unit ("80GiB", "2TB"). Raises UserError with all problems.

    >>> cluster = Cluster("h100-80gb", gpus=4, nodes=2, nvme="8TB")
    >>> cluster.ranks
    8
    >>> cluster.device.name, cluster.device.link_name
    ('H100', 'NVLink 4')
    >>> Cluster("h100")
    Traceback (most recent call last):
    zerofit.spec.errors.UserError: no GPU kind 'h100' (did you mean h100-80gb or h100-pcie-80gb?)
    """

    # a name in the catalog, a cloud's instance type, a YAML file, "cpu" (this machine's CPU), or a Device
    kind: str | Device
    gpus: int  # devices per node; default: those of the kind's usual node, or the ranks that suit this CPU
    nodes: int
    host_memory: int | None  # bytes per node; None: the devices' share of their usual node, or this machine's
    device_memory: int | None  # bytes per device, instead of the catalog's
    nvme: int | None  # bytes per node's disks that offloading may use
    network: int | None  # bytes per second and device to other nodes, instead of the usual node's
    origin: str  # the machine that the figures were read from, if any
    notes: tuple[str, ...] = field(init=False, compare=False, repr=False)  # assumptions

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
                message = f"{name} is {count!r}; allowed: an integer of at least 1"
                problems.add("bad-value", message, "use 1 or more", f"--{name}")
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
            kind = device  # so that the file of a device is read only once
        elif device and isinstance(kind, str) and kind.lower() not in INSTANCES:
            kind = device.kind  # "RTX 4090" is rtx4090
        usual = device.node.gpus if device else cpu_ranks(usable_cores())
        if (gpus or usual) * (nodes or 1) > MOST_RANKS:
            message = f"{nodes or 1} nodes x {gpus or usual} devices; allowed: at most {MOST_RANKS:,} devices"
            raise UserError(Problem(kind="bad-value", message=message, hint="use fewer", where="--gpus, --nodes"))
        values = {"kind": kind, "gpus": gpus or usual, "nodes": nodes or 1, **parsed, "origin": origin}
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        object.__setattr__(self, "notes", self._notes(gpus_given=gpus is not None))

    @classmethod
    def here(cls) -> Cluster:
        """Return this machine's GPUs, or its CPU if it has none.

        Raises UserError for a GPU that is not in the catalog. Does not import torch for NVIDIA's GPUs.

        >>> Cluster.here().nodes
        1
        """
        gpus = nvidia_gpus() or amd_gpus()
        if not gpus:
            return cls("cpu")
        # All ranks run in step, so a machine with different GPUs is described by one kind: its first.
        gpu = gpus[0]
        device = by_name(gpu.name, gpu.total_bytes)
        if device is None or not gpu.total_bytes:
            unknown = "is not in the catalog" if device is None else "has memory that nvidia-smi does not report"
            hint = "give the nearest kind with --gpu KIND and the memory with --device-memory"
            raise UserError(Problem(kind="unknown-gpu", message=f"GPU {gpu.name!r} {unknown}", hint=hint))
        origin = f"this machine: {len(gpus)} x {gpu.name}"
        if gpu.is_part:
            origin = f"this machine: a part (MIG) of {gpu.name}; step times are those of the whole GPU"
        part_bytes = gpu.total_bytes if gpu.is_part else None
        return cls(device.kind, gpus=len(gpus), host_memory=memory_bytes(), device_memory=part_bytes, origin=origin)

    @property
    def label(self) -> str:
        """The device's kind, with the instance type if one was given: "h100-80gb (p5.48xlarge)"."""
        name = self.kind if isinstance(self.kind, str) else self.device.kind
        return self.device.kind if name == self.device.kind else f"{self.device.kind} ({name})"

    @property
    def ranks(self) -> int:
        """Total number of devices."""
        return self.gpus * self.nodes

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks run on CPUs."""
        return self.device.kind == "cpu"

    @property
    def accelerator(self) -> Literal["cpu", "cuda"]:
        """torch's name of the device type."""
        return "cpu" if self.on_cpu else "cuda"

    @cached_property
    def device(self) -> Device:
        """The device. A given device memory or network replaces the catalog's figure."""
        # cached_property writes to __dict__, so it works on a frozen dataclass.
        on_cpu = self.kind == "cpu"
        device = cpu_device(usable_cores(), self.host_bytes, self.gpus) if on_cpu else _device_of(self.kind)
        if self.network:
            device = replace(device, node=replace(device.node, network=float(self.network)))
        return replace(device, memory_bytes=self.device_memory) if self.device_memory else device

    @cached_property
    def host_bytes(self) -> int:
        """Host memory of one node, in bytes."""
        if self.host_memory:
            return self.host_memory
        if self.kind == "cpu":
            return memory_bytes()
        node = _device_of(self.kind).node
        return node.host_bytes * self.gpus // node.gpus

    @property
    def nvme_bytes(self) -> int:
        """Bytes of one node's disks that offloading may use."""
        return self.nvme or 0

    def _notes(self, gpus_given: bool) -> tuple[str, ...]:
        if self.kind == "cpu":
            memory = shown_bytes(self.host_bytes)
            ranks = counted(self.gpus, "rank")
            return (self.origin or f"this machine's CPU: {usable_cores()} cores, {memory}, {ranks}",)
        notes, node = [self.origin] if self.origin else [], self.device.node
        if not gpus_given:
            notes.append(f"--gpus: {self.gpus} per node, as in {node.name}")
        if not self.host_memory:
            notes.append(f"--host-memory: {shown_bytes(self.host_bytes)} per node, its share of {node.name}")
        if self.device.unified_memory:
            notes.append("the GPU uses the host's memory: figures for the host include the GPU's")
        if not self.network and self.nodes > 1:
            each = node.network / 1e9
            notes.append(f"--network: {each:.3g} GB/s per device between nodes, as in {node.name} ({node.source})")
        return tuple(notes)


def _device_of(kind: str | Device) -> Device:
    return find_device(kind) if isinstance(kind, str) else kind
