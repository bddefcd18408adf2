"""Checks of a host's devices, tools and limits, and of its measured speeds.

A measured speed is compared with a share of an expected speed. For a GPU, the expected speed is in its data sheet
(`spec.devices`, with sources). For a CPU, it is the speed that `zerofit plan` assumes for a core (`spec.devices`). A
healthy machine easily reaches these shares. A lower speed shows a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerofit.doctor.check import OK, WARN, Check, check
from zerofit.doctor.clashes import clashes, driver
from zerofit.doctor.facts import HostFacts
from zerofit.doctor.measured import Figures
from zerofit.spec.devices import Device, by_name, cpu_device
from zerofit.spec.local_machine import LIBAIO_HINT
from zerofit.spec.units import shown_bytes

GIB = 2**30
NOFILE = 4096  # 8 ranks, each with a socket to every other rank, loader workers and checkpoint files
NPROC = 4096
MEMLOCK = 64 * 2**20  # NCCL over InfiniBand locks its buffers in memory; its manual recommends no limit
NCCL_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
SHARED = GIB  # a container has 64 MiB by default; NCCL and loader workers pass tensors through it
TOTAL_SHARE = 0.95  # share of the catalog's memory; ECC and the driver use a part
MATMUL, MEMORY, COPY, LINK = 0.6, 0.7, 0.6, 0.5  # shares of the peak
CPU_SHARE = 0.5
NETWORK = 0.5  # share of an interface's speed that gloo, or NCCL over sockets, reaches
BUS = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: compare bus and link bandwidth"
LATENCY_S = {"cuda": 100e-6, "cpu": 2e-3}  # seconds of a small all-reduce; a step has about 100 collectives
DISK = 200e6  # bytes per second: a checkpoint of 10 GB in 50 s
NVME_READ = 1.5e9  # PCIe 3 x4 has 3.9 GB/s (PCI-SIG); with offload, each layer's parameters are read from the disk
BF16_SHARE = 0.5  # share of fp32's speed; a processor without bf16 instructions is many times slower
HINTS = {
    "matmul": "look for other processes; check clocks and power: nvidia-smi -q -d PERFORMANCE, or the CPU's governor",
    "memory": "look for other processes; check ECC errors: nvidia-smi -q -d ECC",
    "copy": "check the PCIe link's generation and width (nvidia-smi -q); bind ranks to the GPU's NUMA node",
    "link": "nvidia-smi topo -m shows how the GPUs are connected; NCCL_DEBUG=INFO shows what NCCL uses",
    "network": "NCCL_DEBUG=INFO shows the network in use; choose another with --master-addr or NCCL_SOCKET_IFNAME",
    "latency": "look for other processes, or switch off the processor's power saving, which increases latency",
    "disk": "keep run folders on a faster disk, or save less often (--save-every, --save-async)",
}


def checks(host: str, facts: HostFacts, *, many: bool) -> Iterator[Check]:
    """Yield all checks of a host's facts. `many`: whether the host is one of several."""
    yield from _gpus(host, facts)
    yield from driver(host, facts)
    if facts["gpus"] and not facts["versions"]["hip"]:
        nccl = facts["versions"]["nccl"]
        problem = "" if nccl else "the nvidia-nccl package is not installed, so NCCL's version is unknown"
        hint = "torch may contain its own NCCL; torch from pytorch.org installs it as a package"
        yield check("nccl", host, problem, str(nccl), WARN, hint=hint)
    yield from _compilers(host, facts)
    yield from clashes(host, facts)
    lacks = [part for part, is_installed in facts["libaio"].items() if not is_installed]
    problem = f"no {' and no '.join(lacks)}" if lacks else ""
    expected, hint = "installed, for offload to NVMe", f"{LIBAIO_HINT}; offload to host memory works without it"
    yield check("libaio", host, problem, "installed", WARN, expected, hint)
    for name in ("ssh", "pdsh"):
        path = facts["tools"][name]
        if path or many:
            expected = "installed, to start ranks on other hosts"
            yield check(name, host, "" if path else "missing", str(path), WARN, expected, f"apt-get install {name}")
    yield from _limits(host, facts)
    memory = facts["memory"]
    value = f"{shown_bytes(memory['free_bytes'])} of {shown_bytes(memory['total_bytes'])} free"
    yield Check(name="memory", host=host, status=OK, value=value, figure=float(memory["free_bytes"]))


def _gpus(host: str, facts: HostFacts) -> Iterator[Check]:
    if not facts["gpus"]:
        problem = f"nvidia-smi fails: {facts['gpu_error']}" if facts["gpu_error"] else ""
        hint = "repair the driver; after an update: reboot"
        yield check("gpus", host, problem, f"none: {facts['cores']['usable']} cores", hint=hint)
        return
    for name in dict.fromkeys(gpu["name"] for gpu in facts["gpus"]):
        same = [gpu for gpu in facts["gpus"] if gpu["name"] == name]
        total = min(gpu["total_bytes"] or 0 for gpu in same)  # a forecast must fit the smallest
        device = by_name(name, total)
        good, problem = f"{len(same)} x {name}, {shown_bytes(total)}", ""
        if device is None:
            problem = f"{good}: not in the catalog, so its speed is not known"
        elif total and total < TOTAL_SHARE * device.memory_bytes:
            problem = f"{good}: less memory than the catalog's {shown_bytes(device.memory_bytes)}"
        hint = "plan with a similar GPU and this one's memory: --gpu KIND --device-memory SIZE"
        yield check("gpus", host, problem, good, WARN, hint=hint)


def _compilers(host: str, facts: HostFacts) -> Iterator[Check]:
    needed = {"g++": "apt-get install g++", "ninja": "pip install ninja"}
    if facts["gpus"]:
        needed["nvcc"] = "install the CUDA toolkit for which torch was built (torch.version.cuda), or load that module"
    for name, hint in needed.items():
        path, version = facts["tools"][name], facts["compilers"].get(name)
        good = f"{version} ({path})" if version else str(path)
        expected = "installed: DeepSpeed's C++ ops (offload, fused optimizers) are compiled with it"
        yield check(f"compiler {name}", host, "" if path else "missing", good, WARN, expected=expected, hint=hint)


def _limits(host: str, facts: HostFacts) -> Iterator[Check]:
    """Check the limits of processes, and the size of /dev/shm."""
    locks = facts["gpus"] and facts["infiniband"]
    least = {"nofile": NOFILE, "nproc": NPROC} | ({"memlock": MEMLOCK} if locks else {})
    for name, value in least.items():
        limit = facts["limits"][name]
        shown, figure = ("none", None) if limit is None else (str(limit), float(limit))
        problem = shown if limit is not None and limit < value else ""
        hint = f"raise it in /etc/security/limits.conf (* - {name} unlimited), or with `ulimit`"
        found = check(f"limit {name}", host, problem, shown, WARN, f"{value} or more", hint)
        yield replace(found, figure=figure, source=NCCL_SOURCE if name == "memlock" else "")
    shared = facts["shared_memory"]
    total = shared["total_bytes"] if shared else 0
    shown, expected = shown_bytes(total), f"{shown_bytes(SHARED)} or more in /dev/shm"
    problem, hint = shown if total < SHARED else "", "start the container with --shm-size 16g, or --ipc host"
    found = check("shared-memory", host, problem, shown, WARN, expected, hint)
    yield replace(found, figure=float(total), source=NCCL_SOURCE)


def _device(facts: HostFacts, ranks: int) -> Device | None:
    if facts["gpus"]:
        return by_name(facts["gpus"][0]["name"], facts["gpus"][0]["total_bytes"])
    return cpu_device(facts["cores"]["usable"], facts["memory"]["total_bytes"], ranks)


@dataclass(frozen=True)
class LowestSpeed:
    """The lowest speed of a healthy machine."""

    value: float | None  # FLOP or bytes per second; None: unknown
    why: str = ""
    source: str = ""


def _rate(name: str, host: str, figure: float, lowest: LowestSpeed, hint: str, unit: str = "B") -> Check:
    """Compare a rate in FLOP or bytes ("B") a second with the lowest expected rate."""
    scale, word = (1e12, "TFLOP/s") if unit == "FLOP" else (1e9, "GB/s")
    low = lowest.value is not None and figure < lowest.value
    expected = "" if lowest.value is None else f"{lowest.value / scale:.3g} {word} or more{lowest.why}"
    value = f"{figure / scale:.3g} {word}"
    rate = check(name, host, value if low else "", value, WARN, expected, hint)
    return replace(rate, figure=figure, source=lowest.source)


def _latency(name: str, host: str, figure: float, kind: str) -> Check:
    most = LATENCY_S[kind]
    expected = f"{most * 1e6:,.0f} us or less: a step has about 100 collectives"
    value = f"{figure * 1e6:,.0f} us"
    latency = check(name, host, value if figure > most else "", value, WARN, expected, HINTS["latency"])
    return replace(latency, figure=figure)


def speeds(host: str, facts: HostFacts, figures: Figures, ranks: int) -> Iterator[Check]:
    """Check the speeds of one host. `figures`: the measurements of its slowest rank."""
    gpu, device = bool(facts["gpus"]), _device(facts, ranks)
    source = device.source if device else ""

    def lowest(peak: float | None, share: float, source: str = source) -> LowestSpeed:
        return LowestSpeed(None if peak is None else peak * (share if gpu else CPU_SHARE), source=source)

    for dtype, flops in figures["matmul_flops"].items():
        wanted, hint = lowest(device.peak(dtype) if device else None, MATMUL), HINTS["matmul"]
        # `cpu_device` assumes one speed for fp32 and bf16. A processor without bf16 instructions is far slower in bf16.
        # So bf16 is compared with the measured fp32.
        if not gpu and dtype == "bf16":
            wanted = LowestSpeed(BF16_SHARE * figures["matmul_flops"]["fp32"], source=source)
            hint = "train in fp32: --precision fp32"
        yield _rate(f"matrix products {dtype}", host, flops, wanted, hint, "FLOP")
    peaks = (device.bandwidth, device.pcie, device.link) if device else (None, None, None)
    yield _rate("memory bandwidth", host, figures["memory_bandwidth"], lowest(peaks[0], MEMORY), HINTS["memory"])
    if gpu:
        yield _rate("host to device", host, figures["host_copy"], lowest(peaks[1], COPY), HINTS["copy"])
    if "link" in figures:
        yield _rate("all-reduce", host, figures["link"], lowest(peaks[2], LINK, BUS), HINTS["link"])
        yield _latency("all-reduce latency", host, figures["link_latency_s"], "cuda" if gpu else "cpu")
    yield from _disk(host, "disk", figures, 0.0)


def _disk(host: str, name: str, figures: Figures, read: float) -> Iterator[Check]:
    """Check one disk. `read`: the expected read speed in bytes per second; 0 for the default."""
    why = ": a checkpoint of 10 GB in 50 s"
    for way, least, words in (("write", DISK, why), ("read", read or DISK, "" if read else why)):
        if f"disk_{way}" in figures:
            yield _rate(f"{name} {way}", host, figures[f"disk_{way}"], LowestSpeed(least, words), HINTS["disk"])


def nvme_speeds(host: str, found: dict[str, dict[str, float]]) -> Iterator[Check]:
    """Check each NVMe file system; `found`: figures by mount point."""
    for mount, figures in found.items():
        yield from _disk(host, f"nvme {mount}", figures, NVME_READ)


def speeds_across(host: str, facts: HostFacts, figures: Figures, interface: str | None) -> Iterator[Check]:
    """Check the all-reduce over all hosts, which is as fast as the slowest link.

    The check is reported for the first host.
    """
    # For a GPU in the catalog, its node's network counts instead of the interface, because NCCL may use InfiniBand.
    rows = [row for row in facts["addresses"] if row["interface"] == interface]
    speed = rows[0]["speed_mbit"] if rows else None
    device = _device(facts, 1) if facts["gpus"] else None
    least, why = (NETWORK * speed * 125e3, f": half of {interface}'s") if speed else (None, "")
    if device:
        least, why = LINK * device.node.network, f": half of {device.node.name}'s network ({device.node.source})"
    lowest = LowestSpeed(least, why, BUS)
    yield _rate("all-reduce between hosts", host, figures["link"], lowest, HINTS["network"])
    yield _latency(
        "all-reduce latency between hosts", host, figures["link_latency_s"], "cuda" if facts["gpus"] else "cpu"
    )
