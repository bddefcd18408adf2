"""Conversions of checkpoints: their result, forecast, progress, and plan to continue."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.index import MASTER, ParameterGroup
from zerofit.checkpoint.model_folder import writable
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.process import deepspeed_quiet
from zerofit.spec.units import shown_bytes

SETTLED_S = 10.0  # seconds before the time left is estimated
PROBE = 1 << 24  # elements that are copied for a forecast of the time
# settings of torch's AdamW, for checkpoints without their own
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
ADAMW |= {"foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True}


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """The folder written by a conversion."""

    out: Path
    tag: str
    parameters: int  # elements
    bytes: int
    format: str = "universal"

    def to_dict(self) -> dict[str, object]:
        """Return the object for `zerofit ckpt convert --json`."""
        return {**vars(self), "out": str(self.out)}


def groups_of(state: FullState) -> list[ParameterGroup]:
    """Return the optimizer's groups in the files, or else matrices and vectors."""
    if state.groups:
        return state.groups
    matrices = [name for name in state.names if len(state.shape(name)) > 1]
    vectors = [name for name in state.names if len(state.shape(name)) <= 1]
    return [ParameterGroup(names, ADAMW) for names in (matrices, vectors) if names]


def forecast(state: FullState, total: int, out: Path, ranks: int = 1) -> str:
    """Return a forecast of disk, memory and time for a conversion, as text.

    The time is measured by copying a part of the largest parameter. `total`: bytes of the result. `ranks`: number
    of ranks that each store a part of every parameter (ZeRO 3).
    """
    name = max(state.names, key=lambda name: state.numel(name))
    numel = state.numel(name)
    # a part of the largest parameter is read and written, which measures both disks
    start, probe = time.monotonic(), state.read_flat(name, MASTER, 0, min(numel, PROBE))
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    with writable(out), tempfile.TemporaryFile(dir=existing) as file:
        for _ in range(2):  # into the mapped file, and into the result
            file.write(probe.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    seconds = (time.monotonic() - start) * total / (4 * len(probe))
    # On Linux, ru_maxrss is in KiB.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 4 * -(-numel // ranks)
    duration = f"about {seconds / 60:.0f} min" if seconds > 60 else "less than a minute"
    return f"forecast: {shown_bytes(total)} of disk, at most {shown_bytes(memory)} of host memory, {duration}"


def no_optimizer(state: FullState, what: str) -> UserError:
    """Return the error for a checkpoint without usable optimizer states."""
    message = f"{what} cannot be converted: {next(iter(state.notes), 'it has no optimizer states')}"
    hint = "use --to hf for the weights"
    return UserError(Problem(kind="no-optimizer", message=message, hint=hint, where="PATH"))


def loss_scaling(numbers: dict[str, Any] | None, fp16: bool) -> dict[str, object]:
    """Return the loss scaler's fields for the optimizer state of a DeepSpeed engine.

    `numbers`: the scaler's numbers in the checkpoint. If they are None, an engine in fp16 gets a new scaler with
    DeepSpeed's defaults.
    """
    with deepspeed_quiet():
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    numbers = numbers if fp16 else {"cur_scale": 1.0}
    if numbers and "scale_window" not in numbers:
        return {"loss_scaler": LossScaler(numbers["cur_scale"]), "dynamic_loss_scale": False}
    # runtime/constants.py, FP16_*_DEFAULT
    scaler = DynamicLossScaler(2**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
    vars(scaler).update(numbers or {})
    return {"loss_scaler": scaler, "dynamic_loss_scale": True}


def conversion_plan(checkpoint: Path, *options: object) -> dict[str, object]:
    """Return input and options, which must be equal to continue an interrupted conversion."""
    root = checkpoint if checkpoint.is_dir() else checkpoint.parent
    files = sorted(file for file in root.rglob("*") if file.is_file()) if checkpoint.is_dir() else [checkpoint]
    seen = {str(file.relative_to(root)): [(s := file.stat()).st_size, s.st_mtime_ns] for file in files}
    return {"checkpoint": str(checkpoint.resolve()), "files": seen, "options": [str(option) for option in options]}


def progress(report: Reporter, total: int, verb: str = "converting") -> Callable[[int], None]:
    """Return a function that counts written bytes, and reports their sum and the time left."""
    done, begun = 0, time.monotonic()

    # Files of an interrupted conversion count at once. So the first seconds would give far too short an estimate.
    def wrote(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        passed = time.monotonic() - begun
        seconds = passed * (total / done - 1) if done and passed > SETTLED_S else 0.0
        left = f", about {seconds / 60:.0f} min left" if seconds > 60 else ""
        report.status(f"{verb} {shown_bytes(done)} of {shown_bytes(total)}{left}")

    return wrote
