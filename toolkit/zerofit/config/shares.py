"""Chooses a micro batch for each rank: from a list, or by the ranks' measured speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerofit.config.batch import solve
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run, micro_batches_of
from zerofit.spec.run_folder import Batch, Layout

MOST_TIMES = 2  # a fast rank gets at most this multiple of an equal share; memory is forecast for the multiple


def solve_by_rank(asked: str, given: Mapping[str, Any], dp: int, place: str, where: str, problems: Problems) -> Batch:
    """Return the batch for `--micro-batch-by-rank`.

    With "auto", micro batches are equal until the ranks are measured. A list must agree with the other batch sizes.
    """
    # `micro_batches_of` returns nothing for "auto".
    micros = micro_batches_of(asked)
    if not micros:
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
        "--pipeline": (layout.pp, "stages pass on activations of one size"),
        "--tensor-parallel": (layout.tp, "its ranks process the same samples"),
        "--sequence-parallel": (layout.sp, "its ranks have parts of the same samples"),
        "--expert-parallel": (layout.ep, "ranks exchange equal numbers of tokens"),
    }
    for name, (degree, why) in reasons.items():
        if degree > 1:
            message = f"{place} {run.micro_batch_by_rank} with {name} {degree}: {why}"
            problems.add("layout", message, f"leave {name} at 1, or leave out --micro-batch-by-rank", place)
    if run.micro_batch_by_rank == "auto" and layout.zero_stage == 3:
        message = "at ZeRO stage 3, ranks wait for each other in every layer, so their speed cannot be measured"
        hint = f"use --ds-config zero2, or give the micro batches, like {place} 4,2"
        problems.add("layout", f"{place} auto: {message}", hint, place)


def check_weighted(run: Run, facts: ModelFacts, problems: Problems) -> None:
    """Check that the loss is averaged over samples, as unequal micro batches require."""
    # Ranks with larger micro batches need a larger weight in the average of the gradients. zerofit applies this weight
    # in its own cross entropy losses, and cannot in a loss that the model computes.
    own = (facts.own and run.loss is None) or not facts.gives_logits or facts.experts is not None
    if run.micro_batch_by_rank and (run.loss == "mse" or facts.task == "gan" or own):
        what = "its routers' loss" if facts.experts is not None else "its loss"
        message = f"--micro-batch-by-rank with {run.model}: {what} is averaged over ranks, not over samples"
        problems.add(
            "loss", message, "leave it out: with equal micro batches the result is exact", "--micro-batch-by-rank"
        )
