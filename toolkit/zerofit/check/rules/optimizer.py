"""The names of optimizer and scheduler, and the names and values of their parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from zerofit.check.catalog import names
from zerofit.check.edit import Assignment
from zerofit.check.finding import Finding, as_number, near, plainly, unknown_parameter
from zerofit.check.rules.terms import optimizer_is_wrapped, scheduler_is_deepspeeds
from zerofit.check.subject import CheckSubject
from zerofit.features.optimizers import of_json

PARAMS = "optimizer.params"
SCHEDULER_PARAMS = "scheduler.params"
LEARNING_RATES = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")
# scheduler parameters that may be null
NULLABLE = ("warmup_type", "warmup_max_lr", "cycle_second_step_size")
NULLABLE = (*NULLABLE, "cycle_second_stair_count", "cycle_momentum", "lr_range_test_staircase")


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
            why=f'DeepSpeed stops after the ranks have started: "{name} is not a supported DeepSpeed Optimizer". '
            "`zerofit train` supports this optimizer and creates it itself",
            fix="remove the block, and pass the optimizer to deepspeed.initialize in your script",
        )
        return
    if variants is None:
        # The successor of a removed optimizer is a hint, but no automatic fix: it does not train the same.
        same = names("optimizers")
        better = near(name, ["AdamW", *known], {**same, **names("removed_optimizers")})
        yield Finding(
            code="optimizer-unknown",
            path="optimizer.type",
            message=f"unknown optimizer {name!r}; known: {', '.join(sorted(known))}",
            why=f'DeepSpeed stops after the ranks have started: "{name} is not a supported DeepSpeed Optimizer" '
            "(torch's names are case-sensitive)",
            fix=f"did you mean {better}?" if better else "use AdamW",
            edits=(Assignment("optimizer.type", better),) if better and plainly(name, better, same) else (),
        )
        return
    allowed = variants.get(_variant(c, variants))
    params = c.section(PARAMS)
    for key in params:
        # gradients.yaml has a rule about max_grad_norm.
        if allowed is not None and key not in allowed and key != "max_grad_norm":
            yield unknown_parameter(
                c,
                f"{PARAMS}.{key}",
                code="optimizer-param",
                owner=name,
                allowed=allowed,
                synonyms=names("optimizer_parameters"),
                dropped=entry is not None and entry.drops_params,
            )
    pairs = entry.pairs if entry else ()
    for key in ("lr", "weight_decay", "momentum", "eps"):
        if key in params and key not in pairs:
            yield from _number(c, key, params[key])
    betas = params.get("betas", "auto")
    valid = (
        isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas)
    )
    if betas != "auto" and not valid:
        yield Finding(
            code="optimizer-value",
            path=f"{PARAMS}.betas",
            message=f"betas is {json.dumps(betas)}; allowed: two numbers from 0 up to but not including 1",
            why="DeepSpeed passes it on, and the optimizer fails or diverges",
            fix="use [0.9, 0.999]",
        )


def _variant(c: CheckSubject, variants: Mapping[str, list[str]]) -> str:
    """Return the variant of the optimizer that gets the parameters."""
    # DeepSpeed chooses in this order (runtime/engine.py:2370-2411).
    if c.on(f"{PARAMS}.torch_adam") and "torch" in variants:
        return "torch"
    if c.offload("optimizer") and "cpu" in variants:
        return "cpu"
    return "fused" if "fused" in variants else "torch"


def _quoted_number(path: str, key: str, value: str, why: str) -> Finding:
    """Return the finding about a parameter whose number is in quotes."""
    meant = as_number(value)
    return Finding(
        code="number-as-string",
        path=path,
        message=f"{key} is the string {value!r}",
        why=why,
        fix="write it without quotes",
        edits=(Assignment(path, meant),) if meant is not None else (),
    )


def _number(c: CheckSubject, key: str, value: object) -> Iterator[Finding]:
    """Check that a parameter is a number, and not negative; a learning rate of 0 needs a scheduler that sets it."""
    path = f"{PARAMS}.{key}"
    if isinstance(value, str):
        why = "DeepSpeed fails on it: \"'<=' not supported between instances of 'float' and 'str'\""
        if value != "auto":
            yield _quoted_number(path, key, value, why)
    elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        yield Finding(
            code="optimizer-value",
            path=path,
            message=f"{key} is {json.dumps(value)}; allowed: a number of at least 0",
            why="torch's optimizers stop with an error. DeepSpeed's own accept a negative number, and the weights "
            "diverge",
            fix="correct it, or remove it for the default",
        )
    elif key == "lr" and value == 0 and not _sets_learning_rate(c):
        yield Finding(
            code="optimizer-value",
            effect="changes",
            path=path,
            message="lr is 0",
            why="the weights do not change, unless the script's own scheduler sets the learning rate",
            fix='set a learning rate, or write "auto" if zerofit or Hugging Face fills it in',
        )


def _sets_learning_rate(c: CheckSubject) -> bool:
    """Return whether a scheduler of DeepSpeed overwrites the learning rate."""
    # WarmupCosineLR multiplies it. WarmupLR warms up to it without warmup_max_lr (runtime/lr_schedules.py:738).
    name, highest = c.word("scheduler.type"), c.section(SCHEDULER_PARAMS).get("warmup_max_lr", "missing")
    keeps = name == "WarmupCosineLR" or highest is None or (name == "WarmupLR" and highest == "missing")
    return scheduler_is_deepspeeds(c) and not keeps


def scheduler(c: CheckSubject) -> Iterator[Finding]:
    """Check the scheduler's name and the names of its parameters."""
    name = c.word("scheduler.type")
    if name is None:
        return
    known = c.catalog.schedulers
    if name not in known:
        # torch's schedulers are allowed, but most users mean one of DeepSpeed's own.
        own = [n for n, s in known.items() if s["own"]]
        better = near(name, own, names("schedulers")) or near(name, known)
        yield Finding(
            code="scheduler-unknown",
            path="scheduler.type",
            message=f"unknown scheduler {name!r}; known: {', '.join(sorted(own))}",
            why=f'DeepSpeed stops after the ranks have started: "DeepSpeed does not recognize LR scheduler {name}"',
            fix=f"did you mean {better}?" if better else "use WarmupLR",
            edits=(Assignment("scheduler.type", better),) if better and plainly(name, better) else (),
        )
        return
    if not known[name]["own"] and optimizer_is_wrapped(c):
        return  # see the rule scheduler-torch
    allowed = [*known[name]["required"], *known[name]["optional"]]
    synonyms = names("scheduler_parameters")
    unknown = [key for key in c.section(SCHEDULER_PARAMS) if key not in allowed]
    for key in unknown:
        path = f"{SCHEDULER_PARAMS}.{key}"
        yield unknown_parameter(c, path, code="scheduler-param", owner=name, allowed=allowed, synonyms=synonyms)
    # A misspelled parameter is not missing too.
    misspelled = {near(key, allowed, synonyms) for key in unknown}
    for key in known[name]["required"]:
        if c.has(SCHEDULER_PARAMS) and not c.has(f"{SCHEDULER_PARAMS}.{key}") and key not in misspelled:
            yield Finding(
                code="scheduler-param-missing",
                path=SCHEDULER_PARAMS,
                message=f"{name} needs {key}",
                why="DeepSpeed stops after the ranks have started: "
                f"\"missing 1 required positional argument: '{key}'\"",
                fix='set it (or "auto" if zerofit or Hugging Face fills it in)',
            )


def scheduler_values(c: CheckSubject) -> Iterator[Finding]:
    """Check the numeric parameters of DeepSpeed's schedulers: no strings, and not too low."""
    if not scheduler_is_deepspeeds(c):
        return
    for key, value in c.section(SCHEDULER_PARAMS).items():
        path = f"{SCHEDULER_PARAMS}.{key}"
        if isinstance(value, str) and value != "auto" and key not in ("warmup_type", "warmup_num_steps"):
            why = "DeepSpeed passes the string to the scheduler, which fails to compute with it"
            yield _quoted_number(path, key, value, why)
        if value is None and key not in NULLABLE:
            yield Finding(
                code="scheduler-value",
                path=path,
                message=f"{key} is null; allowed: a number",
                why="DeepSpeed passes null to the scheduler, which fails to compute with it",
                fix='set it, or write "auto" if zerofit or Hugging Face fills it in',
            )
        number = c.number(path)
        if number is not None and ((key in LEARNING_RATES and number < 0) or (key == "total_num_steps" and number < 1)):
            yield Finding(
                code="scheduler-value",
                effect="changes",
                path=path,
                message=f"{key} is {number}; allowed: a number of at least {0 if key in LEARNING_RATES else 1}",
                why="DeepSpeed does not check this and trains with a negative learning rate or none",
                fix='correct it, or write "auto" if zerofit or Hugging Face fills it in',
            )
