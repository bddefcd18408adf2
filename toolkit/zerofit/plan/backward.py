"""DeepSpeed's handling of gradients, replayed over a backward: what they, their buckets and their reduction hold.

Places are of DeepSpeed 0.19.8, below deepspeed/runtime/.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.persistent import overlap_in_partition, partitions, reduction_bytes, shards
from zerofit.plan.timeline import Parameter, Point, StageTimeline
from zerofit.plan.zero3_gather import gathered_in_backward
from zerofit.spec.precision import ELEMENT_BYTES

ALLREDUCE_ELEMENTS = 500_000_000  # engine.py, MEMORY_OPT_ALLREDUCE_SIZE


class LiveMemory(NamedTuple):
    """Bytes at one moment: activations as a point, the rest by kind."""

    activations: Point
    gradients: int = 0
    buckets: int = 0
    gathered: int = 0
    temporaries: int = 0
    after: bool = False  # after the last backward: nothing is in flight in a pipeline

    @property
    def fixed(self) -> float:
        """Bytes that do not grow with the micro batch."""
        return self.activations[0] + self.gradients + self.buckets + self.gathered + self.temporaries


def backward_moments(line: StageTimeline, layout: PlannedLayout, device: str) -> tuple[LiveMemory, ...]:
    """What is alive above the standing bytes at the moments of a backward that can be the peak, for any micro batch.

    With accumulation it is the last backward of a step, else the only one.
    """
    # the same for all of these
    alike = replace(layout, micro_batch=1, max_live=0, accumulation=min(layout.accumulation, 2))
    if device == "cpu":  # the host's memory is the device's
        alike = replace(alike, offload_param="none")
    return _moments(line, alike, device)


@lru_cache(maxsize=4096)
def _moments(line: StageTimeline, layout: PlannedLayout, device: str) -> tuple[LiveMemory, ...]:
    if layout.zero_stage == 2 or (layout.zero_stage == 1 and layout.overlap and layout.pp == 1):
        found = list(_Bucketed(line, layout).run())
    elif layout.zero_stage == 3:
        found = list(_Scattered(line, layout, device).run())
    else:
        found = list(_accumulated(line, layout))
    return (*upper(held for held in found if not held.after), *upper(held for held in found if held.after))


def upper(moments: Iterable[LiveMemory]) -> list[LiveMemory]:
    """Without those that another one exceeds at every micro batch from 1 on."""
    best: list[LiveMemory] = []
    most = -1.0
    for slope, fixed, _, held in sorted(
        ((h.activations[1], h.fixed, n, h) for n, h in enumerate(moments)), reverse=True
    ):
        if fixed + slope > most:
            most = fixed + slope
            best.append(held)
    return best


def _accumulated(line: StageTimeline, layout: PlannedLayout) -> Iterator[LiveMemory]:
    """Stages 0 and 1: whole gradients wait for the last micro batch; stage 1 has its bucket from the first hook on."""
    element = ELEMENT_BYTES[layout.precision]
    whole = element * line.parameters
    later = layout.accumulation > 1
    bucket = element * layout.bucket if layout.zero_stage == 1 else 0  # zero/stage_1_and_2.py:3266
    for event in line.backward:
        gradients = whole if later else element * event.done
        for point in event.live:
            yield LiveMemory(point, gradients, bucket if later or event.done else 0)
    if layout.zero_stage == 0:
        lifted = reduction_bytes(layout) if layout.sp > 1 and element == 2 else 0
        flat = (element + lifted) * _first_buckets(line)  # engine.py:3796, :3801
        yield LiveMemory((0.0, 0.0), whole, temporaries=flat, after=True)
    else:
        yield from _reduced_at_the_end(line, layout, element)


def _first_buckets(line: StageTimeline) -> int:
    """Elements of the largest bucket of the all-reduce without ZeRO: full once beyond the limit (engine.py:3834)."""
    largest = filled = 0
    for group in line.groups:
        for numel in group:
            filled += numel
            largest = max(largest, filled)
            filled = 0 if filled > ALLREDUCE_ELEMENTS else filled
    return largest


def _reduced_at_the_end(line: StageTimeline, layout: PlannedLayout, element: int) -> Iterator[LiveMemory]:
    """Stage 1 without overlap: parameter by parameter, in the groups' order (stage_1_and_2.py:973)."""
    state = _Bucketed(line, layout)
    # with a pipeline a second bucket beside the hooks' (:963)
    state.bucket_bytes = element * layout.bucket * (2 if layout.pp > 1 else 1)
    state.after, waiting = True, line.parameters
    # what waits grows less: after the first reductions no more than before is alive
    end = waiting - 3 * (layout.bucket + line.largest)
    for group in line.members:
        for parameter in group:
            state.waiting_bytes = element * waiting
            yield from state.arrive(parameter, (0.0, 0.0))
            waiting -= parameter.numel
            if waiting < end:
                return
    state.waiting_bytes = 0
    yield from state.finish()


class _Bucketed:
    """Stages 1 and 2: gradients are copied into a bucket, reduced when it is full, and this rank's are kept."""

    def __init__(self, line: StageTimeline, layout: PlannedLayout):
        self.line, self.element, self.ranks = line, ELEMENT_BYTES[layout.precision], shards(layout)
        self.limit = layout.bucket
        self.bucket_bytes = self.element * layout.bucket * (2 if layout.overlap else 1)  # :3266, :3275
        offloaded = layout.offload_optimizer != "none"
        kept = overlap_in_partition(line, self.ranks)
        self.partition_bytes = 0 if offloaded else self.element * kept  # :2187
        # offloaded gradients pass through a float32 copy, and a float64 one for the norm (:1897, :1884)
        self.passing = 8 if offloaded else 0
        self.before = self.partition_bytes if layout.accumulation > 1 and layout.zero_stage == 2 else 0
        # lifted where the ranks reduce in another dtype (:2375)
        self.lifted = reduction_bytes(layout) if layout.sp > 1 and self.element == 2 else 0
        self.sizes = partitions(line, self.ranks)
        self.kept_bytes = self.filled = self.oversized = 0
        self.bucket: list[Parameter] = []
        self.waiting_bytes, self.after = 0, False  # whole gradients outside of the bucket

    def run(self) -> Iterator[LiveMemory]:
        """Over the backward."""
        began = False
        for event in self.line.backward:
            for point in event.live:
                yield self._held(point, bucket=began)
            if event.parameter is not None:
                began = True
                yield from self.arrive(event.parameter, event.end)
        yield from self.finish()

    def arrive(self, parameter: Parameter, activations: Point) -> Iterator[LiveMemory]:
        """The hook of one complete gradient (:1414)."""
        numel = parameter.numel
        if self.filled + numel > self.limit:
            yield from self._reduce(activations)
        yield self._held(activations)
        self.filled += numel
        self.bucket.append(parameter)
        if numel > self.limit:
            self.oversized = self.element * numel

    def finish(self) -> Iterator[LiveMemory]:
        """What is left in the bucket (independent_gradient_partition_epilogue)."""
        yield from self._reduce((0.0, 0.0))

    def _reduce(self, activations: Point) -> Iterator[LiveMemory]:
        if not self.filled:
            return
        slices = [part for parameter in self.bucket for part in self._slices(parameter)]
        yield self._held(activations, temporaries=self.element * self._flattened(slices) + self.lifted * self.filled)
        self.kept_bytes = self.partition_bytes
        yield self._held(activations, temporaries=self.passing * max(numel for _, numel in slices))
        self.filled = self.oversized = 0
        self.bucket = []

    def _slices(self, parameter: Parameter) -> Iterator[tuple[int, int]]:
        """Which rank's partition has how many of a parameter's elements."""
        size = self.sizes[min(parameter.group, len(self.sizes) - 1)]
        start, end = parameter.start, parameter.start + parameter.numel
        while start < end:
            rank = start // size
            stop = min(end, (rank + 1) * size)
            yield rank, stop - start
            start = stop

    def _flattened(self, slices: list[tuple[int, int]]) -> int:
        """Elements that are put side by side for one all-reduce (:1545); a single slice stays where it is."""
        merged: list[list[int]] = []
        for rank, numel in slices:
            if merged and merged[-1][0] == rank:
                merged[-1][1] += numel
            else:
                merged.append([rank, numel])
        largest = together = count = 0
        for _, numel in merged:
            together, count = together + numel, count + 1
            largest = max(largest, together if count > 1 else 0)
            if together > self.limit:
                together = count = 0
        return largest

    def _held(self, activations: Point, bucket: bool = True, temporaries: int = 0) -> LiveMemory:
        gradients = self.before + self.kept_bytes + self.oversized + self.waiting_bytes
        return LiveMemory(activations, gradients, self.bucket_bytes if bucket else 0, 0, temporaries, self.after)


class _Scattered:
    """Stage 3: as stage 2, but parts go into standing buffers; parameters are gathered and given back meanwhile."""

    def __init__(self, line: StageTimeline, layout: PlannedLayout, device: str):
        self.line, self.limit = line, layout.bucket
        # gloo's reduce-scatter sums into a clone of its input (ProcessGroupGloo.cpp)
        self.copies = 2 if device == "cpu" else 1
        self.element, self.ranks = ELEMENT_BYTES[layout.precision], shards(layout)
        self.gathered = gathered_in_backward(line, layout)
        self.reduced = reduction_bytes(layout)
        self.lifted = self.reduced if self.reduced != self.element else 0  # a copy of each gradient (stage3.py:1925)
        self.filled = self.outside = self.parts = 0

    def run(self) -> Iterator[LiveMemory]:
        """Over the backward."""
        for event, gathered in zip(self.line.backward, self.gathered, strict=True):
            for point in event.live:
                yield self._held(point, gathered)
            if event.parameter is not None:
                yield from self._arrive(event.parameter.numel, event.end, gathered)
        yield from self._reduce((0.0, 0.0), 0)

    def _arrive(self, numel: int, activations: Point, gathered: int) -> Iterator[LiveMemory]:
        """Take in one complete gradient (zero/stage3.py:1570)."""
        if self.filled and self.filled + numel > self.limit:
            yield from self._reduce(activations, gathered)
        yield self._held(activations, gathered)
        self.parts += 1
        self.filled += numel
        if numel > self.limit:  # does not fit into the bucket, and stays where it is (:1627)
            self.outside = self.element * numel

    def _reduce(self, activations: Point, gathered: int) -> Iterator[LiveMemory]:
        """One parameter alone is reduced in place where it needs no padding (comm/coalesced_collectives.py)."""
        if not self.filled:
            return
        alone = self.parts == 1 and self.filled % self.ranks == 0
        flat = 0 if alone else self.reduced * -(-self.filled // self.ranks) * self.ranks
        copied = (self.copies - 1) * self.reduced * self.filled if self.ranks > 1 else 0
        yield self._held(activations, gathered, temporaries=flat + copied + self.lifted * self.filled)
        self.filled = self.outside = self.parts = 0

    def _held(self, activations: Point, gathered: int, temporaries: int = 0) -> LiveMemory:
        return LiveMemory(activations, self.outside, 0, gathered, temporaries)
