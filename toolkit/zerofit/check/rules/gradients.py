"""How gradients are summed, scaled, measured and clipped."""

from __future__ import annotations

from zerofit.check.edit import Assignment, Removal
from zerofit.check.rules.precision import bf16_optimizer
from zerofit.check.rules.rule import Rule
from zerofit.check.subject import ZERO, CheckSubject


def _reduce_scatter(c: CheckSubject) -> bool:
    return c.stage in (2, 3) and c.on(f"{ZERO}.reduce_scatter")


def _clips(c: CheckSubject) -> bool:
    clipping = c.get("gradient_clipping")
    return clipping == "auto" or clipping is None or bool(c.number("gradient_clipping"))


GRADIENTS = (
    Rule(
        code="predivide-reduce-scatter",
        path="gradient_predivide_factor",
        when=lambda c: (
            c.changed("gradient_predivide_factor")
            and _reduce_scatter(c)
            and c.get("gradient_allreduce_op") in (None, "mean")
        ),
        message="gradient_predivide_factor {value} with reduce-scatter at stage 2 or 3",
        why='DeepSpeed stops: "gradient_predivide_factor != 1.0 is not yet supported with ZeRO-... reduce scatter"',
        fix="remove it",
        edits=(Removal("gradient_predivide_factor"),),
        source="runtime/zero/stage_1_and_2.py:350, stage3.py:395",
    ),
    Rule(
        code="prescale-reduce-scatter",
        path="prescale_gradients",
        when=lambda c: c.on("prescale_gradients") and _reduce_scatter(c),
        message="prescale_gradients with reduce-scatter at stage 2 or 3",
        why='DeepSpeed stops: "pre-scale gradients is not yet supported with ZeRO-... reduce scatter enabled"',
        fix="remove it",
        edits=(Removal("prescale_gradients"),),
        source="runtime/zero/stage_1_and_2.py:351, stage3.py:396",
    ),
    Rule(
        code="sum-of-gradients",
        path="gradient_allreduce_op",
        when=lambda c: (
            c.word("gradient_allreduce_op") in ("sum", "SUM")
            and (c.stage == 3 or c.zenflow or c.on("compile.deepcompile"))
        ),
        message="gradient_allreduce_op sum with ZeRO-3, ZenFlow or DeepCompile",
        why="DeepSpeed stops: these can only average",
        fix="take mean, and a learning rate that suits it",
        edits=(Assignment("gradient_allreduce_op", "mean"),),
        source="runtime/config.py:694-699",
    ),
    Rule(
        code="clipping-in-optimizer",
        path="optimizer.params.max_grad_norm",
        when=lambda c: c.has("optimizer.params.max_grad_norm"),
        message="optimizer.params.max_grad_norm is not an optimizer parameter",
        why="DeepSpeed stops: \"'max_grad_norm' is not supported as an optimizer parameter\"",
        fix="write gradient_clipping at the top level",
        edits=lambda c: (
            Removal("optimizer.params.max_grad_norm"),
            *(
                (Assignment("gradient_clipping", c.number("optimizer.params.max_grad_norm")),)
                if c.number("optimizer.params.max_grad_norm") is not None and not c.has("gradient_clipping")
                else ()
            ),
        ),
        source="runtime/engine.py:2481",
    ),
    Rule(
        code="predivide-ignored",
        severity="warning",
        path="gradient_predivide_factor",
        when=lambda c: c.stage == 0 and c.on("prescale_gradients") and c.changed("gradient_predivide_factor"),
        message="gradient_predivide_factor {value} beside prescale_gradients",
        why="DeepSpeed divides by the number of ranks before the sum then, and ignores the factor",
        fix="keep one of them",
        edits=(Removal("gradient_predivide_factor"),),
        source="runtime/engine.py:3807-3816",
    ),
    Rule(
        code="gradient-norm-accumulation",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: (
            c.get(f"{ZERO}.compute_grad_norm") is False and bf16_optimizer(c) and c.offload("optimizer") is None
        ),
        message="compute_grad_norm false with bf16 at stage 1 and fp32 accumulation",
        why='DeepSpeed stops: "compute_grad_norm=false does not support ZeRO Stage 1 with BF16 parameters and FP32 '
        'gradient accumulation"',
        fix="remove it, or take stage 2",
        edits=(Removal(f"{ZERO}.compute_grad_norm"),),
        source="runtime/engine.py:2307",
    ),
    Rule(
        code="gradient-norm-stage",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: c.get(f"{ZERO}.compute_grad_norm") is False and c.stage in (0, 3),
        message=lambda c: f"compute_grad_norm false at ZeRO stage {c.stage}",
        why='DeepSpeed stops: "compute_grad_norm=false is supported only with ZeRO Stage 1 or 2"',
        fix="remove it",
        edits=(Removal(f"{ZERO}.compute_grad_norm"),),
        source="runtime/zero/config.py:391",
    ),
    Rule(
        code="gradient-norm-clipping",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: c.get(f"{ZERO}.compute_grad_norm") is False and c.stage in (1, 2) and _clips(c),
        message="compute_grad_norm false with gradient clipping, which is 1.0 where gradient_clipping is not given",
        why='DeepSpeed stops: "zero_optimization.compute_grad_norm=false requires gradient_clipping=0"',
        fix="set gradient_clipping to 0, or leave compute_grad_norm true",
        edits=(Removal(f"{ZERO}.compute_grad_norm"),),
        source="runtime/zero/stage_1_and_2.py:212",
    ),
    Rule(
        code="gradient-norm-offload",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: (
            c.get(f"{ZERO}.compute_grad_norm") is False
            and c.stage in (1, 2)
            and not _clips(c)
            and (c.offload("optimizer") is not None or c.zenflow)
        ),
        message="compute_grad_norm false with the optimizer offloaded",
        why='DeepSpeed stops: "compute_grad_norm=false does not support optimizer offload"',
        fix="remove it",
        edits=(Removal(f"{ZERO}.compute_grad_norm"),),
        source="runtime/zero/stage_1_and_2.py:214-216",
    ),
)
