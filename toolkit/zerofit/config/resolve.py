"""Fills in the "auto" values of a run's DeepSpeed JSON: the plain JSON for the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from zerofit.check.dotted import autos, drop, get, leaves, put
from zerofit.check.subject import ZERO
from zerofit.config.decide import Decision
from zerofit.config.validate import PIPE_PARTITIONED
from zerofit.features.optimizer import TORCH_PARAMS
from zerofit.features.optimizers import ENTRIES, OPTIMIZERS, of_json
from zerofit.features.optimizers.adamw import ADAMW
from zerofit.features.zero import ZENFLOW
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import (
    BUCKET_LIMIT,
    Machine,
    ModelFacts,
    bucket_elements,
    persistence_elements,
    prefetch_elements,
)
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout

_BUCKET = (
    f"the number of trained parameters, but at most {BUCKET_LIMIT:,}: 100 MB (in 16 bits) saturate a link; "
    "with its default of 5e8, DeepSpeed would allocate 1 GB"
)
# sizes under zero_optimization, in elements: how they are computed from the model, and why
SIZES: dict[str, tuple[Callable[[ModelFacts], int], str]] = {
    "reduce_bucket_size": (lambda facts: bucket_elements(facts.trained_parameters), _BUCKET),
    "allgather_bucket_size": (lambda facts: bucket_elements(facts.trained_parameters), _BUCKET),
    "stage3_prefetch_bucket_size": (
        lambda facts: prefetch_elements(facts.hidden_size),
        "0.9 x width squared, about one weight matrix (as in transformers)",
    ),
    "stage3_param_persistence_threshold": (
        lambda facts: persistence_elements(facts.hidden_size),
        "10 x width: norms and biases stay on every rank, matrices are partitioned (as in transformers)",
    ),
    "offload_param.buffer_size": (
        lambda facts: facts.largest_parameter,
        "the largest parameter must fit into one swap buffer",
    ),
}
# objects that may be null in DeepSpeed, as if they were missing
NULLABLE = (f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", "bf16", "optimizer.params")
# key -> the reason for its value, if the value is not in the file
_UNCLIPPED = "; ".join(f"0 with {entry.json_type}, {entry.clipping_why}" for entry in ENTRIES if not entry.clipping)
_FULL = ", ".join(entry.json_type for entry in ENTRIES if entry.full_gradients)
REASONS = {
    "train_batch_size": "micro batch {micro} x accumulation {accumulation} x data parallel degree {dp}",
    "train_micro_batch_size_per_gpu": "--micro-batch, else the largest up to 8 that divides the batch",
    "gradient_accumulation_steps": "--gradient-accumulation-steps, else computed from the other two sizes",
    "gradient_clipping": f"--gradient-clipping, else 1.0 ({_UNCLIPPED})",
    "bf16.enabled": "--precision {precision}",
    "fp16.enabled": "--precision {precision}",
    "optimizer.type": "--optimizer, else SGD for a CNN from scratch, AdamW for all others",
    "optimizer.params.lr": "--lr, else chosen by model and batch (docs/defaults.md)",
    "optimizer.params.weight_decay": "--weight-decay, else 0.01; a CNN from scratch gets less (docs/defaults.md)",
    "optimizer.params.momentum": "--momentum, else the optimizer's usual value",
    "optimizer.params.betas": "{params_why}",
    "optimizer.params.eps": "{params_why}",
    "optimizer.params.torch_adam": "on the CPU, torch's Adam is as fast as DeepSpeed's Adam, which takes minutes to "
    "compile",
    "zero_force_ds_cpu_optimizer": "allows torch's Adam in host memory",
    "zero_allow_untested_optimizer": "DeepSpeed's list of tested optimizers is short; zerofit tests this one",
    f"{ZERO}.reduce_scatter": f"{_FULL} needs full gradient matrices",
    "scheduler.params.warmup_min_lr": "the warm-up starts at 0",
    "scheduler.params.warmup_max_lr": "the optimizer's learning rate",
    "scheduler.params.warmup_num_steps": "--warmup-steps, else 5 % of the run",
    "scheduler.params.total_num_steps": "the optimizer steps of the run",
    "tensor_parallel.autotp_size": "--tensor-parallel",
    "sequence_parallel_size": "--sequence-parallel",
    **dict.fromkeys(
        (f"pipeline.{key}" for key in PIPE_PARTITIONED),
        "every tensor parallel rank needs the full activation, so splitting it would only add a gather",
    ),
    **{f"{ZERO}.{key}": why for key, (_, why) in SIZES.items()},
}


def resolve(
    config: Mapping[str, object],
    decision: Decision,
    facts: ModelFacts,
    machine: Machine,
    steps: int,
    problems: Problems,
) -> dict[str, Any]:
    """Return the plain DeepSpeed JSON of a run. An "auto" that stays is a problem."""
    # The result has plain values only: what is decided replaces "auto" and adds missing keys. All other keys stay.
    resolved = copy.deepcopy(dict(config))
    for path in NULLABLE:  # DeepSpeed reads null as a missing object
        if get(resolved, path) is None:
            drop(resolved, path)
    run, layout, batch = decision.run, decision.layout, decision.batch
    put(resolved, "train_micro_batch_size_per_gpu", batch.micro)
    put(resolved, "gradient_accumulation_steps", batch.accumulation)
    if layout.tp > 1 or layout.combined or batch.total != batch.micro * batch.accumulation * batch.dp:
        # DeepSpeed counts tensor parallel ranks (runtime/config.py:471) and a combined layout's sequence ranks as data
        # parallel, and supports only one micro batch for all ranks
        drop(resolved, "train_batch_size")
    else:
        put(resolved, "train_batch_size", batch.total)
    # A block in the file keeps its other keys, such as the loss scale, even if it is disabled.
    for name in ("bf16", "fp16"):
        if run.precision == name or name in resolved:
            put(resolved, f"{name}.enabled", run.precision == name)
    _fill_optimizer(resolved, run, machine, layout)
    for key, (size, _) in SIZES.items():
        if get(resolved, f"{ZERO}.{key}") == "auto":
            put(resolved, f"{ZERO}.{key}", size(facts))
    scheduler = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": run.lr,
        "warmup_num_steps": warmup_steps(run, steps),
        "total_num_steps": steps,
    }
    for key, value in scheduler.items():
        if get(resolved, f"scheduler.params.{key}") == "auto":
            put(resolved, f"scheduler.params.{key}", value)
    put(resolved, "gradient_clipping", run.gradient_clipping)
    _fill_degrees(resolved, layout, problems)
    for path in autos(resolved):
        problems.add("auto", f'{path} is "auto", and nothing fills it in', "write a value, or remove the key", path)
    return resolved


# In a combined layout zerofit, not DeepSpeed, creates the groups.
def _fill_degrees(config: dict[str, object], layout: Layout, problems: Problems) -> None:
    """Fill in the degrees, or remove them for a combined layout."""
    if layout.combined:
        for key in ("tensor_parallel", "sequence_parallel_size", "expert_parallel"):
            config.pop(key, None)
        if layout.pp > 1 and layout.tp > 1:
            for key in PIPE_PARTITIONED:
                if get(config, f"pipeline.{key}") is None:
                    put(config, f"pipeline.{key}", False)
        return
    for path, degree in (("tensor_parallel.autotp_size", layout.tp), ("sequence_parallel_size", layout.sp)):
        if degree > 1 or get(config, path) is not None:
            put(config, path, degree)
    if layout.tp > 1:
        _keep_full_logits(config, problems)


def _keep_full_logits(config: dict[str, object], problems: Problems) -> None:
    """Make each rank compute the loss from all logits.

    By default DeepSpeed splits the vocabulary of a model with tied embeddings and expects its own loss
    (runtime/engine.py:1125). Any other loss would be computed from one rank's part: a wrong loss without an error.
    """
    path = "tensor_parallel.vocab_parallel_lm_head"
    if get(config, path) is True:
        message = f"{path} gives each rank a part of the logits, but the loss needs all of them"
        problems.add("vocab-parallel", message, "remove the key", path)
    put(config, path, False)


def _fill_optimizer(config: dict[str, Any], run: Run, machine: Machine, layout: Layout) -> None:
    is_own_block = get(config, "optimizer.type", "auto") != "auto"  # a user's block gets no defaults for missing keys
    if run.optimizer is not None:
        put(config, "optimizer.type", OPTIMIZERS[run.optimizer].json_type)
    params = {"lr": run.lr, "weight_decay": run.weight_decay, "momentum": run.momentum}
    for key, value in params.items():
        if value is not None:
            put(config, f"optimizer.params.{key}", value)
    entry = of_json(get(config, "optimizer.type"))
    # These values replace only "auto". The optimizer's usual parameters below also fill in missing keys.
    for key, value in (entry.auto if entry else TORCH_PARAMS).items():
        if get(config, f"optimizer.params.{key}") == "auto":
            put(config, f"optimizer.params.{key}", value)
    for key, value in (entry.params if entry and not is_own_block else {}).items():
        put(config, f"optimizer.params.{key}", value)
    if machine.accelerator == "cpu" and entry and entry.torch_on_cpu and not ZENFLOW.on(config):  # needs the C++ op
        # DeepSpeed's Adam is a C++ op that takes minutes to compile
        config["optimizer"]["params"].setdefault("torch_adam", True)
        if get(config, f"{ZERO}.offload_optimizer.device", "none") != "none":
            config.setdefault("zero_force_ds_cpu_optimizer", False)
    if layout.zero_stage and not (entry and entry.zero_tested):
        config.setdefault("zero_allow_untested_optimizer", True)
    if layout.zero_stage == 3 and entry and entry.full_gradients:
        config[ZERO].setdefault("reduce_scatter", False)  # DeepSpeed refuses the default (runtime/zero/stage3.py:361)


def warmup_steps(run: Run, steps: int) -> int:
    """Return the warm-up steps: the run's, else 5 % of all steps, rounded up."""
    return -(-steps // 20) if run.warmup_steps is None else run.warmup_steps


def reasons(
    config: Mapping[str, object], resolved: Mapping[str, object], decision: Decision, facts: ModelFacts
) -> list[dict[str, Any]]:
    """Return `path`, `value` and `why` of each value that is not in the file, in order."""
    words = {
        "micro": decision.batch.micro,
        "accumulation": decision.batch.accumulation,
        "dp": decision.batch.dp,
        "precision": decision.run.precision,
        "params_why": OPTIMIZERS.get(decision.run.optimizer or "", ADAMW).params_why,
    }
    missing = object()  # null is a value that a file can have
    return [
        {"path": path, "value": value, "why": REASONS.get(path, "").format(**words)}
        for path, value in leaves(resolved)
        if get(config, path, missing) != value
    ]
