"""Pipeline stages: how the layers of a model are split, and the ranks of each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

from zerofit.spec.mesh import parts_of_stage, pipeline_parts, ranks_along
from zerofit.spec.model_facts import LayerFacts
from zerofit.spec.run import PipelineSchedule
from zerofit.spec.run_folder import Job, Layout

Bounds = tuple[tuple[int, int], ...]  # first and last layer (exclusive) of each part


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """The layers and ranks of one pipeline stage."""

    stage: int
    ranks: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]  # names of the layers; two parts with DualPipeV
    parameters: int  # of all its layers; tensor or expert parallelism splits them over its ranks


def stages_of(job: Job) -> tuple[PipelineStage, ...]:
    """Return the stages of a job; () without a pipeline, or if time balances it."""
    run, layout, stack = job.run, job.layout, job.facts.stack
    if layout.pp == 1 or run.pipeline_balance == "time":
        return ()
    weights, trained = ([getattr(layer, name) for layer in stack] for name in ("parameters", "trained"))
    bounds = cut_layers(weights, trained, pipeline_parts(layout.pp, run.pipeline_schedule))
    return stage_layers(stack, bounds, layout, run.pipeline_schedule)


def stage_layers(
    stack: Sequence[LayerFacts], bounds: Bounds, layout: Layout, schedule: PipelineSchedule
) -> tuple[PipelineStage, ...]:
    """Return the stages for the layers `stack`, split at `bounds`."""
    ranks = list(zip(*ranks_along(layout, "pp"), strict=True))
    found = []
    for stage in range(layout.pp):
        parts = [stack[slice(*bounds[part])] for part in parts_of_stage(stage, layout.pp, schedule)]
        counts = {layer.tied or layer.name: layer.parameters for layer in chain(*parts)}  # tied layers count once
        names = tuple(tuple(layer.name for layer in part) for part in parts)
        found.append(PipelineStage(stage=stage, ranks=ranks[stage], parts=names, parameters=sum(counts.values())))
    return tuple(found)


def cut_layers(weights: Sequence[float], trained: Sequence[int], parts: int) -> Bounds:
    """Return the bounds of parts of similar weight, each with trained parameters."""
    bounds = balanced(tuple(weights), parts)
    if all(sum(trained[first:last]) for first, last in bounds):
        return bounds
    # DeepSpeed fails in a stage without trained parameters (runtime/engine.py:2493), so their number is balanced
    return balanced(tuple(trained), parts)


# The split of n layers into k parts, as in deepspeed.runtime.utils.partition_balanced. For each number of parts and
# each end, the best split of the layers before the end is kept:
#
#   best[parts][end] = (heaviest part, lightest part), least difference first
#   best[parts][end] = min over cut < end of best[parts - 1][cut] joined with weight(cut .. end)
#
# It takes k * n^2 steps. Of equal splits the latest cut counts, so that both programs choose the same stages.


@lru_cache(maxsize=256)
def balanced(weights: tuple[float, ...], parts: int) -> Bounds:
    """Return the bounds of parts with the least difference between heaviest and lightest."""
    sums = list(accumulate(weights, initial=0))
    best: list[tuple[float, float]] = [(0, math.inf), *[(math.inf, math.inf)] * len(weights)]
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        found = [_best_cut(best, sums, end) if end >= part else (0, (math.inf, math.inf)) for end in range(len(sums))]
        cuts.append([cut for cut, _ in found])
        best = [value for _, value in found]
    bounds, end = [], len(weights)
    for cut in reversed(cuts):
        bounds.append((cut[end], end))
        end = cut[end]
    return tuple(reversed(bounds))


def _best_cut(best: Sequence[tuple[float, float]], sums: Sequence[float], end: int) -> tuple[int, tuple[float, float]]:
    """Return the first layer of the last part in the best split of the first `end` layers.

    Also return the weights of the split's heaviest and lightest parts. `best[n]`: these weights for the first n layers.
    """
    cost, found = math.inf, (0, (math.inf, math.inf))
    for cut in range(end):
        heaviest, lightest = best[cut]
        if heaviest == math.inf:
            continue
        weight = sums[end] - sums[cut]
        if weight > heaviest:  # plan's innermost loop: max and min are twice as slow
            heaviest = weight
        if weight < lightest:
            lightest = weight
        if heaviest - lightest <= cost:
            cost, found = heaviest - lightest, (cut, (heaviest, lightest))
    return found
