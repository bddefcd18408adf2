"""The trained part of a model: adapters on frozen weights, or parameters chosen by patterns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PART_FIELDS = (  # fields of a run
    *("lora", "lora_alpha", "lora_dropout", "lora_targets", "lora_init", "dora", "rslora"),
    *("train", "freeze", "quantize", "double_quant"),
)
Method = Literal["full", "lora", "qlora"]
Bits = Literal["nf4", "int8"]
LoraInit = Literal["default", "gaussian", "orthogonal"]  # peft's other ways change the frozen weights or read data


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The settings of LoRA adapters, as in peft."""

    rank: int
    alpha: int  # adapters are scaled by alpha / rank
    dropout: float
    targets: str  # comma-separated names of layers, or "all-linear"
    init: LoraInit
    dora: bool
    rslora: bool


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How bitsandbytes quantizes the linear layers of a frozen model."""

    kind: Bits
    double: bool = False  # with nf4: also quantize the scales of blocks


@dataclass(frozen=True, kw_only=True)
class PartialTraining:
    """The trained part of a model. All other parameters are frozen."""

    lora: LoraSettings | None
    train: tuple[str, ...]  # shell patterns of parameters or modules
    freeze: tuple[str, ...]
    seed: int  # of the adapters' initial weights
    quantization: Quantization | None = None  # of the frozen layers
