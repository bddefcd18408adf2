"""A model of many equal layers from simulations of few: every figure is a straight line in their number.

The highest moment of each kind (`reading.Moment`) is a straight line; the highest of all is then taken at the full
number of layers, so that another moment may win there than does with few layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from zerofit.check.dotted import get
from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import find
from zerofit.models.hf import make_config
from zerofit.simulate.target import SimulationTarget

FEWEST = 2  # layers, where nothing calls for more
STEP = 2
WORTH = 0.5  # of all layers: where more of them would be simulated in all, the whole model is
TOLERANCE = 0.005  # of the peak
# DeepSpeed's defaults in elements (runtime/zero/config.py)
MAX_LIVE, SUB_GROUP, BUCKET = 1_000_000_000, 1_000_000_000, 500_000_000


def layer_counts(target: SimulationTarget) -> tuple[int, int, int] | None:
    """Three numbers of layers: one to check at and two to extend from; None where the whole model is to be simulated.

    They are large enough that whatever DeepSpeed limits (live parameters, buckets, groups of the optimizer) has
    reached its limit, if it does so in the whole model.
    """
    total = _layers(target)
    if total is None or target.job.layout.pp > 1:
        return None
    first = max(FEWEST, *(1 + math.ceil(limit) for limit in _limits(target)))
    counts = (first, first + STEP, first + 2 * STEP)
    return counts if sum(counts) <= WORTH * total else None


def with_layers(target: SimulationTarget, count: int) -> SimulationTarget:
    """The target with a model of fewer layers, its DeepSpeed JSON unchanged."""
    run = target.job.run
    fewer = run.model_copy(update={"model_args": {**run.model_args, "num_hidden_layers": count}})
    return replace(target, job=replace(target.job, run=fewer))


def layers_of(target: SimulationTarget) -> int:
    """Layers of the whole model. Only for a target that `layer_counts` has taken."""
    return _layers(target) or 0


def extended(answers: list[dict[str, Any]], counts: tuple[int, ...], total: int) -> tuple[dict[str, Any], float]:
    """What a model with `total` layers answers, from the answers of `rank.simulate` for three numbers of layers.

    Extended from the last two; the second value is by how much the first misses their line, in the moment that wins
    (relative; infinite where it has no such moment).
    """
    check, few, more = answers

    def line(a: float, b: float, at: int = total) -> int:
        return round(a + (b - a) * (at - counts[1]) / (counts[2] - counts[1]))

    found = sorted(_moments(few["moments"], more["moments"], line), key=lambda m: -m["bytes"])
    reserved = line(few["reserved_bytes"], more["reserved_bytes"])
    fragmented = more["reserved_bytes"] / more["moments"][0]["bytes"]
    answer = {
        "phases": [_phase(a, b, found, line) for a, b in zip(few["phases"], more["phases"], strict=True)],
        "moments": found,
        "host": {place: line(few["host"][place], more["host"][place]) for place in few["host"]},
        "nvme_bytes": line(few["nvme_bytes"], more["nvme_bytes"]),
        "reserved_bytes": max(reserved, round(found[0]["bytes"] * fragmented)),
        "groups": more["groups"],
        "sent": _rows(few["sent"], more["sent"], ("count", "bytes"), line),
        "flops": _rows(few["flops"], more["flops"], ("flops",), line),
    }
    return answer, _error(found[0]["key"], check, few, more, lambda a, b: line(a, b, counts[0]))


def _error(key: str, check: dict[str, Any], few: dict[str, Any], more: dict[str, Any], line: Any) -> float:
    at, a, b = ({m["key"]: m["bytes"] for m in answer["moments"]}.get(key) for answer in (check, few, more))
    return line(a, b) / at - 1 if at else math.inf


def _moments(few: list[dict[str, Any]], more: list[dict[str, Any]], line: Any) -> list[dict[str, Any]]:
    known = {moment["key"]: moment for moment in few}
    found = []
    for moment in more:
        if moment["key"] in known:
            before = known[moment["key"]]["breakdown"]
            kinds = dict.fromkeys([*moment["breakdown"], *before])
            parts = {k: line(before.get(k, 0), moment["breakdown"].get(k, 0)) for k in kinds}
            found.append({**moment, "breakdown": parts, "bytes": sum(parts.values())})
    return found


def _phase(few: dict[str, Any], more: dict[str, Any], moments: list[dict[str, Any]], line: Any) -> dict[str, Any]:
    ends = {key: line(few[key], more[key]) for key in ("start_bytes", "end_bytes")}
    highest = (m["bytes"] for m in moments if (m["phase"], m["step"]) == (more["name"], more["step"]))
    return {"name": more["name"], "step": more["step"], **ends, "peak_bytes": max([*highest, *ends.values()])}


def _rows(few: list[dict[str, Any]], more: list[dict[str, Any]], figures: tuple[str, ...], line: Any) -> list[Any]:
    """Rows that agree in everything but their figures, those only one has with what it has there."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in row.items() if name not in figures)

    before = {key(row): row for row in few}
    return [{**row, **{f: line(before.get(key(row), row)[f], row[f]) for f in figures}} for row in more]


def _layers(target: SimulationTarget) -> int | None:
    source = find(target.job.run.model)
    if source.family != "transformers":
        return None
    config = make_config(source, target.inputs, dict(target.job.run.model_args))
    return getattr(config, "num_hidden_layers", None)


def _limits(target: SimulationTarget) -> list[float]:
    """For each limit of DeepSpeed's that the whole model reaches, how many layers reach it."""
    a_layer, all_layers = _elements(target)
    zero, layout = target.job.ds_config.get("zero_optimization", {}), target.job.layout
    facts, ranks = target.job.facts, layout.dp * layout.sp
    limits = []
    if layout.zero_stage in (1, 2):
        # what a partition holds of the largest parameter: all of it, once it is as large as that and a layer
        whole = facts.largest_parameter + a_layer - (facts.parameters - all_layers) / ranks
        limits = [(get(zero, "reduce_bucket_size", BUCKET), 1), (max(0, whole), ranks)]
    if layout.zero_stage == 3:
        limits = [
            (get(zero, "stage3_max_live_parameters", MAX_LIVE) + get(zero, "stage3_prefetch_bucket_size", 0), 1),
            (get(zero, "reduce_bucket_size", BUCKET), 1),
            (get(zero, "sub_group_size", SUB_GROUP), ranks),
        ]
    return [limit * share / a_layer for limit, share in limits if limit * share < all_layers] or [0.0]


def _elements(target: SimulationTarget) -> tuple[int, int]:
    """Parameters of one layer and of all layers."""

    def count(layers: int) -> int:
        run = with_layers(target, layers).job.run
        with torch.device("meta"):
            return parameter_count(build(find(run.model), target.inputs, dict(run.model_args)))

    one = count(2) - count(1)
    return one, one * layers_of(target)
