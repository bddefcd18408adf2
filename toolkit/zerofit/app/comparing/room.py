"""Minimum memory of a strategy, compared with the free memory before its processes start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerofit.app.training.free_memory import memory_here
from zerofit.compare.job import CompareJob, Strategy
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, CPU_PROCESS_LOW_BYTES
from zerofit.spec.units import shown_bytes

STATE_BYTES = 12  # per parameter: weight, gradient and momentum in fp32


@dataclass(frozen=True, kw_only=True)
class StateGate:
    """Gate of a comparison. It ignores activations and buffers, so it refuses only what cannot fit at all."""

    parameters: int  # number in the model
    folder: Path  # the comparison's folder
    anyway: bool

    def lacks(self, strategy: Strategy, job: CompareJob) -> str | None:
        """Return why a strategy lacks memory on this machine; None if it may start."""
        if self.anyway or job.hosts:  # other hosts' memory is unknown
            return None
        ranks = 1 if strategy.one else job.ranks
        room, state = memory_here(range(ranks), self.folder), STATE_BYTES * self.parameters
        if job.accelerator == "cuda":
            needed, free = state if strategy.replicas else state // ranks, room.gpu_bytes
            place, beside = f"on each of {ranks} GPUs", ""
        else:
            processes = strategy.processes(job.ranks)
            own = CPU_PROCESS_LOW_BYTES * processes + CPU_LIBRARY_BYTES
            needed, free = own + state * (processes if strategy.replicas else 1), room.host_bytes
            place, beside = room.place, f", including {shown_bytes(own)} for {processes} processes"
        if free is None or needed <= free:
            return None
        words = f"weights, gradients and momentum need at least {shown_bytes(needed)}{beside}"
        return f"does not fit: {words}; {shown_bytes(free)} free {place} (--anyway starts it anyway)"
