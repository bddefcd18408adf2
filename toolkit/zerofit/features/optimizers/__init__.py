"""The optimizers that zerofit supports. Each has its own file, and two lines here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from zerofit.features.optimizer import FLOAT_BYTES, OptimizerEntry, Refusal, States, TrainingSetting
from zerofit.features.optimizers.adafactor import ADAFACTOR
from zerofit.features.optimizers.adamw import ADAMW
from zerofit.features.optimizers.eight_bit import ADAMW8BIT, PAGED_ADAMW8BIT
from zerofit.features.optimizers.lion import LION
from zerofit.features.optimizers.muon import MUON
from zerofit.features.optimizers.sgd import SGD

Optimizer = Literal["adamw", "sgd", "muon", "adamw8bit", "paged-adamw8bit", "adafactor", "lion"]
ENTRIES: tuple[OptimizerEntry, ...] = (ADAMW, SGD, MUON, ADAMW8BIT, PAGED_ADAMW8BIT, ADAFACTOR, LION)
OPTIMIZERS: dict[str, OptimizerEntry] = {entry.name: entry for entry in ENTRIES}
assert tuple(OPTIMIZERS) == get_args(Optimizer)
PLANNED = tuple(entry.name for entry in ENTRIES if entry.planned)  # optimizers whose states plan can forecast


def usual_optimizer(cnn: bool, offload: str) -> Optimizer:
    """Return the default optimizer: SGD for a CNN with states on the device, else AdamW.

    `offload`: where the optimizer states are, "none" for the device.
    """
    return "sgd" if cnn and offload == "none" else "adamw"


def of_json(json_type: object) -> OptimizerEntry | None:
    """Return the optimizer with this DeepSpeed name, in any case; None if it is not supported."""
    kind = str(json_type).lower()
    return next((entry for entry in ENTRIES if kind == entry.json_type.lower() or kind in entry.same_states), None)


def has_weight_decay(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of a DeepSpeed JSON may have weight decay.

    Vectors (norms, biases) are then a parameter group without it. Otherwise all parameters are one group.
    """
    params = (config.get("optimizer") or {}).get("params") or {}
    return bool(params.get("weight_decay", True))


def saved_bytes(
    optimizer: OptimizerEntry | None, parameters: int, stage: int, element_bytes: int, state_bytes: int = FLOAT_BYTES
) -> tuple[int, int]:
    """Return a checkpoint's bytes of weights, and of master weights and optimizer states.

    `element_bytes`: of a weight in the run's precision. `state_bytes`: of a master weight and of each moment.
    """
    # Stage 3 saves the weights as their float32 partitions only. In fp32, only ZeRO has such a copy.
    weights = 0 if stage == 3 else parameters * element_bytes
    masters = parameters * state_bytes if stage or element_bytes < FLOAT_BYTES else 0
    moments = sum((optimizer.states if optimizer else States()).of_tensors([parameters], gpu=True))
    return weights, masters + moments * state_bytes // FLOAT_BYTES


def run_name(json_type: str) -> str:
    """Return the run's name for an optimizer type of a DeepSpeed JSON (case does not matter).

    If runs have no name for a type, the type is returned unchanged.
    """
    entry = of_json(json_type)
    return entry.name if entry and json_type.lower() not in entry.same_states else json_type


def refusals(optimizer: str | None, setting: TrainingSetting) -> Iterator[Refusal]:
    """Yield the reasons why an optimizer would give other results than on one device."""
    entry = OPTIMIZERS.get(optimizer or "")
    if entry is None:
        return
    if setting.momentum is not None and entry.momentum is None:
        hint = "leave it out, or use --optimizer sgd"
        yield Refusal(f"zerofit sets no momentum for {entry.json_type}", hint, where="--momentum", kind="conflict")
    yield from entry.refuses(setting)
