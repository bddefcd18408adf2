"""What DeepSpeed's engine does itself with gradients and in its step, beside a model's kernels and the optimizer's."""

from __future__ import annotations

from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout


class EngineWork(NamedTuple):
    """Passes of the engine over the elements of parameters on a device, and kernels that it launches one by one.

    Bytes are those that kernels read and write for each element. The engine itself tells: `tests/plan/engine_ops.py`
    counts them on fake tensors.
    """

    gradients: int  # bytes of all gradients, each time they are reduced: into a bucket, divided, out of it
    kept: int  # bytes of the rank's share of them
    added: int  # more of that share, where those of earlier micro batches are there
    step: int  # bytes of the share: overflow, norm, scale, flattened, stepped parameters back; without Adam itself
    looped: int  # kernels for each parameter of the share in the step: overflow and norm
    begun: int  # kernels of the step beside those


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
DIVIDED = 2  # times that a gradient is read or written to divide it by the ranks, at stage 0
UNSCALED = 8, 10  # bytes and kernels more of the step under a loss scale, at stage 3


def engine_work(layout: PlannedLayout) -> EngineWork:
    """Return the engine's own work under a layout, by its ZeRO stage and precision."""
    half, stage = layout.element_bytes == 2, layout.zero_stage
    work = (_HALF if half else _FULL)[stage]
    if stage == 0 and layout.zero_ranks > 1:
        return work._replace(gradients=work.gradients + DIVIDED * layout.element_bytes)
    if stage == 3 and layout.precision == "fp16":
        return work._replace(step=work.step + UNSCALED[0], begun=work.begun + UNSCALED[1])
    return work
