"""torch's Adafactor: second moments of rows and columns."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.features.optimizer import (
    ADAM_BYTES,
    JsonRule,
    LearningRates,
    OptimizerEntry,
    Refusal,
    States,
    StepCost,
    TrainingSetting,
)


def _refuses(setting: TrainingSetting) -> Iterator[Refusal]:
    # Adafactor keeps one number for each row and column, so a rank needs full matrices
    why, hint = "", "use --optimizer adamw8bit, whose states can be partitioned"
    if setting.zero_stage:
        why = f"ZeRO stage {setting.zero_stage} flattens the matrices"
        hint = f"use --ds-config zero0, or {hint.removeprefix('use ')}"
    elif setting.pp > 1 and setting.precision == "bf16":
        why = "DeepSpeed's bf16 optimizer of pipelines flattens the matrices"
        hint = f"use --precision fp32, or {hint.removeprefix('use ')}"
    elif setting.tp > 1:
        why = f"--tensor-parallel {setting.tp} splits the matrices"
        hint = "use --tensor-parallel 1"
    if why:
        needed = "--optimizer adafactor needs full matrices (its states are one number per row and column)"
        yield Refusal(f"{needed}, but {why}", hint)


ADAFACTOR = OptimizerEntry(
    name="adafactor",
    json_type="Adafactor",
    docs="4 bytes for each row and column of a matrix, no momentum. ZeRO 0.",
    rates=LearningRates(
        scratch=0.01,  # its largest step, relative to the weights (Shazeer & Stern, 2018, algorithm 6)
        pretrained=1e-3,  # for fine-tuning T5 (Raffel et al., 2020, section 3.1.2)
        adapters=0.01,
        by_batch="fixed",  # relative to the weights
    ),
    auto={},
    states=States(
        factored=True,
        by_weight=False,
        unconvertible="Adafactor's states (per row and column) cannot be converted to another layout",
    ),
    # the estimate, which becomes the update; separate ops over weight and gradient (torch/optim/_adafactor.py,
    # _single_tensor_adafactor)
    step=StepCost(temporary=lambda numel, gpu: 4 * numel, late=lambda gpu: 4, moved_bytes=ADAM_BYTES - 28 + 76),
    refuses=_refuses,
    rules=(
        JsonRule(
            code="adafactor-partitioned",
            severity="warning",
            path="optimizer.type",
            when="optimizer == 'Adafactor' and stage > 0",
            message="Adafactor at ZeRO stage ${stage}",
            why="ZeRO flattens the matrices, so Adafactor stores one number per weight instead of one per row and "
            "column, and its step size depends on the number of ranks",
            fix="use stage 0, or bitsandbytes' AdamW8bit, whose states can be partitioned",
            source="runtime/zero/stage_1_and_2.py:560, stage3.py:1172; torch/optim/_adafactor.py",
            settled=True,
        ),
    ),
    pairs=("eps",),
)
