"""Optimizers: their names and parameters; summing, scaling and clipping of gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from zerofit.check.edit import Assignment, Removal
from zerofit.check.finding import Finding, Rule, as_number, near, plainly, rule_of, unknown_parameter
from zerofit.check.rules.precision import bf16_optimizer
from zerofit.check.subject import ZERO, CheckSubject
from zerofit.features.optimizers import ENTRIES, of_json

PARAMS = "optimizer.params"
GRAD_NORM = f"{ZERO}.compute_grad_norm"
MAX_NORM = "optimizer.params.max_grad_norm"
# optimizers that 0.19.7 removed, and their uncompressed counterparts
GONE = {"onebitadam": "adam", "zerooneadam": "adam", "onebitlamb": "lamb"}
SAME = {"adam_w": "AdamW", "fusedadam": "AdamW", "fusedlamb": "lamb"}  # class names of the same optimizers
# names in other libraries
SYNONYMS = {
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "wd": "weight_decay",
    "decay": "weight_decay",
}


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
        source="runtime/zero/stage_1_and_2.py:350, stage3.py:395",
    ),
    Rule(
        code="prescale-reduce-scatter",
        path="prescale_gradients",
        when=lambda c: c.on("prescale_gradients") and _reduce_scatter(c),
        message="prescale_gradients with reduce-scatter at stage 2 or 3",
        why='DeepSpeed stops: "pre-scale gradients is not yet supported with ZeRO-... reduce scatter enabled"',
        source="runtime/zero/stage_1_and_2.py:351, stage3.py:396",
    ),
    Rule(
        code="sum-of-gradients",
        path="gradient_allreduce_op",
        when=lambda c: (
            c.word("gradient_allreduce_op") in ("sum", "SUM") and (c.stage == 3 or c.zenflow or c.deepcompile)
        ),
        message="gradient_allreduce_op sum with ZeRO-3, ZenFlow or DeepCompile",
        why="DeepSpeed stops: they can only average",
        fix="use mean, and adjust the learning rate",
        source="runtime/config.py:694-699",
    ),
    Rule(
        code="clipping-in-optimizer",
        path=MAX_NORM,
        when=lambda c: c.has(MAX_NORM),
        message="optimizer.params.max_grad_norm is not an optimizer parameter",
        why="DeepSpeed stops: \"'max_grad_norm' is not supported as an optimizer parameter\"",
        fix="write gradient_clipping at the top level",
        edits=lambda c: (
            (Removal(MAX_NORM), Assignment("gradient_clipping", c.get(MAX_NORM)))
            if c.number(MAX_NORM) is not None and c.get("gradient_clipping") in (None, c.get(MAX_NORM))
            else ()
        ),
        source="runtime/engine.py:2481",
    ),
    Rule(
        code="predivide-ignored",
        severity="warning",
        path="gradient_predivide_factor",
        when=lambda c: c.stage == 0 and c.on("prescale_gradients") and c.changed("gradient_predivide_factor"),
        message="gradient_predivide_factor {value} together with prescale_gradients",
        why="DeepSpeed ignores the factor and divides by the number of ranks before the sum",
        fix="keep one of them",
        source="runtime/engine.py:3807-3816",
    ),
    Rule(
        code="gradient-norm-accumulation",
        path=GRAD_NORM,
        when=lambda c: c.off(GRAD_NORM) and bf16_optimizer(c) and c.offload("optimizer") is None,
        message="compute_grad_norm false with bf16 at stage 1 and fp32 accumulation",
        why='DeepSpeed stops: "compute_grad_norm=false does not support ZeRO Stage 1 with BF16 parameters and FP32 '
        'gradient accumulation"',
        fix="remove it, or use stage 2",
        source="runtime/engine.py:2307",
    ),
    Rule(
        code="gradient-norm-stage",
        path=GRAD_NORM,
        when=lambda c: c.off(GRAD_NORM) and c.stage in (0, 3),
        message=lambda c: f"compute_grad_norm false at ZeRO stage {c.stage}",
        why='DeepSpeed stops: "compute_grad_norm=false is supported only with ZeRO Stage 1 or 2"',
        source="runtime/zero/config.py:391",
    ),
    Rule(
        code="gradient-norm-clipping",
        path=GRAD_NORM,
        when=lambda c: c.off(GRAD_NORM) and c.stage in (1, 2) and _clips(c),
        message="compute_grad_norm false with gradient clipping (1.0 by default)",
        why='DeepSpeed stops: "zero_optimization.compute_grad_norm=false requires gradient_clipping=0"',
        fix="set gradient_clipping to 0, or leave compute_grad_norm true",
        source="runtime/zero/stage_1_and_2.py:212",
    ),
    Rule(
        code="gradient-norm-offload",
        path=GRAD_NORM,
        when=lambda c: (
            c.off(GRAD_NORM) and c.stage in (1, 2) and not _clips(c) and (c.offload("optimizer") or c.zenflow)
        ),
        message="compute_grad_norm false with the optimizer offloaded",
        why='DeepSpeed stops: "compute_grad_norm=false does not support optimizer offload"',
        source="runtime/zero/stage_1_and_2.py:214-216",
    ),
)
OPTIMIZER_RULES = (
    *(rule_of(rule) for entry in ENTRIES for rule in entry.rules),
    Rule(
        code="optimizer-no-type",
        path="optimizer",
        when=lambda c: c.section("optimizer") and c.get("optimizer.type") is None,
        message="the optimizer block has no type",
        why="DeepSpeed silently builds no optimizer",
        fix='set the type, for example "AdamW"',
        source="runtime/config.py:289",
    ),
    Rule(
        code="lamb-loss-scale",
        path="fp16.loss_scale",
        when=lambda c: c.optimizer == "lamb" and c.number("fp16.loss_scale"),
        message="Lamb with a static loss scale of {value}",
        why='DeepSpeed stops, even with fp16 off: "DeepSpeed lamb optimizer requires dynamic loss scaling"',
        fix="set loss_scale to 0",
        source="runtime/engine.py:2021",
    ),
    Rule(
        code="needs-cuda",
        path="optimizer.type",
        when=lambda c: c.optimizer == "lamb" and (c.on_cpu or c.offload("optimizer")),
        message="Lamb on the CPU",
        why='DeepSpeed stops: "This op had not been implemented on CPU backend."',
        fix="use AdamW",
        source="ops/lamb/fused_lamb.py:56",
    ),
    Rule(
        code="optimizer-package",
        path="optimizer.type",
        when=lambda c: c.optimizer in ("muadam", "muadamw", "musgd") and importlib.util.find_spec("mup") is None,
        message="optimizer {value} needs the package mup, which is not installed",
        why="DeepSpeed logs this and then fails with an UnboundLocalError",
        fix="pip install mup, or use AdamW",
        source="runtime/engine.py:2513",
    ),
    Rule(
        code="optimizer-legacy-fusion",
        severity="warning",
        path="optimizer.legacy_fusion",
        when=lambda c: c.has("optimizer.legacy_fusion") and not (c.fp16 and c.stage == 0),
        message="optimizer.legacy_fusion has no effect here",
        why="DeepSpeed reads it only in fp16 without ZeRO",
        source="runtime/engine.py:2589",
    ),
)


def optimizer(c: CheckSubject) -> Iterator[Finding]:
    """Check the optimizer's name, and the names and values of its parameters."""
    name = c.word("optimizer.type")
    if name is None:
        return
    known = c.catalog.optimizers
    variants = known.get(c.optimizer or "")
    entry = of_json(name)
    if variants is None and entry and entry.library:
        yield Finding(
            code="optimizer-bitsandbytes",
            path="optimizer.type",
            message=f"{name} is an optimizer of {entry.library}, which DeepSpeed cannot build by name",
            why=f'DeepSpeed stops once the ranks run: "{name} is not a supported DeepSpeed Optimizer"; zerofit train '
            "builds it",
            fix="remove the block, and pass the optimizer to deepspeed.initialize in your script",
        )
        return
    if variants is None:
        better = near(name, ["AdamW", *known], SAME | GONE)
        yield Finding(
            code="optimizer-unknown",
            path="optimizer.type",
            message=f"unknown optimizer {name!r}; known: {', '.join(sorted(known))}",
            why=f'DeepSpeed stops once the ranks run: "{name} is not a supported DeepSpeed Optimizer" (torch\'s names '
            "are case-sensitive)",
            fix=f"did you mean {better}?" if better else "use AdamW",
            edits=(Assignment("optimizer.type", better),) if better and plainly(name, better, SAME) else (),
        )
        return
    taken = variants.get(_variant(c, variants))
    params = c.section(PARAMS)
    for key in params:
        if taken is not None and key not in taken and key != "max_grad_norm":
            yield unknown_parameter(
                c,
                f"{PARAMS}.{key}",
                code="optimizer-param",
                owner=name,
                taken=taken,
                synonyms=SYNONYMS,
                why="DeepSpeed silently drops it" if entry and entry.drops_params else "",
            )
    pairs = entry.pairs if entry else ()
    for key in (name for name in ("lr", "weight_decay", "momentum", "eps") if name not in pairs):
        yield from _number(c, key, params.get(key))
    betas = params.get("betas")
    numbers = isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, int | float) for b in betas)
    if betas not in (None, "auto") and not (numbers and all(0 <= b < 1 for b in betas)):
        yield Finding(
            code="optimizer-value",
            path=f"{PARAMS}.betas",
            message=f"betas is {betas!r}; allowed: two numbers from 0 up to but not including 1",
            why="DeepSpeed passes it on, and the optimizer fails or diverges",
            fix="use [0.9, 0.999]",
        )


def _variant(c: CheckSubject, variants: Any) -> str:
    """Return the optimizer variant that gets the parameters (runtime/engine.py:2370-2411)."""
    if c.on(f"{PARAMS}.torch_adam") and "torch" in variants:
        return "torch"
    if c.offload("optimizer") and "cpu" in variants:
        return "cpu"
    return "fused" if "fused" in variants else "torch"


def _number(c: CheckSubject, key: str, value: Any) -> Iterator[Finding]:
    if value is None or value == "auto":
        return
    path = f"{PARAMS}.{key}"
    if isinstance(value, str):
        meant = as_number(value)
        yield Finding(
            code="number-as-string",
            path=path,
            message=f"{key} is the string {value!r}",
            why="DeepSpeed fails on it: \"'<=' not supported between instances of 'float' and 'str'\"",
            fix="write it without quotes",
            edits=(Assignment(path, meant),) if meant is not None else (),
        )
    elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or (key == "lr" and value == 0):
        yield Finding(
            code="optimizer-value",
            path=path,
            message=f"{key} is {value!r}; allowed: a number {'above' if key == 'lr' else 'from'} 0",
            why="DeepSpeed's own optimizers do not check it and train nothing or diverge; torch's stop",
            fix="correct it, or remove it for the default",
        )
