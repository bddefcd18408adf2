"""Data that crosses the border of a simulation's process: the target goes in, the record of its rank comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerofit.models.inputs import Inputs, inputs_from_dict, inputs_to_dict
from zerofit.simulate.allocator import Event
from zerofit.simulate.issued import IssuedWait, IssuedWork
from zerofit.spec.files import field_data
from zerofit.spec.overhead import pinned_bytes
from zerofit.spec.run_folder import Job

STEPS = ("forward", "backward", "step")  # the phases of an optimizer step


@dataclass(frozen=True, kw_only=True)
class SimulationTarget:
    """One rank of a job, and the device that it would run on."""

    job: Job
    inputs: Inputs
    rank: int = 0
    accelerator: str = "cpu"  # "cuda": device and host are told apart; "cpu": they are one
    device_bytes: int = 0  # what the device has; DeepSpeed asks how much of it is free
    workspace_bytes: int = 0  # that torch keeps for the matrix products of a thread on a stream
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of its process
    steps: int = 2  # ZeRO-3 keeps more alive once it knows the order of the layers: from the second step on

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {**field_data(self), "inputs": inputs_to_dict(self.inputs)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SimulationTarget:
        """Return the target that `as_dict` described."""
        job, inputs = Job.from_dict(value["job"]), inputs_from_dict(value["inputs"])
        return cls(**{**value, "job": job, "inputs": inputs})


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
    """A moment of one kind, the highest one: of all allocations by the same line in the same phase, in any layer."""

    key: str
    which: str = ""  # "first", "last": that one, whether it is the highest or not
    phase: str
    step: int
    module: str
    at: str  # file:line, the file from its package on
    bytes: int  # alive then
    breakdown: dict[str, int]  # kind -> bytes; sums to `bytes`
    own: str = ""  # the user's innermost line, "file:line"; "" where none ran, or memory had been higher in the phase


@dataclass(frozen=True, kw_only=True)
class HostMoment:
    """Host memory when there was most of it in a phase."""

    pageable_bytes: int
    locked_bytes: int  # by DeepSpeed
    pinned: dict[str, tuple[int, ...]]  # line that had blocks made -> the sizes that it had asked for
    pinned_free_bytes: int  # of these blocks, those that wait to be used again

    @property
    def pinned_bytes(self) -> int:
        """Of all blocks that torch has page-locked."""
        return sum(pinned_bytes(size) for sizes in self.pinned.values() for size in sizes)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.pageable_bytes + self.locked_bytes + self.pinned_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind; "pinned_free" are blocks that torch keeps for the next request."""
        used = self.pinned_bytes + self.locked_bytes - self.pinned_free_bytes
        return {"pageable": self.pageable_bytes, "pinned": used, "pinned_free": self.pinned_free_bytes}


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """The calls of one collective over groups of one size, in one phase of one step."""

    op: str
    bytes: int  # of all calls
    group_size: int
    phase: str
    count: int
    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit simulate --json` prints of it."""
        return field_data(self, "step")


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
class Note:
    """A stand-in that was taken while a script ran, and how often."""

    text: str
    count: int
    bound: bool = False  # the figures are an upper bound because of it


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """What was seen of a user's script."""

    name: str
    model: str  # its class
    parameters: int
    trained_parameters: int
    largest_parameter: int
    experts: int | None  # that a layer's router chooses from; None without a mixture
    engines: int  # of DeepSpeed
    pipeline_stages: int  # 1: no pipeline
    trainer: bool  # whether transformers' Trainer, or one made of it, trains
    zero_stage: int
    precision: str
    optimizer: str  # its class
    micro_batch: int
    accumulation: int
    checkpointing: bool
    shapes: tuple[tuple[int, ...], ...]  # of the largest tensor of each micro batch
    longest_seen: int  # tokens of the longest micro batch; 0: none has tokens
    longest_allowed: int  # tokens of the longest that the script allows; 0: not known, or it has no tokens
    allowed_by: str  # what says so
    ended: str  # how the simulation came to its end
    notes: tuple[Note, ...]


@dataclass(frozen=True, kw_only=True)
class SentTensors:
    """The tensors that a pipeline stage sends to the next one with each micro batch."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype ("bfloat16") of each
    is_tuple: bool  # whether they arrive as one: a single tensor may


@dataclass(frozen=True, kw_only=True)
class ScriptStage:
    """The pipeline stage of a script's rank."""

    stage: int
    stage_of_rank: tuple[int, ...]  # of all ranks
    sends: SentTensors | None  # None: the last stage sends nothing


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """A record of all that one simulated rank allocated, computed and sent."""

    phases: list[RankPhase]
    peaks: list[KindPeak]  # highest first
    host: dict[str, int]  # bytes at host memory's peak: "pageable", "pinned", "pinned_free" (kept for reuse)
    nvme_bytes: int
    host_phases: dict[str, int]  # the most bytes of host memory in each phase, of any step
    kept: dict[str, int]  # kind (SAVED) -> bytes after the steps, in any place
    reserved_bytes: int  # by the caching allocator, where the device keeps up with the host
    reserved_ahead_bytes: int  # the same where the host is ahead of the device until it waits for it
    sent: list[CollectiveCalls]
    groups: list[GroupUse]
    flops: list[PhaseFlops]
    host_moments: dict[str, HostMoment] = field(default_factory=dict)  # of which the above are made
    timeline: tuple[MemoryPoint, ...] = ()  # () where layers were extrapolated
    events: list[Event] | None = None  # the device's allocations, to be replayed; None where layers were extrapolated
    convolution_bytes: int = 0  # input, weights and output of the largest convolution
    script: ScriptFacts | None = None  # of a user's script
    pipeline: ScriptStage | None = None  # of a user's script with a pipeline
    issued: tuple[IssuedWork | IssuedWait, ...] = ()  # in a script's last step, where it is traced
    heavier_rank: int | None = None  # of those with the same parameters the one that needs most; None: it is this one

    @property
    def needs(self) -> tuple[int, int]:
        """Return the most bytes that it takes of the device, then of the host."""
        return self.peaks[0].bytes, sum(self.host.values())
