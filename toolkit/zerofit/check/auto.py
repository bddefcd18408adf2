"""Which "auto" somebody fills: zerofit, and transformers' and Accelerate's integrations where noted."""

from __future__ import annotations

from zerofit.check.subject import ZERO

# transformers 5.23, integrations/deepspeed.py:140-260 (trainer_config_process and trainer_config_finalize)
HUGGING_FACE = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "bf16.enabled",
        f"{ZERO}.reduce_bucket_size",
        f"{ZERO}.stage3_prefetch_bucket_size",
        f"{ZERO}.stage3_param_persistence_threshold",
    }
)

# accelerate 1.15, accelerator.py:2208 and utils/dataclasses.py:1280-1450
ACCELERATE = frozenset(
    {
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        f"{ZERO}.offload_optimizer.device",
        f"{ZERO}.offload_param.device",
        f"{ZERO}.offload_optimizer.nvme_path",
        f"{ZERO}.offload_param.nvme_path",
    }
)

# what `zerofit.config.resolve` fills beyond these
ZEROFIT = HUGGING_FACE | {
    "optimizer.type",
    "optimizer.params.momentum",
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    f"{ZERO}.allgather_bucket_size",
    f"{ZERO}.offload_param.buffer_size",
}

FILLED = HUGGING_FACE | ACCELERATE | ZEROFIT
