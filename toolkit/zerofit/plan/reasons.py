"""Why a layout does not fit, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zerofit.plan.fit import Fit, fit
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.units import shown_bytes
from zerofit.spec.zero_sizes import BUCKET_LIMIT

Forecast = Callable[[PlannedLayout], LayoutMemory]


def why(memory: LayoutMemory, judged: Fit) -> str:
    """What is too large, by how much."""
    if judged.short == "device":
        kind, size = max(memory.breakdown.items(), key=lambda item: item[1], default=("allocations", 0))
        wanted, there = shown_bytes(judged.device_bytes), shown_bytes(judged.device_there_bytes)
        return (
            f"the peak in {memory.peak_phase} is {shown_bytes(memory.peak_bytes)}, of it {shown_bytes(size)} {kind}; "
            f"with a margin of {shown_bytes(judged.margin_bytes)} that is {wanted}, and the device has {there}"
        )
    if judged.short == "host":
        return (
            f"the ranks of a node want {shown_bytes(judged.host_bytes)} of host memory, and there are "
            f"{shown_bytes(judged.host_there_bytes)}"
        )
    return f"a node's disks take {shown_bytes(judged.nvme_bytes)}, and there are {shown_bytes(judged.nvme_there_bytes)}"


def remedy(layout: PlannedLayout, cluster: Cluster, forecast: Forecast) -> str:
    """The first change of one knob with which the layout would fit."""
    for words, changed in _changes(layout, cluster):
        try:
            if fit(forecast(changed), changed, cluster).short is None:
                return f"{words} would fit"
        except KeyError:  # a setting that was not traced
            continue
    return ""


def _changes(layout: PlannedLayout, cluster: Cluster) -> list[tuple[str, PlannedLayout]]:
    changes = []
    if layout.bucket > BUCKET_LIMIT:
        changes.append((f"a bucket of {BUCKET_LIMIT:,} elements", replace(layout, bucket=BUCKET_LIMIT)))
    if layout.micro_batch > 1 and layout.micro_batch % 2 == 0:
        halved = replace(layout, micro_batch=layout.micro_batch // 2, accumulation=layout.accumulation * 2)
        changes.append((f"micro batch {layout.micro_batch // 2}", halved))
    if not layout.checkpointing:
        changes.append(("activation checkpointing", replace(layout, checkpointing=True)))
    if layout.pp == 1:
        changes += [(f"ZeRO stage {s}", replace(layout, zero_stage=s)) for s in range(layout.zero_stage + 1, 4)]
    if layout.offload_optimizer == "none" and layout.zero_stage >= 2 and not cluster.on_cpu:
        changes.append(("offloading the optimizer", replace(layout, offload_optimizer="cpu")))
    if layout.micro_batch > 1:
        single = replace(layout, micro_batch=1, accumulation=layout.accumulation * layout.micro_batch)
        changes.append(("micro batch 1", single))
        changes.append(("micro batch 1 with activation checkpointing", replace(single, checkpointing=True)))
    return changes
