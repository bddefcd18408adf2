"""Turn the recorded steps of two micro batches into layers with linear costs.

A step is recorded on the meta device. Each unit's forward and backward has memory, FLOPs and traffic.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zerofit.models.build import expert_places
from zerofit.models.quantized import elements, source_of_bits, statistics_bytes
from zerofit.simulate.costs.kernels import KernelCall, call_of, kernels_of
from zerofit.simulate.costs.traced_model import STAND_INS, TracedModel
from zerofit.simulate.ops import shortcuts
from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, Scratch, added_to
from zerofit.spec.profile import BackwardMoment, Kernel, LayerCost, LayerRun, Linear, ModuleCall

# not 1: with one sample some ops copy less, since a transposed batch of 1 is contiguous and gradients need no sum
MICRO_BATCHES = (2, 3)
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh")
Key = tuple[str, int]  # ("forward" or "backward", unit)


@dataclass
class GradientSegment:
    """A part of a section. The part ends when the gradient of a parameter is complete."""

    key: Key
    live: list[int] = field(default_factory=list)  # bytes alive after each op that allocates
    live_at_end: int = 0  # bytes, the complete gradient included
    parameter: int | None = None  # index in model.parameters() of the gradient that completes at the end


# A step is divided into sections, one for the forward and one for the backward of each unit. A section of backward is
# divided again where the gradient of a parameter is complete:
#
#   forward 0 | forward 1 | ... | backward 1 ....|....|.. | backward 0 ...|...
#                                                `----`- segments: a gradient is complete here, and leaves the trace
#
# From then on the engine decides where the gradient is kept (reduced, partitioned, on the host). So the trace has none
# of its bytes, and `plan` adds them for each ZeRO stage.
class ProfileRecorder(TorchDispatchMode):
    """Records ops, and follows every storage from its allocation to its release.

    `mark` starts a section, to which the following ops belong. `watch` ends segments.
    """

    def __init__(self, model: nn.Module, scratch: Scratch) -> None:
        super().__init__()
        self._model, self._scratch = model, scratch
        self.live_bytes = 0
        self.segments: list[GradientSegment] = []
        self.calls: dict[Key, list[KernelCall]] = {}
        self.before: dict[Key, int] = {}  # bytes alive when a section began
        self.handed_on: dict[int, int] = {}  # bytes of a unit's output, the input of the next one
        self.on_host: Counter[int] = Counter()  # bytes that a unit's forward saves in host memory
        self.largest: Counter[Key] = Counter()  # bytes of a section's largest storage
        self.exchanged: Counter[Key] = Counter()  # bytes that a section sends between ranks with different experts
        self.modules: dict[Key, list[ModuleCall]] = {}  # parameters by index in model.parameters()
        self.last_op = ""
        self._later: Key | None = None
        self._going_over: int | None = None  # storage whose memory the last op's output reuses, if it is released next
        self.readers: dict[int, int] = {}  # index of a frozen parameter -> the first unit that reads it
        self._frozen = {p.untyped_storage()._cdata: n for n, p in enumerate(model.parameters()) if not p.requires_grad}
        # the model's own storages are not counted
        own = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
        self._sizes = {storage._cdata: storage.nbytes() for storage in own}

    def mark(self, phase: str, unit: int) -> None:
        """Start the forward or backward section of a unit."""
        self._begin_later()
        key = (phase, unit)
        self.segments.append(GradientSegment(key, [self.live_bytes]))
        self.before.setdefault(key, self.live_bytes)  # a shared module can begin twice
        self._calls = self.calls.setdefault(key, [])

    def begin_backward(self) -> None:
        """Start the backward section of the unit whose forward is running."""
        self.mark("backward", self.segments[-1].key[1])

    def mark_later(self, phase: str, unit: int) -> None:
        """Start a section of a unit at the next op."""
        self._later = (phase, unit)

    def _begin_later(self) -> None:
        later, self._later = self._later, None
        if later is not None:
            self.mark(*later)

    def watch(self) -> list[RemovableHandle]:
        """Add hooks that remove each parameter's gradient once it is complete. Return their handles."""
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, index))
            for index, parameter in enumerate(self._model.parameters())
            if parameter.requires_grad
        ]

    def watch_modules(self) -> list[RemovableHandle]:
        """Add hooks that record when modules begin and end, also in a recomputation.

        Return their handles.
        """
        place = {id(p): n for n, p in enumerate(self._model.parameters())}
        handles = []
        for module in self._model.modules():
            own = tuple(place[id(p)] for p in module.parameters(recurse=False))
            begin, end = (partial(self._note_module, ModuleCall(begins, own)) for begins in (True, False))
            handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        return handles

    def _note_module(self, call: ModuleCall, _: nn.Module, args: object, *__: object) -> None:
        fed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(args))
        self.modules.setdefault(self._later or self.segments[-1].key, []).append(call._replace(fed=fed))

    def _take_gradient(self, index: int, parameter: Tensor) -> None:
        last = self.segments[-1]
        last.parameter, last.live_at_end = index, self.live_bytes
        parameter.grad = None
        self.segments.append(GradientSegment(last.key))

    def exchange(self, sent: int) -> None:
        """Add `sent` to the bytes of tokens that go to other expert parallel ranks."""
        self.exchanged[self.segments[-1].key] += sent

    def keeping_on_host(self, pin_memory: bool) -> saved_tensors_hooks:
        """Return a replacement for torch's `save_on_cpu`.

        It frees saved tensors, and allocates them again in backward.
        """

        def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.on_host[self.segments[-1].key[1]] += tensor.nbytes
            return tensor.shape, tensor.dtype

        return saved_tensors_hooks(pack, lambda kept: torch.empty(kept[0], dtype=kept[1], device="meta"))

    def few_chunks(self, targets: int, chunk: int) -> Iterator[int]:
        """Yield the starts of the first two chunks of a loss (train/loss.py).

        The kernels of the second chunk are counted again for each further chunk.
        """
        starts, began = range(0, targets, chunk), 0
        for start in starts[:2]:
            began = len(self._calls)
            yield start
        self._calls += self._calls[began:] * (len(starts) - 2)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: OpArguments = (), kwargs: OpKeywords | None = None
    ) -> OpOutput:
        kwargs = kwargs or {}
        self._begin_later()
        self.last_op = str(func)
        if self._frozen:
            self._note_readers(args)
        kernel = STAND_INS.get(func, func)
        out = shortcuts.as_stored(func, args, kernel(*args, **kwargs))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        older = added_to(func, args, sys._getframe().f_back)
        self._going_over = None if older is None else older.untyped_storage()._cdata
        scratch = self._scratch(func._overloadpacket._qualified_op_name, args, kwargs, out)
        if scratch:
            self.segments[-1].live.append(self.live_bytes + scratch)
        if is_kernel(func):
            self._calls.append(call_of(func, args, kwargs, out))
        return out

    def _note_readers(self, args: object) -> None:
        for leaf in tree_leaves(args):
            place = self._frozen.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
            if place is not None:
                self.readers.setdefault(place, self.segments[-1].key[1])

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known == size:
            return
        if known is None:
            # the storage's Python object lives as long as the storage
            weakref.finalize(storage, self._release, key)
        self._sizes[key] = size
        self.live_bytes += size - (known or 0)
        segment = self.segments[-1]
        segment.live.append(self.live_bytes)
        self.largest[segment.key] = max(self.largest[segment.key], size)

    def _release(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size
        if key == self._going_over:  # the last allocation reused its memory
            self.segments[-1].live[-1] -= size
        self._going_over = None


@cache
def is_kernel(func: OpOverload) -> bool:
    """Return whether an op launches a kernel.

    Views do not, and neither do allocations without values.
    """
    alias = next((r.alias_info for r in func._schema.returns), None)
    view = alias is not None and not alias.is_write
    return not view and func._overloadpacket.__name__ not in _FREE


def layer_of(subject: TracedModel, recorder: ProfileRecorder, unit: int) -> LayerRun:
    """Return a unit's layer, with the sizes of its parameters."""
    model, here = subject.model, subject.units[unit]
    every = list(model.parameters())
    indices = _parameters_of(model, recorder, unit)
    mine = [every[index] for index in indices]
    frozen, bits = ([every[index] for index in found] for found in _frozen_of(model, recorder, unit))
    quantized_bytes = sum(p.nbytes + statistics_bytes(p) for p in bits)
    return LayerRun(
        name=here.name,
        count=here.count,
        place=indices[0] if indices else 0,
        matrices=tuple(p.numel() for p in mine if p.dim() > 1),
        vectors=tuple(p.numel() for p in mine if p.dim() <= 1),
        factors=sum(map(_factors, mine)),
        frozen=tuple(p.numel() for p in frozen),
        quantized=tuple(map(elements, bits)),
        packed=tuple(p.nbytes for p in bits),
        quantized_bytes=quantized_bytes,
        buffers_bytes=quantized_bytes + _buffers_bytes(model, {id(p) for p in (*mine, *frozen, *bits)}, rest=unit == 0),
        tied_to="embedding" if here.name == "head" and _is_tied(model) else None,
    )


# Adafactor (Shazeer and Stern, 2018; torch/optim/_adafactor.py) keeps the means of rows and of columns instead of a
# second moment for each element: n + m numbers for a matrix of n x m.
def _factors(parameter: Tensor) -> int:
    """Return how many numbers Adafactor keeps for a parameter's second moment."""
    if parameter.dim() <= 1:
        return parameter.numel()
    *_, rows, columns = parameter.shape
    return parameter.numel() // columns + parameter.numel() // rows


def _parameters_of(model: nn.Module, recorder: ProfileRecorder, unit: int) -> list[int]:
    """Return the indices (in model.parameters()) of gradients that a unit's backward completes.

    Matrices come before vectors, and both are in the model's order. Trained parameters without a gradient belong to
    the first unit.
    """
    units = {s.parameter: s.key[1] for s in recorder.segments if s.parameter is not None}
    every = list(model.parameters())
    mine = [index for index, p in enumerate(every) if p.requires_grad and units.get(index, 0) == unit]
    return sorted(mine, key=lambda index: every[index].dim() <= 1)


def _frozen_of(model: nn.Module, recorder: ProfileRecorder, unit: int) -> tuple[list[int], list[int]]:
    every = list(model.parameters())
    still = [n for n, p in enumerate(every) if not p.requires_grad and recorder.readers.get(n, 0) == unit]
    plain, bits = ([n for n in still if (source_of_bits(every[n]) is None) is plain] for plain in (True, False))
    return plain, bits


def _calls(subject: TracedModel, recorder: ProfileRecorder, unit: int) -> tuple[ModuleCall, ...]:
    """Return the module calls of a unit's forward."""
    # A parameter is given as its layer and its index there.
    layers = [n for n, one in enumerate(subject.units) if one.count]
    found: dict[int, tuple[int, int]] = {}  # index in model.parameters() -> unit, place in its layer
    for one in {*layers, unit}:
        mine = *_parameters_of(subject.model, recorder, one), *chain(*_frozen_of(subject.model, recorder, one))
        found.update({index: (one, place) for place, index in enumerate(mine)})
    calls = []
    for begins, indices, _, fed in recorder.modules.get(("forward", unit), ()):
        known = [found[index] for index in indices if index in found]
        others = tuple((layers.index(one), place) for one, place in known if one != unit)
        calls.append(ModuleCall(begins, tuple(place for one, place in known if one == unit), others, fed))
    return tuple(calls)


# A quantity q of a layer is a line in the micro batch b, through the values at the two MICRO_BATCHES:
#
#   q(b) = fixed + per_sample * b
#
# Memory in forward and backward is the maximum over many moments. Each moment has its own line. Only lines that are
# the maximum at some b are stored (`envelope`), so a profile stays small and the maximum stays exact.
def cost_of(subject: TracedModel, recorders: tuple[ProfileRecorder, ProfileRecorder], unit: int) -> LayerCost:
    """Return the costs of a unit.

    Each quantity is a line through its values at the two MICRO_BATCHES.
    """
    forwards, backwards = (
        [[segment for segment in r.segments if segment.key == (phase, unit)] for r in recorders]
        for phase in ("forward", "backward")
    )
    bases = recorders[0].before["forward", unit], recorders[1].before["forward", unit]
    # index in model.parameters() -> place in the layer's matrices + vectors
    places: dict[int | None, int] = {p: n for n, p in enumerate(_parameters_of(subject.model, recorders[0], unit))}
    moments = tuple(
        BackwardMoment(
            live=envelope(_lines(pair, bases)), end=_end(pair, bases), parameter=places.get(pair[0].parameter)
        )
        for pair in zip(*backwards, strict=True)
    )
    forward = envelope(line for pair in zip(*forwards, strict=True) for line in _lines(pair, bases))
    is_last = unit == len(subject.units) - 1
    after = ("backward", unit) if is_last else ("forward", unit + 1)
    return LayerCost(
        saved_bytes=_line([r.before[after] - base for r, base in zip(recorders, bases, strict=True)]),
        forward_peak_bytes=_line([_peak(s, base) for s, base in zip(forwards, bases, strict=True)]),
        backward_peak_bytes=_line([_peak(s, base) for s, base in zip(backwards, bases, strict=True)]),
        output_bytes=_line([r.handed_on.get(unit, 0) for r in recorders]),
        largest_bytes=_line([r.largest["forward", unit] for r in recorders]),
        forward=forward,
        backward=moments,
        host_bytes=_line([r.on_host[unit] for r in recorders]),
        ep_alltoall_bytes=_line([r.exchanged["forward", unit] for r in recorders]),
        experts=tuple(places[n] for n in expert_places(subject.model) if n in places),
        calls=_calls(subject, recorders[0], unit),
        recomputed=any(call.begins for call in recorders[0].modules.get(("backward", unit), ())),
        forward_kernels=_kernels(recorders, unit, "forward"),
        backward_kernels=_kernels(recorders, unit, "backward"),
    )


def envelope(lines: Iterable[Linear]) -> tuple[Linear, ...]:
    """Return the lines that are the highest at some size of the micro batch."""
    # Upper envelope of lines by ascending slope: a new line replaces the last line in two cases. It is higher
    # already at b = 1, or it crosses the second-to-last line at a smaller b than the last line does.
    best: list[Linear] = []
    for line in sorted(set(lines), key=lambda one: (one.per_sample, one.fixed)):
        while best and (best[-1].at(1) <= line.at(1) or (len(best) > 1 and _hidden(best[-2], best[-1], line))):
            best.pop()
        best.append(line)
    return tuple(best)


def _hidden(left: Linear, middle: Linear, right: Linear) -> bool:
    """Return whether `middle` is nowhere the highest of three lines with ascending slopes."""
    crossing = (left.fixed - right.fixed) * (middle.per_sample - left.per_sample)
    return crossing <= (left.fixed - middle.fixed) * (right.per_sample - left.per_sample)


def _line(values: Sequence[float]) -> Linear:
    (low, high), (at_low, at_high) = MICRO_BATCHES, values
    slope = (at_high - at_low) / (high - low)
    return Linear(fixed=at_low - slope * low, per_sample=slope)


def _lines(pair: tuple[GradientSegment, GradientSegment], bases: tuple[int, int]) -> list[Linear]:
    """Return one line per op."""
    # If the two micro batches ran different ops, return one line for the peak.
    live = [segment.live for segment in pair]
    if len(live[0]) != len(live[1]):
        live = [[max(one, default=base)] for one, base in zip(live, bases, strict=True)]
    return [_line((a - bases[0], b - bases[1])) for a, b in zip(*live, strict=True)]


def _end(pair: tuple[GradientSegment, GradientSegment], bases: tuple[int, int]) -> Linear:
    if pair[0].parameter is None:
        return Linear()
    return _line([segment.live_at_end - base for segment, base in zip(pair, bases, strict=True)])


def _peak(segments: list[GradientSegment], base: int) -> int:
    return max((max(s.live, default=base) for s in segments), default=base) - base


def _kernels(recorders: tuple[ProfileRecorder, ProfileRecorder], unit: int, phase: str) -> tuple[Kernel, ...]:
    few, more = (recorder.calls.get((phase, unit), []) for recorder in recorders)
    return kernels_of(few, more, _line)


def _buffers_bytes(model: nn.Module, mine: set[int], rest: bool) -> int:
    """Return the bytes of buffers in modules whose parameters are in `mine`.

    `rest`: whether modules without parameters count, too.
    """
    total = 0
    for module in model.modules():
        parameters = [id(p) for p in module.parameters(recurse=False)]
        if (parameters and parameters[0] in mine) or (not parameters and rest):
            total += sum(b.nbytes for b in module.buffers(recurse=False))
    return total


def _is_tied(model: Any) -> bool:
    if not hasattr(model, "get_output_embeddings"):
        return False
    out = model.get_output_embeddings()
    return out is not None and getattr(out, "weight", None) is getattr(model.get_input_embeddings(), "weight", 0)
