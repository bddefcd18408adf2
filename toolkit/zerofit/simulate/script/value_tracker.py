"""Keep the values of small device tensors, and assume a value where one is unknown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, Scratch, leaves_of
from zerofit.simulate.ops.tracker import FUNCTIONAL, is_own, user_line
from zerofit.simulate.record import STEPS
from zerofit.simulate.script.issuing import IssuingTracker
from zerofit.simulate.script.values import (
    KEPT_DATA,
    KEPT_FLOATS,
    KEPT_INTEGERS,
    RULES,
    UNDEFINED,
    alike,
    choices,
    forget,
    is_assumed,
    is_data,
    keep,
    known_truth,
    known_value,
    largest,
    on_host,
    overwrite,
    results,
)

SIMULATED = torch.device("privateuseone", 0)  # the device as torch's C++ code sees it
HOLDS_NOTHING_BYTES = 16 << 20  # new host tensors of at least this size are fake
_MOST_ELEMENTS = 16 << 20  # of inputs for which the largest output of an op in _BOUNDED is computed on the host
_aten = torch.ops.aten
_HISTC = _aten.histc.default
_TOP_K = _aten.topk.default
_TOP_1 = (_aten.max.dim, _aten.argmax.default)
_BOUNDED = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "torchvision::nms",  # its largest output: all boxes
)
_COUNTS = (_aten.sum.default, _aten.sum.dim_IntList)
_AND = (_aten.bitwise_and, _aten.logical_and)
# the flag that it would set for an overflow stays 0, since training continues
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_OVERWRITES = (_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor)
_UNDEFINED = ("aten::empty", "aten::new_empty")


class ValueTracker(IssuingTracker):
    """Stores known values with fakes, so that masks, lengths and counters control the script.

    When an op writes unknown values to a tensor, `forget` deletes the tensor's known values. Each assumption about an
    unknown value adds a note.
    """

    def __init__(self, device: str, scratch: Scratch, fakes: FakeTensorMode, workspace_bytes: int = 0):
        super().__init__(device, scratch, workspace_bytes)
        self.fakes = fakes
        self.notes: Counter[str] = Counter()  # each approximation, and how often it was used
        self.inexact: set[str] = set()  # the notes that make the figures an upper bound
        self.missing: set[str] = set()  # the notes on memory that is not counted
        self.all_true = False  # whether masks of unknown values count as all True without a note
        self.crowded = False  # whether all tokens choose the same experts; else all experts get as many tokens
        self.routed = False  # whether the script has read which tokens an expert gets
        self.unknown_objects = ""  # the last objects that only another rank knows, and the line that gets them
        self.reduction: object = dist.ReduceOp.SUM  # of the last all-reduce; the op itself does not contain it

    def note(self, text: str, *, bound: bool = False, missing: bool = False, here: bool = False) -> None:
        """Count an approximation.

        `bound`: the figures become an upper bound. `missing`: the figures lack memory. `here`: add the script's line.
        """
        line = user_line() if here else ""  # "" if no line of the script is running
        text = f"{text}, at {line}" if line else text
        self.notes[text] += 1
        if bound:
            self.inexact.add(text)
        if missing:
            self.missing.add(text)

    def read(self, tensor: Tensor, *, shapes: bool = False) -> Any:
        """Return a tensor's value; None if it is unknown.

        `shapes`: whether an output's shape depends on the value. The first read of a router's assumed choice adds a
        note. Outside of modules, a read adds no note unless `shapes`: zerofit assumes that it is for a metric such as
        accuracy, and does not route tokens.
        """
        # only the first read: each layer has a router, and each reads its choice several times
        if is_assumed(tensor) and not self.routed and (shapes or self._running):
            self.routed = True
            share = (
                "all tokens choose the same experts" if self.crowded else "all experts get the same number of tokens"
            )
            self.note(f"the router's choice of experts is unknown: assumed that {share}", here=True)
        return known_value(tensor)

    def counted(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a sum over a mask of unknown values, as if the mask were all True.

        Masks that are used as an index are assumed to be all True as well. Return None if `tensor` is no such sum. Also
        return None outside of modules, where such a sum is a metric such as accuracy.
        """
        number = vars(tensor).get("_elements")
        if number is None or not self._running:
            return None
        self.note(
            "a mask with unknown values is summed: all its elements are assumed to be True", bound=True, here=True
        )
        with on_host():
            return torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu")

    def _stand_in(self, func: OpOverload, args: OpArguments) -> object:
        """Return a harmless value instead of a value that only a GPU could compute.

        Add a note if the script's own code reads it.
        """
        value = vars(args[0]).get("_passes") or func(*args)  # by the rule of `fakes.patches.item`
        code = self._call_site()[1]
        if code is not None and is_own(code.co_filename):
            self.note(f"the value of a tensor on the device: assumed to be {value}", here=True)
        return value

    def _numbers(self, index: object) -> Sequence[object]:
        """Return the indices where a mask is True, one tensor per dimension.

        A mask of unknown values counts as all True.
        """
        if not isinstance(index, Tensor) or index.dtype != torch.bool:
            return [index]
        known = self.read(index, shapes=True)
        with on_host():
            if known is None:
                if not self.all_true:
                    self.note("a mask of unknown values as an index: assumed to be all True", bound=True, here=True)
                known = torch.ones(index.shape, dtype=torch.bool, device="cpu")
            found = known.nonzero()
            columns = [found[:, d].contiguous() for d in range(index.dim())]
        on_device = [self.fakes.from_tensor(column).to(index.device) for column in columns]
        if known_value(index) is not None:
            for fake, column in zip(on_device, columns, strict=True):
                if isinstance(fake, FakeTensor):
                    keep(fake, column)
        return on_device

    def _by_values(
        self, func: OpOverload, args: OpArguments, kwargs: OpKeywords, leaves: list[Tensor], error: Exception
    ) -> OpOutput:
        """Return the output of an op whose shape depends on values.

        If the values are unknown, return the largest possible output of an op in _BOUNDED, and add a note. Unknown
        masks then count as all True, and other unknown inputs as distinct elements. For other ops, and for very large
        inputs, raise `error`.
        """
        known = all(self.read(t, shapes=True) is not None for t in leaves)
        if not known:
            if (
                func._overloadpacket._qualified_op_name not in _BOUNDED
                or max(t.numel() for t in leaves) > _MOST_ELEMENTS
            ):
                raise error
            text = f"{func._overloadpacket} of unknown values: assumed to return its largest output"
            self.note(text, bound=True, here=True)
            args, kwargs = tree_map(largest, (args, kwargs))
        real = self._computed(func, func._overloadpacket._qualified_op_name, args, kwargs)
        where = next((t.device for t in leaves if isinstance(t, FakeTensor)), torch.device("cpu"))

        def faked(t: object) -> object:
            if not isinstance(t, Tensor):
                return t
            made = torch.empty(t.shape, dtype=t.dtype, device=where)
            made = made if isinstance(made, FakeTensor) else self.fakes.from_tensor(made)
            if known:
                keep(made, t, assumed=any(map(is_assumed, leaves)))
            return made

        return tree_map(faked, real)

    def _keep_values(
        self, func: OpOverload, name: str, args: OpArguments, kwargs: OpKeywords, leaves: list[Tensor], out: OpOutput
    ) -> None:
        """Compute the values of small outputs from known inputs, and store them.

        When an op writes unknown values to a tensor, `forget` deletes the tensor's known values.
        """
        if name.startswith("c10d::"):
            self._receive(name, args, leaves)
            return
        written = out if out is not None else _written(func, args)
        outs = [t for t in leaves_of(written) if isinstance(t, FakeTensor)]
        # the number of elements that each sum adds up: what it would be for a mask that is all True (`counted`)
        if func in _COUNTS and args[0].dtype == torch.bool and known_value(args[0]) is None:
            vars(outs[0])["_elements"] = args[0].numel() // max(1, outs[0].numel())
            return
        if len(outs) == 1:
            _mark_check(func._overloadpacket, args, outs[0])
        # both before the inputs are asked for: these values hold although an input is unknown
        if self._keep_choices(func, args, outs) or (len(outs) == 1 and self._keep_decided(func, args, outs[0])):
            return
        # undefined values, or random ones, which the host would draw differently
        drawn = name.startswith(_UNDEFINED) or torch.Tag.nondeterministic_seeded in func.tags
        if len(outs) == 1 and not drawn and (func in _OVERWRITES or "out" in kwargs):
            self._begin(outs[0], leaves, func)
        known = not drawn and all(known_value(t) is not None for t in leaves)
        assumed = known and any(map(is_assumed, leaves))
        if not outs or not known or not all(_is_small(t, assumed) or is_data(func, leaves, t) for t in outs):
            if func._schema.is_mutable:
                for t in outs:
                    forget(t)
            return
        with on_host():
            for t in leaves_of(_written(func, args)):
                if isinstance(t, FakeTensor) and 0 in known_value(t).stride():  # one element stands for all
                    overwrite(t, known_value(t))
        try:
            real = self._computed(func, name, args, kwargs)
        except Exception:  # the host has no kernel for it, so its values are unknown
            for t in outs:
                forget(t)
            return
        for t, value in zip(leaves_of(out), leaves_of(real), strict=True) if real is not None else ():
            if isinstance(t, FakeTensor) and isinstance(value, Tensor) and value.shape == t.shape:
                keep(t, value, assumed=assumed)

    def _begin(self, out: FakeTensor, leaves: list[Tensor], func: OpOverload) -> None:
        """Store any value of an unknown tensor that an op overwrites in full with known values."""
        others, owns = [t for t in leaves if t is not out], out.nbytes == out.untyped_storage().nbytes()
        if known_value(out) is not None or not owns or any(known_value(t) is None for t in others):
            return
        if _is_small(out) or (others and is_data(func, others, out)):
            with on_host():
                any_value = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
            forget(out)  # the fakes that share its memory do not share this value
            keep(out, any_value)

    def _receive(self, name: str, args: OpArguments, leaves: list[Tensor]) -> None:
        """Write a collective's results to its real tensors, and to the values of its fakes."""
        with on_host():
            for t, value in results(name, args, self.reduction):
                if not isinstance(t, FakeTensor):
                    t.copy_(t if value is None else value)
                elif value is None or value.numel() > KEPT_DATA:
                    forget(t)
                else:
                    overwrite(t, value, assumed=any(map(is_assumed, leaves)))

    def _computed(self, func: OpOverload, name: str, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
        """Run an op on the host with the known values of its arguments."""
        # e.g. zeros(device=...), whose value the host computes
        host = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") == SIMULATED else kwargs
        with on_host():
            known, named = tree_map(known_value, args), tree_map(known_value, host)
            if name.startswith(FUNCTIONAL):
                return alike(name, known)
            if func is _HISTC:  # counts tokens of experts; the host has no kernel for integers
                return func(known[0].double(), *known[1:], **named).to(known[0].dtype)
            return func(*known, **named)

    def _keep_choices(self, func: OpOverload, args: OpArguments, outs: list[FakeTensor]) -> bool:
        """Store the experts that a router is assumed to choose."""
        # Return False if the op is not a router's.
        several = func is _TOP_K  # top-1 also finds predictions, outside of modules or in metrics
        routes = several or (func in _TOP_1 and bool(self._running) and torch.is_grad_enabled())
        if not routes or self._phase not in STEPS or known_value(args[0]) is not None:  # generation chooses tokens
            return False
        with on_host():
            places = choices(several, args, outs[-1].shape, crowded=self.crowded)
        if places is not None:
            keep(outs[-1], places, assumed=True)
        return places is not None

    def _keep_decided(self, func: OpOverload, args: OpArguments, out: FakeTensor) -> bool:
        """Store an output's value if no unknown input can change any element. Return whether stored."""
        if func._overloadpacket not in RULES:
            return False
        undefined = func._overloadpacket in UNDEFINED
        most = (
            (0 if undefined else KEPT_FLOATS) if out.is_floating_point() else KEPT_INTEGERS if undefined else math.inf
        )
        with on_host():
            value = known_truth(func, args, tuple(map(known_value, args[:2])))
            if value is None or out.numel() > most:
                return False
            # Expanded, a value of any size needs one element. Small ones are copied, so that ops can write into them.
            # `torch.tensor` would make it on the GPU within `deepspeed.zero.Init`, which replaces it.
            whole = _aten.scalar_tensor(value, dtype=out.dtype, device="cpu").expand(out.shape)
            if func._schema.is_mutable:
                overwrite(out, whole)
            else:
                keep(out, whole.clone() if out.numel() <= KEPT_INTEGERS else whole)
        return True

    def in_own_code(self) -> bool:
        """Return False always.

        If a script's own module reads an unknown value, zerofit assumes one and adds a note.
        """
        return False


def _mark_check(op: object, args: OpArguments, out: FakeTensor) -> None:
    """Mark the result of a check such as `(boxes[:, 2:] >= boxes[:, :2]).all()`, which passes in a real run."""
    # `(change < 1e-3).all()` and `(error > 1e-3).all()` usually control a loop, so such limits do not count. The same
    # holds for integers.
    if op is _aten.ge or (op is _aten.gt and isinstance(args[1], (int, float)) and args[1] == 0):
        vars(out)["_limited"] = args[0].is_floating_point()
    elif op in _AND:
        vars(out)["_limited"] = any(isinstance(t, Tensor) and vars(t).get("_limited") for t in args[:2])
    elif op is _aten.all:
        vars(out)["_passes"] = vars(args[0]).get("_limited", False)
    elif op is _aten._is_all_true:  # only checks of arguments call it, e.g. those of torch.distributions
        vars(out)["_passes"] = True


def _written(func: OpOverload, args: OpArguments) -> OpArguments:
    """Return the arguments that an op without an output writes, e.g. `_foreach_add_`."""
    if func is _UNSCALE:
        return args[:1]
    infos = [argument.alias_info for argument in func._schema.arguments[: len(args)]]
    return tuple(arg for arg, info in zip(args, infos, strict=True) if info is not None and info.is_write)


def _is_small(tensor: Tensor, assumed: bool = False) -> bool:
    integers = KEPT_DATA if assumed else KEPT_INTEGERS  # which tokens an expert gets decides shapes
    return tensor.numel() <= (KEPT_FLOATS if tensor.is_floating_point() else integers)
