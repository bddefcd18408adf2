"""Decide whether a forecast fits device, host and disks, and which change would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zerofit.features.optimizers import refusals
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.model_facts import BUCKET_LIMIT
from zerofit.spec.overhead import (
    CPU_HEAP,
    FRAGMENTATION,
    FRAGMENTATION_ZERO3,
    FRAGMENTATION_ZERO3_HOST,
    HOST_PROCESS_BYTES,
    HOST_RESERVE,
    LAST_SEGMENTS_BYTES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_CONNECTION_BYTES,
    NCCL_NVLINK_BYTES,
    NCCL_PCIE_BYTES,
    NCCL_PCIE_CHANNELS,
    REPLAYED,
    context_figure,
)
from zerofit.spec.units import shown_bytes

Forecast = Callable[[PlannedLayout], LayoutMemory]
CLOSE = "close to the limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Bytes needed and available: of one rank's device, and of one node's host memory and disks."""

    device_bytes: float  # allocated peak plus margin
    margin_bytes: float  # for fragmentation, context and communicators
    device_available_bytes: int
    host_bytes: float
    host_available_bytes: float
    nvme_bytes: int
    nvme_available_bytes: int

    @property
    def exceeded(self) -> str | None:
        """The memory that is too small: "device", "host" or "nvme"; None if everything fits."""
        if self.device_bytes > self.device_available_bytes:
            return "device"
        if self.host_bytes > self.host_available_bytes:
            return "host"
        return "nvme" if self.nvme_bytes > self.nvme_available_bytes else None

    @property
    def verdict(self) -> str:
        """ "fits", "close to the limit" (the memory fits only without its margin), or "does not fit"."""
        if self.exceeded is None:
            return "fits"
        host_fits = self.host_bytes <= self.host_available_bytes and self.nvme_bytes <= self.nvme_available_bytes
        within = self.device_bytes - self.margin_bytes <= self.device_available_bytes
        return CLOSE if host_fits and within else "does not fit"

    @property
    def lacking_bytes(self) -> float:
        """Bytes that the memory named by `exceeded` lacks; 0 if everything fits."""
        lacks = {
            "device": self.device_bytes - self.device_available_bytes,
            "host": self.host_bytes - self.host_available_bytes,
            "nvme": self.nvme_bytes - self.nvme_available_bytes,
        }
        return lacks[self.exceeded] if self.exceeded else 0.0

    @property
    def utilization(self) -> float:
        """Needed bytes divided by available bytes, of the fullest memory."""
        pairs = [(self.device_bytes, self.device_available_bytes), (self.host_bytes, self.host_available_bytes)]
        if self.nvme_bytes:
            pairs.append((self.nvme_bytes, self.nvme_available_bytes))
        return max(needed / max(1, available) for needed, available in pairs)


def check_fit(memory: LayoutMemory, layout: PlannedLayout, cluster: Cluster) -> Fit:
    """Compare a forecast with the cluster's memory."""
    if cluster.on_cpu:
        margin = CPU_HEAP * memory.peak_bytes + memory.cpu_process_bytes
    else:
        margin = margin_bytes(memory.peak_bytes, layout, cluster, memory.large_bytes, memory.more_communicators)
    process = 0 if cluster.on_cpu else HOST_PROCESS_BYTES
    device_bytes = memory.peak_bytes + margin
    shared = device_bytes if cluster.device.unified_memory else 0
    return Fit(
        device_bytes=device_bytes,
        margin_bytes=margin,
        device_available_bytes=cluster.device.memory_bytes,
        host_bytes=0 if cluster.on_cpu else (memory.host_bytes + process + shared) * cluster.gpus,
        host_available_bytes=cluster.host_bytes * (1 - HOST_RESERVE),
        nvme_bytes=memory.nvme_bytes * cluster.gpus,
        nvme_available_bytes=cluster.nvme_bytes,
    )


# The device needs more than the bytes that tensors have at the peak:
#
#     fragmentation   a share of the peak, but at least the largest blocks that are freed and cannot be reused
#     context         CUDA's context and kernels
#     communicators   NCCL's buffers for each group of ranks, and its connections to single peers
#
# Unlike a simulation, a forecast cannot replay every allocation. So each part is the upper end of the measured range.
def margin_bytes(
    peak_bytes: int, layout: PlannedLayout, cluster: Cluster, large_bytes: int = 0, more_communicators: int = 0
) -> float:
    """Return the bytes that a GPU needs besides the allocated peak.

    `large_bytes`: the sum of the largest activation, gradient, bucket and temporary. `more_communicators`: number of
    communicators besides those for the layout's degrees.
    """
    share = FRAGMENTATION
    if layout.zero_stage == 3:
        share = FRAGMENTATION_ZERO3 if layout.offload_param == "none" else FRAGMENTATION_ZERO3_HOST
    # If torch puts a small tensor into a large freed block, the next large tensor needs an extra block. `large_bytes`
    # allows for one extra block of each kind, which is more than the share in a model of few layers.
    fragmentation = max(share * peak_bytes, large_bytes + LAST_SEGMENTS_BYTES)
    fragmentation += REPLAYED * (peak_bytes + fragmentation)  # simulations keep this free, too
    return fragmentation + _process_bytes(layout, cluster, more_communicators)


def _process_bytes(layout: PlannedLayout, cluster: Cluster, more_communicators: int) -> int:
    device = cluster.device
    divided = (layout.zero_ranks > 1) + (layout.tp > 1) + (layout.replicas > 1)
    # a pipeline has three: the stages (losses), stages and tensor ranks (norm), all ranks (activations)
    # (runtime/pipe/engine.py:629, :153, p2p.py:60); experts have two: ranks with all, and ranks with the same experts
    further = 3 if layout.pp > 1 else divided > 1
    groups = divided + (layout.sp > 1) + 2 * (layout.ep > 1) + further + more_communicators  # (pipe/module.py:475)
    # connections of all-to-alls and pipeline stages to single peers; other nodes share a buffer (nccl#1450)
    peers = min(max(layout.sp - 1, layout.ep - 1, 2 if layout.pp > 1 else 0), device.node.gpus - 1)
    if "PCIe" in device.link_name:
        nccl = groups * NCCL_PCIE_BYTES + peers * NCCL_PCIE_CHANNELS[1] * NCCL_CONNECTION_BYTES
    else:
        nccl = groups * NCCL_NVLINK_BYTES + NCCL_ALL_TO_ALL_BYTES * peers // 7  # measured on 8 GPUs
    return context_figure(device).high_bytes + nccl


def explain(memory: LayoutMemory, fit: Fit) -> str:
    """Return a sentence on the memory that is too small, with needed and available bytes."""
    if fit.exceeded == "device":
        kind, size = max(memory.breakdown.items(), key=lambda item: item[1], default=("allocations", 0))
        needed, available = shown_bytes(fit.device_bytes), shown_bytes(fit.device_available_bytes)
        return (
            f"the peak in {memory.peak_phase} is {shown_bytes(memory.peak_bytes)}, including {shown_bytes(size)} {kind}"
            f"; with a margin of {shown_bytes(fit.margin_bytes)} it needs {needed}, but the device has {available}"
        )
    if fit.exceeded == "host":
        return (
            f"the ranks of a node need {shown_bytes(fit.host_bytes)} of host memory, but "
            f"{shown_bytes(fit.host_available_bytes)} are available"
        )
    return f"a node needs {shown_bytes(fit.nvme_bytes)} of disk, but has {shown_bytes(fit.nvme_available_bytes)}"


def remedy(layout: PlannedLayout, cluster: Cluster, forecast: Forecast) -> str:
    """Return the first single change that makes the layout fit; "" if no single change does."""
    for words, changed in _changes(layout, cluster):
        if any(refusals(changed.optimizer, changed.optimizer_setting)):
            continue
        try:
            if check_fit(forecast(changed), changed, cluster).exceeded is None:
                return f"{words} would fit"
        except KeyError:  # the setting was not traced
            continue
    return ""


def _changes(layout: PlannedLayout, cluster: Cluster) -> list[tuple[str, PlannedLayout]]:
    changes = []
    if layout.bucket > BUCKET_LIMIT:
        changes.append((f"a bucket of {BUCKET_LIMIT:,} elements", replace(layout, bucket=BUCKET_LIMIT)))
    if layout.micro_batch > 1 and layout.micro_batch % 2 == 0:
        halved = replace(layout, micro_batch=layout.micro_batch // 2, accumulation=layout.accumulation * 2)
        changes.append((f"micro batch {layout.micro_batch // 2}", halved))
    if layout.checkpointing is not True:
        changes.append(("activation checkpointing", replace(layout, checkpointing=True)))
    if layout.pp == 1:
        changes += [(f"ZeRO stage {s}", replace(layout, zero_stage=s)) for s in range(layout.zero_stage + 1, 4)]
    if layout.offload_optimizer == "none" and layout.zero_stage >= 2 and not cluster.on_cpu:
        param = "cpu" if layout.by_layer else layout.offload_param  # FSDP2 offloads both
        words = "offloading parameters and optimizer" if layout.by_layer else "offloading the optimizer"
        changes.append((words, replace(layout, offload_optimizer="cpu", offload_param=param)))
    if layout.micro_batch > 1:
        single = replace(layout, micro_batch=1, accumulation=layout.accumulation * layout.micro_batch)
        changes.append(("micro batch 1", single))
        changes.append(("micro batch 1 with activation checkpointing", replace(single, checkpointing=True)))
    return changes
