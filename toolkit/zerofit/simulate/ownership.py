"""Owners of memory: parameters, gradients, master weights and optimizer state, as the engine has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerofit.simulate.categories import BUCKETS, GATHERED, GRADIENTS, MASTER, PARAMETERS, STATE
from zerofit.simulate.tracker import AllocationTracker

# attributes of DeepSpeed's ZeRO optimizers
OWNED_AS = {
    "ipg_buckets": BUCKETS,
    "grad_partitions_flat_buffer": GRADIENTS,
    "averaged_gradients": GRADIENTS,
    "single_partition_of_fp32_groups": MASTER,
    "fp32_partitioned_groups_flat": MASTER,
    "fp32_groups_flat": MASTER,
    "temp_grad_buffer_for_gpu_offload": GRADIENTS,
    "temp_grad_buffer_for_cpu_offload": GRADIENTS,
}


def watch_gradients(meter: AllocationTracker, model: nn.Module) -> None:
    """Tag each parameter's gradient as soon as autograd has finished it, before DeepSpeed takes it away."""

    def tag(parameter: nn.Parameter) -> None:
        _tag(meter, parameter.grad, GRADIENTS)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(tag)


def tag_owned_storages(meter: AllocationTracker, engine: Any) -> None:
    """Tag the storages that model and optimizer own at this moment with what they are for."""
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            _tag(meter, parameter.ds_tensor, PARAMETERS)
            _tag(meter, parameter, PARAMETERS if parameter.ds_persist else GATHERED)
        else:
            _tag(meter, parameter, PARAMETERS)
        _tag(meter, parameter.grad, GRADIENTS)
    for buffer in engine.module.buffers():
        _tag(meter, buffer, PARAMETERS)
    for optimizer in _chain(engine.optimizer):
        for name, kind in OWNED_AS.items():
            for leaf in _leaves(getattr(optimizer, name, None)):
                _tag(meter, leaf, kind)
        for group in getattr(optimizer, "param_groups", []):
            for parameter in group["params"]:
                _tag(meter, parameter, MASTER)
                _tag(meter, parameter.grad, GRADIENTS)
        for leaf in tree_leaves(list(_states(optimizer))):
            _tag(meter, leaf, STATE)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors in a structure, those in DeepSpeed's buckets too."""
    for leaf in tree_leaves(value):
        yield from tree_leaves(leaf.buffer) if hasattr(leaf, "buffer") else [leaf]


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield DeepSpeed's optimizer and those that it wraps, the innermost first."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and inner is not optimizer:
        yield from _chain(inner)
    if optimizer is not None:
        yield optimizer


def _states(optimizer: Any) -> Iterator[Any]:
    if isinstance(optimizer, torch.optim.Optimizer):
        for state in optimizer.state.values():
            yield list(state.values())


def _tag(meter: AllocationTracker, tensor: Any, kind: str) -> None:
    if isinstance(tensor, Tensor) and tensor.device.type != "meta":
        storage = meter.storage_of(tensor)
        if storage is not None and storage.kind is None:
            storage.kind = kind
