"""From two recorded steps, of different micro batches, to layers and their costs as lines in the micro batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from zerofit.simulate.profile_recorder import GradientSegment, ProfileRecorder
from zerofit.simulate.traced_model import TracedModel
from zerofit.spec.profile import BackwardMoment, LayerCost, LayerRun, Linear

# with one sample some ops copy less: a transposed batch of one is contiguous, a gradient is not summed over samples
MICRO_BATCHES = (2, 3)


def layer_of(subject: TracedModel, recorder: ProfileRecorder, unit: int) -> LayerRun:
    """The parameters of a unit: those whose gradients are complete in its backward, in the model's order."""
    model, here = subject.model, subject.units[unit]
    mine = [p for p, owner in zip(model.parameters(), owners(model, recorder), strict=True) if owner == unit]
    return LayerRun(
        name=here.name,
        count=here.count,
        matrices=tuple(p.numel() for p in mine if p.dim() > 1),
        vectors=tuple(p.numel() for p in mine if p.dim() <= 1),
        buffers_bytes=_buffers_bytes(model, {id(p) for p in mine}, rest=unit == 0),
        tied_to="embedding" if here.name == "head" and _is_tied(model) else None,
    )


def owners(model: nn.Module, recorder: ProfileRecorder) -> list[int]:
    """The unit of each parameter; one that gets no gradient goes to the first."""
    arrivals = {s.parameter: s.key[1] for s in recorder.segments if s.parameter is not None}
    return [arrivals.get(index, 0) for index, _ in enumerate(model.parameters())]


def cost_of(subject: TracedModel, recorders: tuple[ProfileRecorder, ProfileRecorder], unit: int) -> LayerCost:
    """Costs of a unit; every quantity is a line through its values at MICRO_BATCHES."""
    forwards, backwards = ([_segments(r, (phase, unit)) for r in recorders] for phase in ("forward", "backward"))
    bases = recorders[0].before["forward", unit], recorders[1].before["forward", unit]
    place = _places(subject, recorders[0], unit)
    moments = tuple(
        BackwardMoment(
            live=envelope(_lines(pair, bases)), end=_end(pair, bases), parameter=place.get(pair[0].parameter)
        )
        for pair in zip(*backwards, strict=True)
    )
    forward = envelope(line for pair in zip(*forwards, strict=True) for line in _lines(pair, bases))
    return LayerCost(
        saved_bytes=_line([_after_forward(r, subject, unit) - base for r, base in zip(recorders, bases, strict=True)]),
        forward_peak_bytes=_line([_peak(s, base) for s, base in zip(forwards, bases, strict=True)]),
        backward_peak_bytes=_line([_peak(s, base) for s, base in zip(backwards, bases, strict=True)]),
        output_bytes=_line([r.handed_on.get(unit, 0) for r in recorders]),
        forward=forward,
        backward=moments,
        **_work(recorders, unit),
    )


def envelope(lines: Iterable[Linear]) -> tuple[Linear, ...]:
    """Those lines that are the largest somewhere from a micro batch of 1 on."""
    best: list[Linear] = []
    for line in sorted(set(lines), key=lambda one: (one.per_sample, one.fixed)):
        while best and (best[-1].at(1) <= line.at(1) or (len(best) > 1 and _hidden(best[-2], best[-1], line))):
            best.pop()
        best.append(line)
    return tuple(best)


def _hidden(left: Linear, middle: Linear, right: Linear) -> bool:
    """Whether `middle` is below one of the others everywhere; slopes ascend."""
    crossing = (left.fixed - right.fixed) * (middle.per_sample - left.per_sample)
    return crossing <= (left.fixed - middle.fixed) * (right.per_sample - left.per_sample)


def _line(values: Sequence[float]) -> Linear:
    (low, high), (at_low, at_high) = MICRO_BATCHES, values
    slope = (at_high - at_low) / (high - low)
    return Linear(fixed=at_low - slope * low, per_sample=slope)


def _lines(pair: tuple[GradientSegment, GradientSegment], bases: tuple[int, int]) -> list[Linear]:
    """One line for each op, where both micro batches ran the same ops; else one for the segment's peak."""
    live = [segment.live for segment in pair]
    if len(live[0]) != len(live[1]):
        live = [[max(one, default=base)] for one, base in zip(live, bases, strict=True)]
    return [_line((a - bases[0], b - bases[1])) for a, b in zip(*live, strict=True)]


def _end(pair: tuple[GradientSegment, GradientSegment], bases: tuple[int, int]) -> Linear:
    if pair[0].parameter is None:
        return Linear()
    return _line([segment.live_at_end - base for segment, base in zip(pair, bases, strict=True)])


def _segments(recorder: ProfileRecorder, key: tuple[str, int]) -> list[GradientSegment]:
    return [segment for segment in recorder.segments if segment.key == key]


def _peak(segments: list[GradientSegment], base: int) -> int:
    return max((max(s.live, default=base) for s in segments), default=base) - base


def _after_forward(recorder: ProfileRecorder, subject: TracedModel, unit: int) -> int:
    last = len(subject.units) - 1
    return recorder.before["backward", last] if unit == last else recorder.before["forward", unit + 1]


def _places(subject: TracedModel, recorder: ProfileRecorder, unit: int) -> dict[int | None, int]:
    """Place in model.parameters() -> place in the layer's matrices + vectors."""
    every = list(subject.model.parameters())
    mine = [index for index, owner in enumerate(owners(subject.model, recorder)) if owner == unit]
    ordered = [i for i in mine if every[i].dim() > 1] + [i for i in mine if every[i].dim() <= 1]
    return {index: place for place, index in enumerate(ordered)}


def _work(recorders: tuple[ProfileRecorder, ProfileRecorder], unit: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for phase in ("forward", "backward"):
        works = [r.work.get((phase, unit)) for r in recorders]
        values[f"{phase}_flops"] = _line([w.flops if w else 0 for w in works])
        values[f"{phase}_bytes"] = _line([w.moved_bytes if w else 0 for w in works])
        values[f"{phase}_ops"] = float(works[0].kernels if works[0] else 0)
    return values


def _buffers_bytes(model: nn.Module, mine: set[int], rest: bool) -> int:
    """Buffers beside a unit's parameters; those of modules without parameters count with the first unit."""
    total = 0
    for module in model.modules():
        parameters = [id(p) for p in module.parameters(recurse=False)]
        if (parameters and parameters[0] in mine) or (not parameters and rest):
            total += sum(b.nbytes for b in module.buffers(recurse=False))
    return total


def _is_tied(model: Any) -> bool:
    if not hasattr(model, "get_output_embeddings"):
        return False
    out, into = model.get_output_embeddings(), model.get_input_embeddings()
    return out is not None and getattr(out, "weight", None) is getattr(into, "weight", 0)
