"""Find which parameters are gathered at each moment, by replaying stage 3's coordinator.

References are to DeepSpeed 0.19.8, deepspeed/runtime/zero/partitioned_param_coordinator.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from zerofit.plan.layout import LIVE, REUSE, PlannedLayout, unset_sizes
from zerofit.plan.persistent import ParameterSharers, sharers
from zerofit.plan.timeline import StageTimeline
from zerofit.spec.profile import ModuleCall


class _Sizes(NamedTuple):
    """Stage 3's sizes of the JSON, in elements."""

    persistence: int
    prefetch: int
    live: int
    reuse: int


class LayerFetches(NamedTuple):
    """The all-gathers for one layer in one direction: their bytes and their number."""

    bytes: int
    calls: int  # all-gathers


def fetches(line: StageTimeline, layout: PlannedLayout) -> tuple[list[LayerFetches], list[LayerFetches]]:
    """Return the fetches of each layer, in forward and in backward.

    If a layer has more elements than stage3_max_live_parameters and stage3_max_reuse_distance, backward gathers
    some of its parameters again after the recomputation.
    """
    gathering = _gathering(line, layout)
    return gathering.fetched[False], gathering.fetched[True]


def gathered_in_forward(line: StageTimeline, layout: PlannedLayout) -> list[int]:
    """Return for each layer in `line.forward` the most bytes that are gathered in its forward.

    `line.forward` has only some of many equal layers. Each peak includes the equal layers before it that are left
    out.
    """
    return [max(moment.bytes for moment in passed) for passed in _passed(line, layout)]


def gathered_at_once(line: StageTimeline, layout: PlannedLayout, device: str) -> list[int]:
    """Return for each layer in `line.forward` what a second copy adds to its gathered bytes."""
    added = []
    for passed in _passed(line, layout):
        most = max(moment.bytes for moment in passed)
        # DeepSpeed receives several parameters in one buffer, and copies each out of it (partition_parameters.py:1343).
        # gloo copies even a single parameter (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
        copied = max(max(moment.waited, moment.sent if device == "cpu" else 0) for moment in passed)
        added.append(max(copied - most, 0))
    return added


def gathered_to_score(line: StageTimeline, layout: PlannedLayout, copied: StageTimeline | None = None) -> int:
    """Return the most gathered bytes in forwards without gradients.

    The trained model runs first, then a frozen copy. `copied`: the copy's timeline; None: no copy.
    """
    trained = _gathering(line, layout)
    peak = max(moment.bytes for moment in chain(*trained.forward))
    if copied is None:
        return peak
    left = trained.backward[-1][0].bytes  # prefetched for a backward that does not come
    # the copy has DeepSpeed's default sizes: DeepSpeed ignores the keys that TRL sets (trl/models/utils.py,
    # prepare_deepspeed)
    copy = _gathering(copied, replace(layout, **unset_sizes(3), live=LIVE, reuse=REUSE), forward_only=True)
    return max(peak, left + max(moment.bytes for moment in chain(*copy.forward)))


def _passed(line: StageTimeline, layout: PlannedLayout) -> list[list[_Fetch]]:
    """Return the moments of each layer in `line.forward` and of layers left out before it."""
    moments, chosen = _gathering(line, layout).forward, [n for n, *_ in line.forward]
    return [list(chain(*moments[before + 1 : n + 1])) for before, n in zip([-1, *chosen], chosen, strict=False)]


def gathered_in_backward(line: StageTimeline, layout: PlannedLayout) -> list[int]:
    """Return for each event of `line.backward` the most bytes that are gathered in it.

    `line.backward` has only some of many equal layers. A layer's last event includes the equal layers after it that
    are left out.
    """
    gathering = _gathering(line, layout)
    most: list[int] = []
    following = [event.layer for event in line.backward[1:]] + [-1]
    layer, cursor = -1, 0
    for event, after in zip(line.backward, following, strict=True):
        if event.layer != layer:
            layer, cursor = event.layer, 0
        moments = gathering.backward[layer]
        if event.parameter is None or after != layer:
            passed = [*moments[cursor:], *(chain(*gathering.backward[after + 1 : layer]) if after != layer else ())]
        else:
            member, start = gathering.begins[layer] + line.layers[layer].index(event.parameter), cursor
            cursor = next((n for n in range(start, len(moments)) if member in moments[n].members), start)
            passed = moments[start : cursor + 1]
        most.append(max(moment.bytes for moment in passed))
    return most


def left_by_backward(line: StageTimeline, layout: PlannedLayout) -> int:
    """Return the bytes that are still gathered when the last gradients are reduced."""
    # e.g. of an embedding: its input has no gradient, so DeepSpeed does not notice that its backward ends
    return _gathering(line, layout).gathered_bytes


def _gathering(line: StageTimeline, layout: PlannedLayout, forward_only: bool = False) -> _Gathering:
    # a parameter on the host is copied to the device even with one rank; results are equal for two or more ranks
    few = (2 if layout.offload_param != "none" else min(2, ranks) for ranks in sharers(layout))
    still = len(line.layers) if forward_only else 0 if layout.checkpointing else line.still
    sizes = _Sizes(layout.persistence, layout.prefetch, layout.live, layout.reuse)
    if line.scored in ("within", "reentrant"):
        sizes = sizes._replace(prefetch=0, reuse=0)
    return _cached(line, layout.element_bytes, sizes, ParameterSharers(*few), still)


def _backward_calls(modules: Sequence[ModuleCall], recomputed: bool) -> list[ModuleCall]:
    """Return the module calls of a layer's backward."""
    # for DeepSpeed, a module's backward ends when its input gets a gradient (parameter_offload.py, post_bwd_fn)
    turned = [call.turned for call in reversed(modules) if call.fed or not call.begins]
    if not recomputed:
        return turned
    # a recomputation begins when the first matmul needs saved tensors
    start = next((n for n, call in enumerate(turned) if call.begins and call.places), 0) + 1
    return [*turned[:start], *modules, *turned[start:]]


class _Fetch(NamedTuple):
    """The moment after a module has fetched and prefetched, or a layer's first moment."""

    bytes: int  # gathered
    members: tuple[int, ...] = ()
    waited: int = 0  # bytes when a buffer with several parameters has arrived, and each is copied out of it
    sent: int = 0  # bytes including a copy of what is being gathered


class _Gathering:
    """A step's gathered parameters, layer by layer. The first `still` layers have no backward.

    A step may run the model without gradients between forward and backward. Then DeepSpeed never has a trace of a step.
    So DeepSpeed neither prefetches parameters nor keeps them for reuse. The run without gradients also resets each
    module's number of gradients to wait for (`ds_grads_remaining`, parameter_offload.py). So modules do not release
    their parameters in backward.

    If a block is recomputed, the modules inside the block set their numbers again and release their parameters. The
    block itself does not release its own parameters. With use_reentrant=True, frozen weights are released only with the
    block (`ds_recompute_parameters`). So frozen weights stay gathered.
    """

    def __init__(self, line: StageTimeline, element: int, sizes: _Sizes, spread: ParameterSharers, still: int):
        layers = [(*layer, *packed) for layer, packed in zip(line.layers, line.packed, strict=True)]
        self.begins = list(accumulate(map(len, layers), initial=0))
        every = list(chain(*layers))
        self.whole_bytes = [p.bytes(element) for p in every]
        # a rank that has a parameter alone allocates nothing to gather it
        self.shared_bytes = [size if spread.of(p) > 1 else 0 for p, size in zip(every, self.whole_bytes, strict=True)]
        self.gathered_bytes = 0
        passes = [(n, False, self._modules(n, line.calls[n])) for n in range(len(layers))]
        for n, _, modules in reversed(passes[still:]):
            turned = _backward_calls(modules, line.recomputed[n])
            keeps = line.scored == "reentrant" or (line.scored == "within" and not line.recomputed[n])
            passes.append((n, True, [call for call in turned if call.begins] if keeps else turned))
        calls = [call for _, _, modules in passes for call in modules]
        scored = sum(call.begins for _, backward, modules in passes for call in modules if not backward)
        numels = [p.numel for p in every]
        self.coordinator = _Coordinator(calls, numels, sizes, forgetful=scored if line.scored == "first" else 0)
        self.of_step = [(n, backward) for n, backward, modules in passes for call in modules if call.begins]
        self.fetched = {backward: [LayerFetches(0, 0) for _ in layers] for backward in (False, True)}
        self.forward: list[list[_Fetch]] = [[] for _ in layers]
        self.backward: list[list[_Fetch]] = [[_Fetch(0)] for _ in layers]
        for n, backward, modules in passes:
            (self.backward if backward else self.forward)[n] = [_Fetch(self.gathered_bytes), *self._moments(modules)]

    def _modules(self, layer: int, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
        places = [[(layer, n) for n in call.places] + list(call.others) for call in calls]
        return [
            call._replace(places=tuple(self.begins[at] + n for at, n in members))
            for call, members in zip(calls, places, strict=True)
        ]

    def _moments(self, modules: Sequence[ModuleCall]) -> Iterator[_Fetch]:
        for call in modules:
            if call.others:
                self.coordinator.held = set(call.places) if call.begins else set()
            if not call.begins:
                self.gathered_bytes -= self._size(self.coordinator.release(call.places))
                continue
            step = self.coordinator.step
            own, waited, ahead = self.coordinator.fetch(call.places)
            if not (call.places or ahead):
                continue
            self._count(dict.fromkeys(own, step))
            self._count(ahead)
            now, later = self._size(own), self._size(ahead)
            self.gathered_bytes += now
            waiting = self.gathered_bytes + max((self._size(group) for group in waited if len(group) > 1), default=0)
            self.gathered_bytes += later
            yield _Fetch(self.gathered_bytes, call.places, waiting, self.gathered_bytes + max(now, later))

    def _count(self, group: dict[int, int]) -> None:
        """Count an all-gather. `group`: parameter -> step that needs it."""
        for number, (member, step) in enumerate(group.items()):
            layer, backward = self.of_step[step]
            size, calls = self.fetched[backward][layer]
            self.fetched[backward][layer] = LayerFetches(size + self.whole_bytes[member], calls + (number == 0))

    def _size(self, members: Iterable[int]) -> int:
        return sum([self.shared_bytes[n] for n in members])


# Stage 3 keeps 1/n of each parameter on a rank. Before a module runs, DeepSpeed gathers its parameters
# and prefetches parameters of the next modules. After a module, it releases the parameters that are not needed soon.
# Which parameters are full at a moment depends on four sizes of the JSON. So DeepSpeed's rules
# (partitioned_param_coordinator.py) are replayed on the module calls of the profile:
#
#     live elements    0 <= gathered <= stage3_max_live_parameters
#     fetch(module)    its own parameters, then the next ones until stage3_prefetch_bucket_size elements
#     release(module)  unless the next use is within stage3_max_reuse_distance elements, or fetching has reached a
#                      later use
#     persistence      smaller parameters than stage3_param_persistence_threshold are never released
class _Coordinator:
    """Gathers and releases parameters as modules begin and end, like DeepSpeed's coordinator.

    A trace is the order of a step's module calls. When a module begins, it fetches its own parameters. Then it
    prefetches the parameters that the trace needs next, up to the prefetch size (:447) and the limit of live elements.
    Modules without parameters prefetch, too, so fetching gets far ahead of releasing. When a module ends, a parameter
    stays gathered in two cases (:649): the trace uses the parameter again within the reuse distance, or fetching has
    already reached a later use.

    For each module call of the trace, DeepSpeed caches which parameters this call releases (:638). In a forward without
    gradients, every call releases all its parameters, because none is used again. If such a forward runs first,
    training reuses the cached releases. Then the first `forgetful` calls of the training trace release all their
    parameters, too. Parameters in `held` are not released.
    """

    def __init__(self, calls: Sequence[ModuleCall], numels: Sequence[int], sizes: _Sizes, forgetful: int):
        fetched = [call.places for call in calls if call.begins]
        self.numels, self.sizes = numels, sizes
        self.queue = [(n, step) for step, members in enumerate(fetched) for n in members]
        self.traversed = list(accumulate((sum(numels[n] for n in members) for members in fetched), initial=0))
        self.uses: dict[int, list[int]] = {}
        for n, step in self.queue:
            self.uses.setdefault(n, []).append(step)
        self.step = self.position = self.live = 0
        self.passed = [-1] * len(numels)  # step of the last use that fetching has reached
        self.forgetful = forgetful
        self.gathered: set[int] = set()
        self.held: set[int] = set()  # of a running module, and also of another module
        self.prefetched_with: dict[int, list[int]] = {}  # parameter -> all that share its buffer, itself included

    def fetch(self, members: Sequence[int]) -> tuple[list[int], list[list[int]], dict[int, int]]:
        """Return the parameters gathered now, the groups to wait for, and what is prefetched.

        The last result maps each prefetched parameter to the step that needs it.
        """
        own, waited = self._fetch_own(members) if members else ([], [])
        ahead, elements, most = dict[int, int](), 0, min(self.sizes.live - self.live, self.sizes.prefetch)
        while elements < most and self.position < len(self.queue):
            n, step = self._next()
            if self._is_missing(n) and n not in ahead:
                ahead[n] = step
                elements += self.numels[n]
        self.step += 1
        if ahead:
            self._gather(ahead)
            self.prefetched_with |= {n: list(ahead) for n in ahead}
        return own, waited, ahead

    def _fetch_own(self, members: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        own = [n for n in dict.fromkeys(members) if self._is_missing(n)]
        self._gather(own)
        waited = [own, *(self.prefetched_with[n] for n in members if n in self.prefetched_with)]
        for n in chain(*waited):
            self.prefetched_with.pop(n, None)
        # fetching always reaches the running module, even if its parameters are gathered already
        unpassed, reached = {n for n in members if self.passed[n] < self.step}, set[int]()
        while self.position < len(self.queue) and len(reached) < len(unpassed):
            reached.add(self._next()[0])
        return own, waited

    def release(self, members: Sequence[int]) -> list[int]:
        """Release and return those of `members` that are not needed soon."""
        released = [n for n in dict.fromkeys(members) if n in self.gathered and not self._is_wanted(n)]
        self.gathered.difference_update(released)
        self.live -= sum(self.numels[n] for n in released)
        return released

    def _is_missing(self, n: int) -> bool:
        return n not in self.gathered and self.numels[n] > self.sizes.persistence

    def _gather(self, members: Collection[int]) -> None:
        self.gathered.update(members)
        self.live += sum(self.numels[n] for n in members)

    def _next(self) -> tuple[int, int]:
        """Return the next parameter of the trace, and the step that needs it."""
        n, step = self.queue[self.position]
        self.position += 1
        self.passed[n] = max(self.passed[n], step)
        return n, step

    def _is_wanted(self, n: int) -> bool:
        if n in self.held or self.step <= self.forgetful:
            return n in self.held
        if self.passed[n] > self.step:
            return True
        uses = self.uses[n]
        later = bisect_left(uses, self.step)
        return later < len(uses) and self.traversed[uses[later]] - self.traversed[self.step] < self.sizes.reuse


_cached = lru_cache(maxsize=1024)(_Gathering)
