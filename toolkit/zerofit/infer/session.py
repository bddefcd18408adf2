"""From a folder to a model in place: the steps that evaluating and writing text share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofit.infer.failures import failures
from zerofit.infer.fit import refuse_merging, refuse_misfit
from zerofit.infer.limits import Device, MemoryLimits
from zerofit.infer.load import load_model
from zerofit.infer.memory import give_back_at_once, peak_device_bytes, peak_host_bytes, start_counting
from zerofit.infer.meta_model import empty_model
from zerofit.infer.placement import Placement, main_device, place
from zerofit.infer.placement_table import table
from zerofit.infer.rewrite import WeightRewrite
from zerofit.infer.saved_model import SavedModel, exported, is_checkpoint, open_saved
from zerofit.models.dtypes import DTYPES, NAMES
from zerofit.spec.events import Reporter


@dataclass(kw_only=True)
class InferenceSession:
    """One saved model on its way to its devices."""

    saved: SavedModel
    dtype: torch.dtype
    limits: MemoryLimits
    scratch: Path  # for what is written on the way
    progress: Reporter
    say: Callable[[str], None]  # a line for people
    empty: nn.Module = field(init=False)  # the model without weights
    _before: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.empty = empty_model(self.saved, self.dtype)

    @property
    def main(self) -> Device:
        """Where the model would run: what its memory beside the weights is counted for."""
        return main_device(self.limits)

    def load(self, working: int, knobs: str) -> tuple[nn.Module, Placement]:
        """Decide where weights go with `working` bytes left beside them, say so, and bring them there.

        Raises DoesNotFit before anything is loaded; `knobs` are the flags that would make the work smaller.
        """
        placement = place(self.empty, self.limits, working)
        for line in table(placement):
            self.say(line)
        refuse_misfit(placement, knobs)
        self._before = start_counting(placement.gpus)
        with failures("nothing else on that device"):
            model = load_model(
                self._readable(placement), self.empty, placement, self.dtype, self.scratch, self.progress
            )
        return model, placement

    def _readable(self, placement: Placement) -> SavedModel:
        """The model in files that each forward can read from, if any of it stays on the disk."""
        if "disk" not in placement.device_map.values():
            return self.saved
        rewriting = WeightRewrite(self.saved, self.empty, self.dtype)
        if not rewriting.needed:
            return self.saved
        refuse_merging(rewriting.host_bytes, self.limits.memory.get("cpu"))
        return rewriting.write(self.scratch, self.progress)

    def facts(self, placement: Placement) -> dict[str, Any]:
        """The device map, what was forecast for each device, and the memory taken since before weights were loaded.

        `host_bytes_before` is what the interpreter, the libraries and the data took; a limit for the CPU is about what
        comes on top of it.
        """
        return {
            "device_map": placement.device_map,
            "placement": [row.as_dict() for row in placement.rows],
            "dtype": NAMES[self.dtype],
            "step": self.saved.about.step if self.saved.about else None,
            "peak_host_bytes": peak_host_bytes(),
            "host_bytes_before": self._before,
            "peak_device_bytes": peak_device_bytes(placement.gpus),
        }


def open_model(
    folder: Path, dtype: str | None, scratch: Path, report: Reporter, trust_model_code: bool = False
) -> tuple[SavedModel, torch.dtype]:
    """The model in a folder that `find_folder` gave, a checkpoint's exported first, and the type of its weights.

    Without `dtype` ("fp32", "bf16" or "fp16") it is the type that the weights are saved in. Comes first of all that
    makes large tensors: a hole that one leaves in the heap would be filled, page by page, by what runs later.
    """
    give_back_at_once()
    if is_checkpoint(folder):
        folder = exported(folder, scratch, dtype, report, trust_model_code)
    saved = open_saved(folder, trust_model_code)
    kept = saved.weights.dtype
    return saved, DTYPES[dtype] if dtype else kept if kept in NAMES else torch.float32
