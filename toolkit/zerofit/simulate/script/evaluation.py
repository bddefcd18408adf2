"""Simulate what a script does between steps: evaluation, and gathering weights to save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import Subset

from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.units import shown_bytes

EVALUATION, SAVING = "evaluation", "saving"
_FEW, _MORE = 2, 4  # batches
_WORTH_SAYING = 1 << 20  # bytes


def evaluate(trainer: Any, log: PhaseLog, meter: ScriptTracker) -> None:
    """Evaluate a few batches, if the arguments of a transformers.Trainer request evaluation.

    If each batch keeps tensors on the device, a note reports the bytes that all batches would keep.
    """
    args, dataset = trainer.args, trainer.eval_dataset
    if args.eval_strategy == "no" or not _length(dataset):
        return
    rows = args.per_device_eval_batch_size * args.world_size
    batches = math.ceil(_length(dataset) / rows)
    log.step = -1
    log.begin(EVALUATION)
    try:
        trainer.evaluate(_first(dataset, _FEW * rows))
        few = meter.peak()
        trainer.evaluate(_first(dataset, _MORE * rows))
    except Exception as error:  # metrics of meaningless values can raise anything
        meter.note(f"evaluation: stopped by {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return
    kept = (meter.peak() - few) // (_MORE - _FEW)
    if kept * batches > _WORTH_SAYING and batches > _MORE:
        grown = f"{shown_bytes(kept)} of each batch on the device, {shown_bytes(kept * batches)} at the end"
        meter.note(
            f"evaluation: {_MORE} of {batches} batches were simulated; the evaluation keeps {grown} "
            "(--eval_accumulation_steps)"
        )


def evaluations(log: PhaseLog) -> None:
    """Limit each evaluation within the simulated steps to a few batches. (transformers.Trainer.evaluate)"""
    from transformers import Trainer

    original = Trainer.evaluate

    def evaluated(self: Any, eval_dataset: Any = None, *args: object, **kwargs: object) -> Any:
        before = log.name
        if before == EVALUATION:
            return original(self, eval_dataset, *args, **kwargs)
        log.begin(EVALUATION)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if _length(dataset):
            eval_dataset = _first(dataset, _FEW * self.args.per_device_eval_batch_size * self.args.world_size)
        try:
            return original(self, eval_dataset, *args, **kwargs)
        finally:
            log.begin(before)

    replace_in(Trainer, "evaluate", evaluated)


def gather_to_save(engines: Sequence[DeepSpeedEngine], log: PhaseLog) -> None:
    """Gather ZeRO-3's 16-bit weights as for saving, if the JSON requests it.

    The key is stage3_gather_16bit_weights_on_model_save. The weights are gathered layer by layer. Rank 0 keeps all
    of them in host memory.
    """
    for engine in engines:
        asked = engine.zero_optimization_partition_weights() and engine.zero_gather_16bit_weights_on_model_save()
        if asked and engine.optimizer is not None:
            log.step = -1
            log.begin(SAVING)
            engine._zero3_consolidated_16bit_state_dict()


def _length(dataset: Any) -> int:
    """Return the rows of a data set, or of the largest one in a dict; 0 if the number is unknown."""
    several = dataset.values() if isinstance(dataset, dict) else [dataset]
    return max(map(len, several), default=0) if all(hasattr(one, "__len__") for one in several) else 0


def _first(dataset: Any, rows: int) -> object:
    if isinstance(dataset, dict):
        return {name: _first(one, rows) for name, one in dataset.items()}
    count = range(min(rows, len(dataset)))
    return dataset.select(count) if hasattr(dataset, "select") else Subset(dataset, count)
