"""Support torch.nn.Lazy* modules, whose parameters and buffers get their shapes from the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.memory.categories import PARAMETERS
from zerofit.simulate.script.tracker import ScriptTracker, is_real

_Mixin: Any = vars(nn.parameter)["UninitializedTensorMixin"]  # type stubs lack it
_watch: list[Callable[[Tensor], None]] = []  # called when a shape becomes known


class _Unknown(_Mixin):
    """A fake tensor of unknown shape; when the shape is known it becomes an ordinary fake."""

    cls_to_become = FakeTensor
    shape = torch._C.TensorBase.shape  # of no elements: ops on fakes read it

    def materialize(self, *args: Any, **kwargs: Any) -> None:
        """Set the shape, and watch the gradient from now on."""
        super().materialize(*args, **kwargs)
        _watch[0](self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow what torch allows; a tensor that was moved stays of unknown shape."""
        out = super().__torch_function__(func, types, args, kwargs)
        if func in cls._allowed_methods and type(out) is FakeTensor:
            out.__class__ = cls
        return out


class _UnknownParameter(_Unknown, UninitializedParameter, FakeTensor):
    """A parameter of unknown shape."""


class _UnknownBuffer(_Unknown, UninitializedBuffer, FakeTensor):
    """A buffer of unknown shape."""


def lazy_modules(meter: ScriptTracker, watch: Callable[[Tensor], None]) -> None:
    """Make parameters and buffers of unknown shape fakes from the start: a real tensor cannot become one in place.

    `watch` is called for each one whose shape becomes known. (torch.nn.parameter.UninitializedParameter.__new__,
    UninitializedBuffer.__new__)
    """

    def became_known(tensor: Tensor) -> None:
        meter.tag(tensor, PARAMETERS)
        watch(tensor)

    _watch[:] = [became_known]
    _Unknown._allowed_methods = [*_Mixin._allowed_methods, Tensor.to, Tensor.cuda]

    def empty(device: Any, dtype: Any) -> Tensor:
        made = torch.empty(0, device=device, dtype=dtype)
        return meter.fakes.from_tensor(made) if is_real(made) else made

    def parameter(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        made = nn.Parameter(empty(device, dtype), requires_grad)
        made.__class__ = _UnknownParameter
        return made

    def buffer(cls: Any, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent=True) -> Any:
        made: Any = empty(device, dtype)
        made.__class__ = _UnknownBuffer
        made.requires_grad, made.persistent, made._is_buffer = requires_grad, persistent, True
        return made

    replace_in(UninitializedParameter, "__new__", staticmethod(parameter))
    replace_in(UninitializedBuffer, "__new__", staticmethod(buffer))
