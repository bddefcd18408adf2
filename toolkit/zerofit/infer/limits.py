"""Memory limits: `--max-memory`, or the free memory of the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.local_machine import gpu_memory
from zerofit.spec.overhead import BLAS_WORKSPACES
from zerofit.spec.reservations import free_for, reserved_on_gpus, reserved_on_host
from zerofit.spec.units import parse_bytes

Device = int | str  # a GPU's number, "cpu" or "disk"; as accelerate names them
# The rest of the free memory is for fragmentation and growing other processes, which are not counted.
SHARE = 0.95  # default share of the free memory; the rest is for other processes and for growth
FLAG = "--max-memory"
NO_LIMIT = 1 << 62
SCRATCH = 64 << 20  # bytes kept free for kernels' scratch and the allocator's gaps
WORKSPACE = max(BLAS_WORKSPACES.values())  # workspace of matrix products on GPUs


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """The bytes that may be used on each device."""

    memory: dict[Device, int]  # of GPUs, by number, and of the CPU; other devices are not used
    disk: int | None = None  # of weights that stay on disk; None: no limit
    named: bool = True  # whether --max-memory sets the limits; else they are a share of the free memory
    reserved: Mapping[Device, int] = field(default_factory=dict)  # bytes reserved by other runs, and so not free


def uncounted_bytes(device: Device) -> int:
    """Return the bytes to reserve on a device that runs layers, for memory that is not counted."""
    return SCRATCH if device == "cpu" else SCRATCH + WORKSPACE


# Names are accelerate's, so a device map can be copied from other code: GPUs by number, "cpu" and "disk".
def read_limits(limits: str | Mapping[Device, str | int] | None) -> MemoryLimits:
    """Read limits such as "0=20GiB,cpu=60GiB" or {0: "20GiB", "cpu": 60 << 30}.

    None allows most of the free memory. Otherwise only the named devices and the disk are used; "disk=0" excludes
    the disk. Raises UserError with all problems.
    """
    import torch

    gpus = torch.cuda.device_count()
    if limits is None:
        return _free_memory(gpus)
    named: dict[Device, int] = {}
    problems = Problems()
    text = limits if isinstance(limits, str) else ",".join(f"{device}={size}" for device, size in limits.items())
    for part in text.split(","):
        pair = problems.attempt(lambda part=part: _pair(part, gpus))
        if pair and pair[0] in named:
            problems.add("bad-value", f"{FLAG} names {pair[0]} twice", "give each device one size", FLAG)
        elif pair:
            named[pair[0]] = pair[1]
    problems.raise_if_any()
    disk = named.pop("disk", None)
    if not any(named.values()):
        hint = "allow memory on a device, such as cpu=8GiB; layers on disk are loaded into it one at a time"
        raise UserError(Problem(kind="bad-value", message=f"{FLAG} {text} allows no memory", hint=hint, where=FLAG))
    return MemoryLimits(memory=named, disk=disk)


def _free_memory(gpus: int) -> MemoryLimits:
    """Return most of each device's free memory, less what other runs have reserved."""
    import torch

    reserved, devices = reserved_on_gpus(), gpu_memory(gpus)
    unreserved = [NO_LIMIT] * gpus
    # `gpu_memory` returns nothing if nvidia-smi is missing or hangs. Then no reservation can be subtracted.
    if len(devices) == gpus:
        unreserved = [gpu.total_bytes - reserved[gpu.uuid] for gpu in devices]
    memory: dict[Device, int] = {}
    for number in range(gpus):
        free, _ = torch.cuda.mem_get_info(number)
        memory[number] = int(SHARE * max(0, min(free, unreserved[number])))
    # Some GPUs use the host's memory. Their bytes would otherwise be allowed twice.
    shared = sum(memory[number] for number, gpu in enumerate(devices) if gpu.of_host)
    memory["cpu"] = max(0, int(SHARE * free_for()) - shared)
    reserved_by_others: dict[Device, int] = {number: reserved[gpu.uuid] for number, gpu in enumerate(devices)}
    reserved_by_others["cpu"] = reserved_on_host()
    return MemoryLimits(memory=memory, named=False, reserved=reserved_by_others)


def _pair(part: str, gpus: int) -> tuple[Device, int]:
    """Return the device and the bytes of DEVICE=SIZE. Raises UserError."""
    name, equals, size = (word.strip() for word in part.partition("="))
    if not equals:
        message, hint = f"{part!r} does not have the form DEVICE=SIZE", "write it like 0=20GiB,cpu=60GiB"
        raise UserError(Problem(kind="bad-value", message=message, hint=hint, where=FLAG))
    device: Device = int(name) if name.isdecimal() else name
    if device not in {*range(gpus), "cpu", "disk"}:
        here = ", ".join([*map(str, range(gpus)), "cpu", "disk"])
        message = f"there is no device {name!r} here"
        raise UserError(Problem(kind="unknown-device", message=message, hint=f"devices: {here}", where=FLAG))
    return device, 0 if size == "0" else parse_bytes(size, FLAG)
