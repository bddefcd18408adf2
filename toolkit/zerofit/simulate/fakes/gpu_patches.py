"""Patch torch and DeepSpeed for a simulated GPU, in addition to `patches`.

Each docstring explains why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import Library

from zerofit.models.state_space import install_mamba_kernels
from zerofit.simulate.fakes import patches
from zerofit.simulate.fakes.autocast import CastCache, autocast_as_cuda
from zerofit.simulate.fakes.device import NAME
from zerofit.simulate.fakes.experts import expert_rows, experts
from zerofit.simulate.fakes.kernels import cuda_attention, fused_norms
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.tracker import AllocationTracker

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.backends.cuda import SDPAParams

_libraries: list[Library] = []  # their registrations end with them


def tensor_constructor() -> None:
    """Let torch.tensor() return a fake on a device that has no kernels. (torch.tensor)"""
    from deepspeed.runtime.zero import partition_parameters

    original: Callable[..., torch.Tensor] = torch.tensor

    def tensor(*args: object, device: torch.types.Device = None, **kwargs: object) -> torch.Tensor:
        made = original(*args, **kwargs)
        if device is None:
            return made
        if torch.device(device).type in ("cpu", "meta"):
            return made.to(device)
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor
    partition_parameters._orig_torch_tensor = tensor  # zero.Init restores this


def list_indices() -> None:
    """Turn list indices of GPU tensors into fakes. torch's C++ code would make real tensors.

    (torch.Tensor.__getitem__)
    """
    original = cast("Callable[[torch.Tensor, object], torch.Tensor]", torch.Tensor.__getitem__)

    def getitem(self: torch.Tensor, index: object) -> torch.Tensor:
        if self.device.type not in ("cpu", "meta"):
            if isinstance(index, list):
                index = torch.tensor(index, device=self.device)
            elif isinstance(index, tuple):
                index = tuple(torch.tensor(i, device=self.device) if isinstance(i, list) else i for i in index)
        return original(self, index)

    replace_in(torch.Tensor, "__getitem__", getitem)


def constants() -> None:
    """Copy fake tensors to the device without their known values.

    The device has no kernels, so torch cannot compute with values there.

    (FakeTensorMode._dispatch_impl, which computes with the known values of fake tensors)
    """
    original = FakeTensorMode._dispatch_impl

    def dispatch_impl(
        self: FakeTensorMode,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        device = (kwargs or {}).get("device")
        known = [t for t in args if isinstance(t, FakeTensor) and t.constant is not None]
        if not known or device is None or torch.device(cast("str | torch.device", device)).type in ("cpu", "meta"):
            return original(self, func, types, args, kwargs)
        values = [t.constant for t in known]
        # only for this call: on the host, the tensors keep their values
        for t in known:
            t.constant = None
        try:
            return original(self, func, types, args, kwargs)
        finally:
            for t, value in zip(known, values, strict=True):
                t.constant = value

    replace_in(FakeTensorMode, "_dispatch_impl", dispatch_impl)


def gpu_ops() -> None:
    """Load ops that only GPUs have, such as the op of FusedLion, on a machine without a GPU.

    (deepspeed.ops.op_builder.cpu)
    """
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder

    def load(self: OpBuilder, verbose: bool = True) -> object:
        return OpBuilder.load(self, verbose)  # as `compiled_ops` replaces it

    replace_in(NotImplementedBuilder, "load", load)


def backend_keys() -> None:
    """Give fakes the CPU's dispatch keys, so that `.data =` works between devices.

    The fakes' `.device` does not change. (torch.Tensor._make_subclass)
    """
    original = cast("Callable[..., torch.Tensor]", torch.Tensor._make_subclass)

    def make_subclass(cls: type, data: torch.Tensor, require_grad: bool = False, **kwargs: object) -> torch.Tensor:
        if kwargs.get("device_for_backend_keys") is not None:
            kwargs["device_for_backend_keys"] = torch.device("cpu")
        return original(cls, data, require_grad, **kwargs)

    replace_in(torch.Tensor, "_make_subclass", staticmethod(make_subclass))


def attention() -> None:
    """Use CUDA's attention kernels. For an unknown device, torch would compute attention by plain matmuls.

    (torch.nn.functional.scaled_dot_product_attention; sdp_utils.cpp of ATen for CUDA; for jagged tensors
    can_use_flash_attention and can_use_efficient_attention of torch.nested._internal.sdpa)
    """
    from torch.nested._internal import sdpa

    original: Callable[..., torch.Tensor] = nn.functional.scaled_dot_product_attention
    on_cuda = cast("Callable[..., torch.Tensor]", cuda_attention)

    # the conditions of `fakes.kernels`; the real functions also ask for the GPU's generation in C++
    def takes_flash(params: SDPAParams, debug: bool = False) -> bool:
        return params.query.dtype != torch.float32 and params.attn_mask is None

    def scaled_dot_product_attention(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        device = query.device.type
        # jagged tensors choose their kernel in Python, by the two functions below
        if device in ("cpu", "meta") or query.is_nested:
            return original(query, *args, **kwargs)
        if not torch.is_autocast_enabled(device):
            return on_cuda(query, *args, **kwargs)
        casts = CastCache(device)  # as the op does, autocast casts all inputs
        cast_args = [casts.cast(value, casts.lower) for value in (query, *args)]
        cast_kwargs = {name: casts.cast(value, casts.lower) for name, value in kwargs.items()}
        with torch.autocast(device, enabled=False):
            return on_cuda(*cast_args, **cast_kwargs)

    nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    replace_in(sdpa, "can_use_flash_attention", takes_flash)
    replace_in(sdpa, "can_use_efficient_attention", lambda params, debug=False: True)


def norms() -> None:
    """Use CUDA's fused RMSNorm.

    By their dispatch keys fakes are on the CPU, which has no such kernel.

    (torch.rms_norm)
    """
    _libraries.append(fused_norms("Meta", "CPU"))


def record_stream(meter: AllocationTracker) -> None:
    """Record that a stream uses a tensor. torch has no streams for a custom device.

    (torch.Tensor.record_stream)
    """
    replace_in(torch.Tensor, "record_stream", lambda self, stream: meter.record_stream(self, stream))


def autocast() -> None:
    """Let autocast cast the same ops as on CUDA, since torch lists no ops for a custom device.

    (torch.clear_autocast_cache)
    """
    autocast_as_cuda("AutocastPrivateUse1", NAME)


def state_space() -> None:
    """Replace mamba_ssm's kernels by functions that allocate the same memory.

    Without the kernels, transformers would scan token by token. (transformers.models.mamba.modeling_mamba)
    """
    install_mamba_kernels()


def sends_in_batches() -> None:
    """Run the sends and receives of a batch one by one.

    For a batch, torch would need a backend for the device.

    (torch.distributed.batch_isend_irecv, DualPipeV)
    """

    def batch_isend_irecv(p2p_op_list: list[torch.distributed.P2POp]) -> list[object]:
        return [p2p.op(p2p.tensor, p2p.peer, group=p2p.group, tag=p2p.tag) for p2p in p2p_op_list]

    torch.distributed.batch_isend_irecv = batch_isend_irecv


def direct_storage() -> None:
    """Let `aio.use_gds` accept the simulated GPU.

    DeepSpeed refuses devices that are not named "cuda". (deepspeed.runtime.swap_tensor.aio_config.get_accelerator)
    """
    from deepspeed.runtime.swap_tensor import aio_config

    replace_in(aio_config, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))


def superoffload() -> None:
    """Let SuperOffload step in this process. Fakes cannot be sent to another process.

    (superoffload_stage3.py:23, superoffload_utils.py:220)
    """
    from deepspeed.runtime.superoffload import superoffload_stage3

    replace_in(superoffload_stage3, "_validate_superoffload_accelerator", lambda: None)
    replace_in(superoffload_stage3, "SuperOffloadCPUOptimizer", HostSteps)


# The optimizer process (superoffload_utils.py) has moments and a buffer in host memory. A simulation has a single
# process, so this class allocates them.
class HostSteps:
    """Steps each parameter group in this process, instead of SuperOffload's optimizer process."""

    def __init__(self, *, max_grad_numel: int, pin_memory: bool, **_: object):
        from deepspeed.runtime.superoffload.superoffload_utils import _allocate_worker_grad_buffer

        self._buffer = _allocate_worker_grad_buffer(max_grad_numel, pin_memory)
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done: deque[dict[str, object]] = deque()

    def async_step(
        self, param_group_id: int, sub_group_id: int, fp32_param: torch.Tensor, fp32_grad: torch.Tensor, **_: object
    ) -> None:
        """Step a group. The first step of a group allocates its moments."""
        from deepspeed.runtime.superoffload.superoffload_utils import ResultKeys, TaskKeys

        # in place and without values, so a step itself needs no code
        if sub_group_id not in self._moments:
            self._moments[sub_group_id] = torch.zeros_like(fp32_param), torch.zeros_like(fp32_param)
        self._done.append({TaskKeys.SUB_GROUP_ID: sub_group_id, ResultKeys.UPDATED_PARAM: fp32_param})

    def get_result(self, **_: object) -> dict[str, object] | None:
        """Return the oldest result that was not returned yet; None if there is none."""
        return self._done.popleft() if self._done else None


ON_EVERY_GPU = (gpu_ops, constants, backend_keys, attention, norms, list_indices, sends_in_batches)
OF_RUNS = (patches.small_values, patches.data_setter, experts)
OF_RUNS_ON_GPU = (state_space, tensor_constructor, autocast, expert_rows, direct_storage, superoffload)


def apply_common(gpu: bool, meter: AllocationTracker) -> None:
    """Apply the patches that both runs and scripts need, for the rest of this process."""
    for patch in patches.ALWAYS + (ON_EVERY_GPU if gpu else ()):
        patch()
    for tracked in (patches.compiled_ops, patches.item, patches.rng_state, *((record_stream,) if gpu else ())):
        tracked(meter)


def apply_to_run(gpu: bool, meter: AllocationTracker, packed: bool, padded: bool) -> None:
    """Apply all patches that a run needs, for the rest of this process.

    `packed`: whether samples have several documents. `padded`: whether samples may end early.
    """
    apply_common(gpu, meter)
    for patch in OF_RUNS + (OF_RUNS_ON_GPU if gpu else ()):
        patch()
    patches.sample_masks(packed, padded)
