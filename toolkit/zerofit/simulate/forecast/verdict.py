"""Decide whether a simulated rank fits, including memory outside of torch.

Figures and their sources are in `spec.overhead`. cuDNN's convolution workspaces are allocated by torch
(aten/src/ATen/native/cudnn/Conv_v8.cpp). Their size depends on the algorithm that cuDNN chooses, so it is given as
a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerofit.simulate.memory.alloc_conf import AllocatorSettings
from zerofit.simulate.memory.allocator import Event, Reserved, replay
from zerofit.spec.devices import Device
from zerofit.spec.overhead import (
    CPU_EXPERTS_BYTES,
    CPU_HEAP,
    CPU_PACKED,
    CPU_PROCESS_BYTES,
    CPU_PROCESS_HIGH_BYTES,
    CPU_PROCESS_LOW_BYTES,
    CUDNN_COPIES,
    CUDNN_SOURCE,
    CUDNN_WORKSPACES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_CONNECTION_BYTES,
    NCCL_NVLINK_BYTES,
    NCCL_NVLINK_CHANNELS,
    NCCL_PCIE_BYTES,
    NCCL_PCIE_CHANNELS,
    REPLAYED,
    context_figure,
)
from zerofit.spec.units import shown_bytes

_PRIVATE = "private memory of ranks besides tensors (spec/overhead.py)"
FITS, WITHIN, NOT = ORDER = ("fits", "close to the limit", "does not fit")


@dataclass(frozen=True)
class Overhead:
    """Memory that is not simulated, as a range from published figures."""

    name: str
    low_bytes: int
    high_bytes: int  # the verdict uses this one
    source: str

    @property
    def bytes(self) -> int:
        """The middle of the range."""
        return (self.low_bytes + self.high_bytes) // 2


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """A communicator: its number of ranks, and to how many of them this rank sends directly."""

    name: str
    ranks: int
    direct_peers: int = 0


def overheads(
    device: Device, groups: Sequence[Communicator], convolution_bytes: int = 0, libraries: str = ""
) -> list[Overhead]:
    """Return the memory that a rank needs besides torch's reserved memory.

    `groups`: the rank's communicators. `convolution_bytes`: bytes of input, weights and output of the rank's
    largest convolution. `libraries`: a key of CPU_PROCESS_BYTES, for the libraries that a rank on a CPU imports; ""
    if unknown.
    """
    if device.kind == "cpu":
        low, high = CPU_PROCESS_BYTES.get(libraries, (CPU_PROCESS_LOW_BYTES, CPU_PROCESS_HIGH_BYTES))
        return [Overhead("process", low, high, _PRIVATE)]
    figure = context_figure(device)
    context = Overhead("context and kernels", figure.low_bytes, figure.high_bytes, figure.source)
    workspaces = Overhead(CUDNN_WORKSPACES, 0, CUDNN_COPIES * convolution_bytes, CUDNN_SOURCE)
    buffers = (_buffers(device, group) for group in groups if group.ranks > 1)
    return [context, *([workspaces] if convolution_bytes else []), *buffers]


def unseen_on_cpu(peak_bytes: int, largest_bytes: int, experts: bool) -> list[Overhead]:
    """Return the memory that libraries allocate on a CPU besides torch's tensors.

    `largest_bytes`: bytes of the model's largest parameter. `experts`: whether the model is a mixture of experts.
    """
    found = {
        "gaps in the C library's heap": round(CPU_HEAP * peak_bytes),
        "copies of matrices in MKL and oneDNN": CPU_PACKED * largest_bytes,
        "oneDNN's kernels for the shapes of experts": CPU_EXPERTS_BYTES if experts else 0,
    }
    return [Overhead(name, 0, most, _PRIVATE) for name, most in found.items() if most]


def _buffers(device: Device, group: Communicator) -> Overhead:
    """Return the buffers of one communicator.

    In rings and trees, a rank has buffers for two neighbors. It also has buffers for each direct connection in use.
    """
    over_pcie = "PCIe" in device.link_name
    fewest, most = NCCL_PCIE_CHANNELS if over_pcie else NCCL_NVLINK_CHANNELS
    low = fewest * NCCL_CONNECTION_BYTES
    high = NCCL_PCIE_BYTES if over_pcie else NCCL_NVLINK_BYTES
    peers = min(group.direct_peers, device.node.gpus - 1)  # other nodes share one buffer (nccl#1450)
    if peers > 0:
        low += peers * NCCL_PCIE_CHANNELS[0] * NCCL_CONNECTION_BYTES
        # measured on 8 GPUs, that is 7 peers; nccl#986: linear
        high += peers * most * NCCL_CONNECTION_BYTES if over_pcie else NCCL_ALL_TO_ALL_BYTES * peers // 7
    source = "NCCL init.cc and p2p.cc (12 MiB a connection), NVIDIA/nccl#1685, #986"
    if device.architecture.startswith("cdna"):
        source += "; RCCL is assumed to be the same"
    return Overhead(f"NCCL buffers of the {group.name} group ({group.ranks} ranks)", low, high, source)


@dataclass(frozen=True, kw_only=True)
class FitVerdict:
    """A verdict (FITS, WITHIN or NOT), with the reason."""

    word: str
    margin_bytes: int  # free bytes with every overhead at its upper end; negative: this much is missing
    sentence: str

    @property
    def fits(self) -> bool:
        """Whether the run fits even in the worst case. A run with WITHIN may run out of memory."""
        return self.word == FITS


# What has to fit on a device:
#
#   | reserved peak | overheads: low .. high | kernels and fragmentation that are not simulated (kept free) |
#
# "fits" means that the run fits with the upper end of each overhead. "does not fit" means that it does not fit with the
# lower ends.
def judge(
    peak_reserved_bytes: int,
    beside: Sequence[Overhead],
    device_bytes: int,
    kept_free_bytes: int | None = None,
    likely_bytes: int | None = None,
) -> FitVerdict:
    """Compare the reserved peak and the overheads with the device's memory.

    FITS: the run fits even with every overhead at its upper end. NOT: it does not fit even with every overhead at
    its lower end. `kept_free_bytes` covers memory that is not simulated (default: the share REPLAYED of the peak).
    `likely_bytes` is the reserved peak if the device keeps up with the host. The reason mentions it.
    """
    kept = round(REPLAYED * peak_reserved_bytes) if kept_free_bytes is None else kept_free_bytes
    left = device_bytes - peak_reserved_bytes
    if left - sum(o.high_bytes for o in beside) >= kept:
        word = FITS
    else:
        word = NOT if left < sum(o.low_bytes for o in beside) else WITHIN
    return _verdict(word, (likely_bytes, peak_reserved_bytes), beside, device_bytes, kept)


# A reserved peak above the device's memory is no error yet: torch first returns cached segments. So the events are
# replayed with limited memory, first what is left in the worst case, then in the best case:
#
#   FITS     room = (device - upper ends) / (1 + REPLAYED)      the share REPLAYED stays free for what is not simulated
#   WITHIN   room = device - lower ends
#   NOT      an allocation fails even there
def judge_events(
    events: Sequence[Event],
    beside: Sequence[Overhead],
    device_bytes: int,
    settings: AllocatorSettings | None = None,
    likely_bytes: int | None = None,
) -> tuple[FitVerdict, Reserved]:
    """Return the verdict on a sequence of allocations, and the replay that decided it.

    The replay is the one that fits. Without one, it is the replay without a limit.
    """
    found = replay(events, settings=settings)
    verdict = judge(found.peak_reserved_bytes, beside, device_bytes, likely_bytes=likely_bytes)
    if verdict.fits or device_bytes <= 0:
        return verdict, found
    low, high = sum(o.low_bytes for o in beside), sum(o.high_bytes for o in beside)
    for word, room in ((FITS, int((device_bytes - high) / (1 + REPLAYED))), (WITHIN, device_bytes - low)):
        tight = replay(events, device_bytes=room, settings=settings)
        if tight.out_of_memory is None:
            kept = round(REPLAYED * tight.peak_reserved_bytes)
            flushes = (
                f" It fits only because the allocator frees cached memory (flushes: {tight.flushes}), which stops the"
                " device each time; PYTORCH_ALLOC_CONF=expandable_segments:True reduces fragmentation."
            )
            more = flushes if tight.flushes else ""
            return _verdict(word, (likely_bytes, tight.peak_reserved_bytes), beside, device_bytes, kept, more), tight
    more = f" The first allocation that fails needs {shown_bytes(tight.out_of_memory.asked_bytes)}."
    return _verdict(NOT, (likely_bytes, found.peak_reserved_bytes), beside, device_bytes, 0, more), found


def _verdict(
    word: str,
    reserves: tuple[int | None, int],
    beside: Sequence[Overhead],
    device_bytes: int,
    kept: int,
    more: str = "",
) -> FitVerdict:
    likely, reserved = reserves
    low, high = sum(o.low_bytes for o in beside), sum(o.high_bytes for o in beside)
    left = device_bytes - reserved - high
    more_memory = shown_bytes(high) if low == high else f"{shown_bytes(low)} to {shown_bytes(high)}"
    outside = f"{', '.join(o.name for o in beside)} need another {more_memory}" if beside else ""
    end = {
        FITS: f"{shown_bytes(left)} remain free; kernels and fragmentation may use {shown_bytes(kept)} of it.",
        WITHIN: f"It may run out of memory: kernels and fragmentation may need {shown_bytes(kept)} more.",
        NOT: f"At least {shown_bytes(reserved + low - device_bytes)} are missing.",
    }[word]
    sizes = " to ".join(dict.fromkeys(shown_bytes(size) for size in (min(likely or reserved, reserved), reserved)))
    torch = f"torch reserves {sizes} of the device's {shown_bytes(device_bytes)}"
    sentence = f"{'; '.join(filter(None, (torch, outside)))}. {end}{more}"
    return FitVerdict(word=word, margin_bytes=left, sentence=sentence)
