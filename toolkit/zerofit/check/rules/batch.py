"""The three batch sizes: whether they agree with each other and with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.check.finding import Finding
from zerofit.check.subject import MICRO, STEPS, TOTAL, CheckSubject


def _size(c: CheckSubject, path: str) -> int | None:
    """Return the batch size at a path if it is a positive integer (8.0 too), else None."""
    value = c.number(path)
    return int(value) if value and value > 0 and value == int(value) else None


def batch(c: CheckSubject) -> Iterator[Finding]:
    """Check that the three batch sizes agree with each other and with the number of ranks."""
    if all(c.get(path) is None for path in (TOTAL, MICRO)):
        # These programs set missing sizes themselves.
        if c.setting.reader not in ("lightning", "zerofit", "neox"):
            yield Finding(
                code="batch-missing",
                path=next((path for path in (TOTAL, MICRO, STEPS) if c.has(path)), ""),
                message=f"neither {TOTAL} nor {MICRO} is given",
                why='DeepSpeed stops: "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"',
                fix='set one of them ("auto" for the Trainer or Accelerate, which fill in only keys that the file has)',
            )
        return
    # DeepSpeed needs total = micro * steps * data parallel degree, and computes a size that is missing.
    total, micro, steps = (_size(c, path) for path in (TOTAL, MICRO, STEPS))
    if total and c.tensor_parallel > 1:
        degree = c.tensor_parallel
        yield Finding(
            code="batch-tensor-parallel",
            path=TOTAL,
            message=f"{TOTAL} {total} with tensor_parallel.autotp_size {degree}",
            why=f"DeepSpeed counts all ranks as data parallel: with {total}, a step has only {total}/{degree} samples. "
            "If the file sets that number, DeepSpeed refuses it",
            fix=f"remove it, and set {MICRO} and {STEPS}",
        )
    elif total and c.ranks:
        dp = max(1, c.ranks // (c.pipeline * c.sequence_parallel))
        product = (micro or 1) * (steps or 1) * dp
        # If a size is missing, DeepSpeed computes it, which needs a division without remainder.
        wrong = total != product if micro and steps else total % product != 0
        if wrong:
            yield _identity(total, micro or 0, steps or 0, dp)
    elif total and total % ((micro or 1) * (steps or 1)):
        yield _identity(total, micro or 1, steps or 1, None)
    elif total and micro and c.setting.reader != "zerofit":  # zerofit chooses the number of ranks itself
        allowed = _data_degrees(total, micro, steps, fixed=steps is not None)
        yield Finding(
            code="batch-ranks",
            severity="warning",
            path=TOTAL,
            message=f"{TOTAL} {total} and micro batch {micro}{f' x {steps} steps' if steps else ''} "
            f"determine the number of data parallel ranks: {allowed}",
            why='with another number DeepSpeed stops: "Check batch related parameters"',
            fix="check it with --ranks N, or remove one of the sizes",
        )


def ranks_of_batch(c: CheckSubject) -> str:
    """Return the data parallel degrees that the batch allows, in words.

    Returns "" if the number of ranks is known. Raises UnclearValue if a batch size is wrong.
    """
    total, micro, steps = (_size(c, path) for path in (TOTAL, MICRO, STEPS))
    divided = total and not micro and not c.ranks and c.tensor_parallel <= 1 and total % (steps or 1) == 0
    return _data_degrees(total, 1, steps, fixed=False) if total and divided and c.setting.reader != "zerofit" else ""


def _data_degrees(total: int, micro: int, steps: int | None, *, fixed: bool) -> str:
    """Return the allowed data parallel degrees in words; the largest one if steps are fixed."""
    most = total // (micro * (steps or 1))
    return str(most) if fixed or most == 1 else f"{most} or a divisor of it"


def _identity(total: int, micro: int, steps: int, dp: int | None) -> Finding:
    """Return the finding about a total that is not the product of the known sizes."""
    product = (micro or 1) * (steps or 1) * (dp or 1)
    complete = micro and steps and dp
    # With a factor unknown, any multiple of the known ones is possible. The nearest one changes the total least.
    nearest = product if complete else max(product, round(total / product) * product)
    factors = [f"micro batch {micro}" if micro else "", f"gradient accumulation steps {steps}" if steps else ""]
    factors.append(f"data parallel degree {dp}" if dp else "")
    words = " x ".join(factor for factor in factors if factor)
    wrong = f"is not {words} = {product}" if complete else f"is not a multiple of {words}"
    return Finding(
        code="batch-identity",
        path=TOTAL,
        message=f"{TOTAL} {total} {wrong}",
        why='DeepSpeed stops after the ranks have started: "Check batch related parameters" or "... has to be greater '
        'than 0"',
        fix=f"use {TOTAL} {nearest}, or remove one of the three",
    )
