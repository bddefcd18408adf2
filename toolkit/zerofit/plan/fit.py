"""Whether a forecast fits: device, host and disks, with what is kept free for that which cannot be known."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.device import Device
from zerofit.spec.overhead import (
    CPU_PROCESS_BYTES,
    FRAGMENTATION,
    FRAGMENTATION_ZERO3,
    FRAGMENTATION_ZERO3_HOST,
    HOST_PROCESS_BYTES,
    HOST_RESERVE,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_CONNECTION_BYTES,
    NCCL_NVLINK_BYTES,
    NCCL_PCIE_BYTES,
    NCCL_PCIE_CHANNELS,
    blas_workspace_bytes,
    context_figure,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Bytes wanted against bytes there are. Device figures are of one rank, host and NVMe figures of one node."""

    device_bytes: float  # the allocated peak and the margin
    margin_bytes: float  # of it: fragmentation, context, communicators
    device_there_bytes: int
    host_bytes: float
    host_there_bytes: float
    nvme_bytes: int
    nvme_there_bytes: int

    @property
    def short(self) -> str | None:
        """The place that is too small: "device", "host" or "nvme"; None where everything fits."""
        if self.device_bytes > self.device_there_bytes:
            return "device"
        if self.host_bytes > self.host_there_bytes:
            return "host"
        return "nvme" if self.nvme_bytes > self.nvme_there_bytes else None

    @property
    def over(self) -> float:
        """How many times what there is the scarcest place would have to be."""
        pairs = [(self.device_bytes, self.device_there_bytes), (self.host_bytes, self.host_there_bytes)]
        if self.nvme_bytes:
            pairs.append((self.nvme_bytes, self.nvme_there_bytes))
        return max(wanted / max(1, there) for wanted, there in pairs)


def fit(memory: LayoutMemory, layout: PlannedLayout, cluster: Cluster) -> Fit:
    """The forecast against the cluster."""
    margin = margin_bytes(memory.peak_bytes, layout, cluster)
    process = 0 if cluster.on_cpu else HOST_PROCESS_BYTES
    return Fit(
        device_bytes=memory.peak_bytes + margin,
        margin_bytes=margin,
        device_there_bytes=cluster.device.memory_bytes,
        host_bytes=0 if cluster.on_cpu else (memory.host_bytes + process) * cluster.gpus,
        host_there_bytes=cluster.host_bytes * (1 - HOST_RESERVE),
        nvme_bytes=memory.nvme_bytes * cluster.gpus,
        nvme_there_bytes=cluster.nvme_bytes,
    )


def margin_bytes(peak_bytes: int, layout: PlannedLayout, cluster: Cluster) -> float:
    """What is kept free beside the allocated peak."""
    share = FRAGMENTATION
    if layout.zero_stage == 3:
        share = FRAGMENTATION_ZERO3 if layout.offload_param == "none" else FRAGMENTATION_ZERO3_HOST
    return share * peak_bytes + fixed_bytes(layout, cluster)


def fixed_bytes(layout: PlannedLayout, cluster: Cluster) -> int:
    """Context, matrix products' workspaces and communicators of a rank, each at the upper end of what sources give."""
    if cluster.on_cpu:
        return CPU_PROCESS_BYTES
    kind = cluster.device.kind
    degrees = [d for d in (layout.dp * layout.sp, layout.tp, layout.pp) if d > 1]
    groups = len(degrees) + (layout.sp > 1) + (len(degrees) > 1)  # the last: all ranks
    # forward's and backward's thread have a workspace each (aten/src/ATen/cuda/CublasHandlePool.cpp)
    return (
        context_figure(kind).high_bytes
        + 2 * blas_workspace_bytes(kind)
        + groups * (NCCL_PCIE_BYTES if _over_pcie(cluster.device) else NCCL_NVLINK_BYTES)
        + _direct_bytes(cluster.device, max(layout.sp - 1, 2 if layout.pp > 1 else 0))
    )


def _direct_bytes(device: Device, peers: int) -> int:
    """Connections of all-to-alls and of pipeline stages to single peers; other nodes share a buffer (nccl#1450)."""
    peers = min(peers, device.node.gpus - 1)
    if _over_pcie(device):
        return peers * NCCL_PCIE_CHANNELS[1] * NCCL_CONNECTION_BYTES
    return NCCL_ALL_TO_ALL_BYTES * peers // 7  # measured on 8 GPUs


def _over_pcie(device: Device) -> bool:
    return "PCIe" in device.link_name
