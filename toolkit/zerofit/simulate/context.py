"""What nvidia-smi shows of a rank beyond what torch has reserved: context, kernels, NCCL's buffers.

Figures and their sources are in `spec.overhead`. cuDNN's convolution workspaces go through torch's allocator
(aten/src/ATen/native/cudnn/Conv_v8.cpp) and depend on the algorithm it picks: not known beforehand, and not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.spec.device import Device
from zerofit.spec.overhead import (
    CPU_PROCESS_BYTES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_CONNECTION_BYTES,
    NCCL_NVLINK_BYTES,
    NCCL_NVLINK_CHANNELS,
    NCCL_PCIE_BYTES,
    NCCL_PCIE_CHANNELS,
    blas_workspace_bytes,
    context_figure,
)
from zerofit.spec.plain_data import field_data


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """One thing that takes memory outside of torch's allocator: a figure to show, and the range that sources give."""

    name: str
    bytes: int  # the middle of the range
    low_bytes: int
    high_bytes: int  # what a verdict reckons with
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit simulate --json` prints of it."""
        return field_data(self, "bytes")


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """A communicator: its ranks, and to how many of them this rank sends directly (all-to-all: to all the others)."""

    name: str
    ranks: int
    direct_peers: int = 0


def overheads(device: Device, groups: Sequence[Communicator]) -> list[Overhead]:
    """What a rank of these communicators has on this device besides torch's reserved memory."""
    if device.kind == "cpu":
        source = "resident size after importing torch and DeepSpeed and starting gloo (spec/overhead.py)"
        return [_overhead("process", CPU_PROCESS_BYTES, CPU_PROCESS_BYTES, source)]
    figure = context_figure(device.kind)
    found = [_overhead("context and kernels", figure.low_bytes, figure.high_bytes, figure.source)]
    for group in groups:
        if group.ranks > 1:
            found.append(_communicator(device, group))
    return found


def blas_workspaces(device: Device) -> list[int]:
    """Bytes of each workspace that torch allocates and keeps, to be replayed with the tensors' allocations.

    One at the first matrix product of forward and one at the first of backward: handles belong to threads
    (aten/src/ATen/cuda/CublasHandlePool.cpp, `thread_local` pool window), and autograd runs backward in its own.
    """
    return [] if device.kind == "cpu" else [blas_workspace_bytes(device.kind)] * 2


def _communicator(device: Device, group: Communicator) -> Overhead:
    """Buffers of one communicator: rings and trees to two neighbours, and the direct connections that are used."""
    over_pcie = "PCIe" in device.link_name
    fewest, most = NCCL_PCIE_CHANNELS if over_pcie else NCCL_NVLINK_CHANNELS
    low = fewest * NCCL_CONNECTION_BYTES
    high = NCCL_PCIE_BYTES if over_pcie else NCCL_NVLINK_BYTES
    peers = min(group.direct_peers, device.node.gpus - 1)  # other nodes share one buffer (nccl#1450)
    if peers > 0:
        low += peers * NCCL_PCIE_CHANNELS[0] * NCCL_CONNECTION_BYTES
        # measured on 8 GPUs, so to 7 peers; nccl#986: linear
        high += peers * most * NCCL_CONNECTION_BYTES if over_pcie else NCCL_ALL_TO_ALL_BYTES * peers // 7
    source = "NCCL init.cc and p2p.cc (12 MiB a connection), NVIDIA/nccl#1685, #986"
    if device.kind.startswith("mi"):
        source += "; RCCL is taken to be alike"
    return _overhead(f"NCCL buffers of the {group.name} group ({group.ranks} ranks)", low, high, source)


def _overhead(name: str, low: int, high: int, source: str) -> Overhead:
    return Overhead(name=name, bytes=(low + high) // 2, low_bytes=low, high_bytes=high, source=source)
