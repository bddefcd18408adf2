"""The optimizers of a run: their names in a DeepSpeed JSON, and the size of their states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

Optimizer = Literal["adamw", "sgd", "muon", "adamw8bit", "paged-adamw8bit", "adafactor"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
OPTIMIZER_TYPES: dict[Optimizer, str] = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "muon": "Muon",
    "adamw8bit": "AdamW8bit",
    "paged-adamw8bit": "PagedAdamW8bit",
    "adafactor": "Adafactor",
}
# bitsandbytes' classes, which DeepSpeed cannot build by name
EIGHT_BIT: dict[Optimizer, str] = {name: OPTIMIZER_TYPES[name] for name in ("adamw8bit", "paged-adamw8bit")}
EIGHT_BIT_OP = "optimizer_update_8bit_blockwise"  # below torch.ops.bitsandbytes
# from bitsandbytes 0.50.2 (optim/optimizer.py, init_state, get_state_buffer)
EIGHT_BIT_ELEMENTS = 4096  # smaller tensors keep 32-bit states (min_8bit_size)
BLOCK_ELEMENTS, BLOCK_BYTES = 256, 4  # each state has a float32 scale per block
MAPS_BYTES = 2 * 256 * 4  # the float32 values of the 256 codes of both states, once per optimizer
PAGED_ELEMENTS = 100_000  # from this size on, states are in memory that the driver pages between host and device


def eight_bit_bytes(numel: int) -> int:
    """Return the bytes of a tensor's two moments, without the codes' values."""
    if numel < EIGHT_BIT_ELEMENTS:
        return 2 * 4 * numel
    return 2 * (numel + BLOCK_BYTES * -(-numel // BLOCK_ELEMENTS))


def usual_optimizer(cnn: bool, offload: str) -> Literal["sgd", "adamw"]:
    """Return the default optimizer: SGD for a CNN, else (and with states on the host) AdamW.

    `offload`: where its states are, "none" for the device.
    """
    return "sgd" if cnn and offload == "none" else "adamw"


class Refusal(NamedTuple):
    """Why an optimizer is refused, and what to do."""

    message: str
    hint: str


def refusals(optimizer: str | None, precision: str | None, offload: str, layout: Any) -> Iterator[Refusal]:
    """Yield why an optimizer would not train as on one device; nothing if it would.

    `offload`: where its states are, "none" for the device. `layout`: of a job or a plan; its ZeRO stage and the
    degrees `tp`, `pp` and `ep` are read.
    """
    if optimizer in EIGHT_BIT:
        yield from _of_eight_bit(f"--optimizer {optimizer}", offload, layout)
    elif optimizer == "adafactor":
        yield from _of_adafactor(precision, layout)


def _of_eight_bit(asked: str, offload: str, layout: Any) -> Iterator[Refusal]:
    """Refuse bitsandbytes' AdamW on the host and with expert parallelism."""
    if offload != "none":
        yield Refusal(
            f"{asked} with offload_optimizer.device {offload}: on the host bitsandbytes unpacks all states to float32 "
            "in each step, which needs more memory than it saves",
            "remove offload_optimizer, or use --optimizer adamw (DeepSpeed's CPU Adam)",
        )
    if layout.ep > 1:
        message = f"{asked} with --expert-parallel {layout.ep}: DeepSpeed splits the parameter groups of experts only"
        hint = "use --optimizer adamw, or --expert-parallel 1"
        yield Refusal(f"{message} for optimizers that it builds itself (runtime/engine.py:2330)", hint)


def _of_adafactor(precision: str | None, layout: Any) -> Iterator[Refusal]:
    """Refuse Adafactor with split matrices: its second moments are one number per row and per column."""
    why, hint = "", "use --optimizer adamw8bit, whose states can be partitioned"
    if layout.zero_stage:
        why = f"ZeRO stage {layout.zero_stage} flattens the matrices"
        hint = f"use --ds-config zero0, or {hint.removeprefix('use ')}"
    elif layout.pp > 1 and precision == "bf16":
        why = "DeepSpeed's bf16 optimizer of pipelines flattens the matrices"
        hint = f"use --precision fp32, or {hint.removeprefix('use ')}"
    elif layout.tp > 1:
        why = f"--tensor-parallel {layout.tp} splits the matrices"
        hint = "use --tensor-parallel 1"
    if why:
        asked = "--optimizer adafactor needs full matrices (its states are one number per row and column)"
        yield Refusal(f"{asked}, but {why}", hint)


def run_name(kind: str) -> str:
    """Return the run's name for an optimizer type of a DeepSpeed JSON (in any case), else the type itself."""
    return next((name for name, of in OPTIMIZER_TYPES.items() if of.lower() == kind.lower()), kind)
