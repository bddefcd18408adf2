"""Count the engine's own work on gradients and in a step, without model and optimizer."""

from __future__ import annotations

from typing import NamedTuple

from zerofit.features.optimizer import UNSTEPPED_BYTES
from zerofit.plan.layout import PlannedLayout


class EngineWork(NamedTuple):
    """The engine's own memory traffic per parameter element, and its kernel launches.

    Traffic is in bytes that kernels read and write per element.
    """

    gradients: int  # for all gradients per reduction: copied into a bucket, divided, copied out of it
    kept: int  # for the rank's share of all gradients
    added: int  # for the share: adding gradients of earlier micro batches
    step: int  # for the share: overflow, norm, scale, flattening, copying parameters back; without Adam itself
    looped: int  # kernels per parameter of the share in the step: overflow and norm
    begun: int  # other kernels of the step


# by ZeRO stage, counted on fake tensors by `tests/plan/engine_ops.py`: with 16-bit weights, then with float32 weights
_HALF = (
    EngineWork(10, 0, 0, 38, 15, 10),
    EngineWork(16, 6, 6, 48, 15, 84),
    EngineWork(16, 6, 6, 48, 15, 84),
    EngineWork(14, 6, 0, 44, 2, 60),
)
_FULL = (
    EngineWork(20, 0, 0, 12, 2, 9),
    EngineWork(32, 12, 12, 48, 2, 78),
    EngineWork(32, 12, 12, 48, 2, 78),
    EngineWork(28, 12, 0, 48, 2, 58),
)
DIVIDED = 2  # reads and writes of a gradient to divide it by the number of ranks, at stage 0
UNSCALED = 8, 10  # further bytes and kernels of the step with a loss scale, at stage 3
CLIPPED = 12  # reads and writes of a gradient in float32, for its norm and to scale it


def engine_work(layout: PlannedLayout) -> EngineWork:
    """Return the engine's own work for a layout, by its ZeRO stage and precision."""
    if layout.by_layer:  # parameters are copied out of the gathered buffer, gradients into the buffer to scatter
        copied, scattered = (1 + layout.reshard) * 2 * layout.element_bytes, layout.element_bytes + layout.reduced_bytes
        return EngineWork(copied + scattered, 0, 0, UNSTEPPED_BYTES + CLIPPED, 0, 30)
    half, stage = layout.element_bytes == 2, layout.zero_stage
    work = (_HALF if half else _FULL)[stage]
    if stage == 0 and layout.zero_ranks > 1:
        return work._replace(gradients=work.gradients + DIVIDED * layout.element_bytes)
    if stage == 3 and layout.precision == "fp16":
        return work._replace(step=work.step + UNSCALED[0], begun=work.begun + UNSCALED[1])
    return work
