"""Why a resolved DeepSpeed JSON says what the file left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.check.dotted import get, leaves
from zerofit.check.subject import ZERO
from zerofit.config.derived_sizes import SIZES
from zerofit.config.resolve import Decision
from zerofit.spec.model_facts import ModelFacts

REASONS = {
    "train_batch_size": "micro batch {micro} x accumulation {accumulation} x data parallel degree {dp}",
    "train_micro_batch_size_per_gpu": "--micro-batch, else the largest up to 8 that divides",
    "gradient_accumulation_steps": "--gradient-accumulation-steps, else what the other two sizes leave",
    "gradient_clipping": "--gradient-clipping, else 1.0 (0 with Muon, whose update has a norm of its own)",
    "bf16.enabled": "--precision {precision}",
    "fp16.enabled": "--precision {precision}",
    "optimizer.type": "--optimizer, else SGD for a CNN from scratch and AdamW for all others",
    "optimizer.params.lr": "--lr, else by the model's kind and size and the batch (docs/defaults.md)",
    "optimizer.params.weight_decay": "--weight-decay, else 0.01, and less for a CNN from scratch (docs/defaults.md)",
    "optimizer.params.momentum": "--momentum, else the optimizer's usual one",
    "optimizer.params.betas": "torch's default",
    "optimizer.params.eps": "torch's default",
    "optimizer.params.torch_adam": "on the CPU torch's Adam is as fast, and DeepSpeed's takes minutes to compile",
    "zero_force_ds_cpu_optimizer": "so that torch's Adam may step in host memory",
    "zero_allow_untested_optimizer": "DeepSpeed's list of tested optimizers is short; zerofit tests this one",
    f"{ZERO}.reduce_scatter": "Muon needs whole gradient matrices",
    "scheduler.params.warmup_min_lr": "the warm-up starts at 0",
    "scheduler.params.warmup_max_lr": "the optimizer's learning rate",
    "scheduler.params.warmup_num_steps": "--warmup-steps, else 5 % of the run",
    "scheduler.params.total_num_steps": "the optimizer steps of the run",
    "tensor_parallel.autotp_size": "--tensor-parallel",
    "sequence_parallel_size": "--sequence-parallel",
}


def reasons(
    config: Mapping[str, Any], resolved: Mapping[str, Any], decision: Decision, facts: ModelFacts
) -> list[dict[str, Any]]:
    """`path`, `value`, `why` of each value that the file did not have, in the order of the resolved JSON."""
    words = {
        "micro": decision.batch.micro,
        "accumulation": decision.batch.accumulation,
        "dp": decision.batch.dp,
        "precision": decision.run.precision,
    }
    sizes = {f"{ZERO}.{key}": size.why for key, size in SIZES.items()}
    missing = object()
    return [
        {"path": path, "value": value, "why": (sizes.get(path) or REASONS.get(path, "")).format(**words)}
        for path, value in leaves(resolved)
        if get(config, path, missing) != value
    ]
