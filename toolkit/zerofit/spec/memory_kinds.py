"""Kinds of memory, and the code that allocates each kind, in simulations and real runs."""

from __future__ import annotations

PARAMETERS, GRADIENTS, MASTER, STATE = "parameters", "gradients", "master weights", "optimizer state"
ACTIVATIONS, LOGITS, BUCKETS = "activations", "logits and loss", "communication buckets"
GATHERED, TEMPORARIES = "gathered parameters", "temporaries"
WORKSPACES = "workspaces"  # that libraries keep from their first call on
ENGINE = "inference engine"  # on the trainer's devices
KIND_FILE = "zerofit kind"  # the file of a frame that names a block's kind, in snapshots of `zerofit simulate`
SAVED = (PARAMETERS, MASTER, STATE)  # contents of a checkpoint
KINDS = (PARAMETERS, GRADIENTS, MASTER, STATE, ACTIVATIONS, LOGITS, BUCKETS, GATHERED, TEMPORARIES, WORKSPACES, ENGINE)

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


def is_loss(file: str) -> bool:
    """Return whether this source file computes a loss."""
    return file.endswith(("zerofit/train/loss.py", "models/segmentation.py", "transformers/loss/loss_utils.py"))
