"""Patch torch, transformers and DeepSpeed, so that the real engine runs on fake tensors.

The patches are applied once, and only in a simulation's process. Each patch is a function, whose docstring explains
why it is needed. `tests/simulate/test_patches.py` has a test for each patch. It fails if a new version lacks the
attribute that the patch replaces.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import EllipsisType, FunctionType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributions import Distribution
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from zerofit.simulate.fakes.device import FakeOps
from zerofit.simulate.fakes.experts import expert_ops
from zerofit.simulate.fakes.kernels import masking
from zerofit.simulate.ops.shortcuts import sharing_pieces
from zerofit.simulate.ops.tracker import AllocationTracker
from zerofit.train.process_group import compile_no_collectives

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

_SMALL = 1024  # elements: more than the number of layers of a model


class AskedForValueError(RuntimeError):
    """Raised if the user's own module reads the value of a fake tensor.

    Its next ops are then unknown.
    """


def replace_in(owner: object, name: str, value: object) -> None:
    """Set an attribute where type checkers reject a plain assignment."""
    # libraries read signatures, so a function defined for this purpose has the signature of the one that it replaces
    original = getattr(owner, name, None)
    own = isinstance(value, FunctionType) and "<locals>" in value.__qualname__ and "<lambda>" not in value.__qualname__
    if own and callable(original):
        value.__dict__.setdefault("__wrapped__", original)
    setattr(owner, name, value)


def module_apply() -> None:
    """Make Module.to() assign `.data`, as for real parameters, and not swap tensors' contents.

    torch refuses to swap fakes that have a weak reference or a graph node. (torch.nn.Module._apply)
    """
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own = [t for t in [*self._parameters.values(), *self._buffers.values()] if t is not None]
        # a module without tensors also ends up below, since its children may have fakes
        if own and not any(isinstance(t, FakeTensor) for t in own):
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    moved = fn(parameter.data)
                    if moved.is_meta:  # `.data` cannot change to meta: torch makes a new parameter, too
                        self._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
                        continue
                    if moved is not parameter.data:
                        parameter.data = moved
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad.data)
        self._buffers.update({name: b if b is None else fn(b) for name, b in self._buffers.items()})
        return self

    replace_in(nn.Module, "_apply", apply)


def item(meter: AllocationTracker) -> None:
    """Let `item()` of a fake tensor return a harmless value: False, 1.0 or 0.

    Libraries read norms, overflow flags and counters with `item()`. Two tensors of equal shape count as equal. If
    the user's own model reads a value, the simulation stops, since the model's next ops may depend on the value.
    (torch._subclasses.fake_impls.op_implementations_dict, torch.equal)
    """

    def local_scalar_dense(fake_mode: object, func: OpOverload, arg: FakeTensor) -> object:
        # 1.0 rather than 0.0: code divides by norms and loss scales. False: no overflow, no parameter to skip.
        if arg.constant is not None:
            return arg.constant.item()
        if meter.in_own_code():
            raise AskedForValueError("the model reads the value of a tensor, which a simulation does not compute")
        if arg.dtype == torch.bool:
            return False
        return 1.0 if arg.dtype.is_floating_point else 0

    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = local_scalar_dense
    torch.equal = lambda one, other: one.shape == other.shape


def tracing() -> None:
    """Keep transformers from making causal masks that real runs omit.

    transformers treats fake tensors as a sign of tracing. (transformers.masking_utils)
    """
    from transformers import masking_utils

    replace_in(masking_utils, "is_tracing", masking()["is_tracing"])


def sample_masks(packed: bool, padded: bool) -> None:
    """Keep transformers from reading values to find packed samples, and masks that hide nothing (e.g. BART's).

    `packed`: whether samples have several documents. `padded`: whether samples may end early.
    (transformers.masking_utils)
    """
    from transformers import masking_utils

    for name, function in masking(packed, padded).items():
        replace_in(masking_utils, name, function)


def foreach_types() -> None:
    """Let optimizers and gradient clipping use their multi-tensor code on fakes.

    For unknown tensor types torch steps each parameter alone, which needs a different amount of memory.
    (torch.optim.optimizer, torch.utils._foreach_utils)
    """
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(name)._foreach_supported_types.append(FakeTensor)


def fast_paths() -> None:
    """Run multi-head attention and encoder layers in evaluation op by op.

    torch would run them as one op, whose inner FLOPs and tensors are unknown. (torch.backends.mha)
    """
    torch.backends.mha.set_fastpath_enabled(False)


def order_checks() -> None:
    """Skip ZeRO-3's check that parameters have the same order as on rank 0.

    It would read values.

    (deepspeed.runtime.zero.utils)
    """
    from deepspeed.runtime.zero import utils

    utils.get_lst_from_rank0 = lambda values: values
    utils.assert_lst_len_same_as_other_ranks = lambda values: None


def device_mesh() -> None:
    """Make device meshes from real tensors, since a mesh reads its rank numbers.

    (deepspeed.comm, AutoTP)
    """
    from deepspeed.comm import comm

    original = comm.initialize_mesh_device

    def initialize_mesh_device(*args: object, **kwargs: object) -> object:
        with _disable_current_modes():
            return original(*args, **kwargs)

    # the package deepspeed.comm has the function by name, too; `deepspeed.comm.comm` is the module
    replace_in(comm, "initialize_mesh_device", initialize_mesh_device)
    replace_in(sys.modules["deepspeed.comm"], "initialize_mesh_device", initialize_mesh_device)


def object_collectives() -> None:
    """Use this rank's objects for all ranks, since fake tensors cannot be pickled.

    (torch.distributed, AutoTP)
    """

    def broadcast_object_list(object_list: list[object], *_: object, **__: object) -> None:
        pass

    def all_gather_object(object_list: list[object], obj: object, *_: object, **__: object) -> None:
        object_list[:] = [obj] * len(object_list)

    torch.distributed.broadcast_object_list = broadcast_object_list
    torch.distributed.all_gather_object = all_gather_object


def compiled_ops(meter: AllocationTracker) -> None:
    """Replace DeepSpeed's C++ ops, which would read memory that does not exist.

    (deepspeed.ops.op_builder)
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(self: OpBuilder, verbose: bool = True) -> FakeOps:
        return FakeOps(meter)

    replace_in(OpBuilder, "load", load)
    compile_no_collectives()


def cpu_vendor() -> None:
    """Skip py-cpuinfo's search for the CPU's vendor, which takes 1.5 s.

    DeepSpeed starts the search for Adam and Lion on offloaded states. The optimizers use the vendor only to warn of
    fp16 on AMD CPUs. (deepspeed/ops/adam/cpu_adam.py:75, ops/lion/cpu_lion.py:42)
    """
    import cpuinfo

    def get_cpu_info() -> dict[str, object]:
        return {}

    cpuinfo.get_cpu_info = get_cpu_info


def rng_state(meter: AllocationTracker) -> None:
    """Record the random states that activation checkpointing saves, which are real tensors.

    (torch.get_rng_state)
    """
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = original()
        meter.track(state, "get_rng_state")
        return state

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state


class PlainContext:
    """A context manager that does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# In a real run, the tensors are mapped pages of the file until they are copied or cast. The kernel can drop these
# pages, so they do not count as memory.
class WeightFile(PlainContext):
    """A file of weights without its data. Its tensors are fakes that do not count as memory."""

    def __init__(self, file: str, *args: str, **kwargs: str):
        from safetensors import safe_open

        self._file = safe_open(file, *args, **kwargs)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory, in the file's dtype."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> WeightSlice:
        """Return an unread tensor, with its shape and dtype."""
        return WeightSlice(self._file.get_slice(name))


class WeightSlice:
    """A tensor of a weight file that is not yet read. `lazy`: the result of safetensors' get_slice."""

    def __init__(self, lazy: Any):
        self.get_shape, self.get_dtype = lazy.get_shape, lazy.get_dtype

    def __getitem__(self, index: EllipsisType | slice | tuple[slice, ...]) -> torch.Tensor:
        from transformers.modeling_utils import str_to_torch_dtype

        fakes = next(mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, FakeTensorMode))
        with _disable_current_modes(), fakes:
            mapped = torch.empty(self.get_shape(), dtype=str_to_torch_dtype[self.get_dtype()])
        return mapped[index]


def weight_files() -> None:
    """Let transformers allocate a pretrained folder's weights without reading them.

    (transformers.modeling_utils.safe_open)
    """
    from transformers import modeling_utils

    replace_in(modeling_utils, "safe_open", WeightFile)


def small_values() -> None:
    """Let fakes on the CPU keep the values of small tensors, not only those of scalars.

    Models are built from these values. Hiera sums the depths of its stages, and many models space their drop rates
    evenly.

    (torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT, torch.linspace, torch.distributions)
    """
    original = cast("Callable[..., torch.Tensor]", torch.linspace)

    def linspace(*args: object, **kwargs: object) -> torch.Tensor:
        made = original(*args, **kwargs)
        if isinstance(made, FakeTensor) and made.device.type == "cpu" and made.numel() <= _SMALL:
            with unset_fake_temporarily():
                made.constant = original(*args, **kwargs)
        return made

    Distribution._validate_args = False  # Gemma 3n makes a distribution in each forward; its checks read values
    fake_tensor.CONSTANT_NUMEL_LIMIT = _SMALL
    torch.linspace = linspace


def data_setter() -> None:
    """Let `parameter.data = t` move the parameter to the device of `t`, and drop the old value.

    (torch.Tensor.data)
    """
    data = vars(torch._C.TensorBase)["data"]  # the descriptor

    def set_data(self: FakeTensor, value: object) -> None:
        data.__set__(self, value)
        self.constant = None  # of the old data
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    replace_in(FakeTensor, "data", property(lambda self: data.__get__(self), set_data))


def pieces_of_ranks() -> None:
    """Keep ZeRO-3 from creating a fake for each rank's part of a collective.

    For hundreds of ranks this would take minutes. (deepspeed.runtime.zero.stage3, AllGatherCoalescedHandle of
    deepspeed.runtime.zero.partition_parameters)
    """
    from deepspeed.runtime.zero import partition_parameters, stage3

    handle, name = partition_parameters.AllGatherCoalescedHandle, "reduce_scatter_coalesced"
    replace_in(stage3, name, sharing_pieces(stage3.reduce_scatter_coalesced, "__getitem__"))
    replace_in(handle, "wait", sharing_pieces(handle.wait, "narrow"))


def parameters_of_modules() -> None:
    """Let ZeRO-3's hooks find the parameters of a module faster.

    (iter_params and PartitionedParameterCoordinator.__params_to_release of
    deepspeed.runtime.zero.partitioned_param_coordinator; _z3_leaf of modules, which z3_leaf_module reads)
    """
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    kind, name = partitioned_param_coordinator.PartitionedParameterCoordinator, "__params_to_release"
    of_module, to_release = partitioned_param_coordinator.iter_params, getattr(kind, f"_{kind.__name__}{name}")

    # the hooks call this several times per call of a module, and a model with LoRA has thousands of modules
    def iter_params(module: nn.Module, recurse: bool = False) -> Iterable[nn.Parameter]:
        if recurse:
            return of_module(module, recurse)
        own = [p for p in module._parameters.values() if p is not None]
        external = cast("Callable[[], Iterable[tuple[str, nn.Parameter]]]", module.ds_external_parameters)
        return [*own, *(p for _, p in external())]

    # Most modules have no parameters to release: no parameters, or only small ones, which stay gathered. For these,
    # DeepSpeed would look for the next use in all modules within `stage3_max_reuse_distance`.
    @cache  # as in DeepSpeed: release_sub_module changes the set that it gets
    def params_to_release(self: PartitionedParameterCoordinator, submodule: nn.Module, step_id: int) -> set[int]:
        own = iter_params(submodule, recurse=partitioned_param_coordinator.z3_leaf_module(submodule))
        persist = all(p.ds_persist for p in own)  # pyright: ignore[reportAttributeAccessIssue]
        return set() if persist else to_release(self, submodule, step_id)

    for owner in (partitioned_param_coordinator, parameter_offload):
        replace_in(owner, "iter_params", iter_params)
    replace_in(kind, f"_{kind.__name__}{name}", params_to_release)
    replace_in(nn.Module, "_z3_leaf", False)  # else each read of a missing attribute raises an error


ALWAYS = (
    module_apply,
    expert_ops,
    tracing,
    foreach_types,
    fast_paths,
    order_checks,
    pieces_of_ranks,
    parameters_of_modules,
    device_mesh,
    object_collectives,
    cpu_vendor,
    weight_files,
)
