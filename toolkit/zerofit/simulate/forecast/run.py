"""Simulate jobs: with all layers, or with a few layers and a checked extrapolation.

If a model has many equal layers, all figures are linear in the number of layers. Three peaks of each kind are linear,
too: the first, the last and the highest (`record.KindPeak`). Each of them is extrapolated to the full number of layers.
The highest of all peaks is chosen only then: with few layers, the highest peak may be at another moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

import torch

from zerofit.check.dotted import get
from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import ModelError, find, source_of
from zerofit.models.depth import depths, leading, part, with_depths
from zerofit.models.hf_config import make_config
from zerofit.models.partial import differ_by_layer
from zerofit.simulate.forecast.limits import SUB_GROUP, limits, sub_groups
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.memory.host import Line, extended, highest
from zerofit.simulate.record import (
    CollectiveCalls,
    HostMoment,
    KindPeak,
    PhaseFlops,
    RankPhase,
    RankRecord,
    SimulationTarget,
)
from zerofit.spec.errors import Problem

Row = TypeVar("Row", CollectiveCalls, PhaseFlops)

FEWEST = 2  # layers, if nothing needs more
STEP = 2
WORTH = 0.5  # share of all layers: if the three runs have more layers together, the full model is simulated
TOLERANCE = 0.005  # relative error of the peak


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """A simulated rank, with its record."""

    target: SimulationTarget
    record: RankRecord
    layers: tuple[int, ...] = ()  # numbers of layers that were simulated, the first for the check; () if all were
    check_error: float = 0.0  # largest relative error of the extrapolation at the first number of layers


def simulate_ranks(
    targets: Sequence[SimulationTarget], show: Callable[[str], None], *, exact: bool = False
) -> list[SimulatedRank | Problem]:
    """Simulate each target. If a target cannot be simulated, its result is a Problem.

    A large model is extrapolated from a few layers unless `exact`. If its peak is not linear in the number of
    layers (error above TOLERANCE), all layers are simulated.
    """
    counts = [None if exact else layer_counts(target) for target in targets]
    wanted = [[_with_layers(t, n) for n in c] if c else [t] for t, c in zip(targets, counts, strict=True)]
    outcomes = iter(simulate_all([one for several in wanted for one in several], show))
    return [
        _simulated(target, count, [next(outcomes) for _ in several], show)
        for target, count, several in zip(targets, counts, wanted, strict=True)
    ]


def heaviest_of(
    ranks: Sequence[SimulatedRank | Problem],
    simulate_more: Callable[[list[SimulationTarget]], Sequence[SimulatedRank | Problem]],
) -> list[SimulatedRank | Problem]:
    """Replace each rank by the one with the highest peak in its data parallel group.

    If that one cannot be simulated, the rank stays.
    """
    found = list(ranks)
    heavier = [
        (n, replace(one.target, rank=one.record.heavier_rank))
        for n, one in enumerate(found)
        if isinstance(one, SimulatedRank) and one.record.heavier_rank is not None
    ]
    more = simulate_more([target for _, target in heavier]) if heavier else []
    for (n, _), other in zip(heavier, more, strict=True):
        one = found[n]
        if isinstance(one, SimulatedRank) and isinstance(other, SimulatedRank):
            found[n] = max(one, other, key=lambda rank: rank.record.needs)
    return found


def _simulated(
    target: SimulationTarget,
    counts: tuple[int, ...] | None,
    outcomes: Sequence[RankRecord | Problem],
    show: Callable[[str], None],
) -> SimulatedRank | Problem:
    records = []
    for outcome in outcomes:
        if isinstance(outcome, Problem):
            return outcome
        records.append(outcome)
    if counts is None:
        return SimulatedRank(target=target, record=replace(records[0], peaks=_highest(records[0].peaks)))
    extrapolated = _extrapolated(records, counts, _layers(target), _sub_groups(target))
    if extrapolated is None or abs(extrapolated[1]) > TOLERANCE:
        return simulate_ranks([target], show, exact=True)[0]
    return SimulatedRank(target=target, record=extrapolated[0], layers=counts, check_error=extrapolated[1])


def layer_counts(target: SimulationTarget) -> tuple[int, int, int] | None:
    """Return three layer counts: one to check the extrapolation, two to extrapolate from.

    Each count includes the layers before the equal layers. Return None if the full model must be simulated.
    """
    # E.g. if layers differ in their parameters, or if ranks divide flat groups (stages 1 and 2): a rank's parameters
    # then depend on the number of layers.
    total, before, layout = _layers(target), _leading(target), target.job.layout
    if layout.pp > 1 or differ_by_layer(target.job.run.partial, total):
        return None
    if layout.zero_stage in (1, 2) and layout.dp * layout.sp > 1:
        return None
    # the fewest layers of three runs: before + 2, before + 4 and before + 6
    if 3 * (before + FEWEST) + 3 * STEP > WORTH * total:
        return None
    try:
        counts = _worthwhile(target, total, before)
        return counts if counts and _grows_evenly(target, counts, total) else None
    except ModelError:  # other values of the config depend on the number of layers
        return None


def _grows_evenly(target: SimulationTarget, counts: tuple[int, int, int], total: int) -> bool:
    source, sizes = replace(source_of(target.job.run), pretrained=None), list[int]()
    for count in counts:
        with torch.device("meta"):
            args = dict(_with_layers(target, count).job.run.model_args)
            sizes.append(parameter_count(build(source, target.inputs, args)))
    steps = pairwise(zip((*counts, total), (*sizes, target.job.facts.parameters), strict=True))
    return len({Fraction(more - few, m - n) for (n, few), (m, more) in steps}) == 1


def _worthwhile(target: SimulationTarget, total: int, before: int) -> tuple[int, int, int] | None:
    """Return the smallest counts for `layer_counts`; None if they exceed WORTH * `total` layers."""
    # With each count, DeepSpeed must reach every limit that it reaches with the full model (live parameters, buckets,
    # optimizer groups). And the largest sub-group of stage 3 must be that of the full model, since a sub-group can end
    # within a layer.
    few, more = (_with_layers(target, before + n) for n in (1, 2))
    first = before + max([FEWEST, *(1 + math.ceil(limit) for limit in limits(target, few, more, total - before))])
    groups, counts = _sub_groups(target), list[int]()
    full = get(target.job.ds_config, "zero_optimization.sub_group_size", SUB_GROUP)
    largest = [max((part for part in groups(count) if part >= full), default=0) for count in range(total + 1)]
    for count in range(first, total):
        if largest[count] == largest[total] and (not counts or count >= counts[-1] + STEP):
            counts.append(count)
    chosen = tuple(counts[:3])
    return chosen if len(chosen) == 3 and sum(chosen) <= WORTH * total else None


def _sub_groups(target: SimulationTarget) -> Callable[[int], list[int]]:
    """Return a function: number of layers -> a rank's elements in each of stage 3's sub-groups.

    At other stages the function returns [].
    """
    if target.job.layout.zero_stage != 3:
        return lambda count: []
    before = _leading(target)
    of_equal = sub_groups(*(_with_layers(target, before + n) for n in (1, 2)))
    return lambda count: of_equal(count - before)


def _with_layers(target: SimulationTarget, count: int) -> SimulationTarget:
    """Return the target with fewer layers and the same DeepSpeed JSON.

    In an encoder-decoder model, the part with more layers is cut. If both have equally many, both are cut.
    """
    run, deep = target.job.run, _depths(target)
    wanted = {path: count for path, layers in deep.items() if layers == max(deep.values())}
    fewer = run.model_copy(update={"model_args": with_depths(run.model_args, wanted)})
    return replace(target, job=replace(target.job, run=fewer))


# Three simulations with n0 < n1 < n2 layers give a forecast for n layers:
#
#   figure(n) = figure(n1) + (figure(n2) - figure(n1)) * (n - n1) / (n2 - n1)
#
# The same line at n0 is compared with the simulation of n0 layers. If they differ by more than TOLERANCE, the figure is
# not linear and the full model is simulated. Reserved bytes are not linear, since they grow in steps of a segment. So
# the bytes above the allocated peak are extrapolated with the smaller slope.
def _extrapolated(
    records: list[RankRecord], counts: tuple[int, ...], total: int, groups: Callable[[int], list[int]]
) -> tuple[RankRecord, float] | None:
    """Return the record for `total` layers, and the error of the extrapolation.

    The error is the largest relative error at the first layer count among the highest peak, host memory and bytes on
    NVMe. If there is no peak to compare, the error is infinite. If host memory is not linear, the result is None.
    """
    first, few, more = records

    def line(a: float, b: float, at: int = total) -> int:
        return round(a + (b - a) * (at - counts[1]) / (counts[2] - counts[1]))

    def back(a: float, b: float) -> int:
        return line(a, b, counts[0])

    def groups_with(count: int) -> list[list[int]]:
        return [groups(counts[1]), groups(counts[2]), groups(count)]

    peaks = sorted(_peaks(few.peaks, more.peaks, line), key=lambda peak: -peak.bytes)
    if len(groups(total)) > len(groups(counts[0])):
        # In the first step, stage 3 allocates the states sub-group by sub-group. The highest moment of this step
        # depends on the size of the last sub-group, which is not linear in the layers. In every later step all states
        # exist, so the first step's peak cannot be above theirs.
        later = max((peak.bytes for peak in peaks if peak.phase == "step" and peak.step > 0), default=math.inf)
        peaks = [peak for peak in peaks if peak.phase != "step" or peak.step > 0 or peak.bytes <= later]
    moments = _moments(few, more, line, groups_with(total))
    checked = _moments(few, more, back, groups_with(counts[0]))
    if moments is None or checked is None:
        return None
    record = RankRecord(
        phases=[_phase(a, b, peaks, line) for a, b in zip(few.phases, more.phases, strict=True)],
        peaks=_highest(peaks),
        host=highest(moments),
        host_phases={phase: moment.total_bytes for phase, moment in moments.items()},
        kept={kind: line(few.kept[kind], more.kept[kind]) for kind in few.kept},
        nvme_bytes=line(few.nvme_bytes, more.nvme_bytes),
        reserved_bytes=_reserved(records, counts, total, peaks[0].bytes, "reserved_bytes"),
        reserved_ahead_bytes=_reserved(records, counts, total, peaks[0].bytes, "reserved_ahead_bytes"),
        groups=more.groups,
        convolution_bytes=more.convolution_bytes,
        sent=_rows(few.sent, more.sent, ("count", "bytes"), line),
        flops=_rows(few.flops, more.flops, ("flops",), line),
    )
    winner = peaks[0].key, peaks[0].which
    at, a, b = ({(peak.key, peak.which): peak.bytes for peak in one.peaks}.get(winner) for one in records)
    host = sum(highest(checked).values())
    misses = [
        back(a, b) / at - 1 if at and a and b else math.inf,
        _miss(host, sum(first.host.values())),
        _miss(back(few.nvme_bytes, more.nvme_bytes), first.nvme_bytes),
    ]
    return record, max(misses, key=abs)


def _miss(extended_bytes: int, known_bytes: int) -> float:
    return extended_bytes / known_bytes - 1 if known_bytes else float(extended_bytes > 0)


def _moments(few: RankRecord, more: RankRecord, line: Line, groups: list[list[int]]) -> dict[str, HostMoment] | None:
    found = dict[str, HostMoment]()
    for name, moment in more.host_moments.items():
        if name in few.host_moments:
            with_all = extended(few.host_moments[name], moment, line, groups)
            if with_all is None:
                return None
            found[name] = with_all
    return found


def _reserved(records: list[RankRecord], counts: tuple[int, ...], total: int, peak: int, name: str) -> int:
    """Return the extrapolated reserved bytes: the peak, plus what is reserved but unused.

    `counts`: the numbers of layers of the three records.
    """
    # The growth of the unused bytes per layer is known twice: from the first record to the second, and from the second
    # to the third. The smaller growth is used, because one extra segment can make the other too large.
    unused = [getattr(record, name) - record.peaks[0].bytes for record in records]
    steps = [(b - a) / (m - n) for (a, b), (n, m) in zip(pairwise(unused), pairwise(counts), strict=True)]
    return peak + max(*unused, unused[-1] + round(min(steps) * (total - counts[-1])))


def _highest(peaks: list[KindPeak]) -> list[KindPeak]:
    """Return the highest peak of each kind. `peaks` must be sorted by height."""
    found: dict[str, KindPeak] = {}
    for peak in peaks:
        found.setdefault(peak.key, replace(peak, which=""))
    return list(found.values())


def _peaks(few: list[KindPeak], more: list[KindPeak], line: Line) -> list[KindPeak]:
    known = {(peak.key, peak.which): peak for peak in few}
    found = []
    for peak in more:
        if (peak.key, peak.which) in known:
            before = known[peak.key, peak.which].breakdown
            kinds = dict.fromkeys([*peak.breakdown, *before])
            parts = {kind: line(before.get(kind, 0), peak.breakdown.get(kind, 0)) for kind in kinds}
            found.append(replace(peak, breakdown=parts, bytes=sum(parts.values())))
    return found


def _phase(few: RankPhase, more: RankPhase, peaks: list[KindPeak], line: Line) -> RankPhase:
    start, end = line(few.start_bytes, more.start_bytes), line(few.end_bytes, more.end_bytes)
    highest = (peak.bytes for peak in peaks if (peak.phase, peak.step) == (more.name, more.step))
    return replace(more, start_bytes=start, end_bytes=end, peak_bytes=max([*highest, start, end]))


def _rows(few: list[Row], more: list[Row], figures: tuple[str, ...], line: Line) -> list[Row]:
    """Extrapolate the figures of rows that are in both `few` and `more`."""
    # Rows only in `more` stay unchanged.

    def key(row: Row) -> tuple[object, ...]:
        return tuple(value for name, value in vars(row).items() if name not in figures)

    before = {key(row): row for row in few}
    return [
        replace(row, **{f: line(getattr(before.get(key(row), row), f), getattr(row, f)) for f in figures})
        for row in more
    ]


def _layers(target: SimulationTarget) -> int:
    return max(_depths(target).values(), default=0)


def _depths(target: SimulationTarget) -> dict[tuple[str, ...], int]:
    config = _config(target)
    return {} if config is None else depths(config)


def _leading(target: SimulationTarget) -> int:
    config = _config(target)
    return max((leading(part(config, path)) for path in _depths(target)), default=0)


def _config(target: SimulationTarget) -> object:
    source = find(target.job.run.model)
    if source.family != "transformers":
        return None
    return make_config(source, target.inputs, dict(target.job.run.model_args))
