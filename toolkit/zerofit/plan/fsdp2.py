"""Replay FSDP, which gathers parameters and scatters gradients layer by layer.

References are to torch 2.14, below torch/distributed/fsdp/_fully_shard/. Accelerate and torchtitan make the same
groups: the embedding, each block, and the final norm with the head. The last group stays gathered. A tied matrix is in
the group of the head. Other parameters of the embedding are in the root's group, which stays gathered too.

FSDP 1 (`flattens`; _flat_param.py and _runtime_utils.py, one folder above) flattens each group into one parameter.
Embedding, norm and head are one group, which is gathered first and stays gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from zerofit.features.engines import ENGINES
from zerofit.plan.backward import LiveMemory
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.optimizer_states import host_state_bytes, states_of
from zerofit.plan.persistent import PersistentMemory
from zerofit.plan.timeline import FROZEN, NOTHING, Parameter, Point, StageTimeline, TimelineEvent, add
from zerofit.plan.transient import StepMemory
from zerofit.spec.overhead import pinned_bytes


class _GatheredGroup(NamedTuple):
    """Parameters that are gathered together, in elements."""

    shard: int = 0  # all parameters of a rank's shard, with padding
    trained: int = 0  # parameters of the shard that have gradients
    numel: int = 0  # the full trained parameters
    largest: int = 0  # shard of the largest trained parameter
    last: int = 0  # the last trained parameter, full

    @classmethod
    def of(cls, parameters: Sequence[Parameter], layout: PlannedLayout, width: int) -> _GatheredGroup:
        trained, frozen = (_parts(kind, layout, width) for kind in _by_training(parameters))
        numels = [p.numel for p in _trained(parameters)]
        last = numels[-1] if numels else 0
        return cls(sum(trained + frozen), sum(trained), sum(numels), max(trained, default=0), last)


def _groups(line: StageTimeline, layout: PlannedLayout) -> tuple[list[Sequence[Parameter]], list[Parameter]]:
    """Return the parameters gathered together for each layer, and those of the root alone."""
    first, *blocks, head = line.layers
    embedding = max(first, key=lambda p: p.numel)
    others = [p for p in first if p is not embedding]
    tail = [*sorted(head, key=lambda p: -p.group), *([embedding] if line.tied else [])]  # the norm comes first
    own = [] if line.tied else [embedding]
    return ([[], *blocks, [*others, *own, *tail]], []) if layout.flattens else ([own, *blocks, tail], others)


def root_elements(line: StageTimeline, layout: PlannedLayout) -> int:
    """Return the number of elements of the group that FSDP 1 leaves gathered after a forward."""
    return sum(parameter.numel for parameter in _groups(line, layout)[0][-1])


def _parts(parameters: Sequence[Parameter], layout: PlannedLayout, width: int) -> list[int]:
    """Return a rank's elements of each parameter of a group."""
    if layout.flattens and parameters:  # FSDP 1 makes one parameter of a group
        return [-(-sum(p.numel for p in parameters) // layout.shard_ranks)]
    return [shard(p, layout.shard_ranks, width) for p in parameters]


def _all_parts(line: StageTimeline, layout: PlannedLayout) -> tuple[list[int], list[int]]:
    """Return a rank's elements of each trained, and of each frozen parameter."""
    groups, root = _groups(line, layout)
    trained: list[int] = []
    frozen: list[int] = []
    for group in (*groups, root):
        for parts, kind in zip((trained, frozen), _by_training(group), strict=True):
            parts.extend(_parts(kind, layout, line.width))
    return trained, frozen


def _by_training(parameters: Sequence[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    return _trained(parameters), [parameter for parameter in parameters if parameter.group == FROZEN]


def _trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.group != FROZEN]


def shard(parameter: Parameter, ranks: int, width: int) -> int:
    """Return how many elements of a parameter a rank has, with padding."""
    # The first dimension is divided (_fsdp_param.py:337). A profile has no shapes, so one side of a matrix is assumed
    # to be the model's width. Which side comes first is unknown: the result is the larger of both cases.
    numel = parameter.numel
    sides = {numel} if parameter.group == 1 or not width or numel % width or numel == width else {width, numel // width}
    return max(-(-rows // ranks) * (numel // rows) for rows in sides)


def block_persistent(line: StageTimeline, layout: PlannedLayout) -> PersistentMemory:
    """Return the memory that a rank keeps between steps: its part of the parameters and moments."""
    parts, frozen = _all_parts(line, layout)
    sizes = [layout.weight_bytes * part for part in parts]
    frozen = [layout.element_bytes * part for part in frozen]
    buffers = {"buffers of the model": line.buffers_bytes}
    if layout.offload_param == "none":
        states = states_of(layout, parts, "cuda").device
        return PersistentMemory({**buffers, "parameters": sum(sizes + frozen), "optimizer state": states}, {})
    # offloaded parameters and their gradients are page-locked (_fsdp_param.py:345)
    gradients, states = sum(map(pinned_bytes, sizes)), host_state_bytes(layout) * sum(parts)
    host = {"parameters": gradients + sum(map(pinned_bytes, frozen)), "gradients": gradients, "optimizer state": states}
    return PersistentMemory(buffers, host)


def block_init(line: StageTimeline, layout: PlannedLayout) -> Iterator[dict[str, int]]:
    """Yield the start-up moment when only the largest layer is still undivided."""
    if ENGINES[layout.engine].only_methods:  # verl starts while the GPU is empty, so its start is no peak
        return
    divided_bytes = block_persistent(line, layout).device.get("parameters", 0)
    if ENGINES[layout.engine].builds_in_parts:
        yield {"parameters": divided_bytes}
        return
    largest = max(sum(p.numel for p in layer) for layer in line.layers)
    yield {"parameters": divided_bytes, "temporaries": layout.weight_bytes * largest}


def block_step(line: StageTimeline, layout: PlannedLayout) -> Iterator[StepMemory]:
    """Yield the moment of the optimizer step, with a rank's gradients."""
    parts = _all_parts(line, layout)[0]
    # fused Adam allocates nothing
    yield StepMemory(gradients=layout.weight_bytes * sum(parts) if layout.offload_param == "none" else 0)


def block_moments(line: StageTimeline, layout: PlannedLayout) -> tuple[list[LiveMemory], list[LiveMemory]]:
    """Return the moments of the last micro batch's forward, and the moments of its backward."""
    replay = _LayerReplay(line, layout)
    return list(replay.forward()), list(replay.backward())


def block_fetches(elements: Sequence[int], layout: PlannedLayout) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return bytes and number of all-gathers for each kind of layer, in forward and in backward.

    `elements`: number of parameter elements of each kind of layer. The last kind, the head, stays gathered. The first
    kind, the embedding, stays gathered with FSDP 1.
    """
    forward = tuple((float(layout.element_bytes * numel), 1.0 if numel else 0.0) for numel in elements)
    again = range(1 if layout.flattens else 0, len(forward) - 1 if layout.reshard else 0)
    return forward, tuple(fetch if n in again else (0.0, 0.0) for n, fetch in enumerate(forward))


# What a rank has gathered, and what waits for the network (_fsdp_param_group.py):
#
#     forward    gather k -> copy out of the flat buffer -> run layer k -> release k
#                the flat buffer of k stays until k + 1 has been copied out (wait_for_unshard)
#     backward   copy k out -> gather k - 1 -> run layer k -> release k -> scatter its gradients
#                the input of the scatter stays until the next layer's gradients are scattered (post_backward)
#
# Without `reshard`, layers stay gathered from forward to backward.
#
# FSDP 1 copies nothing out and has no buffer besides a gathered group. It gathers k - 1 when the backward of k begins,
# joins the gradients of k into a flat one, releases k, converts the flat gradient, and scatters it at once.
class _LayerReplay:
    """One rank's forward and backward."""

    def __init__(self, line: StageTimeline, layout: PlannedLayout):
        self.line, self.layout, self.ranks, self.element = line, layout, layout.shard_ranks, layout.element_bytes
        self.stored, self.reduced = layout.weight_bytes, layout.reduced_bytes
        self.converts = self.element < self.stored  # a gather converts the weights
        self.offloaded = layout.offload_param != "none"
        self.copies = not layout.flattens  # parameters are copied out of the buffer into which they are gathered
        layers, self.last_layer = line.layers, len(line.layers) - 1
        groups, root = _groups(line, layout)
        self.groups = [_GatheredGroup.of(group, layout, line.width) for group in groups]
        self.root = _GatheredGroup.of(root, layout, line.width)
        self.head_first = line.tied or layout.flattens  # whether the last group is gathered for the first layer
        # bytes of gathered parameters, of the flat buffer, and of a scatter's input
        self.gathered_bytes = self.flat_bytes = self.scatter_input = 0
        # full or scattered gradients of earlier micro batches
        every = sum(p.numel for p in _trained(chain(*layers)))
        self.keeps_full = layout.keeps_full_gradients
        self.adds_up = layout.accumulation > 1 and not self.keeps_full
        self.full_gradients = layout.full_gradient_bytes * every if self.keeps_full else 0
        self.scattered_gradients = next(block_step(line, layout)).gradients if self.adds_up else 0
        self.merges = self.keeps_full and self.copies  # FSDP 1 first joins the new gradients of a group
        self.in_place = self.merges and self.reduced == self.element  # autograd adds to the gradient
        self.trained = [sum(p.numel for p in _trained(layer)) for layer in layers]
        self.in_chunks = ENGINES[layout.engine].loss_in_chunks
        # one rank of FSDP 1 has only a copy in the compute precision, which the root releases too (post_reshard)
        alone = self.ranks == 1 and not self.copies
        self.releases = layout.reshard and (ENGINES[layout.engine].releases_head or alone)
        if self.in_chunks and line.tied:  # torchtitan ties after it divides, so both places have a copy
            head = self.groups[-1]
            self.groups[-1] = head._replace(shard=head.shard + shard(groups[-1][-1], self.ranks, line.width))
        self.last_group = self.groups[-1]
        if self.in_chunks:  # the head's gradient is scattered before the norm's
            norm = _GatheredGroup.of(groups[-1][:-1], layout, line.width)
            self.last_group = norm._replace(shard=self.last_group.shard)
            self.trained[-1] = self.last_group.numel

    def forward(self) -> Iterator[LiveMemory]:
        moments = {n: (before, points) for n, before, points in self.line.forward}
        for n, group in enumerate(self.groups):
            before, points = moments.get(n, (None, ()))
            for new in self._gathered_for(n):
                # a local variable keeps the buffer before until the parameters are copied out (wait_for_unshard)
                sent, gathered, flat = self._sent(new), self._gathered(new), self._flat(new)
                added = flat + max(sent, gathered) if self.copies else sent + gathered
                if before is not None:
                    yield self._live(before, self.gathered_bytes + self.flat_bytes + added, n)
                self.gathered_bytes, self.flat_bytes = self.gathered_bytes + gathered, flat
            for number, point in enumerate(points):
                released = self.releases and n == self.last_layer and number  # all but the head's product
                yield self._live(point, 0 if released else self.gathered_bytes + self.flat_bytes, n)
            if self.layout.reshard and n < self.last_layer:
                self.gathered_bytes -= self._gathered(group)
        self.flat_bytes = 0

    def backward(self) -> Iterator[LiveMemory]:
        events: dict[int, list[TimelineEvent]] = {}
        for event in self.line.backward:
            events.setdefault(event.layer, []).append(event)
        end: Point | None = None
        pending = 0  # bytes of gradients whose group is scattered after all layers
        if self.in_chunks:
            head, *events[self.last_layer] = events[self.last_layer]
            yield from self._loss(head)
        for n in range(self.last_layer, -1, -1):
            layer, group = events.get(n, []), self.groups[n] if n < self.last_layer else self.last_group
            yield from self._gather(n, end, pending)
            for event in layer:
                gradients = pending + (0 if self.in_place else self.element * (event.done - layer[0].done))
                for point in event.live:
                    # the loss is differentiated before the head's backward gathers the last block
                    own = self.element * self.groups[n].last
                    began = n < self.last_layer or event is not layer[0] or (own and point[0] >= own)
                    ahead = self.flat_bytes if began else 0
                    gathered = 0 if self.releases and not began else self.gathered_bytes + ahead
                    yield self._live(point, gathered, n, gradients)
            end = layer[-1].end if layer else None
            own = 0 if self.merges else self.element * self.trained[n]
            if n and not (self.head_first and n == self.last_layer):
                yield from self._scatter(group, end, pending + own, n)
            else:
                pending += own
        for group in (self.root, self.groups[-1] if self.head_first else self.groups[0]):
            yield from self._scatter(group, NOTHING, pending, 0)
            pending -= 0 if self.merges else self.element * group.numel

    def _loss(self, head: TimelineEvent) -> Iterator[LiveMemory]:
        """Replay the head, whose chunks run forward and backward one by one."""
        # The gradients of all chunks are added up in float32, and scattered after the last chunk
        # (torchtitan/components/loss.py). This replay keeps the head gathered until the norm's backward. FSDP2
        # releases it in between, when less memory is in use.
        group, added = self.groups[-1], self.stored * self.groups[-1].last
        for point in (*head.live, head.end):
            yield self._live(point, self.gathered_bytes, self.last_layer, added)
        self.scatter_input = self.reduced * self.ranks * group.trained
        rest = add(head.end, (-self.element * group.last, 0.0))
        yield self._live(rest, self.gathered_bytes, self.last_layer, added, self.stored * group.trained)
        if not (self.offloaded or self.adds_up):
            self.scattered_gradients += self.stored * (group.trained - self.last_group.trained)

    def _gathered_for(self, n: int) -> list[_GatheredGroup]:
        """Return the groups that are gathered when the forward of layer n begins."""
        if n == 0:
            first = [self.root, self.groups[-1] if self.head_first else self.groups[0]]
            return [group for group in first if group.shard]
        return [] if self.head_first and n == self.last_layer else [self.groups[n]]

    def _gather(self, n: int, end: Point | None, gradients: int) -> Iterator[LiveMemory]:
        """Copy layer n out of its buffer, and gather the layer before it (pre_backward)."""
        if not self.layout.reshard or n < self.line.still:
            return
        if n < self.last_layer:
            self.gathered_bytes += self._gathered(self.groups[n])
            if end is not None and self.copies:
                yield self._live(end, self.gathered_bytes + self.flat_bytes, n, gradients)
        ahead = self.groups[n - 1] if n else _GatheredGroup()
        self.flat_bytes = self._flat(ahead) if self.copies else self._gathered(ahead)
        if end is not None:
            yield self._live(end, self.gathered_bytes + self.flat_bytes + self._sent(ahead), n, gradients)

    def _scatter(self, group: _GatheredGroup, end: Point | None, gradients: int, layer: int) -> Iterator[LiveMemory]:
        """Release a group and scatter its gradients (post_backward, foreach_reduce)."""
        if not self.copies:
            yield from self._scatter_flat(group, end, gradients, layer)
            return
        self.gathered_bytes -= self._gathered(group)
        self.scatter_input = self.reduced * self.ranks * group.trained
        if not group.trained:
            return
        if end is not None:
            yield self._live(end, self.gathered_bytes + self.flat_bytes, layer, gradients)
        size = self.reduced if self.keeps_full else self.element
        if self.keeps_full:
            self.full_gradients -= size * group.numel
        if end is not None:
            # a loop variable keeps the last gradient (_fsdp_collectives.py, foreach_reduce)
            left = (
                gradients
                - (0 if self.keeps_full else size * group.numel)
                + (size * group.last if self.ranks > 1 else 0)
            )
            lowered = self.reduced * group.trained if self.reduced < self.stored else 0
            yield self._live(
                end, self.gathered_bytes + self.flat_bytes, layer, left, lowered + self.stored * group.trained
            )
        if not (self.offloaded or self.adds_up):
            self.scattered_gradients += self.stored * group.trained
        if self.layout.replicas > 1 and (self.reduced < self.stored or self.adds_up):
            # each group keeps what its replicas have reduced (_all_reduce_state), unless it is the gradient itself
            self.scattered_gradients += self.reduced * group.trained

    def _scatter_flat(
        self, group: _GatheredGroup, end: Point | None, gradients: int, layer: int
    ) -> Iterator[LiveMemory]:
        """Join a group's gradients, release the group, and scatter (_post_backward_hook)."""
        own, moment = self.element * group.numel, end if group.numel else None  # frozen groups are only released
        if moment is not None:
            yield self._live(moment, self.gathered_bytes + self.flat_bytes, layer, gradients + own)
        self.gathered_bytes -= self._gathered(group)
        if moment is not None:
            converted, padded = (self.reduced * size for size in (group.numel, self.ranks * group.trained))
            self.scatter_input = (converted if self.reduced > self.element else 0) + (
                padded if padded > converted else 0
            )
            part = self.reduced * (self.ranks > 1) + (self.stored if self.stored < self.reduced else 0)
            yield self._live(moment, self.gathered_bytes + self.flat_bytes, layer, gradients, part * group.trained)
            self.scatter_input = 0
        if self.keeps_full:
            self.full_gradients -= own
        if not self.adds_up:
            self.scattered_gradients += self.stored * group.trained

    def _gathered(self, group: _GatheredGroup) -> int:
        """Return the bytes of a gathered group."""
        return self.element * self.ranks * group.shard

    def _flat(self, group: _GatheredGroup) -> int:
        """Return the bytes of the buffer into which a group is gathered; 0 with one rank."""
        return self._gathered(group) if self.ranks > 1 and self.copies else 0

    def _sent(self, group: _GatheredGroup) -> int:
        """Return the bytes of a gather's input: the shards in the compute precision.

        Offloaded shards are copied from the host (_fsdp_collectives.py:382, _fsdp_param.py:1051).
        """
        if not self.copies:
            low, host = self.element * self.converts * (self.ranks > 1), self.stored * self.offloaded
            return (low + host) * group.shard
        if self.ranks == 1:
            return self.element * group.largest if self.converts else 0
        if not self.converts:
            return self.stored * group.shard if self.offloaded else 0
        if self.offloaded:
            return self.element * group.shard + self.stored * group.largest
        return self.element * group.trained

    def _live(
        self, activations: Point, gathered: int, layer: int, gradients: int = 0, temporaries: int = 0
    ) -> LiveMemory:
        waiting = gradients + self.full_gradients + self.scattered_gradients
        return LiveMemory(activations, waiting, self.scatter_input, gathered, temporaries, layer=layer)
