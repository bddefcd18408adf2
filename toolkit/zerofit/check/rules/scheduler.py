"""Learning rate schedulers."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.check.edit import Assignment
from zerofit.check.finding import Finding, Rule, as_number, near, plainly, unknown_parameter
from zerofit.check.subject import CheckSubject
from zerofit.features.optimizers import of_json

PARAMS = "scheduler.params"
WARMUP = f"{PARAMS}.warmup_num_steps"
TOTAL = f"{PARAMS}.total_num_steps"
SYNONYMS = {
    "warmup_steps": "warmup_num_steps",
    "num_warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
    "num_training_steps": "total_num_steps",
    "max_lr": "warmup_max_lr",
    "min_lr": "warmup_min_lr",
}
TYPES = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR", "onecyclelr": "OneCycle"}
LEARNING_RATES = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")


def _own(c: CheckSubject) -> bool:
    return bool(c.catalog.schedulers.get(c.word("scheduler.type") or "", {}).get("own"))


def _wrapped(c: CheckSubject) -> bool:
    """Return whether the engine passes the scheduler a DeepSpeed optimizer, which is not a torch Optimizer."""
    return c.stage > 0 or c.fp16 or c.bf16


def _below(c: CheckSubject, lower: str, upper: str) -> bool:
    """Return whether both parameters are numbers and the first is smaller."""
    first, second = c.number(f"{PARAMS}.{lower}"), c.number(f"{PARAMS}.{upper}")
    return first is not None and second is not None and first < second


def _cycles_betas(c: CheckSubject) -> bool:
    entry = of_json(c.optimizer)
    return entry is not None and entry.cycled_betas


SCHEDULER_RULES = (
    Rule(
        code="scheduler-no-type",
        path="scheduler",
        when=lambda c: c.section("scheduler") and c.get("scheduler.type") is None,
        message="the scheduler block has no type",
        why="DeepSpeed silently builds no scheduler: the learning rate stays constant",
        fix='set the type, for example "WarmupDecayLR", or remove the block',
        source="runtime/config.py:326",
    ),
    Rule(
        code="scheduler-no-params",
        path="scheduler",
        when=lambda c: c.word("scheduler.type") in c.catalog.schedulers and not c.has(PARAMS),
        message="the scheduler block has no params",
        why='DeepSpeed stops once the ranks run: "argument after ** must be a mapping, not NoneType"',
        fix='add "params": {}',
        edits=lambda c: (
            () if c.catalog.schedulers[c.word("scheduler.type") or ""]["required"] else (Assignment(PARAMS, {}),)
        ),
        source="runtime/engine.py:1934",
    ),
    Rule(
        code="scheduler-torch",
        path="scheduler.type",
        when=lambda c: c.word("scheduler.type") in c.catalog.schedulers and not _own(c) and _wrapped(c),
        message="torch's scheduler {value} with ZeRO, fp16 or bf16",
        why='DeepSpeed stops once the ranks run: "DeepSpeedZeroOptimizer is not an Optimizer"',
        fix="use one of DeepSpeed's (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle), or build it in code",
        source="runtime/engine.py:1893",
    ),
    Rule(
        code="scheduler-plateau",
        path="scheduler.type",
        when=lambda c: c.word("scheduler.type") == "ReduceLROnPlateau" and not _wrapped(c),
        message="ReduceLROnPlateau cannot be used from the JSON",
        why="DeepSpeed passes it the constant batch size as its metric, so the learning rate keeps falling",
        fix="use one of DeepSpeed's",
        source="runtime/engine.py:3543",
    ),
    Rule(
        code="scheduler-warmup",
        path=WARMUP,
        when=lambda c: _own(c) and c.has(WARMUP) and c.get(WARMUP) != "auto" and not _count(c.get(WARMUP)),
        message="warmup_num_steps is {value}; allowed: a whole number from 1, without a decimal point",
        why='DeepSpeed stops once the ranks run: "warmup_num_steps must be a positive integer"',
        fix="use 1 for no warm-up",
        edits=lambda c: (
            (Assignment(WARMUP, int(number)),) if (number := c.number(WARMUP) or 0) >= 1 and number % 1 == 0 else ()
        ),
        source="runtime/lr_schedules.py:733",
    ),
    Rule(
        code="scheduler-warmup-type",
        severity="warning",
        path=f"{PARAMS}.warmup_type",
        when=lambda c: (
            c.word(f"{PARAMS}.warmup_type") is not None and c.word(f"{PARAMS}.warmup_type") not in ("log", "linear")
        ),
        message='warmup_type is {value}; allowed: "log" or "linear"',
        why="DeepSpeed warns and uses log",
        fix="use linear",
        source="runtime/lr_schedules.py:746",
    ),
    Rule(
        code="scheduler-total",
        path=TOTAL,
        when=lambda c: _own(c) and _below(c, "total_num_steps", "warmup_num_steps"),
        message=lambda c: f"total_num_steps {{value}} is below warmup_num_steps {c.number(WARMUP)}",
        why="DeepSpeed only warns: the learning rate never reaches its peak",
        fix="set it to the optimizer steps of the entire run",
        source="runtime/lr_schedules.py:826",
    ),
    Rule(
        code="scheduler-peak",
        path=PARAMS,
        when=lambda c: (
            c.word("scheduler.type") == "WarmupDecayLR"
            and c.number("optimizer.params.lr") not in (None, 1e-3)
            and c.number(f"{PARAMS}.warmup_max_lr") is None
        ),
        message=lambda c: f"WarmupDecayLR without warmup_max_lr, but with lr {c.number('optimizer.params.lr')}",
        why="DeepSpeed uses 0.001 as the peak, not the optimizer's learning rate",
        fix="set warmup_max_lr",
        source="runtime/lr_schedules.py:818",
    ),
    Rule(
        code="scheduler-onecycle-momentum",
        severity="warning",
        path=PARAMS,
        when=lambda c: (
            c.word("scheduler.type") == "OneCycle" and c.get(f"{PARAMS}.cycle_momentum") is None and _cycles_betas(c)
        ),
        message="OneCycle without cycle_momentum also cycles the momentum",
        why="DeepSpeed overwrites the optimizer's betas with (0.8 to 0.9, 0.99)",
        fix="set cycle_momentum to false to keep your betas",
        source="runtime/lr_schedules.py:565",
    ),
    Rule(
        code="scheduler-without-optimizer",
        severity="warning",
        path="scheduler",
        when=lambda c: c.has("scheduler.type") and not c.has("optimizer"),
        message="a scheduler without an optimizer",
        why="DeepSpeed builds it only if your code passes an optimizer; Accelerate refuses a scheduler in the JSON "
        "with an optimizer in the code",
        fix="put both into the JSON or both into the code",
        source="runtime/engine.py:681",
    ),
    Rule(
        code="scheduler-size",
        path=f"{PARAMS}.cycle_first_step_size",
        when=lambda c: (
            c.word("scheduler.type") == "OneCycle"
            and (size := c.number(f"{PARAMS}.cycle_first_step_size")) is not None
            and size <= 0
        ),
        message="cycle_first_step_size is {value}; allowed: a number above 0",
        why='DeepSpeed stops once the ranks run: "cycle_first_step_size must be positive"',
        fix="use half of the run's steps, or remove it (the default is 2000)",
        source="runtime/lr_schedules.py:526",
    ),
    Rule(
        code="scheduler-size",
        path=f"{PARAMS}.cycle_second_step_size",
        when=lambda c: (
            c.word("scheduler.type") == "OneCycle" and (c.number(f"{PARAMS}.cycle_second_step_size") or 0) < 0
        ),
        message="cycle_second_step_size is {value}; allowed: a number from 0",
        why='DeepSpeed stops once the ranks run: "cycle_second_step_size must be non-negative"',
        fix="remove it (the default is cycle_first_step_size)",
        source="runtime/lr_schedules.py:528",
    ),
    Rule(
        code="scheduler-size",
        path=f"{PARAMS}.lr_range_test_step_size",
        when=lambda c: (
            c.word("scheduler.type") == "LRRangeTest"
            and c.has(f"{PARAMS}.lr_range_test_step_size")
            and not _count(c.get(f"{PARAMS}.lr_range_test_step_size"))
        ),
        message="lr_range_test_step_size is {value}; allowed: a whole number from 1, without a decimal point",
        why='DeepSpeed stops once the ranks run: "lr_range_test_step_size must be a positive integer"',
        fix="remove it (the default is 2000)",
        source="runtime/lr_schedules.py:370",
    ),
    *(
        Rule(
            code="scheduler-order",
            path=f"{PARAMS}.{upper}",
            when=lambda c, lower=lower, upper=upper: _below(c, upper, lower),
            message=lambda c, lower=lower, upper=upper: (
                f"{upper} {{value}} is below {lower} {c.number(f'{PARAMS}.{lower}')}"
            ),
            why=f"DeepSpeed does not check this: the {what}",
            fix="swap the two values",
            source=source,
        )
        for lower, upper, what, source in (
            ("warmup_min_lr", "warmup_max_lr", "learning rate falls during the warm-up", "runtime/lr_schedules.py:725"),
            ("cycle_min_lr", "cycle_max_lr", "learning rate starts high and falls", "runtime/lr_schedules.py:483"),
        )
    ),
)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def scheduler(c: CheckSubject) -> Iterator[Finding]:
    """Check the scheduler's name and the names of its parameters."""
    name = c.word("scheduler.type")
    if name is None:
        return
    known = c.catalog.schedulers
    if name not in known:
        own = [n for n, s in known.items() if s["own"]]
        better = near(name, own, TYPES) or near(name, known)
        yield Finding(
            code="scheduler-unknown",
            path="scheduler.type",
            message=f"unknown scheduler {name!r}; known: {', '.join(sorted(own))}",
            why=f'DeepSpeed stops once the ranks run: "DeepSpeed does not recognize LR scheduler {name}"',
            fix=f"did you mean {better}?" if better else "use WarmupLR",
            edits=(Assignment("scheduler.type", better),) if better and plainly(name, better) else (),
        )
        return
    if not known[name]["own"] and _wrapped(c):
        return  # see the rule scheduler-torch
    taken = [*known[name]["required"], *known[name]["optional"]]
    for key in c.section(PARAMS):
        if key not in taken:
            path = f"{PARAMS}.{key}"
            yield unknown_parameter(c, path, code="scheduler-param", owner=name, taken=taken, synonyms=SYNONYMS)
    renamed = {near(k, taken, SYNONYMS) for k in c.section(PARAMS) if k not in taken}
    for key in known[name]["required"]:
        if c.has(PARAMS) and not c.has(f"{PARAMS}.{key}") and key not in renamed:
            yield Finding(
                code="scheduler-param-missing",
                path=PARAMS,
                message=f"{name} needs {key}",
                why=f"DeepSpeed stops once the ranks run: \"missing 1 required positional argument: '{key}'\"",
                fix='set it (or "auto" if zerofit or Hugging Face fills it in)',
            )


def scheduler_values(c: CheckSubject) -> Iterator[Finding]:
    """Check the numbers of DeepSpeed's schedulers: not strings, not too low."""
    if not _own(c):
        return
    for key, value in c.section(PARAMS).items():
        path = f"{PARAMS}.{key}"
        if isinstance(value, str) and value != "auto" and key not in ("warmup_type", "warmup_num_steps"):
            meant = as_number(value)
            yield Finding(
                code="number-as-string",
                path=path,
                message=f"{key} is the string {value!r}",
                why="DeepSpeed passes it on unchanged, and the scheduler fails to compute with it",
                fix="write it without quotes",
                edits=(Assignment(path, meant),) if meant is not None else (),
            )
        number = c.number(path)
        if number is not None and ((key in LEARNING_RATES and number < 0) or (key == "total_num_steps" and number < 1)):
            yield Finding(
                code="scheduler-value",
                path=path,
                message=f"{key} is {number}; allowed: a number from {0 if key in LEARNING_RATES else 1}",
                why="DeepSpeed does not check this and trains with a negative learning rate or none",
                fix='correct it, or write "auto" if zerofit or Hugging Face fills it in',
            )
