"""Find the data parallel rank with the highest peak at ZeRO 1 and 2: replay one rank's training for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from zerofit.simulate.memory.ledger import DEVICE
from zerofit.simulate.ops.tracker import AllocationTracker
from zerofit.spec.partitions import partition_overlaps

# Ranks differ only in the gradients that they keep. A rank keeps the gradients of parameters that overlap its
# partition, from the moment when the first of them is reduced:
#
#   parameters   |   a   |     b      | c |     d     |
#   partitions   |  rank 0  |  rank 1  |  rank 2  |          rank 1 keeps b and c in full, d not at all
#
# Gradients of the last layers are reduced first, while activations are still alive.
# Line numbers refer to DeepSpeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py.
Array = npt.NDArray[np.int64]
NORM_BYTES = 8  # per element while its norm is computed (zero/utils.py, get_norm_dtype)
AVERAGE, REDUCE, EPILOGUE = "average_tensor", "reduce_ipg_grads", "independent_gradient_partition_epilogue"
NORM, FREE, STEP = "get_grad_norm_direct", "free_grad_in_param_list", "_optimizer_step"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that changes which gradients a rank keeps, and the ledger's events during the call."""

    name: str
    begin: int
    end: int
    reduced: int  # event at which the bucket's all-reduce is done
    parameters: tuple[int, ...]  # in the bucket, by DeepSpeed's number
    is_last: bool  # of the micro batches
    accumulates: bool  # adds to the gradients of other micro batches


class GradientLog:
    """Records when the ZeRO optimizer of a rank reduces, keeps and frees gradients."""

    def __init__(self, meter: AllocationTracker):
        self._meter, self._ledger = meter, meter.ledger
        self._calls: WeakKeyDictionary[DeepSpeedZeroOptimizer, list[_Call]] = WeakKeyDictionary()  # per optimizer
        for name in (AVERAGE, REDUCE, EPILOGUE, NORM, FREE, STEP):
            setattr(DeepSpeedZeroOptimizer, name, self._noting(name, getattr(DeepSpeedZeroOptimizer, name)))

    def heavier_rank(self, engines: Sequence[object], among: Sequence[int] = ()) -> int | None:
        """Return the rank with the highest peak; None if this rank's peak is not exceeded.

        `among`: the ranks to consider, which must do the same work as this rank. (): all ranks that share the
        parameters of the first engine.
        """
        for engine in engines:
            optimizer = getattr(engine, "optimizer", None)
            if isinstance(optimizer, DeepSpeedZeroOptimizer):
                group = max(optimizer.real_dp_process_group, key=dist.get_world_size)
                ranks = dist.get_process_group_ranks(group)
                here = ranks.index(dist.get_rank())
                replay = _Replay(optimizer, ranks, here, self._meter)
                needs = list(zip(*replay.needs(self._calls.get(optimizer, [])), strict=True))
                chosen = [n for n, rank in enumerate(ranks) if not among or rank in among]
                most = max(chosen, key=needs.__getitem__)
                return ranks[most] if needs[most] > needs[here] else None
        return None

    def _noting(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def noted(optimizer: DeepSpeedZeroOptimizer, *args: object, **kwargs: object) -> object:
            begin, calls = len(self._ledger.events), self._calls.setdefault(optimizer, [])
            held, before = _in_buckets(optimizer), len(calls)
            boundary: object = optimizer.is_gradient_accumulation_boundary
            is_last = bool(boundary() if callable(boundary) else boundary)  # an attribute up to DeepSpeed 0.18
            accumulates = optimizer.micro_step_id > 0 or not is_last
            result = original(optimizer, *args, **kwargs)
            end, left = len(self._ledger.events), set(_in_buckets(optimizer))
            reduced = calls[-1].end if calls[before:] else end
            parameters = tuple(number for number in held if number not in left)
            calls.append(_Call(name, begin, end, reduced, parameters, is_last, accumulates))
            return result

        return noted


def _in_buckets(optimizer: DeepSpeedZeroOptimizer) -> list[int]:
    """Return the indices of the parameters whose gradients wait in buckets.

    DeepSpeed up to 0.16 has a single bucket.
    """
    if hasattr(optimizer, "ipg_buckets"):
        entries = [entry for bucket in optimizer.ipg_buckets.values() for entry in bucket.params]
    else:
        entries = vars(optimizer)["params_in_ipg_bucket"]
    return [cast("int", entry[-1]) for entry in entries]


class _Group:
    def __init__(self, optimizer: DeepSpeedZeroOptimizer, number: int, ranks: int):
        members = optimizer.round_robin_bit16_groups[number]
        sharing = dist.get_world_size(optimizer.real_dp_process_group[number])
        self.size = int(optimizer.partition_size[number])  # a float up to DeepSpeed 0.19.6
        self.whole, inside, self.pieces, self.largest = np.zeros((4, ranks), dtype=np.int64)
        self.reached: dict[int, list[tuple[int, int]]] = {}  # parameter's number -> (rank, elements in its partition)
        for rank, place, piece in partition_overlaps([p.numel() for p in members], self.size, ranks // sharing):
            self.reached.setdefault(optimizer.get_param_id(members[place]), []).append((rank, piece))
            self.whole[rank] += members[place].numel()
            inside[rank] += piece
            self.pieces[rank] += 1
            if not getattr(members[place], "ds_pipe_replicated", False):  # if not, another stage computes its norm
                self.largest[rank] = max(self.largest[rank], piece + self.pieces[rank])  # with the norms so far
        self.pieces += inside < self.size  # padding with zeros at the end
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)  # not in DeepSpeed 0.19.5
        self.is_compact = compact is not None and compact(number)
        self.accumulated = self.size * optimizer.gradient_accumulation_dtype.itemsize
        self.zeros = self.accumulated // self.size * (self.size - inside) * (not self.is_compact)
        self.made = np.zeros(ranks, dtype=bool)  # whether the compact partition is allocated
        self.master = optimizer.single_partition_of_fp32_groups[number].element_size()


# All ranks run the same ops, so bytes before each event differ only in what a rank keeps for its own partition:
#
#   bytes of rank r at an event = bytes of the simulated rank at it - own(simulated rank) + own(r)
#
# The replay follows the recorded calls of the optimizer, and computes own(r) for all ranks at once, as arrays. Between
# two calls it uses the highest moment of the recording (`_pass`). Inside a call ranks allocate different sizes, so its
# recorded events are skipped and replaced by a formula of DeepSpeed's code (`_change`).
class _Replay:
    """Replays the training of one rank for all ranks that share its parameters.

    Arrays have one element per rank.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, ranks: Sequence[int], here: int, meter: AllocationTracker):
        self._optimizer, self._here, self._is_cpu = optimizer, here, meter.device == "cpu"
        self._groups = [_Group(optimizer, n, len(ranks)) for n in range(len(optimizer.round_robin_bit16_groups))]
        self._group_of = {number: group for group in self._groups for number in group.reached}
        self._element, self._none = optimizer.dtype.itemsize, np.zeros(len(ranks), dtype=np.int64)
        changes = [size * (meter.ledger.storages[index].place == DEVICE) for index, size in meter.ledger.events]
        self._alive = np.cumsum([0, *changes])  # bytes before each event, and at the end
        self._at = 0  # the replay has reached this event
        self._own, self._most, self._host = self._none, self._none, self._none
        self._new = self._none  # kept of this micro batch
        self._outside = self._none  # gradients too large for a bucket, which a copy has replaced
        self._late = self._none  # bytes that are freed after the group's step
        self._earlier = False  # whether gradients of an earlier micro batch are kept
        self._accumulated: set[int] = set()  # parameters with a gradient of earlier micro batches on the host
        self._stepping = 0
        self._flattening = False

    def needs(self, calls: Sequence[_Call]) -> tuple[list[int], list[int]]:
        """Return each rank's peak on the device, and the bytes of gradients it keeps on the host."""
        replay = {REDUCE: self._reduce, EPILOGUE: self._end, NORM: self._norm, FREE: self._flatten, STEP: self._step}
        for call in calls:
            if call.name in replay:
                replay[call.name](call)
        self._pass(len(self._alive))
        return self._most.tolist(), self._host.tolist()

    def _pass(self, event: int) -> None:
        """Advance to `event`. Up to this event, all ranks allocate and free the same bytes."""
        if event > self._at:
            most = self._alive[self._at : event].max() - self._own[self._here]
            self._most = np.maximum(self._most, most + self._own)
            self._at = event

    def _change(self, more: Array, momentary: Array, until: int) -> None:
        """Apply a change that differs between ranks."""
        # Skip the recorded rank's own events up to `until`.
        common = self._alive[self._at] - self._own[self._here]
        self._own = self._own + more
        self._most = np.maximum(self._most, common + self._own + momentary)
        self._at = until

    def _reduce(self, call: _Call) -> None:
        """Handle a reduced bucket: count the bytes of its gradients that each rank keeps (:2205)."""
        if self._optimizer.cpu_offload:
            self._offload(call)
        elif all(group.is_compact for group in self._groups):
            self._add_up(call)
        else:
            self._copy(call)

    # With `contiguous_gradients`, the first gradient of a micro batch allocates one buffer for all that the rank keeps.
    # Without it, each gradient is a tensor of its own: stage 2 frees those of other ranks, stage 1 only at the end.
    def _copy(self, call: _Call) -> None:
        """Copy the gradients into a buffer that fits all gradients of the rank (:2187)."""
        optimizer = self._optimizer
        self._pass(call.reduced)
        kept, ended = self._none.copy(), self._none.copy()
        for number in call.parameters:
            size = self._element * optimizer.param_dict[number].numel()
            for rank, _ in self._group_of[number].reached[number]:
                kept[rank] += size
                if size > self._element * optimizer.reduce_bucket_size and not optimizer.partition_gradients:
                    ended[rank] -= size  # other ranks keep it until backward ends
        if optimizer.contiguous_gradients:
            kept = np.where((kept > 0) & (self._new == 0), self._whole(), 0)
        elif not optimizer.partition_gradients:
            kept = self._none  # nothing is freed before backward ends
        self._new = self._new + kept
        self._change(kept, self._none, call.end)
        self._own, self._outside = self._own + ended, self._outside + ended

    # The first piece allocates the partition. Each piece is cast to the partition's dtype for a moment (`lifted`), and
    # pieces wait in a flat copy until a bucket's worth is all-reduced (`filled`).
    def _add_up(self, call: _Call) -> None:
        """Add a rank's pieces to a partition of another dtype (:1303, :1545)."""
        self._pass(call.begin)
        made, lifted, momentary, filled, count = self._none.copy(), self._none.copy(), self._none, 0, 0
        for number in call.parameters:
            group = self._group_of[number]
            for rank, piece in group.reached[number]:
                made[rank] += 0 if group.made[rank] else group.accumulated
                group.made[rank] = True
                lifted[rank] = max(lifted[rank], group.accumulated // group.size * piece)
                filled, count = filled + piece, count + 1
                if filled > self._optimizer.reduce_bucket_size:  # all-reduced at once
                    momentary = np.maximum(momentary, lifted + self._element * filled * (count > 1))
                    lifted, filled, count = self._none.copy(), 0, 0
        self._change(made, np.maximum(momentary, lifted + self._element * filled * (count > 1)), call.end)

    def _offload(self, call: _Call) -> None:
        """Send gradients to the host one by one.

        One copy in float64 is for the norm, and one copy is in the master weights' type.
        """
        self._pass(call.reduced)
        kept, momentary = self._none.copy(), self._none.copy()
        for number in call.parameters:
            group, whole = self._group_of[number], self._element * self._optimizer.param_dict[number].numel()
            is_new = call.accumulates and number not in self._accumulated
            self._accumulated |= {number} if is_new else set()
            for rank, piece in group.reached[number]:
                kept[rank] += whole * is_new
                momentary[rank] = max(momentary[rank], NORM_BYTES * piece * call.is_last)
        self._host = self._host + kept
        self._change(kept if self._is_cpu else self._none, momentary, call.end)

    def _whole(self) -> Array:
        return self._element * sum((group.whole for group in self._groups), start=self._none)

    def _end(self, call: _Call) -> None:
        """End a micro batch, and add its gradients to those of earlier micro batches (:1016)."""
        self._pass(call.end)
        own, self._outside = self._own - self._outside, self._none
        if self._optimizer.cpu_offload:
            return
        if all(group.is_compact for group in self._groups):
            for group in self._groups if call.is_last else ():
                own = own + np.where(group.made, 0, group.accumulated)
                group.made[:] = True
        else:
            if not self._optimizer.contiguous_gradients and not self._optimizer.partition_gradients:
                own = own + self._whole()
            if self._earlier:
                own = own - self._new
            if call.is_last:
                own = own + sum((group.zeros for group in self._groups), start=self._none)
        self._own, self._earlier, self._new = own, True, self._none

    def _norm(self, call: _Call) -> None:
        """Compute the norm of a group's gradients, one gradient at a time (:2648)."""
        self._pass(call.begin)
        self._change(self._none, NORM_BYTES * self._groups[self._stepping].largest, call.end)
        self._stepping = (self._stepping + 1) % len(self._groups)

    # Bytes of a group's step, with e = bytes of a gradient's element and m = those of a master weight's:
    #
    #   before    whole * e                 the gradients that the rank keeps
    #   peak      + size * e + size * m     their flat copy (with one piece none), and its cast (if m and e differ)
    #   after     the cast, or the flat copy, until the step ends
    def _flatten(self, call: _Call) -> None:
        """Allocate a group's flat gradient in the master weights' dtype. Free its sources (:3107)."""
        self._flattening = not self._flattening
        if self._flattening:  # the first of two calls frees gradients of other ranks' partitions
            self._pass(call.begin)
            return
        group, number = self._groups[self._stepping], self._stepping
        flat = np.where((group.pieces > 1) & (not group.is_compact), group.size * self._element, 0)
        lifted = 0 if group.is_compact or group.master == self._element else group.size * group.master
        self._change(self._none, flat + lifted, call.begin)
        freed = group.zeros + self._element * group.whole
        if self._optimizer.contiguous_gradients:  # one buffer for all groups
            last = np.max([n * (one.whole > 0) for n, one in enumerate(self._groups)], axis=0)
            freed = group.zeros + np.where(last == number, self._whole(), 0)
        if group.is_compact:
            self._late = np.where(group.made, group.accumulated, 0)
            group.made[:] = False
        elif lifted:
            self._own, self._late = self._own - freed, self._none
        else:  # the step uses the flat gradient; a single piece is the gradient itself
            self._own = self._own + flat - np.where(group.pieces > 1, freed, 0)
            self._late = np.where(group.pieces > 1, flat, freed)

    def _step(self, call: _Call) -> None:
        self._pass(call.end)
        self._own, self._late = self._own - self._late, self._none
        self._stepping = (self._stepping + 1) % len(self._groups)
        self._earlier = self._earlier and self._stepping > 0
