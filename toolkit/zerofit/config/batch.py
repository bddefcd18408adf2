"""Global batch = micro batch x gradient accumulation steps x data parallel degree.

Ranks of different speed may have different micro batches: from a list, or by measured speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run, micro_batches_of
from zerofit.spec.run_folder import Batch, Layout
from zerofit.spec.units import counted

MOST_NAMED = 4096  # largest micro batch that a hint suggests
DEFAULT_MICRO = 8  # samples: fills a device with a small model; a large model needs fewer
MOST_TIMES = 2  # a fast rank gets at most this multiple of an equal share; memory is forecast for the multiple


def solve(given: Mapping[str, Any], dp: int, least: int, where: str, problems: Problems) -> Batch:
    """Return the batch.

    `given` has any of micro_batch, gradient_accumulation_steps and global_batch. Missing values are chosen: at least
    `least` accumulation steps (for a pipeline), and the largest micro batch up to DEFAULT_MICRO that divides the batch.
    A problem is added if the given sizes contradict each other.
    """
    micro, steps, total = (given.get(k) for k in ("micro_batch", "gradient_accumulation_steps", "global_batch"))
    if total is None:
        return Batch(micro=micro or DEFAULT_MICRO, accumulation=steps or least, dp=dp)
    # global batch = micro batch x accumulation steps x dp: the missing sizes follow from the given ones
    if micro is None and steps is not None:
        micro = max(1, total // (dp * steps))
    elif micro is None:
        share = total // dp  # samples per data parallel rank and step
        fit = [m for m in range(1, DEFAULT_MICRO + 1) if share and share % m == 0 and share // m >= least]
        micro = max(fit, default=1)
    # A floor division may leave a rest. The comparison with `total` below then reports the mismatch.
    if steps is None:
        steps = max(1, total // (dp * micro))
    batch = Batch(micro=micro, accumulation=steps, dp=dp)
    if batch.total != total:
        message = f"global batch {total} is not micro batch {micro} x gradient accumulation steps {steps}"
        message += f" x data parallel degree {dp} = {batch.total}"
        problems.add("batch-size", message, _hint(batch, total), where)
    return batch


def _hint(batch: Batch, total: int) -> str:
    each, dp = batch.micro * batch.dp, batch.dp  # samples in one forward of all ranks
    if total % dp:
        below = total // dp * dp
        near = f"{below} or {below + dp}" if below else str(dp)
        return f"--global-batch must be a multiple of the data parallel degree {dp}; use {near}"
    if total % each:
        # Both candidates are multiples of the samples in one forward. If the nearest one is below, they are equal.
        totals = " or ".join(str(each * n) for n in sorted({max(1, round(total / each)), max(1, total // each)}))
        share = total // dp
        micros = [m for m in range(1, min(share, MOST_NAMED) + 1) if share % m == 0][:8]
        return f"use --global-batch {totals}, or a --micro-batch that divides {share}: {', '.join(map(str, micros))}"
    return f"use --gradient-accumulation-steps {total // each}, or --global-batch {batch.total}"


def regroup(batch: Batch, inner: int, ranks: int) -> tuple[int, Batch] | None:
    """Return the number of ranks to use for the same global batch, and their batch sizes.

    There are at most `ranks`. `inner`: the tensor x pipeline x sequence degree, which does not change. The micro batch
    does not grow, since memory was planned for it; gradient accumulation compensates. Return None if not even one data
    parallel rank is left.
    """
    # the most data parallel ranks that divide the global batch
    for dp in range(ranks // inner, 0, -1):
        if batch.total % dp == 0:
            share = batch.total // dp
            micro = max(m for m in range(1, min(batch.micro, share) + 1) if share % m == 0)
            return dp * inner, Batch(micro=micro, accumulation=share // micro, dp=dp)
    return None


def shown(batch: Batch) -> str:
    """Describe a batch: "3 data parallel ranks x micro batch 4 x 2 ... = 24 samples per step"."""
    parts = f"{counted(batch.dp, 'data parallel rank')} x micro batch {_sizes(batch)} x "
    parts += counted(batch.accumulation, "accumulation step")
    return f"{parts} = {batch.total} samples per step"


def brief(batch: Batch) -> str:
    """Describe a batch as plans do: "micro batch 4 x 2, 24 samples per step"."""
    return f"micro batch {_sizes(batch)} x {batch.accumulation}, {counted(batch.total, 'sample')} per step"


def _sizes(batch: Batch) -> str:
    return ", ".join(map(str, batch.by_rank)) or str(batch.micro)


def solve_by_rank(asked: str, given: Mapping[str, Any], dp: int, place: str, where: str, problems: Problems) -> Batch:
    """Return the batch for `--micro-batch-by-rank`.

    With "auto", micro batches are equal until the ranks are measured. A list must agree with the other batch sizes.
    """
    micros = micro_batches_of(asked)
    if not micros:
        # until the speeds are known, memory is forecast for the largest micro batch that a rank may get
        batch = solve(given, dp, 1, where, problems)
        return replace(batch, by_rank=(batch.micro,) * dp, limit=MOST_TIMES * batch.micro if dp > 1 else batch.micro)
    if len(micros) != dp:
        message = f"{len(micros)} micro batches ({asked}) for {dp} data parallel rank{'s' if dp > 1 else ''}"
        problems.add("batch-size", message, f"give {dp} micro batches, or use --ranks {len(micros)}", place)
    micro, steps, total = (given.get(k) for k in ("micro_batch", "gradient_accumulation_steps", "global_batch"))
    if micro is not None and micro != max(micros):
        message = f"micro batch {micro} together with {asked}, which sets it for each rank"
        problems.add("conflict", message, f"leave it out, or use {max(micros)}, the largest micro batch", where)
    if steps is None:
        steps = max(1, (total or 0) // sum(micros))
    batch = Batch(micro=max(micros), accumulation=steps, dp=dp, by_rank=micros)
    if total not in (None, batch.total):
        message = f"global batch {total} is not ({'+'.join(map(str, micros))}) x {steps} accumulation steps"
        hint = f"use --global-batch {batch.total}, or another multiple of {sum(micros)}"
        problems.add("batch-size", f"{message} = {batch.total}", hint, where)
    return batch


def shared_out(samples: int, speeds: Sequence[float], most: int) -> tuple[int, ...]:
    """Split `samples` into shares from 1 to `most`, in proportion to the speeds.

    Each sample goes to the rank that would finish it first, which minimizes the time of the slowest rank.
    """
    shares = [1] * len(speeds)  # samples of each rank; the rest is dealt out one by one
    for _ in range(samples - len(speeds)):
        free = [rank for rank, share in enumerate(shares) if share < most]
        shares[min(free, key=lambda rank: (shares[rank] + 1) / speeds[rank])] += 1
    return tuple(shares)


def check_shares(run: Run, layout: Layout, problems: Problems) -> None:
    """Check that ranks with different micro batches are all data parallel."""
    place = "--micro-batch-by-rank"
    if run.micro_batch_by_rank is None:
        return
    reasons = {
        "--pipeline": "stages pass on activations of one size",
        "--tensor-parallel": "its ranks process the same samples",
        "--sequence-parallel": "its ranks have parts of the same samples",
        "--expert-parallel": "ranks exchange equal numbers of tokens",
    }
    for name, degree in layout.by_flag.items():
        message = f"{place} {run.micro_batch_by_rank} with {name} {degree}: {reasons[name]}"
        problems.add("layout", message, f"leave {name} at 1, or leave out --micro-batch-by-rank", place)
    if run.micro_batch_by_rank == "auto" and layout.zero_stage == 3:
        message = "at ZeRO stage 3, ranks wait for each other in every layer, so their speed cannot be measured"
        hint = f"use --ds-config zero2, or give the micro batches, like {place} 4,2"
        problems.add("layout", f"{place} auto: {message}", hint, place)


def check_weighted(run: Run, facts: ModelFacts, problems: Problems) -> None:
    """Check that the loss is averaged over samples, as unequal micro batches require."""
    own = (facts.own and run.loss is None) or not facts.gives_logits or facts.experts is not None
    if run.micro_batch_by_rank and (run.loss == "mse" or facts.task == "gan" or own):
        what = "its routers' loss" if facts.experts is not None else "its loss"
        message = f"--micro-batch-by-rank with {run.model}: {what} is averaged over ranks, not over samples"
        hint = "leave it out: with equal micro batches the result is exact"
        problems.add("loss", message, hint, "--micro-batch-by-rank")
