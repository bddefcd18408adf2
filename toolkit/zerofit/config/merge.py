"""Values that stand both in a run and in a DeepSpeed JSON: taken from either, and an error where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.check.dotted import get
from zerofit.spec.errors import Problems
from zerofit.spec.load import RunRequest

# field of the run -> dotted path in the DeepSpeed JSON
PAIRS = {
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
    "gradient_clipping": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "momentum": "optimizer.params.momentum",
    "tensor_parallel": "tensor_parallel.autotp_size",
    "sequence_parallel": "sequence_parallel_size",
}

DEGREES = ("tensor_parallel", "sequence_parallel")
WHOLE = ("micro_batch", "gradient_accumulation_steps", "global_batch", *DEGREES)
OPTIMIZER_TYPES = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


def merge(asked: RunRequest, config: Mapping[str, Any], ds_place: str, problems: Problems) -> dict[str, Any]:
    """What run and JSON say together, for the fields of PAIRS plus `optimizer` and `precision`.

    Only definite values are in the answer; a value that both give and that differs is noted with both places.
    """
    merged: dict[str, Any] = {}
    for field, path in PAIRS.items():
        theirs = get(config, path, "auto")
        if field in DEGREES and theirs == 0:
            theirs = 1  # as DeepSpeed has it
        if field in WHOLE and isinstance(theirs, float):
            theirs = int(theirs)  # the checker lets 16.0 pass
        _settle(asked, field, None if theirs == "auto" else theirs, f"{ds_place}: {path}", merged, problems)
    _settle(asked, "optimizer", _optimizer_of(config), f"{ds_place}: optimizer.type", merged, problems)
    theirs, path = _precision_of(asked, config)
    _settle(asked, "precision", theirs, f"{ds_place}: {path}", merged, problems)
    return merged


def _settle(
    asked: RunRequest, field: str, theirs: Any, their_place: str, merged: dict[str, Any], problems: Problems
) -> None:
    ours = getattr(asked.run, field) if field in asked.places else None
    if ours is not None and theirs is not None and ours != theirs:
        problems.add(
            "conflict",
            f"{field} is {ours} in {asked.place(field)} but {theirs} in {their_place}",
            f'make them equal, or write "auto" at {their_place} so that the run decides',
            f"{asked.place(field)} and {their_place}",
        )
    value = theirs if ours is None else ours
    if value is not None:
        merged[field] = value


def _optimizer_of(config: Mapping[str, Any]) -> str | None:
    """The run's word for the JSON's optimizer; DeepSpeed compares its own names without regard to case."""
    kind = get(config, "optimizer.type", "auto")
    if kind == "auto":
        return None
    return {t.lower(): name for name, t in OPTIMIZER_TYPES.items()}.get(str(kind).lower(), str(kind))


def _precision_of(asked: RunRequest, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The precision that the JSON settles, and where; None where the run decides."""
    bf16, fp16 = get(config, "bf16.enabled", "auto"), get(config, "fp16.enabled", "auto")
    for name, enabled in (("bf16", bf16), ("fp16", fp16)):
        if enabled is True:
            return name, f"{name}.enabled"
        if enabled is False and asked.run.precision == name:
            return "fp32" if bf16 is False and fp16 is False else f"not {name}", f"{name}.enabled"
    return ("fp32" if bf16 is False and fp16 is False else None), "bf16.enabled and fp16.enabled"
