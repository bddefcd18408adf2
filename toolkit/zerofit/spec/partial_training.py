"""Training a part of a model: adapters beside frozen weights, or the parameters that patterns name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PART_FIELDS = (  # of a run
    *("lora", "lora_alpha", "lora_dropout", "lora_targets", "lora_init", "dora", "rslora"),
    *("train", "freeze", "quantize", "double_quant"),
)
Method = Literal["full", "lora", "qlora"]
Bits = Literal["nf4", "int8"]
LoraInit = Literal["default", "gaussian", "orthogonal"]  # peft's others change the frozen weights, or read data


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The settings of LoRA adapters, as peft has them."""

    rank: int
    alpha: int  # adapters are scaled by alpha / rank
    dropout: float
    targets: str  # names of layers with commas between, or "all-linear"
    init: LoraInit
    dora: bool
    rslora: bool


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How bitsandbytes keeps the linear layers of a frozen model."""

    kind: Bits
    double: bool = False  # of nf4: the scales of blocks are quantised, too


@dataclass(frozen=True, kw_only=True)
class PartialTraining:
    """What of a model is trained; everything else is frozen."""

    lora: LoraSettings | None
    train: tuple[str, ...]  # shell patterns of parameters or modules
    freeze: tuple[str, ...]
    seed: int  # of the adapters' first weights
    quantization: Quantization | None = None  # of what adapters stand beside
