"""Compute transient memory: what start-up or the optimizer's step allocates and frees.

References are to DeepSpeed 0.19.8, below deepspeed/runtime/. Models are built on the CPU in float32
(train/build.py). FusedAdam and CPUAdam step in place. plan/optimizer_states.py has the allocations of other
optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerofit.features.optimizers import OPTIMIZERS
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.optimizer_states import step_bytes, whole_states, whole_step_bytes
from zerofit.plan.persistent import (
    MASTER_BYTES,
    SUB_GROUP_ELEMENTS,
    in_bf16_optimizer,
    overlap_in_partition,
    overlaps_and_pieces,
    padded_groups,
    parameter_shards,
    partitions,
    sharers,
)
from zerofit.plan.timeline import StageTimeline

NORM_BYTES = 8  # gradients are converted to float64 for their norm (zero/utils.py:59)


def init_moments(
    line: StageTimeline, layout: PlannedLayout, device: str, built_in_parts: bool
) -> Iterator[dict[str, int]]:
    """Yield the bytes by kind at each moment of start-up that can exceed a training step.

    `built_in_parts`: whether stage 3 builds the model in parts (transformers in zero.Init).
    """
    if not built_in_parts or layout.zero_stage < 3 or layout.combined:
        # the model is cast before it is copied to "cuda" (engine.py:2094)
        yield {"parameters": (4 if device == "cpu" else layout.element_bytes) * line.elements}
    elif line.quantized_bytes:  # the other weights are full until the engine divides them one by one
        spread, every = sharers(layout), [p for layer in line.layers for p in layer]
        shards = (p._replace(numel=spread.shard(p)).bytes(layout.element_bytes) for p in every if spread.of(p) > 1)
        yield {"parameters": layout.element_bytes * line.elements, "temporaries": max(shards, default=0)}
    if layout.zero_stage in (1, 2) or in_bf16_optimizer(layout):
        yield from _init_flat_partitions(line, layout, device)
    elif layout.zero_stage == 3:
        yield from _init_shards(line, layout, device)
    elif layout.element_bytes == 2:
        # masters, and a step on zero gradients that allocates the states (fp16/unfused_optimizer.py:425)
        yield {
            "parameters": 2 * line.elements,
            "master weights": MASTER_BYTES * line.parameters,
            "gradients": 4 * line.parameters,
            "optimizer state": whole_states(line, layout, device).device,
            "temporaries": whole_step_bytes(line, layout, device),
        }


def _init_flat_partitions(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[dict[str, int]]:
    """Yield two moments per parameter group, then the zero gradients."""
    element, parameters = layout.element_bytes, layout.element_bytes * line.elements
    masters = 0
    on_device = layout.offload_optimizer == "none" or device == "cpu"
    for size, padded in zip(partitions(line, layout.zero_ranks), padded_groups(line, layout.zero_ranks), strict=True):
        # the group is copied into a flat buffer (zero/stage_1_and_2.py:483)
        yield {"parameters": parameters, "temporaries": element * padded, "master weights": masters}
        # the originals are freed, and the rank's part is copied to float32 (:560)
        master = MASTER_BYTES * size if on_device else 0
        yield {"parameters": parameters, "temporaries": element * size, "master weights": masters + master}
        masters += master
    if on_device:  # zero gradients (:941)
        yield {"parameters": parameters, "master weights": masters, "gradients": masters}


def _init_shards(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[dict[str, int]]:
    """Yield the copy of master weights (zero/stage3.py:1170), then a zero gradient (:1306)."""
    if layout.offload_optimizer != "none" and device == "cuda":
        return
    spread = sharers(layout)
    parts, frozen = parameter_shards(line, spread), sum(map(spread.shard, line.frozen))
    kept = {"parameters": layout.element_bytes * (sum(parts) + frozen), "master weights": MASTER_BYTES * sum(parts)}
    yield {**kept, "temporaries": MASTER_BYTES * max(parts) if layout.element_bytes == 2 else 0}
    yield {**kept, "gradients": MASTER_BYTES * max(parts)}


class StepMemory(NamedTuple):
    """Memory at one moment of the step, in bytes."""

    gradients: int = 0
    temporaries: int = 0
    host: int = 0
    flat: int = 0  # the part of `gradients` that is allocated as one block


def step_moments(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[StepMemory]:
    """Yield the moments that can be the step's peak."""
    if in_bf16_optimizer(layout):
        # float32 gradients of all partitions at once, in addition to the parameters' gradients (bf16_optimizer.py:325)
        sizes = partitions(line, layout.zero_ranks)
        gradients = layout.element_bytes * line.parameters + MASTER_BYTES * sum(sizes)
        yield StepMemory(gradients, step_bytes(layout, max(sizes), device), flat=MASTER_BYTES * max(sizes))
    elif layout.zero_stage == 0:
        yield from _step_whole(line, layout, device)
    elif layout.offload_optimizer != "none":
        yield StepMemory(temporaries=_gather_copy(line, layout, device))
        ranks = layout.zero_ranks
        parts = partitions(line, ranks) if layout.zero_stage < 3 else parameter_shards(line, sharers(layout))
        yield StepMemory(host=step_bytes(layout, min(max(parts, default=0), SUB_GROUP_ELEMENTS), device))
    elif layout.zero_stage == 3:
        yield from _step_shards(line, layout, device)
    else:
        yield from _step_flat_partitions(line, layout, device)
        yield StepMemory(temporaries=_gather_copy(line, layout, device))


def _step_whole(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[StepMemory]:
    element = layout.element_bytes
    gradients = element * line.parameters
    if device == "cpu" or element == 4 or not OPTIMIZERS[layout.optimizer].step.fused:
        # in low precision, a float32 gradient for each parameter (fp16/unfused_optimizer.py:222)
        in_float32 = MASTER_BYTES * line.parameters if element == 2 else 0
        yield StepMemory(gradients + in_float32, whole_step_bytes(line, layout, device))
    else:  # float32 gradients of a group, and their flat copy (fp16/fused_optimizer.py:265)
        waiting, flat = gradients, 0
        for group in line.groups:
            in_float32 = MASTER_BYTES * sum(group)
            yield StepMemory(waiting + flat + in_float32, in_float32, flat=in_float32)
            waiting, flat = waiting - element * sum(group), flat + in_float32


def _step_flat_partitions(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[StepMemory]:
    """Yield the moments of a step group by group (zero/stage_1_and_2.py:3107)."""
    element, sizes = layout.element_bytes, partitions(line, layout.zero_ranks)
    kept = element * overlap_in_partition(line, layout.zero_ranks)
    for overlap, piece in overlaps_and_pieces(line, layout.zero_ranks):
        yield StepMemory(element * overlap, NORM_BYTES * piece)  # of the elements in the partition (:2838)
    for n, size in enumerate(sizes):
        in_float32 = MASTER_BYTES * size
        yield StepMemory(kept + in_float32, element * size if element == 2 else 0, flat=in_float32)
        rest = kept if n < len(sizes) - 1 else 0  # gradients are freed when the last group is flattened
        yield StepMemory(rest + in_float32, step_bytes(layout, size, device), flat=in_float32)


def _step_shards(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[StepMemory]:
    """Yield the moments of a step by sub-groups (zero/stage3.py:2686)."""
    element, parts = layout.element_bytes, parameter_shards(line, sharers(layout))
    if element == 2:  # isinf of all gradients (:3012)
        yield StepMemory(0, (element + 1) * sum(parts))
    yield StepMemory(0, NORM_BYTES * -(-line.largest // layout.zero_ranks))
    for part in parts:
        size = min(part, SUB_GROUP_ELEMENTS)
        low = element * size if element == 2 else 0
        in_float32 = MASTER_BYTES * size
        yield StepMemory(in_float32, max(low, step_bytes(layout, size, device)), flat=in_float32)


def _gather_copy(line: StageTimeline, layout: PlannedLayout, device: str) -> int:
    """Return the bytes of gloo's copy of a group's gathered parameters (ProcessGroupGloo.cpp)."""
    if device == "cuda" or layout.zero_stage == 3 or layout.zero_ranks == 1:
        return 0
    return layout.element_bytes * max(padded_groups(line, layout.zero_ranks))
