"""Pipeline stages: where the layers of a model are cut, and which ranks hold them."""

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
    """The layers of one pipeline stage, and the ranks that hold them."""

    stage: int
    ranks: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]  # names of the layers; two parts with DualPipeV
    parameters: int  # of all its layers; with tensor or expert parallelism its ranks divide them


def stages_of(job: Job) -> tuple[PipelineStage, ...]:
    """Return the stages of a job; none where no pipeline cuts it, or a measurement at the start decides."""
    run, layout, stack = job.run, job.layout, job.facts.stack
    if layout.pp == 1 or run.pipeline_balance == "time":
        return ()
    weights, trained = ([getattr(layer, name) for layer in stack] for name in ("parameters", "trained"))
    bounds = cut_layers(weights, trained, pipeline_parts(layout.pp, run.pipeline_schedule))
    return stage_layers(stack, bounds, layout, run.pipeline_schedule)


def stage_layers(
    stack: Sequence[LayerFacts], bounds: Bounds, layout: Layout, schedule: PipelineSchedule
) -> tuple[PipelineStage, ...]:
    """Return what each stage of a layout holds of layers that are cut at these bounds."""
    ranks = list(zip(*ranks_along(layout, "pp"), strict=True))
    found = []
    for stage in range(layout.pp):
        parts = [stack[slice(*bounds[part])] for part in parts_of_stage(stage, layout.pp, schedule)]
        held = {layer.tied or layer.name: layer.parameters for layer in chain(*parts)}
        names = tuple(tuple(layer.name for layer in part) for part in parts)
        found.append(PipelineStage(stage=stage, ranks=ranks[stage], parts=names, parameters=sum(held.values())))
    return tuple(found)


def cut_layers(weights: Sequence[float], trained: Sequence[int], parts: int) -> Bounds:
    """Return the bounds of parts of equal weight; where one would train nothing, of equally many trained parameters.

    DeepSpeed fails in a stage without a trained parameter (runtime/engine.py:2493).
    """
    bounds = balanced(tuple(weights), parts)
    if all(sum(trained[first:last]) for first, last in bounds):
        return bounds
    return balanced(tuple(trained), parts)


@lru_cache(maxsize=256)
def balanced(weights: tuple[float, ...], parts: int) -> Bounds:
    """Cut with the least difference between the heaviest and the lightest part, ties cut as late as possible.

    The dynamic programme of deepspeed.runtime.utils.partition_balanced, over (heaviest, lightest) of the best cut of
    the first layers.
    """
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
    """Return where the last of the parts over the first `end` layers begins, and the heaviest and lightest part."""
    cost, found = math.inf, (0, (math.inf, math.inf))
    for cut in range(end):
        heaviest, lightest = best[cut]
        if heaviest == math.inf:
            continue
        mine = sums[end] - sums[cut]
        if mine > heaviest:  # the innermost loop of a plan: max and min would take twice as long
            heaviest = mine
        if mine < lightest:
            lightest = mine
        if heaviest - lightest <= cost:
            cost, found = heaviest - lightest, (cut, (heaviest, lightest))
    return found
