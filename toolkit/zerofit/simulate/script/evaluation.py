"""Simulate what a script does between steps: evaluation, and gathering weights to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, cast

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import Subset

from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

EVALUATION, SAVING = "evaluation", "saving"
_FEW, _MORE = 2, 4  # batches
_WORTH_SAYING = 1 << 20  # bytes


def evaluate(trainer: Trainer, log: PhaseLog, meter: ScriptTracker) -> None:
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
    run = cast("Callable[[object], object]", trainer.evaluate)
    try:
        run(_first(dataset, _FEW * rows))
        few = meter.peak()
        run(_first(dataset, _MORE * rows))
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
    """Limit each evaluation within the simulated steps to a few batches.

    (transformers.Trainer.evaluate)
    """
    from transformers import Trainer

    original = cast("Callable[..., object]", Trainer.evaluate)

    def evaluated(self: Trainer, eval_dataset: object = None, *args: object, **kwargs: object) -> object:
        before = log.name
        if before == EVALUATION:
            return original(self, eval_dataset, *args, **kwargs)
        log.begin(EVALUATION)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = cast("Mapping[str, object]", self.eval_dataset)[dataset]
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
        gathers = engine.zero_optimization_partition_weights() and engine.zero_gather_16bit_weights_on_model_save()
        if gathers and engine.optimizer is not None:
            log.step = -1
            log.begin(SAVING)
            engine._zero3_consolidated_16bit_state_dict()


def _length(dataset: object) -> int:
    """Return the rows of a data set, or of the largest in a dict; 0 if the number is unknown."""
    datasets = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    sizes = [len(each) for each in datasets if isinstance(each, Sized)]
    return max(sizes, default=0) if len(sizes) == len(datasets) else 0


def _first(dataset: object, rows: int) -> object:
    """Return the first rows of a data set, or of each one in a dict."""
    if isinstance(dataset, dict):
        return {name: _first(each, rows) for name, each in dataset.items()}
    sized = cast("Dataset", dataset)
    indices = range(min(rows, len(sized)))
    return sized.select(indices) if hasattr(sized, "select") else Subset(dataset, indices)  # pyright: ignore[reportArgumentType]
