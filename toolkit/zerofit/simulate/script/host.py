"""Patch torch so that a script's tensors are real on the host and fake on the device.

The patches are applied once, in the process of a script's simulation, in addition to those of
`simulate.fakes.patches`. The docstring of each patch explains why it is needed, and names the replaced functions.
`tests/simulate/test_patches.py` tests each patch.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import flex_attention
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import is_own
from zerofit.simulate.script.tracker import ScriptTracker, is_real
from zerofit.simulate.script.values import forget, is_assumed, keep, known_value, on_host
from zerofit.spec.memory_kinds import PARAMETERS

_Mixin: Any = vars(nn.parameter)["UninitializedTensorMixin"]  # type stubs lack it
_watch: list[Callable[[Tensor], None]] = []  # called when a shape becomes known
_OF_TRITON = {"trl.kernels", "liger_kernel", "unsloth", "fla"}  # packages of kernels that fall back to plain torch


def parameters(meter: ScriptTracker) -> None:
    """Make every new parameter a fake on the parameter's device. (torch.nn.Parameter.__new__)"""
    original = cast("Callable[..., nn.Parameter]", nn.Parameter.__new__)

    def new(
        cls: type[nn.Parameter], data: Tensor | None = None, requires_grad: bool = True, **kwargs: object
    ) -> nn.Parameter:
        # not of subclasses: DTensors and quantized weights contain tensors that are already fake
        if data is not None and type(data) in (Tensor, nn.Parameter) and data.device.type == "cpu":
            real = data.detach()
            data = meter.fakes.from_tensor(real)
            meter.adopt(real, data)
        return original(cls, data, requires_grad, **kwargs)

    replace_in(nn.Parameter, "__new__", staticmethod(new))


def parameter_types() -> None:
    """Let `type(parameter)(tensor, requires_grad=...)` create a parameter, and copy parameters.

    The type of a fake parameter is FakeTensor, whose constructor needs a mode. (FakeTensor.__new__, __deepcopy__)
    """
    original = cast("Callable[..., FakeTensor]", FakeTensor.__new__)
    parameter = cast("Callable[..., nn.Parameter]", nn.Parameter)

    def new(cls: type[FakeTensor], first: object = None, *args: object, **kwargs: object) -> Tensor:
        if isinstance(first, Tensor) and "fake_mode" not in kwargs:
            return parameter(first, *args, **kwargs)
        return original(cls, first, *args, **kwargs)

    # as in torch, a copy of a parameter has neither its gradient nor the attributes that ZeRO-3 added
    def copied(self: FakeTensor, memo: dict[int, object]) -> Tensor:
        return (
            nn.Parameter.__deepcopy__(self, memo) if isinstance(self, nn.Parameter) else Tensor.__deepcopy__(self, memo)
        )

    replace_in(FakeTensor, "__new__", staticmethod(new))
    replace_in(FakeTensor, "__deepcopy__", copied)


def parameter_data(meter: ScriptTracker) -> None:
    """Let `parameter.data = t` move the parameter to the device of `t`.

    If `t` is real, use a fake of it. (torch.Tensor.data)
    """
    data = vars(torch._C.TensorBase)["data"]

    def set_data(self: FakeTensor, value: Tensor) -> None:
        if is_real(value) and value.device.type != "meta":
            real, value = value, meter.fakes.from_tensor(value)
            meter.adopt(real, value)
        data.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device
            # the known value is that of the old data
            vars(self).pop("_known", None)
            if known_value(value) is not None:
                keep(self, known_value(value), assumed=is_assumed(value))

    replace_in(FakeTensor, "data", property(lambda self: data.__get__(self), set_data))


def gradients(meter: ScriptTracker, parameter: Tensor) -> None:
    """Replace a real gradient by a fake. Small parameters on the host have real gradients.

    DeepSpeed sets `grad.data` to a part of its buffers. This needs a fake gradient: the data of a real tensor cannot be
    part of a fake. (Tensor hooks)
    """

    def faked(gradient: Tensor) -> Tensor:
        if type(gradient) is not Tensor:
            return gradient
        fake = meter.fakes.from_tensor(gradient)
        meter.adopt(gradient, fake)
        return fake

    if parameter.requires_grad:
        parameter.register_hook(faked)


def tensor_values(meter: ScriptTracker) -> None:
    """Let Python read a fake tensor's values: those that are known, otherwise zeros.

    (torch.Tensor.numpy, tolist, __format__)
    """

    def to_numpy(self: FakeTensor, *, force: bool = False) -> numpy.ndarray:
        known = meter.read(self)
        known = meter.counted(self) if known is None else known
        if known is not None:
            return known.numpy(force=force)
        meter.note("the script reads values of a tensor on the device; in a simulation these are zeros", here=True)
        dtype = str(self.dtype).removeprefix("torch.").replace("bfloat16", "float32")  # NumPy has no bfloat16
        return numpy.zeros(tuple(self.shape), dtype=dtype)

    def to_list(self: FakeTensor) -> object:
        return to_numpy(self, force=True).tolist()

    def format_as(self: FakeTensor, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    for name, function in (("numpy", to_numpy), ("tolist", to_list), ("__format__", format_as)):
        replace_in(FakeTensor, name, function)


def lbfgs(meter: ScriptTracker) -> None:
    """Let LBFGS make all its iterations, with a full history from the second step on.

    It decides by values: it keeps updates of positive curvature, and stops when little changes. A full history needs
    twice `history_size` copies of the parameters. (torch.optim.LBFGS: step, _gather_flat_grad; torch/optim/lbfgs.py)
    """
    optimizer, dot = torch.optim.LBFGS, Tensor.dot
    original, gather = optimizer.step, optimizer._gather_flat_grad

    def gathered(self: torch.optim.LBFGS) -> Tensor:
        flat = gather(self)
        vars(flat)["_is_gradient"] = True
        return flat

    # a slope of 0 ends a line search at its first point
    def product(self: Tensor, other: Tensor) -> Tensor:
        out = dot(self, other)
        if isinstance(out, FakeTensor):
            with on_host():
                keep(out, torch.tensor(0.0 if "_is_gradient" in vars(self) else 1.0, dtype=out.dtype))
        return out

    def fill(state: dict[str, Any], size: int) -> None:
        missing = size - len(state["ro"])
        if missing > 0:
            meter.note(f"LBFGS: its history of {size} updates is counted as full", bound=True)
            for name in ("old_dirs", "old_stps"):
                state[name] += [state["d"].clone() for _ in range(missing)]
            state["ro"] += [state["d"].new_ones(()) for _ in range(missing)]

    def step(self: torch.optim.LBFGS, closure: Callable[[], object]) -> object:
        group, state = self.param_groups[0], self.state[self._params[0]] if self._params else {}
        if "d" in state:
            fill(state, group["history_size"])
        tolerance, group["tolerance_change"] = group["tolerance_change"], -math.inf
        try:
            with patch.object(Tensor, "dot", product):
                return original(self, closure)
        finally:
            group["tolerance_change"] = tolerance

    replace_in(optimizer, "_gather_flat_grad", gathered)
    replace_in(optimizer, "step", step)


def equality() -> None:
    """Compare real tensors and known values by value, and other tensors by shape.

    (torch.equal, Tensor.equal)
    """
    original = torch.Tensor.equal

    def equal(input: Tensor, other: Tensor) -> bool:
        value, other_value = known_value(input), known_value(other)
        # True rather than False: scripts assert that weights are equal, e.g. tied or broadcast ones
        if value is None or other_value is None:
            return input.shape == other.shape
        return original(value, other_value)

    torch.equal = equal
    replace_in(Tensor, "equal", equal)


def subclasses() -> None:
    """Leave fakes as they are where a library makes them its own kind of tensor.

    Images of MONAI and fastai keep their type when they move to the device. torch refuses a second type for a fake.

    (torch.Tensor.as_subclass)
    """
    original = cast("Callable[..., Tensor]", Tensor.as_subclass)

    def as_subclass(self: Tensor, kind: type[Tensor]) -> Tensor:
        return self if isinstance(self, FakeTensor) else original(self, kind)

    replace_in(Tensor, "as_subclass", as_subclass)


def addresses() -> None:
    """Give fakes addresses like real tensors: libraries find shared memory by address.

    (FakeTensor.data_ptr, torch.UntypedStorage.data_ptr; torch/distributed/fsdp/_flat_param.py, _same_storage)
    """
    original = torch.UntypedStorage.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        if self.device.type != "meta":
            return original(self)
        return self._cdata if self.nbytes() else 0  # FSDP 1 reads whether a storage is freed

    def of_tensor(self: FakeTensor) -> int:
        start = of_storage(self.untyped_storage())
        return start and int(start + self.storage_offset() * self.element_size())

    replace_in(torch.UntypedStorage, "data_ptr", of_storage)
    replace_in(FakeTensor, "data_ptr", of_tensor)


def nested_lengths() -> None:
    """Make the ragged dimension of a fake jagged tensor a number, as in eager torch.

    FakeTensorMode would make this dimension a symbol. A copy on the device has the same number as the real tensor.
    (FakeTensorMode.create_symbolic_nested_int, torch.Tensor.nested_int_memo)
    """
    from torch.nested._internal.nested_int import NestedIntNode
    from torch.nested._internal.nested_tensor import get_tensor_symint

    numbers = itertools.count(1 << 32)  # above the numbers of real tensors

    def create_symbolic_nested_int(self: object, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        return torch.SymInt(NestedIntNode(next(numbers) if nt_tensor_id is None else nt_tensor_id, 1))

    replace_in(FakeTensorMode, "create_symbolic_nested_int", create_symbolic_nested_int)
    replace_in(Tensor, "nested_int_memo", property(get_tensor_symint))  # a fake has its own attribute


def loaders() -> None:
    """Load and preprocess data in this process, since workers do not inherit the fake mode.

    The batches are the same. (torch.utils.data.DataLoader.__init__; datasets.Dataset.map, filter)
    """
    from datasets import Dataset
    from torch.utils.data import DataLoader

    original: Callable[..., None] = DataLoader.__init__
    # DataLoader refuses most of these if it has no workers
    of_workers = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "in_order")

    def init(self: DataLoader[object], dataset: object, *args: object, **kwargs: object) -> None:
        names = ("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory")
        names += ("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
        kwargs |= dict(zip(names, args, strict=False))  # positional arguments, too, may be those of workers
        for name in of_workers:
            kwargs.pop(name, None)
        original(self, dataset, **{**kwargs, "num_workers": 0})

    replace_in(DataLoader, "__init__", init)

    def in_this_process(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def changed(self: Dataset, *args: object, **kwargs: object) -> object:
            return method(self, *args, **(kwargs | {"num_proc": None} if "num_proc" in kwargs else kwargs))

        return changed

    for name in ("map", "filter"):
        replace_in(Dataset, name, in_this_process(getattr(Dataset, name)))


def compiling(meter: ScriptTracker) -> None:
    """Run compiled functions and models eagerly.

    Compiled kernels would keep less memory; how much less is unknown. (torch.compile, torch.nn.Module.compile)
    """
    of_torch = os.path.dirname(torch.__file__) + os.sep

    def note(what: str, of_model: bool) -> None:
        # torch and other libraries compile functions of their own; only the user's models and functions count
        caller = sys._getframe(2).f_code.co_filename
        if is_own(caller) or (of_model and not caller.startswith(of_torch)):
            meter.compiles = True
            meter.note(f"{what}: simulated as eager", bound=True, here=True)

    def compile(model: object = None, *_: object, **__: object) -> object:
        note("torch.compile", isinstance(getattr(model, "__self__", model), nn.Module))
        if model is flex_attention.flex_attention:
            meter.compiles = True  # as transformers and torchtitan compile it; by torch's warning it must be compiled
        if model is flex_attention.create_block_mask:
            return fused
        return model if model is not None else lambda function: function

    create_block_mask: Callable[..., flex_attention.BlockMask] = flex_attention.create_block_mask

    def fused(*args: object, **kwargs: object) -> flex_attention.BlockMask:
        with _disable_current_modes(), meter.fakes:  # the compiled kernel stores no mask of all tokens
            mask = create_block_mask(*args, **kwargs)
        for part in mask.as_tuple():
            if isinstance(part, Tensor):
                meter.track(part, "create_block_mask")
        return mask

    def compile_module(self: nn.Module, *_: object, **__: object) -> None:
        note("Module.compile", of_model=True)

    torch.compile = compile
    replace_in(nn.Module, "compile", compile_module)


def autocast_types(meter: ScriptTracker) -> None:
    """Record autocast's dtype during training, which is reported as the precision.

    (torch.autocast.__enter__)
    """
    original = torch.autocast.__enter__

    def enter(self: torch.autocast) -> object:
        if self._enabled and self.device == meter.device and torch.is_grad_enabled():
            meter.autocast = self.fast_dtype
        return original(self)

    replace_in(torch.autocast, "__enter__", enter)


def missing_triton(meter: ScriptTracker) -> None:
    """Add a note for each package that uses plain torch because Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        for name in sorted(_OF_TRITON & sys.modules.keys()):
            text = f"Triton is not installed here: {name} uses plain torch instead (pip install triton)"
            meter.note(text, bound=True)


def triton_kernels(meter: ScriptTracker) -> None:
    """Skip Triton kernels, which only write into tensors that Python code has allocated.

    (triton.runtime)
    """
    try:
        from triton.runtime import autotuner, jit
    except ImportError:
        return

    def run(self: object, *args: object, **kwargs: object) -> None:
        for tensor in (t for t in (*args, *kwargs.values()) if isinstance(t, FakeTensor)):
            forget(tensor)
        function = getattr(self, "fn", self)
        name = getattr(function, "__name__", None) or getattr(getattr(function, "fn", None), "__name__", "?")
        meter.note(f"Triton kernel {name}: assumed to write only into its arguments")

    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        replace_in(kind, "run", run)


def higher_order_ops(meter: ScriptTracker) -> None:
    """Run the bodies of higher-order ops op by op.

    (torch.cond; torch._higher_order_ops: `_get_current_dispatch_mode` in cond_op_dense and others)
    """
    from torch._higher_order_ops import cond as conditions

    # For gradients, the real torch.cond needs a compiler. It keeps only the operands; this function keeps the
    # activations of its branch.
    def cond(
        pred: object,
        true_fn: Callable[..., object],
        false_fn: Callable[..., object],
        operands: tuple[object, ...] | list[object] = (),
    ) -> object:
        known = known_value(pred)
        if known is None:
            meter.note("torch.cond of an unknown value: assumed to be True", here=True)
        if torch.is_grad_enabled():
            meter.note("torch.cond: keeps the activations of its branch", bound=True)
        return (true_fn if known is None or known else false_fn)(*operands)

    name = "_get_current_dispatch_mode"  # the eager kernels assert that it finds no mode
    for module in [m for key, m in sys.modules.items() if key.startswith("torch._higher_order_ops.")]:
        if hasattr(module, name):
            replace_in(module, name, lambda: None)
    torch.cond = conditions.cond = cond


class _Unknown(_Mixin):
    """A fake tensor of unknown shape. Once its shape is known, it becomes an ordinary fake."""

    cls_to_become = FakeTensor
    shape = torch._C.TensorBase.shape  # of no elements: ops on fakes read it

    def materialize(self, *args: object, **kwargs: object) -> None:
        super().materialize(*args, **kwargs)
        _watch[0](self)

    @classmethod
    def __torch_function__(cls, func: OpOverload, types: object, args: object = (), kwargs: object = None) -> object:
        """Run what torch allows for unknown shapes. After a move the shape is still unknown."""
        out = super().__torch_function__(func, types, args, kwargs)
        if func in cls._allowed_methods and type(out) is FakeTensor:
            out.__class__ = cls
        return out


class _UnknownParameter(_Unknown, UninitializedParameter, FakeTensor):
    """A parameter of unknown shape."""


class _UnknownBuffer(_Unknown, UninitializedBuffer, FakeTensor):
    """A buffer of unknown shape."""


def lazy_modules(meter: ScriptTracker, watch: Callable[[Tensor], None]) -> None:
    """Create parameters and buffers of unknown shape as fakes.

    `watch` is called for each parameter or buffer whose shape becomes known.
    (torch.nn.parameter.UninitializedParameter.__new__, UninitializedBuffer.__new__)
    """

    def became_known(tensor: Tensor) -> None:
        meter.tag(tensor, PARAMETERS)
        watch(tensor)

    _watch[:] = [became_known]
    # torch's list has the original `to` and `cuda`, which `gpu.to_device` has replaced; the ledger reads storages
    _Unknown._allowed_methods = [*_Mixin._allowed_methods, Tensor.to, Tensor.cuda, Tensor.untyped_storage]

    def empty(device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
        made = torch.empty(0, device=device, dtype=dtype)
        return meter.fakes.from_tensor(made) if is_real(made) else made  # a real tensor cannot become a fake later

    def parameter(
        cls: object, requires_grad: bool = True, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> object:
        made = nn.Parameter(empty(device, dtype), requires_grad)
        made.__class__ = _UnknownParameter
        return made

    def buffer(
        cls: object,
        requires_grad: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        persistent=True,
    ) -> object:
        made = empty(device, dtype)
        made.__class__ = _UnknownBuffer
        made.requires_grad = requires_grad
        vars(made).update(persistent=persistent, _is_buffer=True)
        return made

    replace_in(UninitializedParameter, "__new__", staticmethod(parameter))
    replace_in(UninitializedBuffer, "__new__", staticmethod(buffer))
