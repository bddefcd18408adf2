"""Devices: what one can do at most, the catalogue of GPUs with public sources, and this machine's CPU as one."""

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

# A CPU core, until `zerofit calibrate` has measured this machine: 8 lanes x 2 FMA x 2 FLOP x 2.5 GHz (AVX2)
CORE_TFLOPS = 0.08
CORE_BANDWIDTH = 8 * GB  # assumed: a core's share of a server's memory channels
LOOPBACK = 1.5 * GB  # assumed: gloo through the loopback device


def find_device(kind: str, where: str = "--gpu") -> Device:
    """Return the device of a kind, of a cloud's instance type, or of a YAML file (`device_file`).

    Raises UserError with the nearest names; `cpu` is made by `cpu_device` instead.
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
    """Return one of `ranks` processes that share a host's cores and memory, as a device."""
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
        source="assumed for an AVX2 core of 2.5 GHz; `zerofit calibrate` measures",
        memory_source="the host's memory less what ranks share, in equal shares",
    )


def by_name(device_name: str, total_bytes: int | None = None) -> Device | None:
    """Return the device that torch reports under this name; of a family with several sizes the first.

    `total_bytes`: what its driver says it has; then the largest size that is no more than that.
    """
    # "A10" would be found in no "A10G", but "H100" is in "H100 PCIe": longer names are tried first
    for device in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        if re.search(rf"\b{re.escape(device.name)}\b", device_name):
            # the driver keeps a part of what it shows; more than the catalogue's figure is never promised
            sizes = [d for d in DEVICES.values() if d.name == device.name and d.memory_bytes <= (total_bytes or 0)]
            return max(sizes, key=lambda d: d.memory_bytes, default=device)
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return peak FLOP/s of a device at a precision, None where not known (a CPU, a device not in the table)."""
    device = by_name(device_name)
    return device.peak(precision) if device else None


def supports(kind: str, precision: str) -> bool:
    """Return whether a kind of GPU has arithmetic of a precision ("bf16", "fp16", "fp32")."""
    return precision in DEVICES[kind].tflops
