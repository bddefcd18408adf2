"""Decide the kind of each storage: by owner, else by allocating code, else by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils._pytree import tree_leaves

from zerofit.simulate.memory.ledger import Storage
from zerofit.spec.memory_kinds import (
    ACTIVATIONS,
    ALLOCATED_BY,
    BUCKETS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    MASTER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    is_loss,
)

Tag = Callable[[object, str], None]  # AllocationTracker.tag

# A storage gets the first kind that is found: by owner (tags, set while it lives), by the function of DeepSpeed
# that allocated it (ALLOCATED_BY), by the file of a loss, by the phase.
#
# Owners are attributes of DeepSpeed's ZeRO optimizers. They are read at the beginning of each phase, since DeepSpeed
# replaces the tensors while it trains.
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


def watch_gradient(tag: Tag, parameter: torch.Tensor) -> None:
    """Tag a parameter's gradient once autograd has completed it, before DeepSpeed moves it."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(lambda p: tag(p.grad, GRADIENTS))


def tag_owned_storages(tag: Tag, engine: DeepSpeedEngine) -> None:
    """Tag the storages that the model and the optimizer own now."""
    model = cast("nn.Module", engine.module)
    for parameter in model.parameters():
        # ZeRO-3: a parameter's own storage lives only while it is gathered, and `ds_tensor` is this rank's part
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            tag(partition, PARAMETERS)
            tag(parameter, PARAMETERS if vars(parameter)["ds_persist"] else GATHERED)
        else:
            tag(parameter, PARAMETERS)
        tag(parameter.grad, GRADIENTS)
    for buffer in model.buffers():
        tag(buffer, PARAMETERS)
    for optimizer in optimizer_chain(engine.optimizer):
        for name, kind in OWNED_AS.items():
            for leaf in tree_leaves(getattr(optimizer, name, None)):
                for tensor in tree_leaves(getattr(leaf, "buffer", leaf)):  # DeepSpeed's buckets have a buffer
                    tag(tensor, kind)
        tag_optimizer(tag, optimizer, MASTER)


def tag_optimizer(tag: Tag, optimizer: object, kind: str) -> None:
    """Tag the storages of an optimizer, with `kind` for its parameters."""
    for group in getattr(optimizer, "param_groups", []):
        for parameter in group["params"]:
            tag(parameter, kind)
            tag(parameter.grad, GRADIENTS)
    if isinstance(optimizer, torch.optim.Optimizer):
        for leaf in tree_leaves(list(optimizer.state.values())):
            tag(leaf, STATE)


def optimizer_chain(optimizer: object) -> Iterator[Any]:
    """Yield DeepSpeed's optimizer after the optimizers that it wraps, innermost first."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and inner is not optimizer:
        yield from optimizer_chain(inner)
    if optimizer is not None:
        yield optimizer


def classify(storage: Storage) -> str:
    """Return the kind of a storage whose owner is unknown."""
    code = storage.code
    if code is not None:
        for ending, functions in ALLOCATED_BY.items():
            if code.co_filename.endswith(ending) and code.co_name in functions:
                return functions[code.co_name]
        if is_loss(code.co_filename):
            return LOGITS
    if storage.phase == "build":
        return PARAMETERS
    return ACTIVATIONS if storage.phase == "forward" or storage.recomputed else TEMPORARIES
