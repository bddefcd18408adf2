"""The catalog of GPUs and instance types, and this machine's CPU as a device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from zerofit.spec.device_file import GB, SUFFIXES, Device, Node, entry_names, read_device, read_gpu, read_instance
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.overhead import CPU_LIBRARY_BYTES


class HardwareCatalog(Mapping[str, Device]):
    """The devices of one catalog folder, by name."""

    def __init__(self, folder: str, read: Callable[[str], Device]):
        self._folder, self._read = folder, read  # a device's file is read when the device is used

    def __getitem__(self, name: str) -> Device:
        """Return a device. Raises KeyError."""
        if name not in self:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(entry_names(self._folder))

    def __len__(self) -> int:
        return len(entry_names(self._folder))

    def __contains__(self, name: object) -> bool:
        """Return whether the catalog has a name, without reading a file."""
        return name in entry_names(self._folder)


DEVICES = HardwareCatalog("gpus", read_gpu)
INSTANCES = HardwareCatalog("instances", read_instance)  # by the instance type in lower case

# TFLOP/s of a CPU core before `zerofit calibrate`: 8 lanes x 2 FMA x 2 FLOP x 2.5 GHz (AVX2)
CORE_TFLOPS = 0.08
CORE_BANDWIDTH = 8 * GB  # assumed: a core's share of a server's memory channels
LOOPBACK = 1.5 * GB  # assumed: gloo through the loopback device


def find_device(kind: str) -> Device:
    """Return the device for a kind, a cloud's instance type, or a YAML file (`device_file`).

    A kind may be written as people and drivers write it: "RTX 4090", "NVIDIA A100-SXM4-80GB".

    Raises UserError for an unknown kind, with the nearest names. For "cpu" use `cpu_device`.
    """
    if kind in DEVICES:
        return DEVICES[kind]
    if kind.lower() in INSTANCES:
        return INSTANCES[kind.lower()]
    if kind.endswith(SUFFIXES):
        return read_device(Path(kind), "--gpu")
    word = _letters(kind)
    for known in DEVICES:
        if _letters(known) == word:
            return DEVICES[known]
    begins = [
        known
        for known in (*DEVICES, "cpu")
        if _letters(known).startswith(word) or kind.lower().startswith(f"{known}-")  # h100, h200-141gb
    ]
    known = (*DEVICES, "cpu", *INSTANCES)
    if begins and word:
        hint = f"did you mean {' or '.join(begins)}?"
    else:
        likely = nearest(kind.lower(), known)
        hint = f"{likely} For" if likely else f"known: {', '.join(known)}; for"
        hint += " another GPU: --gpu FILE.yaml with lines like `gpu: l40s`, `memory: 48GiB` and `network: 25GB`"
    raise UserError(Problem(kind="unknown-gpu", message=f"no GPU kind {kind!r}", hint=hint, where="--gpu"))


def _letters(kind: str) -> str:
    """Return a kind without case, separators, and the words that a driver adds to it."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|sxm\d|hbm\d+e?|[\W_]", "", kind.lower())


def cpu_device(cores: int, memory_bytes: int, ranks: int) -> Device:
    """Return a device for one of `ranks` processes that share a host's cores and memory."""
    share = cores // ranks or cores / ranks  # more ranks than cores take turns
    return Device(
        kind="cpu",
        name="CPU",
        memory_bytes=max(0, memory_bytes - CPU_LIBRARY_BYTES) // ranks,
        tflops={"fp32": CORE_TFLOPS * share, "bf16": CORE_TFLOPS * share},
        bandwidth=CORE_BANDWIDTH * share,
        link=LOOPBACK,
        link_name="loopback",
        pcie=CORE_BANDWIDTH * share,
        node=Node(
            name="this machine's kind",
            gpus=ranks,
            host_bytes=memory_bytes,
            host_bandwidth=20 * GB,
            network=1.25 * GB,
            nvme_read=2.0 * GB,
            nvme_write=1.0 * GB,
            source="assumed until `zerofit calibrate` measures it: two memory channels, 10 Gb/s Ethernet, one disk",
        ),
        source="assumed for an AVX2 core at 2.5 GHz; `zerofit calibrate` measures it",
        memory_source="an equal share of the host's memory for each rank, minus the libraries' memory",
    )


def by_name(device_name: str, total_bytes: int | None = None) -> Device | None:
    """Return the catalog's device for a name that torch reports; None if there is none.

    `total_bytes`: memory by the GPU's driver, for devices with several sizes.
    """
    # "H100" is also in "H100 PCIe": try longer names first
    for device in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        if re.search(rf"\b{re.escape(device.name)}\b", device_name):
            # The driver's figure is never below the catalog's, so the largest size within it is meant. The smallest
            # size is for an unknown figure.
            sizes = sorted((d for d in DEVICES.values() if d.name == device.name), key=lambda d: d.memory_bytes)
            return next((d for d in reversed(sizes) if d.memory_bytes <= (total_bytes or 0)), sizes[0])
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device at a precision; None for a CPU or an unknown device."""
    device = by_name(device_name) if device_name != "cpu" else None  # reads all of the catalog
    return device.peak(precision) if device else None
