"""What deciding a configuration needs to know of a model and of the machine, as plain figures."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.spec.precision import ELEMENT_BYTES
from zerofit.spec.task import Task


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Figures of one model, taken from it on the meta device (no memory used)."""

    task: Task
    parameters: int  # tied ones counted once
    largest_parameter: int  # elements
    hidden_size: int  # width of the residual stream; for CNNs the square root of the largest parameter
    forward_flops: int | None  # of one sample; None where the ops cannot be counted
    attention_heads: int | None = None
    kv_heads: int | None = None
    model_type: str | None = None  # transformers' model_type
    layers: int | None = None  # length of the list of layers that a pipeline cuts; None where it cannot
    own: bool = False  # the user's own model

    def checkpoint_bytes(self, precision: str) -> int:
        """About what one checkpoint takes on the disk: fp32 master weights, Adam's two moments, and the weights."""
        return self.parameters * (12 + ELEMENT_BYTES[precision])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that ranks run on."""

    accelerator: str  # "cuda" or "cpu"
    devices: int  # GPUs, or the number of CPU ranks that make sense
    cores: int  # physical cores this process may use
    device_name: str
    fp16: bool
    bf16: bool
    here: bool = True  # this very machine, whose folders can be looked at
