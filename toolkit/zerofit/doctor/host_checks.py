"""Checks of a host's devices, tools and limits, and of its measured speeds.

A measured speed is compared with a share of an expected speed. For a GPU, the expected speed is in its data sheet
(`spec.devices`, with sources). For a CPU, it is the speed that `zerofit plan` assumes for a core (`spec.devices`). A
healthy machine easily reaches these shares. A lower speed shows a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zerofit.doctor.check import FAIL, OK, WARN, Check, check
from zerofit.doctor.facts import HostFacts
from zerofit.doctor.measured import Figures
from zerofit.spec.devices import Device, by_name, cpu_device
from zerofit.spec.local_machine import LIBAIO_HINT
from zerofit.spec.units import shown_bytes

NOFILE = 4096  # 8 ranks, each with a socket to every other rank, loader workers and checkpoint files
NPROC = 4096
MEMLOCK = 64 * 2**20  # NCCL over InfiniBand locks its buffers in memory; its manual recommends no limit
NCCL_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
SHARED = 2**30  # a container has 64 MiB by default; NCCL and loader workers pass tensors through it
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
# CUDA's major version -> the oldest driver that supports it
DRIVERS = {13: 580, 12: 525, 11: 450}
DRIVERS_SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
ANY_MINOR = (11, 12)  # in these CUDA versions, DeepSpeed builds with another minor version than torch's
STABLE_VISION = 29  # torchvision 0.29 and later also work with newer releases of torch
BUILDER = "deepspeed/ops/op_builder/builder.py: assert_no_cuda_mismatch"


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
        size = shown_bytes(total) if total else "memory not reported by nvidia-smi"
        good, problem = f"{len(same)} x {name}, {size}", ""
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
    # InfiniBand reads and writes only locked memory, whose size memlock limits.
    locks = facts["gpus"] and facts["infiniband"]
    least = {"nofile": NOFILE, "nproc": NPROC} | ({"memlock": MEMLOCK} if locks else {})
    for name, value in least.items():
        limit = facts["limits"][name]
        shown, figure = ("none", None) if limit is None else (str(limit), float(limit))
        problem = shown if limit is not None and limit < value else ""
        hint = f"raise it in /etc/security/limits.conf (* - {name} unlimited), or with `ulimit`"
        found = check(f"limit {name}", host, problem, shown, WARN, f"{value} or more", hint)
        yield replace(found, figure=figure, source=NCCL_SOURCE if name == "memlock" else "")
    total = facts["shared_memory_bytes"]
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


@dataclass(frozen=True)
class Clash:
    """One combination of versions to avoid."""

    name: str
    applies: Callable[[HostFacts], bool]
    what: str
    hint: str
    source: str
    status: str = WARN


def version(text: str | None) -> tuple[int, ...]:
    """Return the numbers of "2.30.7" or "13.0+cu130" as a tuple; () for None."""
    # A build after "+" or a letter does not count: "2.9.0a0+git5f7" is (2, 9, 0).
    return tuple(map(int, re.findall(r"\d+", re.split(r"[+a-z]", text or "")[0])))


def _nccl(facts: HostFacts) -> tuple[int, ...]:
    return version(facts["versions"]["nccl"]) if facts["gpus"] else ()


def _has_gpu(facts: HostFacts, *words: str) -> bool:
    return any(word in gpu["name"] for gpu in facts["gpus"] for word in words)


def _torchvision_differs(facts: HostFacts) -> bool:
    torch, vision = version(facts["versions"]["torch"]), version(facts["versions"]["torchvision"])
    if not vision or torch[:1] != (2,):
        return False
    # torchvision 0.N is built for torch 2.(N-15). From 0.29 on it also works with newer releases of torch: 0.29.1 and
    # 0.29.2 require torch 2.14 or newer (their METADATA).
    built_for = vision[1] - 15
    return torch[1] < built_for if vision[1] >= STABLE_VISION else torch[1] != built_for


def _cuda_differs(facts: HostFacts) -> bool:
    nvcc, torch = version(facts["compilers"]["nvcc"]), version(facts["versions"]["cuda"])
    if not (facts["gpus"] and nvcc and torch) or nvcc == torch[:2]:
        return False
    return nvcc[0] != torch[0] or nvcc[0] not in ANY_MINOR


def _gcc_is_too_new(facts: HostFacts) -> bool:
    limit, gcc = facts["compilers"]["newest_g++"], version(facts["compilers"]["g++"])
    return bool(facts["gpus"] and limit and gcc and gcc[0] > limit)


CLASHES = (
    Clash(
        "nccl 2.29.2",
        lambda f: _nccl(f) == (2, 29, 2),
        "NCCL 2.29.2 can hang",
        "use NCCL 2.29.3 or newer",
        "https://github.com/pytorch/pytorch/pull/174338",
        FAIL,
    ),
    Clash(
        "nccl 2.28.3",
        lambda f: _nccl(f) == (2, 28, 3) and _has_gpu(f, "H100", "H200"),
        "NCCL 2.28.3 fails on H100: torch returned to 2.27.5 for this reason",
        "use NCCL 2.27.5, or 2.28.7 or newer",
        "https://github.com/pytorch/pytorch/pull/164352",
        FAIL,
    ),
    Clash(
        "nccl on ARM",
        lambda f: () < _nccl(f) < (2, 29, 3) and f["cores"]["machine"] == "aarch64",
        "NCCL before 2.29.3 loses slots of its queue on ARM and then hangs",
        "use NCCL 2.29.3 or newer",
        "https://github.com/marin-community/marin/pull/8038",
        FAIL,
    ),
    Clash(
        "nccl on RTX PRO Blackwell",
        lambda f: () < _nccl(f) <= (2, 26, 2) and _has_gpu(f, "RTX PRO 6000"),
        "NCCL 2.26.2 fails with illegal memory accesses in collectives of 512 KiB and more",
        "use a newer NCCL (2.31.2 works)",
        "https://github.com/NVIDIA/nccl/issues/2418",
        FAIL,
    ),
    Clash(
        "deepspeed 0.17.6 to 0.18.2",
        lambda f: (0, 17, 6) <= version(f["versions"]["deepspeed"]) <= (0, 18, 2),
        "ZeRO stage 2 computes wrong gradients",
        "use DeepSpeed 0.19.8 or newer",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
        FAIL,
    ),
    Clash(
        "torchvision",
        _torchvision_differs,
        "torchvision is built for another version of torch: its operators (torchvision::nms) are missing",
        "install torch and torchvision together from one index: https://pytorch.org/get-started",
        "https://github.com/pytorch/vision/issues/9174",
    ),
    Clash(
        "nvcc",
        _cuda_differs,
        "nvcc and torch have different CUDA versions: DeepSpeed refuses to compile its CUDA ops",
        "install the CUDA toolkit for which torch was built (torch.version.cuda) and set CUDA_HOME to it",
        BUILDER,
    ),
    Clash(
        "g++",
        _gcc_is_too_new,
        "g++ is too new for this nvcc, which refuses it",
        "install an older g++; set CXX=/path/to/g++ and NVCC_PREPEND_FLAGS='-ccbin /path/to/g++'",
        "crt/host_config.h of that host's CUDA toolkit",
    ),
)


def clashes(host: str, facts: HostFacts) -> Iterator[Check]:
    """Yield a check for each known bad combination on this host; one OK check if none."""
    found = [clash for clash in CLASHES if clash.applies(facts)]
    for clash in found:
        yield Check(
            name="versions-clash",
            host=host,
            status=clash.status,
            value=clash.what,
            expected=f"another combination than {clash.name}",
            hint=clash.hint,
            source=clash.source,
        )
    if not found:
        yield Check(name="versions-clash", host=host, status=OK, value=f"none of {len(CLASHES)} known clashes")


def driver(host: str, facts: HostFacts) -> Iterator[Check]:
    """Check whether the driver is new enough for the CUDA that torch was built with."""
    if not facts["driver"]:
        return
    # A driver runs programs of every minor version of CUDA that have its major version. So only the major version
    # counts.
    cuda = version(facts["versions"]["cuda"])
    least = DRIVERS.get(cuda[0]) if cuda else None
    short = least is not None and version(facts["driver"])[0] < least
    expected = f"{least} or newer for CUDA {facts['versions']['cuda']}" if least else ""
    hint = "update the driver, or install a torch for an older CUDA"
    problem = facts["driver"] if short else ""
    driver = check("driver", host, problem, facts["driver"], expected=expected, hint=hint)
    yield replace(driver, source=DRIVERS_SOURCE if least else "")
