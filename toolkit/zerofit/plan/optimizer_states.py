"""Compute an optimizer's states for each tensor, and what its step allocates.

Adam is torch's on a CPU and DeepSpeed's FusedAdam on a GPU. The others are those of torch 2.14 and bitsandbytes 0.50.2.
SGD has momentum and weight decay, as in `train`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import StageTimeline
from zerofit.spec.measured_kernels import ADAM_BYTES, SGD_BYTES
from zerofit.spec.optimizers import EIGHT_BIT, EIGHT_BIT_ELEMENTS, MAPS_BYTES, PAGED_ELEMENTS, eight_bit_bytes

STATES_BYTES = 8  # per element, for any precision: Adam's two moments
# bytes per element that a step moves on the device, instead of Adam's: 1-byte moments; Adafactor's separate ops over
# weight and gradient (torch/optim/_adafactor.py, _single_tensor_adafactor)
STEP_BYTES = {
    "sgd": SGD_BYTES,
    "adamw8bit": ADAM_BYTES - 12,
    "paged-adamw8bit": ADAM_BYTES - 12,
    "adafactor": ADAM_BYTES - 28 + 76,
}


class StateBytes(NamedTuple):
    """Bytes of an optimizer's states by place."""

    device: int
    host: int = 0  # paged memory, which the driver moves to the device page by page


def moments_bytes(layout: PlannedLayout) -> int:
    """Return the bytes of an element's moments in float32."""
    return STATES_BYTES // 2 if layout.optimizer == "sgd" else STATES_BYTES


def states_of(layout: PlannedLayout, numels: Iterable[int], device: str) -> StateBytes:
    """Return the states of tensors with these element counts; they may be flat parts of many parameters."""
    if layout.optimizer not in EIGHT_BIT:
        return StateBytes(moments_bytes(layout) * sum(numels))
    sizes = list(numels)
    paged = [n for n in sizes if layout.optimizer == "paged-adamw8bit" and device == "cuda" and n >= PAGED_ELEMENTS]
    maps = MAPS_BYTES if any(n >= EIGHT_BIT_ELEMENTS for n in sizes) else 0
    host = 2 * sum(paged)
    return StateBytes(sum(map(eight_bit_bytes, sizes)) + maps - host, host)


def whole_states(line: StageTimeline, layout: PlannedLayout, device: str) -> StateBytes:
    """Return the states without ZeRO, one tensor per parameter."""
    if layout.optimizer == "adafactor":
        return StateBytes(4 * line.factors)
    return states_of(layout, (numel for group in line.groups for numel in group), device)


def step_bytes(layout: PlannedLayout, numel: int, device: str) -> int:
    """Return the bytes that the step of one tensor allocates at its peak."""
    if layout.optimizer in ("sgd", "adafactor"):
        return 4 * numel  # SGD: the gradient plus decay; Adafactor: the estimate, which becomes the update
    if device == "cuda":
        return 0
    if layout.optimizer in EIGHT_BIT:  # backends/cpu/ops.py: gradient, root, quotient; with 8 bits both moments, too
        return (20 if numel >= EIGHT_BIT_ELEMENTS else 12) * numel
    return 8 * numel  # a root and a quotient


def whole_step_bytes(line: StageTimeline, layout: PlannedLayout, device: str) -> int:
    """Return the bytes that the step allocates at its peak without ZeRO, parameter by parameter.

    torch's loops free a parameter's last tensor only after allocating the next parameter's. On "cuda" SGD adds the
    decay to all gradients of a group at once.
    """
    if layout.optimizer == "sgd":
        at_once = map(sum, line.groups) if device == "cuda" else (numel for group in line.groups for numel in group)
        return step_bytes(layout, max(at_once, default=0), device)
    left = 0 if layout.optimizer in EIGHT_BIT or (device == "cuda" and layout.optimizer == "adamw") else 4
    numels = [0, *(numel for group in line.groups for numel in group)]
    pairs = pairwise(numels)
    return max((left * before + step_bytes(layout, numel, device) for before, numel in pairs), default=0)
