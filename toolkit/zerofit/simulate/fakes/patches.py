"""Patch torch, transformers and DeepSpeed so that the unmodified engine runs on fake tensors.

The patches are applied once, and only in the process of a simulation. Each is a function; its docstring explains why it
is needed. `tests/simulate/test_patches.py` has a test for each, which fails if a new version lacks what it replaces.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.models.state_space import install_mamba_kernels
from zerofit.simulate.fakes.autocast import autocast_as_cuda
from zerofit.simulate.fakes.device import NAME, fake_op
from zerofit.simulate.fakes.experts import expert_counts, expert_rows, experts
from zerofit.simulate.fakes.host_steps import HostSteps
from zerofit.simulate.fakes.kernels import MASKING, PACKED_MASKING, PADDED_MASKING, cuda_attention
from zerofit.simulate.fakes.small_values import small_values
from zerofit.simulate.fakes.weight_files import WeightFile
from zerofit.simulate.ops.shortcuts import sharing_pieces
from zerofit.simulate.ops.tracker import AllocationTracker
from zerofit.train.process_group import compile_no_collectives


class AskedForValueError(RuntimeError):
    """The user's own module reads the value of a fake tensor, so what it does next is unknown."""


def replace_in(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute where type checkers reject a plain assignment."""
    setattr(owner, name, value)


def module_apply() -> None:
    """Make Module.to() assign `.data`, as it does for real parameters, instead of swapping the tensors' contents.

    Torch refuses to swap fakes that have a weak reference or a graph node. (torch.nn.Module._apply)
    """
    original = nn.Module._apply

    def apply(self: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        own = [t for t in [*self._parameters.values(), *self._buffers.values()] if t is not None]
        if own and not any(isinstance(t, FakeTensor) for t in own):
            return original(self, function, recurse)
        if recurse:
            for child in self.children():
                child._apply(function)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    moved = function(parameter.data)
                    if moved.is_meta:  # `.data` cannot change to meta: torch makes a new parameter, too
                        self._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
                        continue
                    if moved is not parameter.data:
                        parameter.data = moved
                    if parameter.grad is not None:
                        parameter.grad.data = function(parameter.grad.data)
        self._buffers.update({name: b if b is None else function(b) for name, b in self._buffers.items()})
        return self

    replace_in(nn.Module, "_apply", apply)


def item(meter: AllocationTracker) -> None:
    """Return a harmless value for `item()` of a fake tensor: no overflow, a norm of 1, zero, equal.

    Libraries read norms, overflow flags and counters this way. If the user's own model reads a value, the simulation
    stops: what the model does with the value is unknown.
    (torch._subclasses.fake_impls.op_implementations_dict, torch.equal)
    """

    def local_scalar_dense(fake_mode: Any, func: Any, arg: FakeTensor) -> Any:
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
    """Keep transformers from making causal masks that it omits in real runs: it mistakes fake tensors for tracing.

    (transformers.masking_utils)
    """
    from transformers import masking_utils

    replace_in(masking_utils, "is_tracing", MASKING["is_tracing"])


def packed_samples(packed: bool = False) -> None:
    """Keep transformers from searching the values of positions for packed samples. (transformers.masking_utils)"""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    replace_in(masking_utils, name, (PACKED_MASKING if packed else MASKING)[name])


def no_padding(padded: bool = False) -> None:
    """Let transformers find that a mask of ones, which BART makes itself, hides nothing. (transformers.masking_utils)

    `padded`: samples end early, so masks hide something.
    """
    from transformers import masking_utils

    for name in ("fast_all", "_ignore_bidirectional_mask_sdpa"):
        replace_in(masking_utils, name, (PADDED_MASKING if padded else MASKING)[name])


def state_space() -> None:
    """Use stand-ins that allocate what mamba_ssm's kernels do; without them transformers scans token by token.

    (transformers.models.mamba.modeling_mamba)
    """
    install_mamba_kernels()


def foreach_types() -> None:
    """Let optimizers and gradient clipping use their multi-tensor code on fakes.

    For unknown tensor types they go parameter by parameter, with other memory.
    (torch.optim.optimizer, torch.utils._foreach_utils)
    """
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(name)._foreach_supported_types.append(FakeTensor)


def order_checks() -> None:
    """Skip ZeRO-3's comparison of parameter order with rank 0, which needs values. (deepspeed.runtime.zero.utils)"""
    from deepspeed.runtime.zero import utils

    utils.get_lst_from_rank0 = lambda values: values
    utils.assert_lst_len_same_as_other_ranks = lambda values: None


def device_mesh() -> None:
    """Make device meshes from real tensors, since they read the rank numbers. (deepspeed.comm, AutoTP)"""
    from deepspeed.comm import comm

    original = comm.initialize_mesh_device

    def initialize_mesh_device(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    replace_in(comm, "initialize_mesh_device", initialize_mesh_device)
    replace_in(sys.modules["deepspeed.comm"], "initialize_mesh_device", initialize_mesh_device)


def object_collectives() -> None:
    """Use this rank's objects for all ranks: fake tensors cannot be pickled. (torch.distributed, AutoTP)"""

    def broadcast_object_list(object_list: list[Any], *_: Any, **__: Any) -> None:
        pass

    def all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    torch.distributed.broadcast_object_list = broadcast_object_list
    torch.distributed.all_gather_object = all_gather_object


def compiled_ops(meter: AllocationTracker) -> None:
    """Replace DeepSpeed's C++ ops, which would read memory that does not exist. (deepspeed.ops.op_builder)"""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(self: Any, verbose: bool = True) -> Any:
        return fake_op(self.NAME, meter)

    replace_in(OpBuilder, "load", load)
    compile_no_collectives()


def cpu_vendor() -> None:
    """Skip py-cpuinfo's 1.5 s search for the CPU vendor, which DeepSpeed starts for Adam and Lion on offloaded states.

    They use it only to warn of fp16 on AMD CPUs. (deepspeed/ops/adam/cpu_adam.py:75, ops/lion/cpu_lion.py:42)
    """
    import cpuinfo

    def get_cpu_info() -> dict[str, Any]:
        return {}

    cpuinfo.get_cpu_info = get_cpu_info


def rng_state(meter: AllocationTracker) -> None:
    """Record the random states that activation checkpointing saves, which are real tensors. (torch.get_rng_state)"""
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = original()
        meter.track(state, "get_rng_state")
        return state

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state


def weight_files() -> None:
    """Read no weights of a pretrained folder, but let transformers allocate what it would.

    (transformers.modeling_utils.safe_open)
    """
    from transformers import modeling_utils

    replace_in(modeling_utils, "safe_open", WeightFile)


def data_setter() -> None:
    """Let `parameter.data = t` adopt t's device and forget the old value. (torch.Tensor.data)"""
    data: Any = torch._C.TensorBase.data  # its descriptor

    def set_data(self: FakeTensor, value: Any) -> None:
        data.__set__(self, value)
        self.constant = None
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    replace_in(FakeTensor, "data", property(lambda self: data.__get__(self), set_data))


def pieces_of_ranks() -> None:
    """Keep ZeRO-3 from creating a fake for each rank's part of a collective: with hundreds of ranks it takes minutes.

    (deepspeed.runtime.zero.stage3, AllGatherCoalescedHandle of deepspeed.runtime.zero.partition_parameters)
    """
    from deepspeed.runtime.zero import partition_parameters, stage3

    handle, name = partition_parameters.AllGatherCoalescedHandle, "reduce_scatter_coalesced"
    replace_in(stage3, name, sharing_pieces(stage3.reduce_scatter_coalesced, "__getitem__"))
    replace_in(handle, "wait", sharing_pieces(handle.wait, "narrow"))


# for scripts, too
ALWAYS = (
    module_apply,
    expert_counts,
    tracing,
    foreach_types,
    order_checks,
    pieces_of_ranks,
    device_mesh,
    object_collectives,
    cpu_vendor,
    weight_files,
)
EVERYWHERE = (*ALWAYS, small_values, packed_samples, no_padding, data_setter, experts)


def tensor_constructor() -> None:
    """Return a fake from torch.tensor() on a device that has no kernels. (torch.tensor)"""
    from deepspeed.runtime.zero import partition_parameters

    original = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if device is None:
            return made
        if torch.device(device).type in ("cpu", "meta"):
            return made.to(device)
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor
    partition_parameters._orig_torch_tensor = tensor  # zero.Init restores this


def list_indices() -> None:
    """Turn list indices of GPU tensors into tensors: torch's C++ code would make real ones.

    (torch.Tensor.__getitem__)
    """
    original = torch.Tensor.__getitem__

    def getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
        if isinstance(index, list | tuple) and self.device.type not in ("cpu", "meta"):
            if isinstance(index, list):
                index = torch.tensor(index, device=self.device)
            else:
                index = tuple(torch.tensor(i, device=self.device) if isinstance(i, list) else i for i in index)
        return original(self, index)

    replace_in(torch.Tensor, "__getitem__", getitem)


def constants() -> None:
    """Forget the value of a small CPU tensor that is copied to the device, where no kernel could compute with it.

    (FakeTensorMode._dispatch_impl, which computes with the known values of fake tensors)
    """
    original = FakeTensorMode._dispatch_impl

    def dispatch_impl(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = (kwargs or {}).get("device")
        known = [t for t in args if isinstance(t, FakeTensor) and t.constant is not None]
        if not known or device is None or torch.device(device).type in ("cpu", "meta"):
            return original(self, func, types, args, kwargs)
        values = [t.constant for t in known]
        for t in known:
            t.constant = None
        try:
            return original(self, func, types, args, kwargs)
        finally:
            for t, value in zip(known, values, strict=True):
                t.constant = value

    FakeTensorMode._dispatch_impl = dispatch_impl


def backend_keys() -> None:
    """Give fakes the CPU's dispatch keys, so `.data =` works between devices; their `.device` stays their own.

    (torch.Tensor._make_subclass)
    """
    original = torch.Tensor._make_subclass

    def make_subclass(cls: type, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        if kwargs.get("device_for_backend_keys") is not None:
            kwargs["device_for_backend_keys"] = torch.device("cpu")
        return original(cls, data, require_grad, **kwargs)

    replace_in(torch.Tensor, "_make_subclass", staticmethod(make_subclass))


def attention() -> None:
    """Use CUDA's flash kernel; for an unknown device torch would compute attention by plain matrix products.

    With a mask or in fp32, which flash attention does not support, it is the memory-efficient kernel.
    (torch.nn.functional.scaled_dot_product_attention; sdp_utils.cpp of ATen for CUDA)
    """
    original = nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention = original if query.device.type in ("cpu", "meta") else cuda_attention
        return attention(query, *args, **kwargs)

    nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def record_stream(meter: AllocationTracker) -> None:
    """Record that a stream uses a tensor's memory: torch has no streams for a custom device.

    (torch.Tensor.record_stream)
    """
    replace_in(torch.Tensor, "record_stream", lambda self, stream: meter.record_stream(self, stream))


def autocast() -> None:
    """Let the simulated device's autocast cast the same ops as CUDA's: for a custom device torch lists none.

    (torch.clear_autocast_cache)
    """
    autocast_as_cuda("AutocastPrivateUse1", NAME)


def sends_in_batches() -> None:
    """Run the sends and receives of a batch one by one: torch would need a backend for the device.

    (torch.distributed.batch_isend_irecv, DualPipeV)
    """

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        return [one.op(one.tensor, one.peer, group=one.group, tag=one.tag) for one in p2p_op_list]

    torch.distributed.batch_isend_irecv = batch_isend_irecv


def superoffload() -> None:
    """Let SuperOffload run on the simulated device and step in this process: fakes cannot be sent to another one.

    (superoffload_stage3.py:23, superoffload_utils.py:220)
    """
    from deepspeed.runtime.superoffload import superoffload_stage3

    replace_in(superoffload_stage3, "_validate_superoffload_accelerator", lambda: None)
    replace_in(superoffload_stage3, "SuperOffloadCPUOptimizer", HostSteps)


OF_GPUS = (constants, backend_keys, attention, list_indices, sends_in_batches)  # for scripts, too
ON_GPU = (*OF_GPUS, state_space, tensor_constructor, autocast, expert_rows, superoffload)


def apply_all(gpu: bool, meter: AllocationTracker, packed: bool = False, padded: bool = False) -> None:
    """Apply all patches for the rest of this process.

    `packed`: samples hold several documents; `padded`: samples may end early.
    """
    compiled_ops(meter)
    item(meter)
    rng_state(meter)
    for patch in EVERYWHERE + (ON_GPU if gpu else ()):
        patch()
    if packed:
        packed_samples(packed)
    if padded:
        no_padding(padded)
    if gpu:
        record_stream(meter)
