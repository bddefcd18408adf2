"""Open a saved model and load it to its devices: the steps that `eval` and `generate` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofit.checkpoint.adapters import is_adapters
from zerofit.checkpoint.export import export
from zerofit.checkpoint.store import manifest_of
from zerofit.infer.guards import failures
from zerofit.infer.limits import Device, MemoryLimits
from zerofit.infer.load import WeightRewrite, load_model
from zerofit.infer.memory import (
    peak_device_bytes,
    return_freed_memory_at_once,
    start_counting,
)
from zerofit.infer.placement import (
    DeviceRow,
    Placement,
    empty_model,
    main_device,
    place,
    refuse_misfit,
    table_rows,
)
from zerofit.infer.saved_model import MODEL, SavedModel, is_checkpoint, open_saved
from zerofit.models.dtypes import DTYPES, NAMES
from zerofit.spec.errors import DoesNotFit, Problem
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Precision
from zerofit.spec.process import resident_memory
from zerofit.spec.units import shown_bytes


@dataclass(frozen=True, kw_only=True)
class PlacementResult:
    """Where a model's weights are, and the memory used since before they were loaded."""

    device_map: dict[str, Device]
    placement: tuple[DeviceRow, ...]  # the forecast for each device
    dtype: Precision  # of the weights
    step: int | None  # optimizer steps that the model was trained for; None if unknown
    peak_host_bytes: int
    host_bytes_before: int  # the interpreter, libraries and data; the CPU's limit applies to memory beyond this
    peak_device_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "placement": [row.to_dict() for row in self.placement]}


@dataclass(kw_only=True)
class InferenceSession:
    """One saved model, while it is loaded to its devices."""

    saved: SavedModel
    dtype: torch.dtype
    limits: MemoryLimits
    scratch: Path  # folder for temporary files
    report: Reporter
    _before: int = field(init=False, default=0)

    @cached_property
    def empty(self) -> nn.Module:
        """The model without weights."""
        return empty_model(self.saved, self.dtype)

    @property
    def main(self) -> Device:
        """The device on which the model would run; its activations are counted there."""
        return main_device(self.limits)

    def load(self, working: int, knobs: str) -> tuple[nn.Module, Placement]:
        """Decide where weights go, leaving `working` bytes free; report the placement, and load them.

        Raises DoesNotFit before anything is loaded; `knobs` are flags that reduce the memory of the forward.
        """
        placement = place(self.empty, self.limits, working)
        self.report.table("where the model's weights go", table_rows(placement))
        refuse_misfit(placement, self.limits, knobs)
        self._before = start_counting(placement.gpus)
        with failures("nothing else on that device"):
            model = load_model(self._readable(placement), self.empty, placement, self.dtype, self.scratch, self.report)
        return model, placement

    def _readable(self, placement: Placement) -> SavedModel:
        """If weights stay on disk, rewrite files that a forward cannot read as they are; return the model's files.

        Raises DoesNotFit if merging tensors that are stored in parts needs more memory than the CPU is allowed.
        """
        if "disk" not in placement.device_map.values():
            return self.saved
        rewriting = WeightRewrite(self.saved, self.empty, self.dtype)
        if not rewriting.needed:
            return self.saved
        needed, allowed = rewriting.host_bytes, self.limits.memory.get("cpu")
        if allowed is not None and needed > allowed:
            message = f"merging one layer's experts needs {shown_bytes(needed)} of host memory"
            message += f"; allowed: {shown_bytes(allowed)}"
            hint = f"--max-memory cpu={-(-needed >> 20)}MiB or more"
            raise DoesNotFit(Problem(kind="does-not-fit", message=message, hint=hint, where="--max-memory"))
        return rewriting.write(self.scratch, self.report)

    def result(self, placement: Placement) -> PlacementResult:
        """Return where the weights are and the peak memory so far."""
        return PlacementResult(
            device_map=placement.device_map,
            placement=placement.rows,
            dtype=NAMES[self.dtype],
            step=self.saved.info.step if self.saved.info else None,
            peak_host_bytes=resident_memory().peak,
            host_bytes_before=self._before,
            peak_device_bytes=peak_device_bytes(placement.gpus),
        )


def open_model(
    folder: Path, dtype: Precision | None, scratch: Path, report: Reporter, trust_model_code: bool = False
) -> tuple[SavedModel, torch.dtype]:
    """Return the model in a folder from `find_folder`, and the type of its weights.

    A checkpoint is exported first, and adapters are merged into their model. Without `dtype` the type is that of the
    saved weights. Call it before large tensors are created: later allocations would fill the holes that they leave in
    the heap, page by page.
    """
    return_freed_memory_at_once()
    if is_checkpoint(folder) or is_adapters(folder):
        merge = is_adapters(folder) or manifest_of(folder).job.run.lora is not None
        how = {"merge": merge, "trust_model_code": trust_model_code, "report": report}
        folder = export(folder, scratch / MODEL, dtype, **how).out
    saved = open_saved(folder, trust_model_code)
    kept = saved.weights.dtype
    return saved, DTYPES[dtype] if dtype else kept if kept in NAMES else torch.float32
