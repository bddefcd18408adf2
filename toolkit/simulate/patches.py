"""Everything that is changed in torch, transformers and DeepSpeed so that an unmodified engine runs on fake tensors.

Applied once, in the process of a simulation and nowhere else. Each patch is a function that says why it is needed;
`tests/simulate/test_patches.py` has a test for each that fails when a new version no longer has what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor


def module_apply() -> None:
    """Module.to() swaps fake parameters' insides, which torch refuses for any that has a weak reference or a node.

    With plain `.data =`, as real parameters get it. (torch.nn.Module._apply)
    """
    original = nn.Module._apply

    def apply(self: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        own = [t for t in [*self._parameters.values(), *self._buffers.values()] if t is not None]
        if own and not any(isinstance(t, FakeTensor) for t in own):
            return original(self, function, recurse)
        if recurse:
            for child in self.children():
                child._apply(function)
        for parameter in self._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    moved = function(parameter.data)
                    if moved is not parameter.data:
                        parameter.data = moved
                    if parameter.grad is not None:
                        parameter.grad.data = function(parameter.grad.data)
        self._buffers.update({name: b if b is None else function(b) for name, b in self._buffers.items()})
        return self

    nn.Module._apply = apply


def item() -> None:
    """`item()` of a fake tensor has no answer: a benign one instead (no overflow, a norm of 1, zeros)."""

    def local_scalar_dense(fake_mode: Any, func: Any, arg: FakeTensor) -> Any:
        if arg.constant is not None:
            return arg.constant.item()
        if arg.dtype == torch.bool:
            return False
        return 1.0 if arg.dtype.is_floating_point else 0

    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = local_scalar_dense


def masks() -> None:
    """transformers takes a fake tensor for a sign of tracing, and then makes the causal mask that it would leave out.

    (transformers.masking_utils)
    """
    from transformers import masking_utils

    masking_utils.is_tracing = lambda *_, **__: False
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # asks for values


def order_checks() -> None:
    """ZeRO-3 compares the order of parameters with other ranks' by value. (deepspeed.runtime.zero)"""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, utils

    for module in (utils, partition_parameters, partitioned_param_coordinator):
        if hasattr(module, "assert_ints_same_as_other_ranks"):
            module.assert_ints_same_as_other_ranks = lambda *_, **__: None
        if hasattr(module, "get_lst_from_rank0"):
            module.get_lst_from_rank0 = lambda values: values


PATCHES = (module_apply, item, masks, order_checks)


def apply_all() -> None:
    """Change what must be changed, for the rest of this process."""
    for patch in PATCHES:
        patch()
