"""What building the model and making the engine hold, where that can exceed a training step.

Places are of DeepSpeed 0.19.8, below deepspeed/runtime/. Models are built on the CPU in float32 (train/build.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.persistent import (
    MASTER_BYTES,
    STATES_BYTES,
    in_bf16_optimizer,
    partitions,
    shards,
    shards_of_parameters,
)
from zerofit.plan.timeline import StageTimeline
from zerofit.spec.precision import ELEMENT_BYTES


def start_moments(
    line: StageTimeline, layout: PlannedLayout, device: str, born_in_parts: bool
) -> Iterator[dict[str, int]]:
    """Device bytes by kind; `born_in_parts`: transformers enters zero.Init at stage 3 by itself."""
    element, whole = ELEMENT_BYTES[layout.precision], line.parameters
    parts_from_birth = born_in_parts and layout.zero_stage == 3
    if not parts_from_birth:
        # "cuda" gets the model when it is cast (engine.py:2094)
        yield {"parameters": (4 if device == "cpu" else element) * whole}
    making = _flattened if in_bf16_optimizer(layout) else _MAKING[layout.zero_stage]
    yield from making(line, layout, element, device)


def _whole(line: StageTimeline, layout: PlannedLayout, element: int, device: str) -> Iterator[dict[str, int]]:
    """Masters, and a step on zero gradients that makes the states (fp16/unfused_optimizer.py:425)."""
    if element == 4:
        return
    parts = {"parameters": element, "master weights": MASTER_BYTES, "gradients": 4, "optimizer state": STATES_BYTES}
    temporaries = 8 * line.largest if device == "cpu" else 0
    yield {**{kind: size * line.parameters for kind, size in parts.items()}, "temporaries": temporaries}


def _flattened(line: StageTimeline, layout: PlannedLayout, element: int, device: str) -> Iterator[dict[str, int]]:
    """Each group's flat copy beside the originals, then its part's float32 clone (zero/stage_1_and_2.py:483, :560)."""
    sizes = partitions(line, shards(layout))
    made = 0
    here = layout.offload_optimizer == "none" or device == "cpu"
    for size in sizes:
        parameters = element * line.parameters
        yield {"parameters": parameters, "temporaries": element * size * shards(layout), "master weights": made}
        lifted = MASTER_BYTES * size if here else 0
        yield {"parameters": parameters, "temporaries": element * size, "master weights": made + lifted}
        made += lifted
    if here:  # zero gradients (:941)
        yield {"parameters": element * line.parameters, "master weights": made, "gradients": made}


def _in_parts(line: StageTimeline, layout: PlannedLayout, element: int, device: str) -> Iterator[dict[str, int]]:
    """Masters are converted, then cloned (zero/stage3.py:1170), and a zero gradient of a group is kept (:1306)."""
    parts = shards_of_parameters(line, layout)
    if layout.offload_optimizer != "none" and device == "cuda":
        return
    lifted = MASTER_BYTES * sum(parts)
    converted = MASTER_BYTES * max(parts) if element == 2 else 0
    yield {"parameters": element * sum(parts), "master weights": lifted, "temporaries": converted}
    yield {"parameters": element * sum(parts), "master weights": lifted, "gradients": MASTER_BYTES * max(parts)}


_MAKING = {0: _whole, 1: _flattened, 2: _flattened, 3: _in_parts}
