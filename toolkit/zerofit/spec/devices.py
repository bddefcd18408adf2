"""The catalogue of GPUs, with public sources, and this machine's CPU as a device."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zerofit.spec import nodes
from zerofit.spec.datacenter_gpus import DATACENTER_GPUS
from zerofit.spec.device import Device
from zerofit.spec.device_file import SUFFIXES, read_device
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.instances import INSTANCES
from zerofit.spec.nodes import GB
from zerofit.spec.other_gpus import OTHER_GPUS
from zerofit.spec.overhead import CPU_LIBRARY_BYTES

DEVICES: dict[str, Device] = {device.kind: device for device in (*DATACENTER_GPUS, *OTHER_GPUS)}
KINDS = (*DEVICES, "cpu")

# TFLOP/s of a CPU core before `zerofit calibrate`: 8 lanes x 2 FMA x 2 FLOP x 2.5 GHz (AVX2)
CORE_TFLOPS = 0.08
CORE_BANDWIDTH = 8 * GB  # assumed: a core's share of a server's memory channels
LOOPBACK = 1.5 * GB  # assumed: gloo through the loopback device


def find_device(kind: str, where: str = "--gpu") -> Device:
    """Return the device for a kind, a cloud's instance type, or a YAML file (`device_file`).

    Raises UserError with the nearest names. For "cpu" use `cpu_device`.
    """
    if kind in DEVICES:
        return DEVICES[kind]
    if kind.lower() in INSTANCES:
        return INSTANCES[kind.lower()]
    if kind.endswith(SUFFIXES):
        return read_device(Path(kind), where)
    word = kind.lower().replace("-", "").replace("_", "")
    begins = [known for known in KINDS if known.replace("-", "").startswith(word)]
    hint = f"did you mean {' or '.join(begins)}?" if begins and word else nearest(kind.lower(), (*KINDS, *INSTANCES))
    hint = hint or f"known: {', '.join((*KINDS, *INSTANCES))}, or a YAML file of your own"
    raise UserError(Problem(kind="unknown-gpu", message=f"no GPU kind {kind!r}", hint=hint, where=where))


def cpu_device(cores: int, memory_bytes: int, ranks: int) -> Device:
    """Return as a device one of `ranks` processes that share a host's cores and memory."""
    share = max(1, cores // ranks)
    return Device(
        kind="cpu",
        name="CPU",
        memory_bytes=max(0, memory_bytes - CPU_LIBRARY_BYTES) // ranks,
        tflops={"fp32": CORE_TFLOPS * share, "bf16": CORE_TFLOPS * share},
        bandwidth=CORE_BANDWIDTH * share,
        link=LOOPBACK,
        link_name="loopback",
        pcie=CORE_BANDWIDTH * share,
        node=replace(nodes.THIS, gpus=ranks, host_bytes=memory_bytes),
        source="assumed for an AVX2 core at 2.5 GHz; `zerofit calibrate` measures it",
        memory_source="equal shares of the host's memory, less libraries",
    )


def by_name(device_name: str, total_bytes: int | None = None) -> Device | None:
    """Return the device that torch reports under this name.

    If there are several sizes, return the largest within `total_bytes` (the driver's figure), else the first.
    """
    # "H100" is also in "H100 PCIe": try longer names first
    for device in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        if re.search(rf"\b{re.escape(device.name)}\b", device_name):
            # the driver's figure is never below the catalogue's
            sizes = [d for d in DEVICES.values() if d.name == device.name and d.memory_bytes <= (total_bytes or 0)]
            return max(sizes, key=lambda d: d.memory_bytes, default=device)
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device at a precision, or None for a CPU or an unknown device."""
    device = by_name(device_name)
    return device.peak(precision) if device else None


def supports(kind: str, precision: str) -> bool:
    """Return whether a kind of GPU supports a precision ("bf16", "fp16", "fp32")."""
    return precision in DEVICES[kind].tflops
