"""What an optimizer step holds besides the standing bytes, by ZeRO stage and device.

Places are of DeepSpeed 0.19.8, below deepspeed/runtime/. torch's AdamW for single tensors (torch/optim/adam.py, the
CPU's) holds a square root and a quotient of the tensor it steps; FusedAdam and CPUAdam step in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerofit.plan.host import SUB_GROUP_ELEMENTS
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.persistent import (
    MASTER_BYTES,
    in_bf16_optimizer,
    overlap_in_partition,
    partitions,
    shards,
    shards_of_parameters,
)
from zerofit.plan.timeline import StageTimeline
from zerofit.spec.precision import ELEMENT_BYTES

NORM_BYTES = 8  # gradients are lifted to float64 for their norm (zero/utils.py:59)


class StepMemory(NamedTuple):
    """Bytes at one moment of the step."""

    gradients: int = 0
    temporaries: int = 0
    host: int = 0


def step_moments(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[StepMemory]:
    """The moments that can be the step's peak."""
    element = ELEMENT_BYTES[layout.precision]
    temporaries = 8 if device == "cpu" else 0
    if in_bf16_optimizer(layout):
        yield from _all_partitions(line, layout, element, temporaries)
    elif layout.zero_stage == 0:
        yield from _whole(line, element, device, temporaries)
    elif layout.offload_optimizer != "none":
        yield StepMemory(temporaries=_gather_copy(line, layout, element, device))
        yield StepMemory(host=_host_temporaries(line, layout, temporaries))
    elif layout.zero_stage == 3:
        yield from _parts(line, layout, element, temporaries)
    else:
        yield from _flat_partitions(line, layout, element, temporaries)
        yield StepMemory(temporaries=_gather_copy(line, layout, element, device))


def _whole(line: StageTimeline, element: int, device: str, temporaries: int) -> Iterator[StepMemory]:
    gradients = element * line.parameters
    if device == "cpu" or element == 4:
        # in low precision a float32 gradient for each parameter (fp16/unfused_optimizer.py:222)
        lifted = MASTER_BYTES * line.parameters if element == 2 else 0
        yield StepMemory(gradients + lifted, _one_after_another(line) if temporaries else 0)
    else:  # float32 gradients of a group, and their flat copy (fp16/fused_optimizer.py:265)
        waiting, flat = gradients, 0
        for group in line.groups:
            lifted = MASTER_BYTES * sum(group)
            yield StepMemory(waiting + flat + lifted, lifted)
            waiting, flat = waiting - element * sum(group), flat + lifted


def _one_after_another(line: StageTimeline) -> int:
    """Square root and quotient of each parameter in turn; the quotient of the one before is dropped after them."""
    numels = [numel for group in line.groups for numel in group]
    return max(4 * before + 8 * numel for before, numel in zip([0, *numels], numels, strict=False))


def _all_partitions(line: StageTimeline, layout: PlannedLayout, element: int, temporaries: int) -> Iterator[StepMemory]:
    """bf16_optimizer.py:325: float32 gradients of all partitions at once, beside the parameters' own."""
    sizes = partitions(line, shards(layout))
    yield StepMemory(element * line.parameters + MASTER_BYTES * sum(sizes), temporaries * max(sizes))


def _flat_partitions(
    line: StageTimeline, layout: PlannedLayout, element: int, temporaries: int
) -> Iterator[StepMemory]:
    """zero/stage_1_and_2.py:3107: group after group; the kept gradients go when the last group's are flattened."""
    ranks = shards(layout)
    kept = element * overlap_in_partition(line, ranks)
    sizes = partitions(line, ranks)
    yield StepMemory(kept, NORM_BYTES * line.largest)
    for n, size in enumerate(sizes):
        lifted = MASTER_BYTES * size
        yield StepMemory(kept + lifted, element * size if element == 2 else 0)
        yield StepMemory((kept if n < len(sizes) - 1 else 0) + lifted, temporaries * size)


def _parts(line: StageTimeline, layout: PlannedLayout, element: int, temporaries: int) -> Iterator[StepMemory]:
    """zero/stage3.py:2686: sub-group after sub-group; isinf of all gradients before (:3012, low precision only)."""
    ranks = shards(layout)
    parts = shards_of_parameters(line, layout)
    if element == 2:
        yield StepMemory(0, (element + 1) * sum(parts))
    yield StepMemory(0, NORM_BYTES * -(-line.largest // ranks))
    for part in parts:
        size = min(part, SUB_GROUP_ELEMENTS)
        yield StepMemory(MASTER_BYTES * size, max(element * size if element == 2 else 0, temporaries * size))


def _gather_copy(line: StageTimeline, layout: PlannedLayout, element: int, device: str) -> int:
    """gloo gathers a group's new parameters into a copy (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp)."""
    if device == "cuda" or layout.zero_stage == 3 or shards(layout) == 1:
        return 0
    return element * max(partitions(line, shards(layout))) * shards(layout)


def _host_temporaries(line: StageTimeline, layout: PlannedLayout, temporaries: int) -> int:
    ranks = shards(layout)
    parts = partitions(line, ranks) if layout.zero_stage < 3 else shards_of_parameters(line, layout)
    return temporaries * min(max(parts, default=0), SUB_GROUP_ELEMENTS)
