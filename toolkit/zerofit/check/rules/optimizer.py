"""Optimizers: names and parameters that DeepSpeed takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from zerofit.check.edit import Assignment, Removal, Renaming
from zerofit.check.finding import Finding
from zerofit.check.rules.near import near
from zerofit.check.rules.rule import Rule
from zerofit.check.subject import CheckSubject

PARAMS = "optimizer.params"
# optimizers that are gone since 0.19.7, and the one whose uncompressed steps they made
GONE = {"onebitadam": "adam", "zerooneadam": "adam", "onebitlamb": "lamb"}
# what other libraries call them
SYNONYMS = {
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "wd": "weight_decay",
    "decay": "weight_decay",
}

OPTIMIZER_RULES = (
    Rule(
        code="optimizer-no-type",
        path="optimizer",
        when=lambda c: bool(c.section("optimizer")) and c.get("optimizer.type") is None,
        message="the optimizer block has no type",
        why="DeepSpeed then builds none, without a word",
        fix='name one, "AdamW" say',
        edits=(Assignment("optimizer.type", "AdamW"),),
        source="runtime/config.py:289",
    ),
    Rule(
        code="optimizer-amsgrad",
        path=f"{PARAMS}.amsgrad",
        when=lambda c: (
            c.on(f"{PARAMS}.amsgrad") and c.optimizer in ("adam", "adamw", "lamb") and not c.on(f"{PARAMS}.torch_adam")
        ),
        message="amsgrad with DeepSpeed's own Adam",
        why='DeepSpeed stops: "FusedAdam does not support the AMSGrad variant."',
        fix="remove it, or set torch_adam to true",
        edits=(Removal(f"{PARAMS}.amsgrad"),),
        source="ops/adam/fused_adam.py:88",
    ),
    Rule(
        code="adam-is-adamw",
        severity="warning",
        path="optimizer.type",
        when=lambda c: (
            c.optimizer == "adam" and not c.has(f"{PARAMS}.adam_w_mode") and bool(c.number(f"{PARAMS}.weight_decay"))
        ),
        message="Adam with weight decay",
        why='DeepSpeed takes "Adam" for AdamW: the decay is decoupled from the gradient',
        fix='write AdamW if that is meant, else "adam_w_mode": false',
        edits=(Assignment("optimizer.type", "AdamW"),),
        source="runtime/engine.py:2490",
    ),
    Rule(
        code="adamw-mode",
        severity="warning",
        path=f"{PARAMS}.adam_w_mode",
        when=lambda c: c.optimizer == "adamw" and c.get(f"{PARAMS}.adam_w_mode") is False,
        message="AdamW with adam_w_mode false",
        why="DeepSpeed ignores it: the name decides",
        fix='write "Adam" for a decay that goes through the gradient',
        edits=(Assignment("optimizer.type", "Adam"),),
        source="runtime/engine.py:2490",
    ),
    Rule(
        code="lamb-loss-scale",
        path="fp16.loss_scale",
        when=lambda c: c.optimizer == "lamb" and bool(c.number("fp16.loss_scale")),
        message="Lamb with a static loss scale of {value}",
        why='DeepSpeed stops, even with fp16 off: "DeepSpeed lamb optimizer requires dynamic loss scaling"',
        fix="set loss_scale to 0",
        edits=(Assignment("fp16.loss_scale", 0),),
        source="runtime/engine.py:2021",
    ),
    Rule(
        code="needs-cuda",
        path="optimizer.type",
        when=lambda c: c.optimizer == "lamb" and (c.setting.accelerator == "cpu" or c.offload("optimizer") is not None),
        message="Lamb on the CPU",
        why='DeepSpeed stops: "This op had not been implemented on CPU backend."',
        fix="take AdamW",
        edits=(Assignment("optimizer.type", "AdamW"),),
        source="ops/lamb/fused_lamb.py:56",
    ),
    Rule(
        code="optimizer-package",
        path="optimizer.type",
        when=lambda c: (
            (c.optimizer or "").startswith("mu")
            and c.optimizer in ("muadam", "muadamw", "musgd")
            and importlib.util.find_spec("mup") is None
        ),
        message="optimizer {value} needs the package mup, which is not installed",
        why="DeepSpeed logs that and then fails with an UnboundLocalError",
        fix="pip install mup, or take AdamW",
        edits=(Assignment("optimizer.type", "AdamW"),),
        source="runtime/engine.py:2513",
    ),
    Rule(
        code="optimizer-legacy-fusion",
        severity="warning",
        path="optimizer.legacy_fusion",
        when=lambda c: c.has("optimizer.legacy_fusion") and not (c.on("fp16.enabled") and c.stage == 0),
        message="optimizer.legacy_fusion has no effect here",
        why="DeepSpeed reads it in fp16 without ZeRO only",
        fix="remove it",
        edits=(Removal("optimizer.legacy_fusion"),),
        source="runtime/engine.py:2589",
    ),
    Rule(
        code="needs-cuda",
        path="optimizer.type",
        when=lambda c: c.optimizer == "lion" and c.setting.accelerator == "cpu" and c.offload("optimizer") is None,
        message="Lion without a GPU and without offload",
        why="DeepSpeed's op for it is written for CUDA only; offloaded to the CPU it has another one",
        fix="take AdamW, or offload the optimizer to the CPU",
        edits=(Assignment("optimizer.type", "AdamW"),),
        source="ops/lion/fused_lion.py:36, ops/op_builder/cpu/ (no fused_lion)",
    ),
)


def optimizer(c: CheckSubject) -> Iterator[Finding]:
    """The name, and the names and values of the parameters."""
    name = c.word("optimizer.type")
    if name is None:
        return
    known = c.catalog.optimizers
    variants = known.get(c.optimizer or "")
    if variants is None:
        better = near(name, ["AdamW", *known], {"adam_w": "AdamW", "fusedadam": "AdamW", **GONE})
        yield Finding(
            code="optimizer-unknown",
            severity="error",
            path="optimizer.type",
            message=f"DeepSpeed knows no optimizer {name!r}; known: {', '.join(sorted(known))}",
            why=f'DeepSpeed stops once the ranks run: "{name} is not a supported DeepSpeed Optimizer" (names of torch '
            "are case-sensitive)",
            fix=f"did you mean {better}?" if better else "take AdamW",
            edits=(Assignment("optimizer.type", better or "AdamW"),),
        )
        return
    taken = variants.get(_variant(c, variants))
    params = c.section(PARAMS)
    for key in params:
        if taken is not None and key not in taken and key != "max_grad_norm":
            yield _unknown(c, key, taken)
    for key in ("lr", "weight_decay", "eps", "momentum"):
        yield from _number(c, key, params.get(key))
    betas = params.get("betas")
    if betas is not None and betas != "auto" and not _pair(betas):
        yield Finding(
            code="optimizer-value",
            severity="error",
            path=f"{PARAMS}.betas",
            message=f"betas is {betas!r}; allowed: two numbers from 0 up to but not including 1",
            why="DeepSpeed hands it on, and the optimizer fails or diverges",
            fix="take [0.9, 0.999]",
            edits=(Assignment(f"{PARAMS}.betas", [0.9, 0.999]),),
        )


def _variant(c: CheckSubject, variants: Any) -> str:
    """Which constructor gets the parameters (runtime/engine.py:2370-2411)."""
    if c.on(f"{PARAMS}.torch_adam") and "torch" in variants:
        return "torch"
    if c.offload("optimizer") and "cpu" in variants:
        return "cpu"
    return "fused" if "fused" in variants else "torch"


def _unknown(c: CheckSubject, key: str, taken: list[str]) -> Finding:
    better = near(key, taken, SYNONYMS)
    free = better is not None and not c.has(f"{PARAMS}.{better}") and better != "betas"
    ignored = c.optimizer == "muon"
    return Finding(
        code="optimizer-param",
        severity="error",
        path=f"{PARAMS}.{key}",
        message=f"{c.get('optimizer.type')} takes no parameter {key!r}; it takes: {', '.join(taken)}",
        why="DeepSpeed drops it without a word"
        if ignored
        else f"DeepSpeed stops once the ranks run: \"unexpected keyword argument '{key}'\"",
        fix=f"did you mean {better}?" if better else "remove it",
        edits=(Renaming(f"{PARAMS}.{key}", better),) if free and better else (Removal(f"{PARAMS}.{key}"),),
    )


def _number(c: CheckSubject, key: str, value: Any) -> Iterator[Finding]:
    if value is None or value == "auto":
        return
    path = f"{PARAMS}.{key}"
    as_number = value
    if isinstance(value, str):
        try:
            as_number = float(value)
        except ValueError:
            as_number = None
        yield Finding(
            code="number-as-string",
            severity="error",
            path=path,
            message=f"{key} is the string {value!r}",
            why="DeepSpeed hands it on as it is: \"'<=' not supported between instances of 'float' and 'str'\"",
            fix="write it without quotes",
            edits=(Assignment(path, as_number) if as_number is not None else Removal(path),),
        )
    elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or (key == "lr" and value == 0):
        yield Finding(
            code="optimizer-value",
            severity="error",
            path=path,
            message=f"{key} is {value!r}; allowed: a number {'above' if key == 'lr' else 'from'} 0",
            why="DeepSpeed's own optimizers do not look, and train nothing or diverge; torch's stop",
            fix="correct it, or remove it for the default",
            edits=(Removal(path),),
        )


def _pair(betas: Any) -> bool:
    numbers = isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, int | float) for b in betas)
    return numbers and all(0 <= b < 1 for b in betas)
