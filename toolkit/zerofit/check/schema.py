"""A JSON Schema of DeepSpeed's configuration for editors, and the keys whose "auto" a program fills in."""

from __future__ import annotations

import copy
from typing import Any

from zerofit.check.catalog import catalog
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

# what `zerofit.config.resolve` fills in addition
ZEROFIT = HUGGING_FACE | {
    "optimizer.type",
    "optimizer.params.momentum",
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    f"{ZERO}.allgather_bucket_size",
    f"{ZERO}.offload_param.buffer_size",
}

FILLED = HUGGING_FACE | ACCELERATE | ZEROFIT


def filled_by(reader: str) -> frozenset[str]:
    """Return the keys whose "auto" a program fills before DeepSpeed reads it."""
    theirs = HUGGING_FACE | ACCELERATE | {f"{ZERO}.stage"}  # filled with 2, which the schema should not offer
    return {"zerofit": FILLED, "trainer": theirs, "accelerate": theirs}.get(reader, frozenset())


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the installed DeepSpeed, with descriptions, defaults and "auto"."""
    known = catalog()
    root = copy.deepcopy(known.schema)
    _allow_auto(root, "")
    optimizer, scheduler = root["properties"]["optimizer"], root["properties"]["scheduler"]
    optimizer["properties"]["type"]["examples"] = ["AdamW", "Adam", *known.optimizers]
    own = [name for name, found in known.schedulers.items() if found["own"]]
    scheduler["properties"]["type"]["examples"] = own
    taken = {p for kinds in known.optimizers.values() for names in kinds.values() for p in names}
    optimizer["properties"]["params"]["properties"] = {name: {} for name in sorted(taken)}
    taken = {p for name in own for kind in ("required", "optional") for p in known.schedulers[name][kind]}
    scheduler["properties"]["params"]["properties"] = {name: {} for name in sorted(taken)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DeepSpeed {known.version} configuration",
        **root,
    }


def _allow_auto(node: dict[str, Any], prefix: str) -> None:
    properties = node.get("properties", {})
    for key, child in properties.items():
        path = f"{prefix}{key}"
        if path in FILLED and "properties" not in child:
            shown = {k: child.pop(k) for k in ("description", "default", "deprecated") if k in child}
            properties[key] = {**shown, "anyOf": [child, {"const": "auto"}]}
        else:
            _allow_auto(child, f"{path}.")
