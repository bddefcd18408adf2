"""Whether a placement fits, and what to turn where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.infer.limits import Device
from zerofit.spec.errors import Problem
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.infer.placement import Placement

SCRATCH = 64 << 20  # bytes kept free for kernels' scratch and the allocator's gaps
WORKSPACE = max(blas_workspace_bytes(kind) for kind in ("mi300x", "h100-80gb", "t4"))  # of products on GPUs


def room(device: Device) -> int:
    """Bytes that are kept free where something runs, for what is not counted."""
    return SCRATCH if device == "cpu" else SCRATCH + WORKSPACE


class DoesNotFit(Exception):
    """A model that has no place in the memory that it may take: a finding, exit code 1."""

    def __init__(self, problem: Problem):
        self.problem = problem
        super().__init__(problem.message)


def refuse_misfit(placement: Placement, knobs: str) -> None:
    """Raise DoesNotFit where a device lacks memory; `knobs` are the flags that make the forward smaller."""
    for row in placement.rows:
        if row.fits:
            continue
        allowed = shown_bytes(row.allowed or 0)
        if row.device == "disk":
            message = f"{shown_bytes(row.weights)} of weights have no place in memory, and the disk may hold {allowed}"
            hint = "allow the disk (leave disk= out of --max-memory), more memory, or --dtype bf16"
        else:
            parts = [f"weights {shown_bytes(row.weights)}"] if row.weights else []
            parts += [f"the largest layer ({placement.largest}) {shown_bytes(row.layer)}"] if row.layer else []
            parts += [f"activations and logits {shown_bytes(row.working)}", f"room {shown_bytes(room(row.device))}"]
            message = f"{row.device} needs {shown_bytes(row.needed)} ({', '.join(parts)}), and may take {allowed}"
            hint = f"--max-memory {row.device}={-(-row.needed >> 20)}MiB or more, {knobs} or --dtype bf16"
        raise DoesNotFit(Problem(kind="does-not-fit", message=message, hint=hint, where="--max-memory"))


def refuse_merging(needed: int, allowed: int | None) -> None:
    """Raise DoesNotFit where putting together what the files hold in parts takes more than the CPU may take."""
    if allowed is not None and needed > allowed:
        message = f"merging one layer's experts takes {shown_bytes(needed)} of host memory, allowed are"
        message += f" {shown_bytes(allowed)}"
        hint = f"--max-memory cpu={-(-needed >> 20)}MiB or more"
        raise DoesNotFit(Problem(kind="does-not-fit", message=message, hint=hint, where="--max-memory"))
