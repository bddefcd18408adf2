"""Data that crosses the border of a script's process: the target goes in, what was seen of the script comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerofit.simulate.record import SentTensors
from zerofit.simulate.script.command import ScriptCommand
from zerofit.spec.devices import Device

LATER_STAGE = "later-stage"  # kind of the problem of a rank that would receive what is not known


@dataclass(frozen=True, kw_only=True)
class ScriptTarget:
    """One rank of a script, and the device that it would run on."""

    command: ScriptCommand
    device: Device
    gpus: int  # of a node
    nodes: int
    rank: int = 0
    workspace_bytes: int = 0  # that torch keeps for the matrix products of a thread on a stream
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of its process
    steps: int = 2  # optimizer steps after which the script is stopped
    traced: bool = False  # note what the rank issues in its last step
    longest: bool = False  # make every batch as long as the script allows
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of TrainingArguments, in place of the script's own
    received: SentTensors | None = None  # of the rank's pipeline stage, from the one before; None of the first

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.gpus * self.nodes

    @property
    def on_gpu(self) -> bool:
        """Whether device and host are told apart."""
        return self.device.kind != "cpu"
