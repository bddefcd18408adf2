"""Solving the batch identity: global batch = micro batch x gradient accumulation steps x data parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.spec.errors import Problems
from zerofit.spec.layout import Batch

DEFAULT_MICRO = 8  # samples; a size that small models fill a device with and that large ones lower


def solve(given: Mapping[str, Any], dp: int, pp: int, where: str, problems: Problems) -> Batch:
    """The batch that the given ones of micro_batch, gradient_accumulation_steps and global_batch determine.

    What is not given is chosen: accumulation 1 (one micro batch a stage under pipeline parallelism) and the largest
    micro batch up to DEFAULT_MICRO that divides. What does not multiply out is noted in `problems`.
    """
    micro, steps, total = (given.get(k) for k in ("micro_batch", "gradient_accumulation_steps", "global_batch"))
    if total is None:
        return Batch(micro=micro or DEFAULT_MICRO, accumulation=steps or pp, dp=dp)
    if micro is None and steps is not None:
        micro = max(1, total // (dp * steps))
    elif micro is None:
        share = total // dp  # samples a data parallel rank takes in one step
        fit = [m for m in range(1, DEFAULT_MICRO + 1) if share and share % m == 0 and share // m >= pp]
        micro = max(fit, default=1)
    if steps is None:
        steps = max(1, total // (dp * micro))
    batch = Batch(micro=micro, accumulation=steps, dp=dp)
    if batch.total != total:
        problems.add("batch-size", _message(batch, total), _hint(given, batch, total), where)
    return batch


def _message(batch: Batch, total: int) -> str:
    return (
        f"global batch {total} is not micro batch {batch.micro} x gradient accumulation steps {batch.accumulation} "
        f"x data parallel degree {batch.dp} = {batch.total}"
    )


def _hint(given: Mapping[str, Any], batch: Batch, total: int) -> str:
    near = sorted({max(1, round(total / (batch.micro * batch.dp))), max(1, total // (batch.micro * batch.dp))})
    totals = " or ".join(str(batch.micro * batch.dp * n) for n in near)
    if total % batch.dp:
        below = total // batch.dp * batch.dp
        near_totals = f"{below} or {below + batch.dp}" if below else str(batch.dp)
        return f"--global-batch must be a multiple of the data parallel degree {batch.dp}: take {near_totals}"
    if total % (batch.micro * batch.dp):
        share = total // batch.dp
        micros = [m for m in range(1, share + 1) if share % m == 0][:8]
        return f"take --global-batch {totals}, or a --micro-batch that divides {share}: {', '.join(map(str, micros))}"
    return f"take --gradient-accumulation-steps {total // (batch.micro * batch.dp)}, or --global-batch {batch.total}"
