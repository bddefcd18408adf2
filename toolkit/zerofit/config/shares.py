"""Micro batches of each rank's own: a list, or a split of their sum in proportion to what ranks were measured to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerofit.config.batch import solve
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run, micro_batches_of
from zerofit.spec.run_folder import Batch, Layout

MOST_TIMES = 2  # as many samples as an equal share, that a fast rank takes at the most: memory is forecast for it


def solve_by_rank(asked: str, given: Mapping[str, Any], dp: int, place: str, where: str, problems: Problems) -> Batch:
    """Return the batch with a micro batch for each data parallel rank, as `--micro-batch-by-rank` has it.

    "auto": equal ones, until a measurement shares their sum out. A list must agree with the other sizes.
    """
    micros = micro_batches_of(asked)
    if not micros:
        batch = solve(given, dp, 1, where, problems)
        return replace(batch, by_rank=(batch.micro,) * dp, limit=MOST_TIMES * batch.micro if dp > 1 else batch.micro)
    if len(micros) != dp:
        message = f"{len(micros)} micro batches ({asked}) for {dp} data parallel rank{'s' if dp > 1 else ''}"
        problems.add("batch-size", message, f"name {dp} of them, or take --ranks {len(micros)}", place)
    micro, steps, total = (given.get(k) for k in ("micro_batch", "gradient_accumulation_steps", "global_batch"))
    if micro is not None and micro != max(micros):
        message = f"micro batch {micro} beside {asked}: each rank has its own"
        problems.add("conflict", message, f"leave it out, or take {max(micros)}, the largest of them", where)
    if steps is None:
        steps = max(1, (total or 0) // sum(micros))
    batch = Batch(micro=max(micros), accumulation=steps, dp=dp, by_rank=micros)
    if total not in (None, batch.total):
        message = f"global batch {total} is not ({'+'.join(map(str, micros))}) x {steps} accumulation steps"
        hint = f"take --global-batch {batch.total}, or another multiple of {sum(micros)}"
        problems.add("batch-size", f"{message} = {batch.total}", hint, where)
    return batch


def shared_out(samples: int, speeds: Sequence[float], most: int) -> tuple[int, ...]:
    """Return whole numbers of samples in proportion to the speeds: at least 1, at most `most` each; they add up.

    One sample at a time goes to the rank that would be done with it first, so that the slowest is as fast as can be.
    """
    shares = [1] * len(speeds)
    for _ in range(samples - len(speeds)):
        free = [rank for rank, share in enumerate(shares) if share < most]
        shares[min(free, key=lambda rank: (shares[rank] + 1) / speeds[rank])] += 1
    return tuple(shares)


def check_shares(run: Run, layout: Layout, problems: Problems) -> None:
    """Check the layout against micro batches of each rank's own: data parallel ranks alone can have them."""
    place = "--micro-batch-by-rank"
    if run.micro_batch_by_rank is None:
        return
    reasons = {
        "--pipeline": (layout.pp, "stages hand on activations of one size"),
        "--tensor-parallel": (layout.tp, "its ranks compute the same samples"),
        "--sequence-parallel": (layout.sp, "its ranks hold parts of the same samples"),
        "--expert-parallel": (layout.ep, "ranks exchange as many tokens as they get"),
    }
    for name, (degree, why) in reasons.items():
        if degree > 1:
            message = f"{place} {run.micro_batch_by_rank} beside {name} {degree}: {why}"
            problems.add("layout", message, f"leave {name} at 1, or leave it out", place)
    if run.micro_batch_by_rank == "auto" and layout.zero_stage == 3:
        message = "at ZeRO stage 3 ranks wait for each other in every layer, so that their own speed cannot be measured"
        hint = f"take --ds-config zero2, or name the micro batches, like {place} 4,2"
        problems.add("layout", f"{place} auto: {message}", hint, place)


def check_weighted(run: Run, facts: ModelFacts, problems: Problems) -> None:
    """Check that the loss is one that is weighted by targets, which makes unequal micro batches exact."""
    own = (facts.own and run.loss is None) or not facts.gives_logits or facts.experts is not None
    if run.micro_batch_by_rank and (run.loss == "mse" or facts.task == "gan" or own):
        what = "its routers' loss" if facts.experts is not None else "its loss"
        message = (
            f"--micro-batch-by-rank with {run.model}: {what} is averaged over ranks, however many samples each has"
        )
        problems.add("loss", message, "leave it out: equal micro batches are exact", "--micro-batch-by-rank")
