"""Measured figures against what they should be.

Of a GPU: a share of its data sheet's figure (`spec.devices`, with sources). Of a CPU: a share of what `zerofit plan`
assumes of a core (`spec.hardware`). The shares are what a machine in order reaches with ease in these measurements; who
gets less has something to find.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerofit.doctor.check import OK, WARN, Check
from zerofit.spec.device import Device
from zerofit.spec.hardware import by_name, cpu_device

MATMUL, MEMORY, COPY, LINK = 0.6, 0.7, 0.6, 0.5  # shares of the peak
CPU_SHARE = 0.5
NETWORK = 0.5  # of an interface's speed, that gloo or NCCL over sockets reaches
BUS = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: bus bandwidth is compared with the link's"
LATENCY_S = {"cuda": 100e-6, "cpu": 2e-3}  # of a small all-reduce: a step has about 100 collectives
DISK = 200e6  # a checkpoint of 10 GB in 50 s
NVME_READ = 1.5e9  # PCIe 3 x4 gives 3.9 GB/s (PCI-SIG); parameters come from there in every layer
BF16_SHARE = 0.5  # of fp32: a processor without instructions for bf16 computes it many times slower
Facts = dict[str, Any]
HINTS = {
    "matmul": "is something else at work there? clocks and power limit: nvidia-smi -q -d PERFORMANCE, or the governor",
    "memory": "is something else at work there? ECC errors: nvidia-smi -q -d ECC",
    "copy": "nvidia-smi -q shows the PCIe link's generation and width; bind ranks to the GPU's NUMA node",
    "link": "nvidia-smi topo -m shows how GPUs are joined; NCCL_DEBUG=INFO what NCCL takes",
    "network": "NCCL_DEBUG=INFO shows which network is taken; name another with --master-addr or NCCL_SOCKET_IFNAME",
    "latency": "is something else at work there? power saving of the processor costs latency",
    "disk": "keep run folders on a faster disk, or save less often (--save-every, --save-async)",
}


def _device(facts: Facts, ranks: int) -> Device | None:
    if facts["gpus"]:
        return by_name(facts["gpus"][0]["name"])
    return cpu_device(facts["cores"]["usable"], facts["memory"]["total_bytes"], ranks)


def _rate(
    name: str, host: str, figure: float, least: float | None, unit: str, hint: str, why: str = "", source: str = ""
) -> Check:
    """A rate (a second, in SI units) against the least that it should be."""
    scale, word = (1e12, "TFLOP/s") if unit == "FLOP" else (1e9, "GB/s")
    low = least is not None and figure < least
    expected = "" if least is None else f"{least / scale:.3g} {word} or more{why}"
    value = f"{figure / scale:.3g} {word}"
    status, hint = (WARN, hint) if low else (OK, "")
    return Check(
        name=name, host=host, status=status, value=value, expected=expected, hint=hint, figure=figure, source=source
    )


def _latency(name: str, host: str, figure: float, kind: str) -> Check:
    most = LATENCY_S[kind]
    low = figure > most
    expected = f"{most * 1e6:.0f} us or less: a step has about 100 collectives"
    hint = HINTS["latency"] if low else ""
    value = f"{figure * 1e6:.3g} us"
    return Check(
        name=name, host=host, status=WARN if low else OK, value=value, expected=expected, hint=hint, figure=figure
    )


def local(host: str, facts: Facts, figures: dict[str, Any], ranks: int) -> Iterator[Check]:
    """What the ranks of one host reach, the slowest of them."""
    gpu, device = bool(facts["gpus"]), _device(facts, ranks)
    source = device.source if device else ""

    def least(peak: float | None, share: float) -> float | None:
        return None if peak is None else peak * (share if gpu else CPU_SHARE)

    for dtype, flops in figures["matmul_flops"].items():
        wanted = least(device.peak(dtype) if device else None, MATMUL)
        hint = HINTS["matmul"]
        if not gpu and dtype == "bf16":
            wanted, hint = BF16_SHARE * figures["matmul_flops"]["fp32"], "train in fp32 here: --precision fp32"
        yield _rate(f"matrix products {dtype}", host, flops, wanted, "FLOP", hint, source=source)
    peaks = (device.bandwidth, device.pcie, device.link) if device else (None, None, None)
    wanted = least(peaks[0], MEMORY)
    yield _rate("memory bandwidth", host, figures["memory_bandwidth"], wanted, "B", HINTS["memory"], source=source)
    if gpu:
        copied = figures["host_copy"]
        yield _rate("host to device", host, copied, least(peaks[1], COPY), "B", HINTS["copy"], source=source)
    if "link" in figures:
        yield _rate("all-reduce", host, figures["link"], least(peaks[2], LINK), "B", HINTS["link"], source=BUS)
        yield _latency("all-reduce latency", host, figures["link_latency_s"], "cuda" if gpu else "cpu")
    yield from disk(host, "disk", figures, 0.0)


def disk(host: str, name: str, figures: dict[str, Any], read: float) -> Iterator[Check]:
    """One disk; `read`: bytes a second that reading should reach."""
    why = ": a checkpoint of 10 GB in 50 s"
    for way, least, words in (("write", DISK, why), ("read", read or DISK, "" if read else why)):
        if f"disk_{way}" in figures:
            yield _rate(f"{name} {way}", host, figures[f"disk_{way}"], least, "B", HINTS["disk"], words)


def nvme(host: str, found: dict[str, dict[str, float]]) -> Iterator[Check]:
    """Each NVMe file system, as offload uses them."""
    for mount, figures in found.items():
        yield from disk(host, f"nvme {mount}", figures, NVME_READ)


def across(host: str, facts: Facts, figures: dict[str, Any], interface: str | None) -> Iterator[Check]:
    """All-reduce over all hosts: the slowest link counts for all, so that one line is enough."""
    rows = [one for one in facts["addresses"] if one["interface"] == interface]
    speed = rows[0]["speed_mbit"] if rows else None
    device = _device(facts, 1) if facts["gpus"] else None
    least, why = (NETWORK * speed * 125e3, f": half of {interface}'s") if speed else (None, "")
    if device:
        least, why = LINK * device.node.network, f": half of {device.node.name}'s network ({device.node.source})"
    yield _rate("all-reduce between hosts", host, figures["link"], least, "B", HINTS["network"], why, BUS)
    yield _latency(
        "all-reduce latency between hosts", host, figures["link_latency_s"], "cuda" if facts["gpus"] else "cpu"
    )
