"""Define the input (a target) and the output (a record) of a simulation's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerofit.models.inputs import Inputs, inputs_from_dict, inputs_to_dict
from zerofit.simulate.memory.allocator import Event
from zerofit.simulate.memory.snapshot import AllocationOrigin
from zerofit.simulate.ops.issued import IssuedWait, IssuedWork
from zerofit.spec.files import field_data
from zerofit.spec.overhead import pinned_bytes
from zerofit.spec.run_folder import Job

STEPS = ("forward", "backward", "step")  # the phases of an optimizer step


@dataclass(frozen=True, kw_only=True)
class SimulationTarget:
    """One rank of a job, with its device."""

    job: Job
    inputs: Inputs
    rank: int = 0
    accelerator: str = "cpu"  # "cuda": device and host are separate; "cpu": they are one
    device_bytes: int = 0  # the device's memory; DeepSpeed reads how much of it is free
    workspace_bytes: int = 0  # kept by torch for matrix products, per thread and stream
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of its process
    stacks: bool = False  # record the origin of each allocation, for a memory snapshot
    steps: int = 2  # from the second step on ZeRO-3 knows the order of the layers and keeps more alive

    def as_dict(self) -> dict[str, Any]:
        """Return the target as plain data for JSON."""
        return {**field_data(self), "inputs": inputs_to_dict(self.inputs)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SimulationTarget:
        """Return the target from the result of `as_dict`. The benchmarks pass targets to processes that train them."""
        job, inputs = Job.from_dict(value["job"]), inputs_from_dict(value["inputs"])
        return cls(**{**value, "job": job, "inputs": inputs})


@dataclass(frozen=True, kw_only=True)
class RankPhase:
    """A phase of a rank's run. It begins where the previous phase ends."""

    name: str  # "build", "init", "forward", "backward" or "step"
    step: int  # optimizer step from 0; -1 before the first
    start_bytes: int
    peak_bytes: int
    end_bytes: int


# One line of code in one phase, for all layers, is one kind: its peaks grow linearly with the number of layers.
@dataclass(frozen=True, kw_only=True)
class KindPeak:
    """A peak of live memory at an allocation of one kind."""

    key: str
    which: str = ""  # "" for the highest peak; "first" or "last" for the first or last peak, even if it is lower
    phase: str
    step: int
    module: str
    at: str  # file:line, the path starting at its package
    bytes: int  # live at that moment
    breakdown: dict[str, int]  # kind -> bytes; sums to `bytes`
    own: str = ""  # the user's innermost line, "file:line"; "" if none ran, or if the phase had a higher moment before


@dataclass(frozen=True, kw_only=True)
class HostMoment:
    """The parts of host memory at the moment when a phase uses the most host memory."""

    pageable_bytes: int
    locked_bytes: int  # by DeepSpeed
    pinned: dict[str, tuple[int, ...]]  # line that allocated blocks -> their requested sizes
    pinned_free_bytes: int  # the same for blocks that wait to be reused

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all blocks that torch has page-locked."""
        return sum(pinned_bytes(size) for sizes in self.pinned.values() for size in sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all host memory."""
        return self.pageable_bytes + self.locked_bytes + self.pinned_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind. "pinned_free": page-locked blocks that torch caches for later requests."""
        used = self.pinned_bytes + self.locked_bytes - self.pinned_free_bytes
        return {"pageable": self.pageable_bytes, "pinned": used, "pinned_free": self.pinned_free_bytes}


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """Calls of one collective over groups of one size, in one phase of one step."""

    op: str
    bytes: int  # of all calls
    group_size: int
    phase: str
    count: int
    step: int

    def to_dict(self) -> dict[str, object]:
        """Return the entry for `zerofit simulate --json`."""
        return field_data(self, "step")


@dataclass(frozen=True, kw_only=True)
class GroupUse:
    """The collectives that were called on a process group."""

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
    """The live bytes on the device by kind, after one allocation or release."""

    t: int  # how many allocations and releases came before this one
    phase: str
    step: int
    bytes: dict[str, int]
    module: str = ""  # the module that allocates; "" outside of the model, and if memory is freed
    at: str = ""  # the line that allocates, "file:line"; the user's own line if it is known


@dataclass(frozen=True, kw_only=True)
class Note:
    """An approximation, with the number of times that it was made while a script ran."""

    text: str
    count: int
    bound: bool = False  # the figures are an upper bound because of it
    missing: bool = False  # the figures lack memory because of it


@dataclass(frozen=True, kw_only=True)
class ScriptFault:
    """A fault of a script, with the change that corrects it."""

    code: str  # in `script.faults.FAULTS`
    line: str  # "file:line" in the script; "" if unknown
    bytes: int  # memory that it costs a rank; 0 if it costs no memory
    problem: str
    mend: str


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Facts that a simulation found in a user's script."""

    name: str
    model: str  # its class
    blocks: str  # path of its repeated blocks, such as "model.layers"; "" without any
    block: str  # their class
    checkpointing_switch: bool  # whether it has gradient_checkpointing_enable()
    takes_liger: bool  # whether Liger has kernels for the model's type, and the script does not use Liger
    parameters: int
    trained_parameters: int
    largest_parameter: int
    experts: int | None  # per layer, from which its router chooses; None if there is no mixture of experts
    engines: int  # of DeepSpeed
    pipeline_stages: int  # 1: no pipeline
    trainer: bool  # whether transformers' Trainer or a subclass trains
    accelerate: bool  # whether an Accelerator was made
    zero_stage: int
    sharding: str  # what divides the work among ranks, e.g. "FSDP2"; "" for nothing
    precision: str
    optimizer: str  # its class
    micro_batch: int
    accumulation: int
    checkpointing: bool
    shapes: tuple[tuple[int, ...], ...]  # of the largest tensor of each micro batch
    longest_seen: int  # tokens of the longest micro batch; 0 if none has tokens
    longest_allowed: int  # largest number of tokens that the script allows; 0 if unknown or without tokens
    allowed_by: str  # the setting that limits it
    ended: str  # how the simulation ended
    notes: tuple[Note, ...]
    faults: tuple[ScriptFault, ...] = ()  # the faults that cost most memory come first


@dataclass(frozen=True, kw_only=True)
class SentTensors:
    """The tensors that a pipeline stage sends to the next stage for each micro batch."""

    tensors: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape and dtype ("bfloat16") of each (DeepSpeed)
    is_tuple: bool = False  # whether they arrive as a tuple, even a single one (DeepSpeed)
    torch_meta: str = ""  # torch's description of them, pickled, as hexadecimal digits (torch's PipelineStage)


@dataclass(frozen=True, kw_only=True)
class ScriptStage:
    """The pipeline stage of a script's rank."""

    stage: int
    stage_of_rank: tuple[int, ...]  # of all ranks
    sends: SentTensors | None  # None: the last stage sends nothing


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What a simulated rank allocated, computed and sent."""

    phases: list[RankPhase]
    peaks: list[KindPeak]  # highest first
    host: dict[str, int]  # bytes at host memory's peak: "pageable", "pinned", "pinned_free" (kept for reuse)
    nvme_bytes: int
    host_phases: dict[str, int]  # peak of host memory in each phase, over all steps
    kept: dict[str, int]  # kind (SAVED) -> bytes after the steps, in any place
    reserved_bytes: int  # peak of the caching allocator if the device keeps up with the host
    reserved_ahead_bytes: int  # the same if the host runs ahead of the device until it waits for it
    sent: list[CollectiveCalls]
    groups: list[GroupUse]
    flops: list[PhaseFlops]
    host_moments: dict[str, HostMoment] = field(default_factory=dict)  # the sources of `host` and `host_phases`
    timeline: tuple[MemoryPoint, ...] = ()  # () if layers were extrapolated
    events: list[Event] | None = None  # the device's allocations, for a replay; None if layers were extrapolated
    origins: tuple[AllocationOrigin, ...] | None = None  # of the storages in `events`, if the target records stacks
    convolution_bytes: int = 0  # input, weights and output of the largest convolution
    script: ScriptFacts | None = None  # of a user's script
    pipeline: ScriptStage | None = None  # of a user's script with a pipeline
    issued: tuple[IssuedWork | IssuedWait, ...] = ()  # in a script's last step
    routed: bool = False  # whether shapes depend on how many tokens each expert gets
    heavier_rank: int | None = None  # the rank with the same parameters and the highest peak; None: this one

    @property
    def needs(self) -> tuple[int, int]:
        """Return the peak bytes on the device and on the host."""
        return self.peaks[0].bytes, sum(self.host.values())
