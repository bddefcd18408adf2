"""The optimizers of a run: what a DeepSpeed JSON calls them, and what their states take."""

from __future__ import annotations

from typing import Literal, get_args

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


def run_name(kind: str) -> str:
    """Return the run's word for the type of a DeepSpeed JSON, compared without regard to case; else the type itself."""
    return next((name for name, of in OPTIMIZER_TYPES.items() if of.lower() == kind.lower()), kind)
