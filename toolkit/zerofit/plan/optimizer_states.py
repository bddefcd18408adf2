"""Compute an optimizer's states per tensor, and the memory that its step allocates.

Both come from the optimizer's entry in `features.optimizers`. Adam is torch's Adam on a CPU and DeepSpeed's
FusedAdam on a GPU. Other optimizers come from torch 2.14 and bitsandbytes 0.50.2. SGD has momentum, as by default in
`train`. So the forecast is too high for runs without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from zerofit.features.optimizer import FLOAT_BYTES, StateBytes
from zerofit.features.optimizers import OPTIMIZERS
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import StageTimeline


def host_state_bytes(layout: PlannedLayout) -> int:
    """Return the bytes per element of optimizer states on the host."""
    # the states have the dtype of the weights
    return OPTIMIZERS[layout.optimizer].states.element_bytes(on_host=True) * layout.weight_bytes // FLOAT_BYTES


def states_of(layout: PlannedLayout, numels: Iterable[int], device: str) -> StateBytes:
    """Return the bytes of the states of tensors, or flat partitions, with `numels` elements."""
    in_float32 = OPTIMIZERS[layout.optimizer].states.of_tensors(numels, gpu=device == "cuda")
    return StateBytes(*(size * layout.weight_bytes // FLOAT_BYTES for size in in_float32))


def whole_states(line: StageTimeline, layout: PlannedLayout, device: str) -> StateBytes:
    """Return the bytes of the states without ZeRO: each parameter has its own state tensors."""
    if OPTIMIZERS[layout.optimizer].states.factored:
        return StateBytes(FLOAT_BYTES * line.factors)
    return states_of(layout, (numel for group in line.groups for numel in group), device)


def step_bytes(layout: PlannedLayout, numel: int, device: str) -> int:
    """Return the peak of what the step of one tensor allocates, in bytes."""
    step = OPTIMIZERS[layout.optimizer].step
    return step.temporary(numel, device == "cuda") + step.decayed * numel * layout.has_weight_decay


def whole_step_bytes(line: StageTimeline, layout: PlannedLayout, device: str) -> int:
    """Return the peak of what a step without ZeRO allocates, in bytes."""
    step, gpu = OPTIMIZERS[layout.optimizer].step, device == "cuda"
    together = gpu and step.group_at_once
    numels = [sum(group) for group in line.groups] if together else [n for group in line.groups for n in group]
    # torch's loops free the last tensor of a parameter only after they have allocated one for the next parameter
    late = step.late(gpu)
    return max((late * before + step_bytes(layout, n, device) for before, n in pairwise([0, *numels])), default=0)
