"""The optimizers of a run: what a DeepSpeed JSON calls them, and what their states take."""

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
# bitsandbytes' classes, which DeepSpeed does not make by name
EIGHT_BIT: dict[Optimizer, str] = {name: OPTIMIZER_TYPES[name] for name in ("adamw8bit", "paged-adamw8bit")}
EIGHT_BIT_OP = "optimizer_update_8bit_blockwise"  # below torch.ops.bitsandbytes
# of bitsandbytes 0.50.2 (optim/optimizer.py, init_state, get_state_buffer)
EIGHT_BIT_ELEMENTS = 4096  # smaller tensors keep states of 32 bits (min_8bit_size)
BLOCK_ELEMENTS, BLOCK_BYTES = 256, 4  # each of both states has a float32 scale a block
MAPS_BYTES = 2 * 256 * 4  # what each of the 256 codes stands for, of both states, once an optimizer
PAGED_ELEMENTS = 100_000  # states of this size are in memory that the driver moves between host and device


def eight_bit_bytes(numel: int) -> int:
    """Return the bytes of the two moments of a tensor, without the maps of codes."""
    if numel < EIGHT_BIT_ELEMENTS:
        return 2 * 4 * numel
    return 2 * (numel + BLOCK_BYTES * -(-numel // BLOCK_ELEMENTS))


def usual_optimizer(cnn: bool, offload: str) -> Literal["sgd", "adamw"]:
    """Return the optimizer of a run that names none: SGD for a CNN, else AdamW, which alone steps well on the host.

    `offload`: where its states are, "none" for the device.
    """
    return "sgd" if cnn and offload == "none" else "adamw"


class Refusal(NamedTuple):
    """Why an optimizer is not taken, and the knob to turn."""

    message: str
    hint: str


def refusals(optimizer: str | None, precision: str | None, offload: str, layout: Any) -> Iterator[Refusal]:
    """Yield what keeps an optimizer from being trained with as one device does; nothing where it is taken.

    `offload`: where its states are, "none" for the device. `layout`: a job's or a planned one, of which the ZeRO stage
    and the degrees `tp`, `pp` and `ep` count.
    """
    if optimizer in EIGHT_BIT:
        yield from _of_eight_bit(f"--optimizer {optimizer}", offload, layout)
    elif optimizer == "adafactor":
        yield from _of_adafactor(precision, layout)


def _of_eight_bit(asked: str, offload: str, layout: Any) -> Iterator[Refusal]:
    """Check where bitsandbytes' AdamW steps: on the device, in groups that DeepSpeed does not make anew."""
    if offload != "none":
        yield Refusal(
            f"{asked} with offload_optimizer.device {offload}: on the host bitsandbytes unpacks all states into "
            "float32 at each step, which takes more than they do",
            "remove offload_optimizer, or take --optimizer adamw, whose step on the host is DeepSpeed's own",
        )
    if layout.ep > 1:
        message = f"{asked} with --expert-parallel {layout.ep}: DeepSpeed puts experts into groups of optimizers"
        hint = "take --optimizer adamw, or leave --expert-parallel at 1"
        yield Refusal(f"{message} that it makes itself alone (runtime/engine.py:2330)", hint)


def _of_adafactor(precision: str | None, layout: Any) -> Iterator[Refusal]:
    """Check that Adafactor sees whole matrices: its second moments are one number a row and one a column."""
    why, hint = "", "take --optimizer adamw8bit, whose states can be divided"
    if layout.zero_stage:
        why = f"ZeRO stage {layout.zero_stage} gives optimizers flat parts of all matrices together"
        hint = f"take --ds-config zero0, or {hint.removeprefix('take ')}"
    elif layout.pp > 1 and precision == "bf16":
        why = "DeepSpeed's optimizer of pipelines in bf16 is given flat parts of all matrices together"
        hint = f"take --precision fp32, or {hint.removeprefix('take ')}"
    elif layout.tp > 1:
        why = f"ranks of --tensor-parallel {layout.tp} hold slices, and the size of steps follows from whole matrices"
        hint = "leave --tensor-parallel at 1"
    if why:
        asked = "--optimizer adafactor keeps a number a row and a number a column of each matrix"
        yield Refusal(f"{asked}, and {why}", hint)


def run_name(kind: str) -> str:
    """Return the run's word for the type of a DeepSpeed JSON, compared without regard to case; else the type itself."""
    return next((name for name, of in OPTIMIZER_TYPES.items() if of.lower() == kind.lower()), kind)
