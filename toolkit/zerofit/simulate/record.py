"""The record of one simulated rank, as it crosses from its process: phases, peaks, traffic, allocations."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.simulate.allocator import Event


@dataclass(frozen=True, kw_only=True)
class RankPhase:
    """A stretch of a rank's life. Each begins where the one before it ends."""

    name: str  # "build", "init", "forward", "backward" or "step"
    step: int  # optimizer step from 0; -1 before the first
    start_bytes: int
    peak_bytes: int
    end_bytes: int


@dataclass(frozen=True, kw_only=True)
class KindPeak:
    """The highest moment of one kind: of all allocations by the same line in the same phase, in any layer."""

    key: str
    phase: str
    step: int
    module: str
    at: str  # file:line, the file from its package on
    bytes: int  # alive then
    breakdown: dict[str, int]  # kind -> bytes; sums to `bytes`


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """All calls of one collective over groups of one size, in one phase of one step."""

    op: str
    group_size: int
    phase: str
    step: int
    count: int
    bytes: int  # of all calls


@dataclass(frozen=True, kw_only=True)
class GroupUse:
    """The collectives that were called on one process group."""

    ranks: int
    ops: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PhaseFlops:
    """FLOPs of one phase of one step."""

    phase: str
    step: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Bytes alive on the device by kind; `t` counts allocations and releases."""

    t: int
    phase: str
    step: int
    bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one simulated rank allocated, computed and sent."""

    phases: list[RankPhase]
    peaks: list[KindPeak]  # highest first
    host: dict[str, int]  # "pageable" and "pinned" bytes at host memory's peak
    nvme_bytes: int
    reserved_bytes: int  # by the caching allocator
    sent: list[CollectiveCalls]
    groups: list[GroupUse]
    flops: list[PhaseFlops]
    timeline: tuple[MemoryPoint, ...] = ()  # () where layers were extrapolated
    events: list[Event] | None = None  # the device's allocations, to be replayed; None where layers were extrapolated
