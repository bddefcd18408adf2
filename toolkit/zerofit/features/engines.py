"""The training engines that `plan` ranks: one entry each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["deepspeed", "fsdp2"]


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine, and how it handles gradients."""

    title: str  # in a layout's words
    reduces_in_float32: bool = False  # type of the gradients of a 16-bit backward
    accumulates_full_gradients: bool = False  # micro batches before the last leave full gradients


ENGINES: dict[Engine, EngineEntry] = {
    "deepspeed": EngineEntry(title="ZeRO"),
    # accelerate/utils/dataclasses.py, set_mixed_precision: one dtype for everything; accelerator.py, no_sync: gradients
    # are scattered once a step
    "fsdp2": EngineEntry(title="FSDP2", accumulates_full_gradients=True),
}
# other engines, and why plan does not rank their layouts
NOT_PLANNED = {
    "torchtitan": "torchtitan trains its own models with other kernels; plan has no profiles of them. Use fsdp2 "
    "for the same sharding, or simulate it: zerofit simulate -- torchrun -m torchtitan.train ...",
}
