"""The name of a learning rate scheduler, and the names and values of its parameters."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.check.catalog import names
from zerofit.check.edit import Assignment
from zerofit.check.finding import Finding, as_number, near, plainly, unknown_parameter
from zerofit.check.rules.terms import optimizer_is_wrapped, scheduler_is_deepspeeds
from zerofit.check.subject import CheckSubject

PARAMS = "scheduler.params"
LEARNING_RATES = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")


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
    unknown = [key for key in c.section(PARAMS) if key not in allowed]
    for key in unknown:
        path = f"{PARAMS}.{key}"
        yield unknown_parameter(c, path, code="scheduler-param", owner=name, allowed=allowed, synonyms=synonyms)
    # A misspelled parameter is not missing too.
    misspelled = {near(key, allowed, synonyms) for key in unknown}
    for key in known[name]["required"]:
        if c.has(PARAMS) and not c.has(f"{PARAMS}.{key}") and key not in misspelled:
            yield Finding(
                code="scheduler-param-missing",
                path=PARAMS,
                message=f"{name} needs {key}",
                why="DeepSpeed stops after the ranks have started: "
                f"\"missing 1 required positional argument: '{key}'\"",
                fix='set it (or "auto" if zerofit or Hugging Face fills it in)',
            )


def scheduler_values(c: CheckSubject) -> Iterator[Finding]:
    """Check the numeric parameters of DeepSpeed's schedulers: no strings, and not too low."""
    if not scheduler_is_deepspeeds(c):
        return
    for key, value in c.section(PARAMS).items():
        path = f"{PARAMS}.{key}"
        if isinstance(value, str) and value != "auto" and key not in ("warmup_type", "warmup_num_steps"):
            meant = as_number(value)
            yield Finding(
                code="number-as-string",
                path=path,
                message=f"{key} is the string {value!r}",
                why="DeepSpeed passes the string to the scheduler, which fails to compute with it",
                fix="write it without quotes",
                edits=(Assignment(path, meant),) if meant is not None else (),
            )
        number = c.number(path)
        if number is not None and ((key in LEARNING_RATES and number < 0) or (key == "total_num_steps" and number < 1)):
            yield Finding(
                code="scheduler-value",
                path=path,
                message=f"{key} is {number}; allowed: a number of at least {0 if key in LEARNING_RATES else 1}",
                why="DeepSpeed does not check this and trains with a negative learning rate or none",
                fix='correct it, or write "auto" if zerofit or Hugging Face fills it in',
            )
