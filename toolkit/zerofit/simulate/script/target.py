"""Define the input of the process that simulates a script: the rank, its device and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerofit.simulate.record import SentTensors
from zerofit.simulate.script.command import ScriptCommand
from zerofit.spec.devices import Device

# changes of `edits`, as a user would write them into the script
CHECKPOINTS, EIGHT_BITS, HALVES = "checkpoints", "8-bit moments", "half batches"
SHARDED, SHARDED_STATES = "FSDP2 for DDP", "ZeroRedundancyOptimizer"
LATER_STAGE = "later-stage"  # kind of the problem of a rank whose input is unknown


@dataclass(frozen=True, kw_only=True)
class ScriptTarget:
    """One rank of a script, and its device."""

    command: ScriptCommand
    device: Device
    gpus: int  # per node
    nodes: int
    host_bytes: int = 0  # of a node
    rank: int = 0
    workspace_bytes: int = 0  # kept by torch for matrix products, per thread and stream
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of its process
    steps: int = 2  # optimizer steps after which the script is stopped
    stacks: bool = False  # record the origin of each allocation, for a memory snapshot
    longest: bool = False  # make every batch as long as the script allows
    crowded: bool = False  # let all tokens choose the same experts (worst routing)
    arguments: Mapping[str, object] = field(
        default_factory=dict
    )  # of TrainingArguments, instead of the script's values
    edits: tuple[str, ...] = ()  # CHECKPOINTS, ...: changes of the script
    received: SentTensors | None = None  # input of the rank's pipeline stage; None for the first stage

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.gpus * self.nodes

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, with memory of its own."""
        return self.device.kind != "cpu"
