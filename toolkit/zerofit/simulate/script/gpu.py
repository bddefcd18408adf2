"""Simulate a GPU for scripts. Python code uses cuda:N. torch's C++ code uses another device.

Without a GPU, a fake tensor on a CUDA device crashes in autograd (torch/csrc/autograd/engine.cpp,
hasPrimaryContext). So C++ code gets the device of `simulate.fakes.device`. Where Python code reads or names a
device, it is translated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from deepspeed.accelerator import real_accelerator
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofit.simulate.fakes import device
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import AllocationTracker
from zerofit.simulate.script.target import ScriptTarget
from zerofit.simulate.script.tracker import SIMULATED, ScriptTracker, on_simulated

SHOWN = "cuda"
_HOSTS = ("cpu", "meta")


class ScriptGpu(device.SimulatedGpu):
    """DeepSpeed's accelerator, with the device names that scripts use."""

    def __init__(self, meter: AllocationTracker, target: ScriptTarget):
        super().__init__(meter, target.device.memory_bytes)
        self._name, self._communication_backend_name = SHOWN, "nccl"
        self._local, self._count = target.rank % target.gpus, target.gpus

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", or "cuda:N" if an index is given."""
        return SHOWN if device_index is None else f"{SHOWN}:{device_index}"

    def current_device(self) -> int:
        """Return the index of this rank on its node."""
        return self._local

    def current_device_name(self) -> str:
        """Return the name of this rank's device."""
        return f"{SHOWN}:{self._local}"

    def device_count(self) -> int:
        """Return the number of devices per node."""
        return self._count

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.device.type == SHOWN


def install_gpu(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Make torch and DeepSpeed use the simulated GPU."""
    device.register(meter)
    real_accelerator.set_accelerator(ScriptGpu(meter, target))
    for patch in (device_shown, to_device, constructors, generators):
        patch(meter, target)


def device_shown(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Show the rank's CUDA device to Python code, and translate it to the simulated device.

    (torch.Tensor.device, is_cuda, get_device, _make_wrapper_subclass; FakeTensor.device, fake_device,
    init_gpu_context)
    """
    # the device has no context, so the constructor of fakes must not initialize one
    replace_in(fake_tensor, "init_gpu_context", lambda device: None)
    original = vars(FakeTensor)["device"]
    # before torch 2.14 `fake_device` is an entry in each tensor's dictionary, not a property
    fake_device: Any = vars(FakeTensor).get("fake_device") or property(
        lambda self: vars(self)["fake_device"], lambda self, value: vars(self).update(fake_device=value)
    )
    here = torch.device(SHOWN, target.rank % target.gpus)

    def as_shown(actual: torch.device) -> torch.device:
        return here if actual.type in (device.NAME, SIMULATED.type) else actual

    def set_fake_device(self: FakeTensor, value: torch.device) -> None:
        fake_device.fset(self, on_simulated(value))

    def index(self: Tensor) -> int:
        return here.index if self.device.type == SHOWN else -1

    replace_in(FakeTensor, "device", property(lambda self: as_shown(original.fget(self)), original.fset))
    replace_in(FakeTensor, "fake_device", property(fake_device.fget, set_fake_device))
    wrapped = vars(torch._C.TensorBase)["device"]  # of subclasses that wrap fakes, such as DTensor
    replace_in(Tensor, "device", property(lambda self: as_shown(wrapped.__get__(self))))
    replace_in(Tensor, "is_cuda", property(lambda self: self.device.type == SHOWN))
    replace_in(Tensor, "get_device", index)
    wrap = cast("Callable[..., Tensor]", Tensor._make_wrapper_subclass)

    def wrapper(*args: object, **kwargs: object) -> Tensor:
        return wrap(*map(on_simulated, args), **{name: on_simulated(value) for name, value in kwargs.items()})

    replace_in(Tensor, "_make_wrapper_subclass", staticmethod(wrapper))


def to_device(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Translate a CUDA device to the simulated device in `.to()`, `.cuda()` and `.type()`.

    Types such as torch.cuda.FloatTensor exist only with a GPU. (torch.Tensor.to, cuda, type; torch.cuda.FloatTensor)
    """
    original = cast("Callable[..., Tensor]", Tensor.to)
    kind = cast("Callable[..., Any]", Tensor.type)  # a string or a tensor

    def translated(value: object) -> object:
        """Return the simulated device if `value` names a CUDA device; otherwise `value`."""
        device = torch.device(SHOWN, value) if isinstance(value, int) else value
        device = torch.device(value) if isinstance(value, str) else device
        if not isinstance(device, torch.device) or device.type != SHOWN:
            return value
        meter.note_gpu(device.index)
        return SIMULATED

    def to(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args and isinstance(args[0], FakeTensor):
            args = (args[0].fake_device, args[0].dtype, *args[1:])
        elif args and not isinstance(args[0], (torch.dtype, Tensor)):
            args = (translated(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = translated(kwargs["device"])
        return original(self, *args, **kwargs)

    def cuda(self: Tensor, device: object = None, non_blocking: bool = False, **_: object) -> Tensor:
        return original(self, SIMULATED if device is None else translated(device), non_blocking=non_blocking)

    def as_type(
        self: Tensor, dtype: str | type | torch.dtype | None = None, non_blocking: bool = False
    ) -> str | Tensor:
        if dtype is None:
            return kind(self).replace(f"torch.{device.NAME}", "torch.cuda")
        match = re.search(r"\btorch\.cuda\.(\w+)", str(dtype))  # also of a class
        if match is None:
            return kind(self, dtype, non_blocking)
        return original(self, SIMULATED, getattr(torch, match[1]).dtype, non_blocking)

    def typed(name: str) -> type:
        def new(cls: type, *args: object) -> Tensor:
            return getattr(torch, name)(*args).to(SIMULATED)

        return type(name, (), {"__new__": new, "__module__": "torch.cuda"})

    for name in (name for name in dir(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)):
        replace_in(torch.cuda, name, typed(name))
    replace_in(Tensor, "to", to)
    replace_in(Tensor, "cuda", cuda)
    replace_in(Tensor, "type", as_type)


def constructors(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Make tensors from Python numbers on the host, then copy them to the device.

    (torch.tensor, as_tensor, asarray)
    """
    from deepspeed.runtime.zero import partition_parameters

    def on_host(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, device: torch.types.Device = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            fakes = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, FakeTensor)]
            if fakes and isinstance(args[0], (list, tuple)):  # C++ code would read their values
                args = (tree_map_only(FakeTensor, Tensor.item, args[0]), *args[1:])
                kwargs = {"dtype": fakes[0].dtype, **kwargs}
            if pin_memory:
                return made(*args, device=device, **kwargs).pin_memory()
            default = torch._C._get_default_device()
            device = default if device is None and default != "cpu" else device
            contexts = (mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext))
            device = next((mode.device for mode in contexts), None) if device is None else device
            if device is None:
                return original(*args, **kwargs)
            if (SHOWN if isinstance(device, int) else torch.device(device).type) in _HOSTS:
                return original(*args, device=device, **kwargs)
            grad = kwargs.pop("requires_grad", False)  # the copy is a leaf
            if not (args and isinstance(args[0], FakeTensor)):
                moved = original(*args, device="cpu", **kwargs).to(SIMULATED)
            elif original is tensor:
                moved = args[0].detach().to(device=device, copy=True, **kwargs)
            else:
                moved = args[0].to(device=device, **kwargs)
            return moved.requires_grad_() if grad else moved

        return made

    tensor = torch.tensor
    for name in ("tensor", "as_tensor", "asarray"):
        replace_in(torch, name, on_host(getattr(torch, name)))
    partition_parameters._orig_torch_tensor = torch.tensor  # zero.Init restores this


def generators(meter: ScriptTracker, target: ScriptTarget) -> None:
    """Use the host's random generators, since the device has none. (torch.Generator)"""
    original = torch.Generator

    class HostGenerator(original):
        def __new__(cls, device: object = "cpu") -> object:
            return original.__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]

    replace_in(torch, "Generator", HostGenerator)
