"""Decide what each storage is for: by its owner, else by the allocating code, else by the phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerofit.simulate.memory.ledger import Storage

PARAMETERS, GRADIENTS, MASTER, STATE = "parameters", "gradients", "master weights", "optimizer state"
ACTIVATIONS, LOGITS, BUCKETS = "activations", "logits and loss", "communication buckets"
GATHERED, TEMPORARIES = "gathered parameters", "temporaries"
WORKSPACES = "workspaces"  # that libraries keep from their first call on
SAVED = (PARAMETERS, MASTER, STATE)  # contents of a checkpoint
KINDS = (PARAMETERS, GRADIENTS, MASTER, STATE, ACTIVATIONS, LOGITS, BUCKETS, GATHERED, TEMPORARIES, WORKSPACES)

Tag = Callable[[object, str], None]  # AllocationTracker.tag

# attributes of DeepSpeed's ZeRO optimizers
# A storage gets the first kind that is found: by owner (tags, set while it lives), by the function of DeepSpeed
# that allocated it (ALLOCATED_BY), by the file of a loss, by the phase.
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

_ZERO_1_2 = {
    "setup_buckets": BUCKETS,
    "allreduce_bucket": BUCKETS,
    "copy_grads_in_partition": GRADIENTS,
    "step": GRADIENTS,  # the flat gradient and its float32 copy
    "initialize_optimizer_states": GRADIENTS,
    "reduce_gradients": BUCKETS,
    "flatten_dense_tensors_aligned": GRADIENTS,
}
_ZERO_3 = {
    "partition_grads": GRADIENTS,
    "_offload_grad_partition_at_boundary": GRADIENTS,
    "_prepare_fp32_grad_for_sub_group": GRADIENTS,
    "initialize_optimizer_states": GRADIENTS,
    "_create_fp32_partitions": MASTER,
}
_GATHERING = (
    *("_all_gather_sequential", "_all_gather_dtype", "_allgather_params_sequential", "_allgather_params_coalesced"),
    *("_allgather_params", "_allgather_param", "all_gather_coalesced", "_partition_all_gather"),
)
# file -> function -> kind, for DeepSpeed 0.19.8. If a function is missing, its memory counts as "temporaries".
ALLOCATED_BY: dict[str, dict[str, str]] = {
    "deepspeed/runtime/zero/stage_1_and_2.py": _ZERO_1_2,
    "deepspeed/runtime/zero/stage3.py": _ZERO_3,
    "deepspeed/runtime/zero/partition_parameters.py": dict.fromkeys(_GATHERING, GATHERED),
    "deepspeed/runtime/fp16/unfused_optimizer.py": {"step": GRADIENTS, "initialize_optimizer_states": GRADIENTS},
    "deepspeed/runtime/fp16/fused_optimizer.py": {"step": GRADIENTS, "initialize_optimizer_states": GRADIENTS},
    "deepspeed/runtime/bf16_optimizer.py": {"_setup_for_real_optimizer": GRADIENTS},
    "deepspeed/runtime/engine.py": {"allreduce_bucket": BUCKETS},
    "deepspeed/runtime/pipe/engine.py": {"_allocate_zeros": ACTIVATIONS},
}


def watch_gradient(tag: Tag, parameter: torch.Tensor) -> None:
    """Tag a parameter's gradient when autograd has finished it, before DeepSpeed moves it."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(lambda p: tag(p.grad, GRADIENTS))


def tag_owned_storages(tag: Tag, engine: Any) -> None:
    """Tag the storages that model and optimizer own at this moment."""
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            tag(parameter.ds_tensor, PARAMETERS)
            tag(parameter, PARAMETERS if parameter.ds_persist else GATHERED)
        else:
            tag(parameter, PARAMETERS)
        tag(parameter.grad, GRADIENTS)
    for buffer in engine.module.buffers():
        tag(buffer, PARAMETERS)
    for optimizer in optimizer_chain(engine.optimizer):
        for name, kind in OWNED_AS.items():
            for leaf in tree_leaves(getattr(optimizer, name, None)):
                for tensor in tree_leaves(getattr(leaf, "buffer", leaf)):  # DeepSpeed's buckets have a buffer
                    tag(tensor, kind)
        for group in getattr(optimizer, "param_groups", []):
            for parameter in group["params"]:
                tag(parameter, MASTER)
                tag(parameter.grad, GRADIENTS)
        if isinstance(optimizer, torch.optim.Optimizer):
            for leaf in tree_leaves(list(optimizer.state.values())):
                tag(leaf, STATE)


def tag_plain_optimizer(tag: Tag, optimizer: torch.optim.Optimizer) -> None:
    """Tag the storages of an optimizer that updates the model's own parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tag(parameter, PARAMETERS)
            tag(parameter.grad, GRADIENTS)
    for leaf in tree_leaves(list(optimizer.state.values())):
        tag(leaf, STATE)


def optimizer_chain(optimizer: object) -> Iterator[Any]:
    """Yield DeepSpeed's optimizer and those that it wraps, innermost first."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and inner is not optimizer:
        yield from optimizer_chain(inner)
    if optimizer is not None:
        yield optimizer


def classify(storage: Storage) -> str:
    """Return the kind of a storage without a known owner."""
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


def is_loss(file: str) -> bool:
    """Return whether this source file computes a loss."""
    return file.endswith(("zerofit/train/loss.py", "models/segmentation.py", "transformers/loss/loss_utils.py"))
