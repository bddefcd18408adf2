"""Memory that a strategy takes at the least, held against what is free before its processes start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerofit.app.room import room_here
from zerofit.compare.job import CompareJob, Strategy
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, CPU_PROCESS_LOW_BYTES
from zerofit.spec.units import shown_bytes

STATE_BYTES = 12  # of a parameter: weight, gradient and momentum in fp32


@dataclass(frozen=True, kw_only=True)
class StateGate:
    """The gate of a comparison. Activations and buffers are not known: it refuses only what cannot fit at all."""

    parameters: int  # of the model
    folder: Path  # of the comparison
    anyway: bool

    def lacks(self, strategy: Strategy, job: CompareJob) -> str | None:
        """Return what a strategy needs and this machine lacks; None where it may start."""
        if self.anyway or job.hosts:  # whose memory is not this machine's
            return None
        ranks = 1 if strategy.one else job.ranks
        room, state = room_here(range(ranks), self.folder), STATE_BYTES * self.parameters
        if job.accelerator == "cuda":
            needed, free = state if strategy.replicas else state // ranks, room.gpu_bytes
            place, beside = f"on each of {ranks} GPUs", ""
        else:
            processes = strategy.processes(job.ranks)
            own = CPU_PROCESS_LOW_BYTES * processes + CPU_LIBRARY_BYTES
            needed, free = own + state * (processes if strategy.replicas else 1), room.host_bytes
            place, beside = room.place, f", with {shown_bytes(own)} of {processes} processes"
        if free is None or needed <= free:
            return None
        words = f"weights, gradients and momentum take {shown_bytes(needed)} at the least{beside}"
        return f"does not fit: {words}; {shown_bytes(free)} are free {place} (--anyway starts it all the same)"
