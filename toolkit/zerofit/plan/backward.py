"""Replay how DeepSpeed handles gradients in a backward.

References are to DeepSpeed 0.19.8, below deepspeed/runtime/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple, TypeVar

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.persistent import MASTER_BYTES, largest_overlap, partitions, reduction_bytes, sharers
from zerofit.plan.timeline import NOTHING, Parameter, Point, StageTimeline
from zerofit.plan.zero3_gather import gathered_in_backward, left_by_backward
from zerofit.spec.partitions import buckets

T = TypeVar("T")
NORM_ELEMENTS = 250_000_000  # zero/stage3.py, _constant_buffered_norm2


class LiveMemory(NamedTuple):
    """Bytes in use at one moment, by kind. Activations have a fixed part and a part per sample."""

    activations: Point
    gradients: int = 0
    buckets: int = 0
    gathered: int = 0
    temporaries: int = 0
    after: bool = False  # after the last backward, when nothing is in flight in a pipeline
    layer: int = -1  # the running layer; -1: none

    def line(self) -> tuple[float, float]:
        """Return the bytes per sample, and the bytes that do not depend on the micro batch."""
        fixed = self.activations[0] + self.gradients + self.buckets + self.gathered + self.temporaries
        return self.activations[1], fixed


def backward_moments(line: StageTimeline, layout: PlannedLayout, device: str, graded: int) -> tuple[LiveMemory, ...]:
    """Return the live memory at each moment that can be the peak of a backward.

    Which moment is the peak depends on the size of the micro batch. Persistent memory is not included.

    `graded`: number of elements that already have gradients from earlier micro batches (stages 0 and 1).
    """
    # the result does not depend on these values
    return _highest(line, replace(layout, micro_batch=1, accumulation=min(layout.accumulation, 2)), device, graded)


@lru_cache(maxsize=4096)
def _highest(line: StageTimeline, layout: PlannedLayout, device: str, graded: int) -> tuple[LiveMemory, ...]:
    moments = list(replayed(line, layout, device, graded))
    moments.reverse()  # so that the last of equal moments is kept
    during, after = [live for live in moments if not live.after], [live for live in moments if live.after]
    return (*upper(during, LiveMemory.line), *upper(after, LiveMemory.line))


def replayed(line: StageTimeline, layout: PlannedLayout, device: str, graded: int) -> Iterator[LiveMemory]:
    """Yield the live memory at each moment of a backward. `graded`: as of `backward_moments`."""
    if device == "cpu":  # host and device memory are the same
        layout = replace(layout, offload_param="none")
    if layout.zero_stage == 2 or (layout.zero_stage == 1 and layout.overlap and layout.pp == 1):
        return _Bucketed(line, layout).run()
    if layout.zero_stage == 3:
        return _Scattered(line, layout, device).run()
    return _accumulated(line, layout, graded)


def upper(moments: Iterable[T], line: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the moments that can be the peak, depending on the micro batch.

    Equal moments count once. `line` returns a moment's bytes per sample and its fixed bytes.
    """
    # steepest first: a moment with a smaller slope can only be the peak if it is above all steeper ones with one sample
    best: list[T] = []
    most = -1.0
    for moment in sorted(moments, key=line, reverse=True):
        if sum(line(moment)) > most:
            most = sum(line(moment))
            best.append(moment)
    return best


# Backward makes gradients from the last layer to the first. Each stage handles them differently:
#
#     0, and 1 without overlap   gradients wait for the last micro batch, and are reduced then   (`_accumulated`)
#     2, and 1 with overlap      gradients are copied into a bucket. A full bucket is reduced,   (`_Bucketed`)
#                                and a rank keeps its own part
#     3                          as stage 2, but a rank receives its part only. Parameters are   (`_Scattered`)
#                                gathered and released meanwhile
#
# The replays walk through the events of the timeline (a layer's live activations, then a complete gradient) and yield
# the live memory after each event.
def _accumulated(line: StageTimeline, layout: PlannedLayout, graded: int) -> Iterator[LiveMemory]:
    """Replay stages 0 and 1, which keep full gradients until the last micro batch."""
    element = layout.element_bytes
    # at stage 1 the first gradient hook allocates the bucket
    bucket = element * layout.bucket if layout.zero_stage == 1 else 0  # zero/stage_1_and_2.py:3266
    for event in line.backward:
        waiting = max(graded, event.done)
        for point in event.live:
            yield LiveMemory(point, element * waiting, bucket if waiting else 0, layer=event.layer)
    if layout.zero_stage == 0:
        converted = reduction_bytes(layout) if reduction_bytes(layout) > element else 0
        copies = [(element * (count > 1) + converted) * size for size, count in buckets(chain(*line.groups))]
        gradients = element * line.parameters
        yield LiveMemory(NOTHING, gradients, temporaries=max(copies, default=0), after=True)  # engine.py:3796, :3801
    else:
        yield from _reduced_at_the_end(line, layout, element)


def _reduced_at_the_end(line: StageTimeline, layout: PlannedLayout, element: int) -> Iterator[LiveMemory]:
    """Replay stage 1 without overlap."""
    # parameters are reduced one by one, in group order (stage_1_and_2.py:973)
    state = _Bucketed(line, layout)
    # a pipeline has a second bucket besides the bucket of the hooks (:963)
    state.bucket_bytes = element * layout.bucket * (2 if layout.pp > 1 else 1)
    state.after, waiting = True, line.parameters
    # waiting gradients are freed: after the first reductions the peak cannot grow any more
    end = waiting - 3 * (layout.bucket + line.largest)
    for group in line.members:
        for parameter in group:
            state.waiting_bytes = element * waiting
            yield from state.arrive(parameter, NOTHING)
            waiting -= parameter.numel
            if waiting < end:
                return
    state.waiting_bytes = 0
    yield from state.reduce(NOTHING)


class _Bucketed:
    """Stages 1 and 2: gradients go into a bucket, which is reduced when it is full.

    Line numbers such as (:1545) are those of DeepSpeed's zero/stage_1_and_2.py.
    """

    def __init__(self, line: StageTimeline, layout: PlannedLayout):
        self.line, self.element, self.limit = line, layout.element_bytes, layout.bucket
        self.bucket_bytes = self.element * layout.bucket * (2 if layout.overlap else 1)  # :3266, :3275
        offloaded = layout.offload_optimizer != "none"
        # elements of the rank with most elements that a parameter overlaps; its first gradient allocates all (:2187)
        self.kept_of = {} if offloaded else largest_overlap(line, layout.zero_ranks)
        # offloaded gradients are copied to float32, and to float64 for the norm (:1897, :1884)
        self.passing = 8 if offloaded else 0
        accumulates = layout.accumulation > 1 and layout.zero_stage == 2
        self.before = self.element * max(self.kept_of.values(), default=0) if accumulates else 0
        # ranks that reduce in another dtype make a copy (:2375)
        self.converted_bytes = reduction_bytes(layout) if reduction_bytes(layout) > self.element else 0
        groups = [group[0].group for group in line.members if group]
        self.sizes = dict(zip(groups, partitions(line, layout.zero_ranks), strict=True))
        self.kept_bytes = self.filled = self.oversized = 0
        self.bucket: list[Parameter] = []
        self.skipped: list[Parameter] = []  # in a bucket, of layers that are skipped
        # full gradients outside of the bucket: at stage 1 the gradients of earlier micro batches
        accumulated = layout.zero_stage == 1 and layout.accumulation > 1
        self.waiting_bytes, self.after = self.element * line.parameters if accumulated else 0, False
        self.layer = -1

    def run(self) -> Iterator[LiveMemory]:
        waiting = began = self.waiting_bytes > 0  # an earlier micro batch has allocated the bucket
        for event in self.line.backward:
            self._skip(self.line.layers[event.layer + 1 : max(self.layer, 0)])
            self.layer = event.layer
            for point in event.live:
                yield self._live(point, bucket=began)
            if event.parameter is not None:
                began = True
                yield from self.arrive(event.parameter, event.end)
                self.waiting_bytes -= self.element * event.parameter.numel if waiting else 0
        yield from self.reduce(NOTHING)  # the rest of the bucket (independent_gradient_partition_epilogue)

    def arrive(self, parameter: Parameter, activations: Point) -> Iterator[LiveMemory]:
        """Handle a complete gradient, as its hook does (:1414)."""
        numel = parameter.numel
        if self.filled + numel > self.limit:
            yield from self.reduce(activations)
        yield self._live(activations)
        self.filled += numel
        self.bucket.append(parameter)
        if numel > self.limit:
            self.oversized = self.element * numel

    def reduce(self, activations: Point) -> Iterator[LiveMemory]:
        if not self.filled:
            return
        # each kind is reduced over its own ranks, one after the other (:1640)
        kinds = [[p for p in self.bucket if p.expert == expert] for expert in (False, True)]
        parts = [[part for parameter in kind for part in self._slices(parameter)] for kind in kinds]
        slices = [*parts[0], *parts[1]]
        flat = max(map(self._flattened, parts))
        yield self._live(activations, temporaries=self.element * flat + self.converted_bytes * self.filled)
        self._keep([*self.bucket, *self.skipped])
        self.skipped = []
        yield self._live(activations, temporaries=self.passing * max(numel for _, numel in slices))
        self.filled = self.oversized = 0
        self.bucket = []

    def _skip(self, layers: Sequence[Sequence[Parameter]]) -> None:
        """Count the gradients of layers that the replay skips. They fill buckets, too."""
        filled, waiting = self.filled, [*self.bucket]
        for parameter in chain.from_iterable(reversed(layers)):
            if filled + parameter.numel > self.limit:
                self._keep(waiting)
                filled, waiting = 0, []
            filled += parameter.numel
            waiting.append(parameter)
        self.skipped = waiting if layers else self.skipped

    def _keep(self, parameters: Iterable[Parameter]) -> None:
        """Allocate all gradients of the ranks whose partitions overlap one of `parameters`."""
        sizes = (self.element * self.kept_of.get(parameter, 0) for parameter in parameters)
        self.kept_bytes = max(self.kept_bytes, max(sizes, default=0))

    def _slices(self, parameter: Parameter) -> Iterator[tuple[int, int]]:
        """Yield the rank and the number of elements of each partition that a parameter overlaps."""
        size = self.sizes[parameter.group]
        start, end = parameter.start, parameter.start + parameter.numel
        while start < end:
            rank = start // size
            stop = min(end, (rank + 1) * size)
            yield rank, stop - start
            start = stop

    def _flattened(self, slices: list[tuple[int, int]]) -> int:
        """Return the size in elements of the largest all-reduce buffer (:1545)."""
        # slices are joined until they exceed the bucket's limit; a single slice needs no buffer
        largest = together = count = 0
        for _, of_rank in groupby(slices, key=itemgetter(0)):
            together, count = together + sum(numel for _, numel in of_rank), count + 1
            largest = max(largest, together if count > 1 else 0)
            if together > self.limit:
                together = count = 0
        return largest

    def _live(self, activations: Point, bucket: bool = True, temporaries: int = 0) -> LiveMemory:
        kept_bytes = max(self.before, self.kept_bytes * (2 if self.before else 1))
        gradients = kept_bytes + self.oversized + self.waiting_bytes
        bucket_bytes = self.bucket_bytes if bucket else 0
        return LiveMemory(activations, gradients, bucket_bytes, 0, temporaries, self.after, self.layer)


class _Scattered:
    """Stage 3: like stage 2, but a rank receives only its part, and parameters are gathered.

    Line numbers such as (:1627) are those of DeepSpeed's zero/stage3.py.
    """

    def __init__(self, line: StageTimeline, layout: PlannedLayout, device: str):
        self.line, self.limit = line, layout.bucket
        # gloo's reduce-scatter sums into a clone of its input (ProcessGroupGloo.cpp)
        self.copies = 2 if device == "cpu" else 1
        self.spread, self.gathered_bytes = sharers(layout), gathered_in_backward(line, layout)
        self.left = left_by_backward(line, layout)
        self.zero_ranks, self.ranks = layout.zero_ranks, layout.zero_ranks  # `ranks` divide the bucket's parameters
        self.element, self.reduced = layout.element_bytes, reduction_bytes(layout)
        # each gradient is copied to the dtype of the reduction (stage3.py:1925)
        self.converted_bytes = self.reduced if self.reduced != self.element else 0
        self.offloaded = layout.offload_optimizer != "none"
        self.fetched = 0 if device == "cpu" else self.element  # per element of an offloaded part, read back (:2028)
        # parts for disks stay in float32 until all parts of the bucket are written (:1453)
        swapped = layout.offload_optimizer == "nvme" and (device != "cpu" or self.element < MASTER_BYTES)
        self.swapped = MASTER_BYTES if swapped else 0
        self.filled = self.outside = 0
        self.parts: list[int] = []  # elements of each parameter in the bucket
        self.layer = -1

    def run(self) -> Iterator[LiveMemory]:
        for event, gathered in zip(self.line.backward, self.gathered_bytes, strict=True):
            self.layer = event.layer
            for point in event.live:
                yield self._live(point, gathered)
            if event.parameter is not None:
                yield from self._arrive(event.parameter, event.end, gathered)
        yield from self._reduce(NOTHING, self.left)  # independent_gradient_partition_epilogue

    def _arrive(self, parameter: Parameter, activations: Point, gathered: int) -> Iterator[LiveMemory]:
        """Handle a complete gradient (zero/stage3.py:1570)."""
        numel = parameter.numel
        ranks = self.spread.expert if parameter.expert else self.zero_ranks
        if self.filled and (self.filled + numel > self.limit or ranks != self.ranks):  # :1580
            yield from self._reduce(activations, gathered)
        self.ranks = ranks
        yield self._live(activations, gathered)
        self.parts.append(numel)
        self.filled += numel
        if numel > self.limit:  # too large for the bucket, so it is not copied (:1627)
            self.outside = self.element * numel

    def _reduce(self, activations: Point, gathered: int) -> Iterator[LiveMemory]:
        """Reduce and empty the bucket."""
        if not self.filled:
            return
        # a single parameter without padding is reduced in place (comm/coalesced_collectives.py)
        alone = len(self.parts) == 1 and self.filled % self.ranks == 0
        flat = 0 if alone else self.reduced * -(-self.filled // self.ranks) * self.ranks
        copied = (self.copies - 1) * self.reduced * self.filled if self.ranks > 1 else 0
        if self.ranks != self.zero_ranks:  # a rank's part is scaled out of place (:1950)
            copied = max(copied, self.reduced * -(-self.filled // self.ranks))
        yield self._live(activations, gathered, temporaries=flat + copied + self.converted_bytes * self.filled)
        if self.offloaded:
            most = swapped = 0
            for numel in self.parts:
                part = -(-numel // self.ranks)
                norm = 8 * min(part, NORM_ELEMENTS)  # a float64 copy (:1964)
                most = max(most, swapped + self.fetched * part + max(norm, self.swapped * part))
                swapped += self.swapped * part
            yield self._live(activations, gathered, temporaries=flat + most)
        self.filled = self.outside = 0
        self.parts.clear()

    def _live(self, activations: Point, gathered: int, temporaries: int = 0) -> LiveMemory:
        return LiveMemory(activations, self.outside, 0, gathered, temporaries, layer=self.layer)
