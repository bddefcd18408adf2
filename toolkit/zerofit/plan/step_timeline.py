"""Lay out a step on a timeline: the work of each stream of a rank over time.

Overlapping work is slower, and pauses make all streams wait.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from zerofit.features.checkpointing import REPEATED
from zerofit.plan.dualpipev import EXCHANGE
from zerofit.plan.kernels import kernel_s
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.passes import ReduceGroup, StageLayers, reduce_groups
from zerofit.plan.rates import Rates
from zerofit.plan.time import StepParts, StepTask, Stream, Timer
from zerofit.spec.profile import Profile

LAUNCHES = "launches", "launches and hooks"  # of the host: without ZeRO-3, and with it
SAME_MOMENT_S = 1e-12  # tolerance for sums in another order


class Span(NamedTuple):
    """Work on one stream of a pipeline stage's rank, in seconds from the step's start."""

    stage: int
    stream: str  # a Stream; in a script's trace, the script's own name for it
    phase: str  # "forward", "backward" or "step"
    micro_batch: int  # from 0; -1: of the step
    module: str  # "block.17"; "" outside of layers
    kind: str  # "product", "all-gather", "optimizer", ...
    start_s: float
    end_s: float
    bytes: float
    flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The work of one optimizer step, on all streams of one rank per pipeline stage."""

    spans: tuple[Span, ...]
    step_s: float

    def busy_s(self) -> dict[tuple[int, str], float]:
        """Return the busy seconds of each (stage, stream)."""
        busy: defaultdict[tuple[int, str], float] = defaultdict(float)
        for span in self.spans:
            busy[span.stage, span.stream] += span.end_s - span.start_s
        return dict(busy)

    def scaled(self, factor: float) -> StepTimeline:
        """Return the timeline with all times multiplied by `factor`."""
        spans = (span._replace(start_s=factor * span.start_s, end_s=factor * span.end_s) for span in self.spans)
        return StepTimeline(spans=tuple(spans), step_s=factor * self.step_s)


def step_timeline(profile: Profile, timer: Timer, layout: PlannedLayout) -> StepTimeline:
    """Lay out a step. Its step time is the one that `timer` forecasts.

    Raises KeyError if the profile was not traced for the layout's setting.
    """
    drawing = _Drawing(profile, timer.rates, timer.parts(layout))
    if layout.schedule == "dualpipev":
        drawing.dualpipev()
    elif layout.pp > 1:
        drawing.pipeline()
    else:
        drawing.micro_batches()
    spans = tuple(sorted(drawing.spans, key=lambda span: (span.stage, span.stream, span.start_s)))
    return StepTimeline(spans=spans, step_s=drawing.now_s)


class _NamedLayer(NamedTuple):
    index: int
    module: str


# The pieces follow the terms of `Timer.step`, so that both forms give the same step time. A forward or backward is laid
# out once, relative to its start (`_flow`), and is then added for each micro batch.
class _Drawing:
    """The spans of a step so far. New work is added at `now_s`."""

    def __init__(self, profile: Profile, rates: Rates, parts: StepParts):
        self.parts, self.layout, self._rates = parts, parts.layout, rates
        self.spans: list[Span] = []
        self.now_s = 0.0
        layout = parts.layout
        self._costs = profile.costs[layout.setting]
        self._stages = list(_named(profile, parts.rank_pass.stages))
        self._known: dict[tuple[int, bool], list[_KindTime]] = {}

    def micro_batches(self) -> None:
        """Lay out the micro batches of a rank without a pipeline, then the optimizer."""
        parts, layers = self.parts, self._stages[0]
        groups = reduce_groups(parts.rank_pass, parts.rank_pass.slowest, self.layout.bucket)
        forward, backward = self._flow(layers, False, []), self._flow(layers[::-1], True, [])
        with_gradients = self._flow(layers[::-1], True, groups) if self.layout.zero_stage else backward
        for micro_batch in range(self.layout.accumulation):
            reducing = self.layout.accumulation - micro_batch <= parts.reductions
            self._add(0, "forward", micro_batch, forward)
            self._add(0, "backward", micro_batch, with_gradients if reducing else backward)
            if reducing and not self.layout.zero_stage:  # at stage 0, gradients are reduced after backward
                self._tasks(0, "backward", micro_batch, [self._reduction(0)])
            self._tasks(0, "backward", micro_batch, parts.later if micro_batch else parts.first)
        self._tasks(0, "step", -1, parts.step)

    def pipeline(self) -> None:
        """Lay out all stages' micro batches (1F1B), then the optimizer.

        All stages run at the pace of the slowest one. The order is DeepSpeed's (runtime/pipe/schedule.py,
        TrainSchedule). In a pipeline of p stages, the forwards of stage s (from 0) are up to p - s micro batches ahead
        of its backwards.
        """
        parts, stages, micro_batches = self.parts, self.layout.pp, self.layout.accumulation
        forward_s, backward_s = parts.forward_s + parts.send_s, parts.backward_s(reducing=False) + parts.send_s
        for stage, layers in enumerate(self._stages):
            forward, backward = self._flow(layers, False, []), self._flow(layers[::-1], True, [])
            self._send(forward, stage < stages - 1)
            self._send(backward, stage > 0)
            for n in range(micro_batches):
                ahead = stages - stage
                self.now_s = (stage + n) * forward_s
                if n >= ahead:  # the pipeline is full: a forward waits for a backward
                    self.now_s = stages * forward_s + (n - ahead) * (forward_s + backward_s) + ahead * backward_s
                self._add(stage, "forward", n, forward)
                self.now_s = stages * forward_s + n * (forward_s + backward_s) + (ahead - 1) * backward_s
                self._add(stage, "backward", n, backward)
        self._steps((micro_batches + stages - 1) * (forward_s + backward_s))

    def dualpipev(self) -> None:
        """Lay out the passes of all stages in DualPipeV's order, then the optimizer."""
        flows: dict[tuple[int, str], list[Piece]] = {}
        for stage, parts in enumerate(self.parts.rank_pass.parts):
            start = 0
            for part, runs in enumerate(parts):
                layers = self._stages[stage][start : (start := start + sum(run.count for run in runs))]
                flows[stage, f"F{part}"] = self._flow(layers, False, [])
                flows[stage, f"B{part}"] = self._flow(layers[::-1], True, [])
        for stage, word, micro_batch, start_s, end_s in self.parts.timed_passes(self.layout.accumulation):
            self.now_s = start_s
            if word == EXCHANGE:
                sent = Piece("pipeline", "", "send", 0.0, end_s - start_s, self.parts.rank_pass.output_bytes)
                self._add(stage, "forward", micro_batch, [sent])
            else:
                self._add(stage, "forward" if word[0] == "F" else "backward", micro_batch, flows[stage, word])
        self._steps(self.parts.dualpipev_s())

    def _steps(self, done_s: float) -> None:
        """Add each pipeline stage's work after the passes, which end at `done_s`."""
        parts, ends = self.parts, []
        for stage in range(self.layout.pp):
            self.now_s, share, others = done_s, self._share(stage), self.layout.accumulation - 1
            # as in the closed form, the engine's work on gradients comes after all passes
            self._tasks(stage, "backward", -1, (task.scaled(others * share) for task in parts.later))
            self._tasks(stage, "step", -1, [self._reduction(stage)])
            self.now_s = done_s + others * sum(task.seconds for task in parts.later) + parts.reduce_s
            self._tasks(stage, "step", -1, (task.scaled(share) for task in parts.step))
            ends.append(self.now_s)
        self.now_s = max(ends)

    def _send(self, pieces: list[Piece], sends: bool) -> None:
        if sends:
            end_s = max((piece.end_s for piece in pieces), default=0.0)
            what = Piece("pipeline", "", "send", end_s, end_s + self.parts.send_s, self.parts.rank_pass.output_bytes)
            pieces.append(what)

    def _share(self, stage: int) -> float:
        """Return a stage's trained parameters, relative to the stage that has most."""
        rank_pass = self.parts.rank_pass
        return rank_pass.trained_of(rank_pass.stages[stage]) / max(1, rank_pass.trained_parameters)

    def _reduction(self, stage: int) -> StepTask:
        share, elements = self._share(stage), self.parts.rank_pass.trained_parameters
        return StepTask(
            "data parallel",
            "all-reduce",
            share * self.layout.element_bytes * elements,
            share * self.parts.reduce_s,
        )

    def _tasks(self, stage: int, phase: str, micro_batch: int, tasks: Iterable[StepTask]) -> None:
        for stream, name, moved, seconds in tasks:
            if seconds:
                end_s = self.now_s + seconds
                self.spans.append(Span(stage, stream, phase, micro_batch, "", name, self.now_s, end_s, moved))
                self.now_s = end_s

    def _add(self, stage: int, phase: str, micro_batch: int, pieces: Iterable[Piece]) -> None:
        end_s = self.now_s
        for stream, module, kind, start_s, stop_s, moved, flops in pieces:
            span = Span(
                stage, stream, phase, micro_batch, module, kind, self.now_s + start_s, self.now_s + stop_s, moved, flops
            )
            self.spans.append(span)
            end_s = max(end_s, span.end_s)
        self.now_s = end_s

    def _flow(self, layers: Sequence[_NamedLayer], backward: bool, groups: Iterable[ReduceGroup]) -> list[Piece]:
        """Return the pieces of forward or `backward`, which reduces the gradients of `groups`."""
        parts, clock = self.parts, Clock(self.parts.exposed)
        works = parts.rank_pass.backward if backward else parts.rank_pass.forward
        elements_after: dict[int, int] = {}  # layers whose backward has ended -> elements to reduce then
        ended = 0
        for group in groups:
            for _ in range(group.groups):
                ended += sum(member.count for member in group.members)
                elements_after[ended] = group.elements
        pieces: list[Piece] = []
        fetched_s = computed_s = 0.0
        reduced_s = sum(parts.fetch_s(layer.index, backward) for layer in layers)  # links serve fetches first
        for done, layer in enumerate(layers, start=1):
            pieces += self._fetch(layer, backward, fetched_s)
            clock.link(fetched_s, fetched_s := fetched_s + parts.fetch_s(layer.index, backward))
            computed_s = max(computed_s, fetched_s)
            pieces += self._layer(layer, backward, computed_s)
            clock.compute(computed_s, computed_s := computed_s + works[layer.index].layer_s)
            if done not in elements_after:
                continue
            elements = elements_after[done]
            op = "reduce-scatter" if self.layout.zero_stage == 3 else "all-reduce"
            seconds, moved = parts.share_s(elements), self.layout.element_bytes * elements
            if parts.overlapped:
                start_s = max(reduced_s, computed_s)
                clock.link(start_s, reduced_s := start_s + seconds)
                pieces.append(Piece("data parallel", "", op, start_s, reduced_s, moved))
            elif seconds:
                clock.pause(computed_s, Piece("data parallel", "", op, 0.0, seconds, moved))
        return clock.placed(pieces)

    def _fetch(self, layer: _NamedLayer, backward: bool, start_s: float) -> Iterator[Piece]:
        parts = self.parts
        if parts.fetches is None:
            return
        moved = parts.fetches.bytes(layer.index, backward)
        copy_s = moved * parts.fetches.copy_s
        stream: Stream = "NVMe" if self.layout.offload_param == "nvme" else "host to device"
        if copy_s:
            share = moved / self.layout.zero_ranks
            yield Piece(stream, layer.module, "fetch", start_s, start_s + copy_s, share)
        end_s = start_s + parts.fetch_s(layer.index, backward)
        yield Piece("data parallel", layer.module, "all-gather", start_s + copy_s, end_s, moved)

    def _layer(self, layer: _NamedLayer, backward: bool, start_s: float) -> Iterator[Piece]:
        work = (self.parts.rank_pass.backward if backward else self.parts.rank_pass.forward)[layer.index]
        cost, micro_batch = self._costs[layer.index], self.layout.micro_batch
        end_s, copied = start_s + work.layer_s, cost.host_bytes.at(micro_batch)
        # activations are copied on the kernels' stream: to the host after a forward, and back before a backward
        if work.copy_s and backward:
            yield Piece("compute", layer.module, "copy from the host", start_s, start_s + work.copy_s, copied)
            start_s += work.copy_s
        elif work.copy_s:
            yield Piece("compute", layer.module, "copy to the host", end_s - work.copy_s, end_s, copied)
            end_s -= work.copy_s
        yield Piece("host", layer.module, LAUNCHES[self.parts.fetches is not None], start_s, start_s + work.host_s, 0.0)
        # a host that does not run ahead launches a layer's kernels before they compute
        now_s = start_s if self.parts.rank_pass.ahead else start_s + work.host_s
        for kind, seconds, moved, flops in self._kinds(layer.index, backward):
            yield Piece("compute", layer.module, kind, now_s, now_s + seconds, moved, flops)
            now_s += seconds
        # collectives end a layer; a recomputation repeats those of the forward
        times = REPEATED[self.layout.checkpointing] if backward else 1
        now_s = end_s - work.tensor_s - work.sequence_s - work.experts_s
        sent = times * cost.tp_allreduce_bytes.at(micro_batch)
        yield Piece("tensor parallel", layer.module, "all-reduce", now_s, now_s + work.tensor_s, sent)
        sent, now_s = times * cost.sp_alltoall_bytes.at(micro_batch), now_s + work.tensor_s
        yield Piece("sequence parallel", layer.module, "all-to-all", now_s, now_s + work.sequence_s, sent)
        sent, now_s = times * cost.ep_alltoall_bytes.at(micro_batch), now_s + work.sequence_s
        yield Piece("expert parallel", layer.module, "all-to-all", now_s, now_s + work.experts_s, sent)

    def _kinds(self, index: int, backward: bool) -> list[_KindTime]:
        """Return the kernels of a layer in one direction, added up by kind."""
        if (index, backward) not in self._known:
            cost, micro_batch = self._costs[index], self.layout.micro_batch
            sums_of: dict[str, _KindTime] = {}
            for kernel in cost.backward_kernels if backward else cost.forward_kernels:
                seconds = kernel_s(kernel, micro_batch, self._rates)
                moved, flops = kernel.moved_bytes.at(micro_batch), kernel.flops.at(micro_batch)
                _, *before = sums_of.get(kernel.kind, _KindTime(kernel.kind, 0.0, 0.0, 0.0))
                sums = map(sum, zip(before, (seconds, moved, flops), strict=True))
                sums_of[kernel.kind] = _KindTime(kernel.kind, *sums)
            self._known[index, backward] = list(sums_of.values())
        return self._known[index, backward]


class _KindTime(NamedTuple):
    kind: str
    seconds: float
    bytes: float
    flops: float


def _named(profile: Profile, stages: Iterable[Sequence[StageLayers]]) -> Iterator[list[_NamedLayer]]:
    """Yield the layers of each stage, one by one, with the names of their modules."""
    seen: Counter[int] = Counter()
    for stage in stages:
        named = []
        for layer, count in stage:
            run = profile.layers[layer]
            for _ in range(count):
                named.append(_NamedLayer(layer, f"{run.name}.{seen[layer]}" if run.count > 1 else run.name))
                seen[layer] += 1
        yield named


class Piece(NamedTuple):
    """A span of work, before it is placed in the step.

    Times count from the start of the forward or backward, as if no other work slowed this piece.
    """

    stream: Stream
    module: str
    kind: str
    start_s: float
    end_s: float
    bytes: float
    flops: float = 0.0


# Pieces are first placed on a timeline as if links and device did not slow each other. Then time is stretched: while
# both are busy, a second of this timeline takes (1 + exposed) real seconds.
#
#     timeline  links   [======]    [===]          real   links   [=========]    [===]
#               device     [==========]                   device      [=============]
#                          ^^^  ^^ both busy: stretched
#
# Real time is therefore piecewise linear in the time of this timeline. This is the same model as `flow_s`
# in closed form.
class Clock:
    """Converts times without contention to real times.

    While links and compute are both busy, both are slower. During a pause, only the piece that causes the pause
    runs.
    """

    def __init__(self, exposed: float):
        self._exposed = exposed
        self._edges: list[tuple[float, int, int]] = []  # when links (0) or compute (1) begin (+1) and end (-1)
        self._pauses: list[tuple[float, Piece]] = []

    def link(self, start_s: float, end_s: float) -> None:
        """Mark the links as busy."""
        self._edges += [(start_s, 0, 1), (end_s, 0, -1)]

    def compute(self, start_s: float, end_s: float) -> None:
        """Mark the device as busy: it computes, or waits for a layer's collective."""
        self._edges += [(start_s, 1, 1), (end_s, 1, -1)]

    def pause(self, at_s: float, piece: Piece) -> None:
        """Make all other work wait for a piece. Calls must be in order of time."""
        self._pauses.append((at_s, piece))

    def placed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces, including pauses, at their real times. Interrupted pieces are split."""
        points = list(self._points())
        placed = []
        for piece in pieces:
            length_s = piece.end_s - piece.start_s
            if length_s <= 0.0:
                continue
            cuts = [at for at, _ in self._pauses if piece.start_s + SAME_MOMENT_S < at < piece.end_s - SAME_MOMENT_S]
            for start_s, end_s in pairwise([piece.start_s, *cuts, piece.end_s]):
                share = (end_s - start_s) / length_s
                start_s = _real(points, start_s) + self._paused(start_s, 1)
                end_s = _real(points, end_s) + self._paused(end_s, -1)
                amounts = {"bytes": share * piece.bytes, "flops": share * piece.flops}
                placed.append(piece._replace(start_s=start_s, end_s=end_s, **amounts))
        for at, piece in self._pauses:
            start_s = _real(points, at) + self._paused(at, -1)
            placed.append(piece._replace(start_s=start_s, end_s=start_s + piece.end_s))
        return placed

    def _paused(self, at_s: float, side: int) -> float:
        """Return the seconds of pauses before a moment; with `side` 1, also of one at the moment."""
        return sum(piece.end_s for at, piece in self._pauses if at < at_s + side * SAME_MOMENT_S)

    def _points(self) -> Iterator[tuple[float, float]]:
        """Yield moments with their real times. Between two moments, real time is linear."""
        busy, before_s, real_s = [0, 0], 0.0, 0.0
        yield 0.0, 0.0
        for at_s, which, change in sorted(self._edges):
            real_s += (at_s - before_s) * (1 + self._exposed if all(busy) else 1.0)
            busy[which] += change
            if at_s > before_s:
                yield at_s, real_s
            before_s = at_s


def _real(points: Sequence[tuple[float, float]], at_s: float) -> float:
    """Return the real time of `at_s`, between two of `points` or on a line through the last two."""
    after_index = min(max(1, bisect_right(points, (at_s, math.inf))), len(points) - 1)
    (before_s, before), (after_s, after) = points[after_index - 1], points[after_index]
    return before + (after - before) * (at_s - before_s) / (after_s - before_s)
