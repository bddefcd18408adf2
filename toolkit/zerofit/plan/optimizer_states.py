"""What an optimizer keeps of each tensor that it steps, and takes beside it in the step.

Adam is torch's on a CPU and DeepSpeed's FusedAdam on a GPU. The others are those of torch 2.14 and bitsandbytes 0.50.2;
SGD has momentum and weight decay, as `train` gives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import StageTimeline
from zerofit.spec.measured_kernels import ADAM_BYTES, SGD_BYTES
from zerofit.spec.optimizers import EIGHT_BIT, EIGHT_BIT_ELEMENTS, MAPS_BYTES, PAGED_ELEMENTS, eight_bit_bytes

STATES_BYTES = 8  # an element, whatever the precision: Adam's two moments
# bytes an element that a step moves on the device, in place of Adam's: moments of one byte; and Adafactor's passes over
# weight and gradient, one op after the other (torch/optim/_adafactor.py, _single_tensor_adafactor)
STEP_BYTES = {
    "sgd": SGD_BYTES,
    "adamw8bit": ADAM_BYTES - 12,
    "paged-adamw8bit": ADAM_BYTES - 12,
    "adafactor": ADAM_BYTES - 28 + 76,
}


class StateBytes(NamedTuple):
    """Where an optimizer's states are."""

    device: int
    host: int = 0  # in memory that the driver moves to the device page by page


def moments_bytes(layout: PlannedLayout) -> int:
    """Return the bytes of an element's moments in float32."""
    return STATES_BYTES // 2 if layout.optimizer == "sgd" else STATES_BYTES


def states_of(layout: PlannedLayout, numels: Iterable[int], device: str) -> StateBytes:
    """Return the states of tensors of so many elements, which may be flat parts of many parameters."""
    if layout.optimizer not in EIGHT_BIT:
        return StateBytes(moments_bytes(layout) * sum(numels))
    sizes = list(numels)
    paged = [n for n in sizes if layout.optimizer == "paged-adamw8bit" and device == "cuda" and n >= PAGED_ELEMENTS]
    maps = MAPS_BYTES if any(n >= EIGHT_BIT_ELEMENTS for n in sizes) else 0
    host = 2 * sum(paged)
    return StateBytes(sum(map(eight_bit_bytes, sizes)) + maps - host, host)


def whole_states(line: StageTimeline, layout: PlannedLayout, device: str) -> StateBytes:
    """Return the states without ZeRO: of each parameter by itself."""
    if layout.optimizer == "adafactor":
        return StateBytes(4 * line.factors)
    return states_of(layout, (numel for group in line.groups for numel in group), device)


def step_bytes(layout: PlannedLayout, numel: int, device: str) -> int:
    """Return the most that the step of one tensor takes beside it."""
    if layout.optimizer in ("sgd", "adafactor"):
        return 4 * numel  # the gradient with the decay; the estimate, which becomes the update
    if device == "cuda":
        return 0
    if layout.optimizer in EIGHT_BIT:  # backends/cpu/ops.py: gradient, root, and quotient; of 8 bits both moments, too
        return (20 if numel >= EIGHT_BIT_ELEMENTS else 12) * numel
    return 8 * numel  # a root and a quotient


def whole_step_bytes(line: StageTimeline, layout: PlannedLayout, device: str) -> int:
    """Return the most that the step takes without ZeRO, parameter by parameter.

    torch's loops drop the last tensor of a parameter when that of the next one is there; SGD adds the decay to all
    gradients of a group at once on "cuda".
    """
    if layout.optimizer == "sgd":
        at_once = map(sum, line.groups) if device == "cuda" else (numel for group in line.groups for numel in group)
        return step_bytes(layout, max(at_once, default=0), device)
    left = 0 if layout.optimizer in EIGHT_BIT or (device == "cuda" and layout.optimizer == "adamw") else 4
    numels = [0, *(numel for group in line.groups for numel in group)]
    pairs = pairwise(numels)
    return max((left * before + step_bytes(layout, numel, device) for before, numel in pairs), default=0)
