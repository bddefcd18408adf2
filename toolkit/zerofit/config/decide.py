"""Decide degrees, batch sizes, precision and optimizer from a run and a DeepSpeed JSON, and fill in the JSON.

A value may be in the run or in the JSON. If their values differ, the error names both places.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerofit.check.aliases import documented_config
from zerofit.check.check import check
from zerofit.check.document import Document
from zerofit.check.dotted import autos, drop, get, leaves, put
from zerofit.check.finding import Finding
from zerofit.check.subject import TargetHardware
from zerofit.config.batch import check_shares, solve, solve_by_rank
from zerofit.config.recipe import CNNS, Kind, peak_lr, warmup_steps, weight_decay
from zerofit.config.validate import (
    PIPE_PARTITIONED,
    check_averages,
    check_combination,
    check_optimizer,
    check_part,
    check_schedule,
)
from zerofit.features.optimizer import TORCH_PARAMS
from zerofit.features.optimizers import ENTRIES, OPTIMIZERS, of_json, run_name, usual_optimizer
from zerofit.features.optimizers.adamw import ADAMW
from zerofit.features.zero import ZENFLOW, ZERO
from zerofit.spec.errors import Problems
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.model_facts import (
    BUCKET_LIMIT,
    Machine,
    ModelFacts,
    bucket_elements,
    default_precision,
    persistence_elements,
    prefetch_elements,
)
from zerofit.spec.run import DS_KEYS, Run, RunRequest, flag
from zerofit.spec.run_folder import Batch, Job, Layout

# findings that do not stop a run, since it fills, fixes or checks the value itself (here, config.validate,
# train.engines)
SETTLED = frozenset(
    {
        "batch-missing",
        "batch-identity",
        "batch-tensor-parallel",
        "optimizer-untested",
        "optimizer-bitsandbytes",
        "fp16-device",
        "bf16-device",
        "bf16-without-zero",
        "fp16-without-zero",
        "sequence-parallel-alone",
        "experts-zero3",
        "scheduler-without-optimizer",
        "trailing-comma",
    }
)
# warnings that are errors on the training machine
FATAL = frozenset({"nvme-path", "monitor-package", "autotuning-on"})
UNUSED = frozenset({"hybrid-engine"})  # warnings that are errors in zerofit's runs, which generate nothing

SIZES = ("global_batch", "micro_batch", "gradient_accumulation_steps")
DEGREES = ("tensor_parallel", "sequence_parallel", "expert_parallel")
_BUCKET = (
    f"the number of trained parameters, but at most {BUCKET_LIMIT:,}: 100 MB (in 16 bits) saturate a link; "
    "with its default of 5e8, DeepSpeed would allocate 1 GB"
)
# sizes under zero_optimization, in elements: how they are computed from the model, and why
ZERO_SIZES: dict[str, tuple[Callable[[ModelFacts], int], str]] = {
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
    **{key: flag(field) for field, key in DS_KEYS.items()},
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
    **dict.fromkeys(
        (f"pipeline.{key}" for key in PIPE_PARTITIONED),
        "every tensor parallel rank needs the full activation, so splitting it would only add a gather",
    ),
    **{f"{ZERO}.{key}": why for key, (_, why) in ZERO_SIZES.items()},
}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The run, layout and batch sizes, before the model and the data are known in detail."""

    run: Run
    layout: Layout
    batch: Batch
    open: frozenset[str] = frozenset()  # fields of the run that `with_recipe` decides
    warnings: tuple[Finding, ...] = ()  # warnings about the JSON


def decide(
    request: RunRequest,
    document: Document,
    ds_place: str,
    machine: Machine,
    problems: Problems,
    kind: Kind = "transformer",
) -> Decision:
    """Check the JSON, and decide degrees, batch sizes, precision and optimizer.

    Adds to `problems`. If the JSON itself has errors, the result must not be used.
    """
    # A JSON with errors counts as empty. The run's own options are still checked, so one call reports all problems.
    warnings = _check_json(document, request.run, machine, ds_place, problems)
    config = {} if warnings is None else documented_config(document.config)
    merged = _merge(request, config, ds_place, problems)
    layout = _layout(request, merged, config, machine, problems)
    size_places = ", ".join(request.places.get(f, f"{ds_place}: {DS_KEYS[f]}") for f in SIZES if f in merged)
    by_rank = request.run.micro_batch_by_rank
    if by_rank and layout.world_size == layout.dp:
        batch = solve_by_rank(by_rank, merged, layout.dp, request.place("micro_batch_by_rank"), size_places, problems)
    else:
        least = pipeline_parts(layout.pp, request.run.pipeline_schedule)
        batch = solve(merged, layout.dp, least, size_places, problems)
    # The default comes after the merge: only two values that somebody wrote can contradict each other.
    merged.setdefault("precision", default_precision(machine.precisions, machine.accelerator))
    run = _filled(request.run, merged, config, layout, batch, kind)
    if warnings is not None:
        check_combination(layout, config, problems)
        check_optimizer(run, layout, config, problems)
        check_shares(run, layout, problems)
        check_schedule(run, layout, config, problems)
        check_part(run, layout, config, problems)
        check_averages(run, layout, config, problems)
    # With this block DeepSpeed sets the learning rate in each step. The run's options for the schedule would have no
    # effect.
    if "scheduler" in config:
        for field in {"schedule", "warmup_steps", "min_lr"} & set(request.places):
            if getattr(request.run, field) == type(request.run).model_fields[field].default:
                continue  # run.json contains all fields
            place = request.place(field)
            message = f"{place} and the scheduler block of {ds_place} both set the learning rate schedule"
            hint = f"remove the scheduler block, or {place}"
            problems.add("conflict", message, hint, f"{place} and {ds_place}: scheduler")
    # The recipe needs the number of steps and the model's size. Both are known only after the data has been read.
    unnamed = {field for field in ("lr", "weight_decay") if field not in merged}
    if run.weight_decay is None:  # a user's own optimizer block without weight decay keeps none
        unnamed.discard("weight_decay")
    return Decision(run=run, layout=layout, batch=batch, open=frozenset(unnamed), warnings=tuple(warnings or ()))


def with_recipe(decision: Decision, kind: Kind, facts: ModelFacts, steps: int) -> Decision:
    """Return the decision with learning rate and weight decay for model, batch and steps."""
    run, values = decision.run, {}
    if "lr" in decision.open:
        values["lr"] = peak_lr(kind, run.optimizer or "adamw", decision.batch.total, facts.parameters)
    if "weight_decay" in decision.open:
        values["weight_decay"] = weight_decay(kind, run.optimizer, steps)
    return replace(decision, run=run.model_copy(update=values), open=frozenset())


def where(finding: Finding, document: Document, place: str) -> str:
    """Return the place of a finding: file, line and column (if there is a file) and the key."""
    line = "" if document.generated else f":{finding.line}:{finding.column}"
    return f"{place}{line}: {finding.path}"


def _check_json(document: Document, run: Run, machine: Machine, place: str, problems: Problems) -> list[Finding] | None:
    """Return warnings about the JSON, or None if it has errors, which are added to `problems`."""
    setting = TargetHardware(pipeline=run.stages, accelerator=machine.accelerator, precisions=machine.precisions)
    entry = of_json(get(document.config, "optimizer.type"))
    settled = {(rule.code, rule.path) for rule in (entry.rules if entry else ()) if rule.settled}
    findings = [f for f in check(document, setting) if f.code not in SETTLED and (f.code, f.path) not in settled]
    fatal = UNUSED | FATAL if machine.here else UNUSED
    errors = [f for f in findings if f.severity == "error" or f.code in fatal]
    for finding in errors:
        problems.add(finding.code, f"{finding.message}. {finding.why}", finding.fix, where(finding, document, place))
    return None if errors else findings


def _merge(request: RunRequest, config: Mapping[str, object], ds_place: str, problems: Problems) -> dict[str, object]:
    """Merge run and JSON: `optimizer`, `precision`, and the fields that DS_KEYS lists.

    The result contains no "auto". Values that differ are added to `problems` with both places.
    """
    from_json = {field: (get(config, path, "auto"), path) for field, path in DS_KEYS.items()}
    if get(config, "expert_parallel.enabled") is not True:
        del from_json["expert_parallel"]
    optimizer = run_name(str(get(config, "optimizer.type", "auto")))  # DeepSpeed's names are case-insensitive
    from_json |= {"optimizer": (optimizer, "optimizer.type"), "precision": precision_of(request.run.precision, config)}
    merged: dict[str, object] = {}
    for field, (value, path) in from_json.items():
        value = None if value == "auto" else value
        if field in DEGREES and value == 0:
            value = 1  # as in DeepSpeed
        if field in (*SIZES, *DEGREES) and isinstance(value, float):
            value = int(value)  # the checker accepts 16.0
        # a default has no place, and contradicts nothing
        from_run = getattr(request.run, field) if field in request.places else None
        if from_run is not None and value is not None and from_run != value:
            message = f"{field} is {from_run} in {request.place(field)} but {value} in {ds_place}: {path}"
            hint = f'make them equal, or write "auto" at {ds_place}: {path} to use the run\'s value'
            problems.add("conflict", message, hint, f"{request.place(field)} and {ds_place}: {path}")
        value = value if from_run is None else from_run
        if value is not None:
            merged[field] = value
    return merged


def precision_of(run_precision: str | None, config: Mapping[str, object]) -> tuple[str, str]:
    """Return the JSON's precision and the key that sets it.

    For "auto" this is the run's precision. If the run names no precision and the JSON only disables 16-bit types,
    training uses float32. Autocast needs float32 weights.
    """
    # If the JSON disables the run's precision, the result is no precision of a run ("not fp16"). `_merge` then reports
    # the conflict with both places.
    blocks = {name: get(config, f"{name}.enabled") for name in ("bf16", "fp16")}
    off = (False,) if run_precision else (False, None)
    in_fp32 = False in blocks.values() and all(enabled in off for enabled in blocks.values())
    in_fp32 = in_fp32 or (run_precision is None and get(config, "torch_autocast.enabled") is True)
    for name, enabled in blocks.items():
        if enabled is True:
            return name, f"{name}.enabled"
        if enabled is False and run_precision == name:
            return "fp32" if in_fp32 else f"not {name}", f"{name}.enabled"
    return "fp32" if in_fp32 else "auto", "bf16.enabled and fp16.enabled"


def _layout(
    request: RunRequest, merged: Mapping[str, Any], config: Mapping[str, Any], machine: Machine, problems: Problems
) -> Layout:
    run = request.run
    tp, pp, sp = merged.get("tensor_parallel", 1), run.stages, merged.get("sequence_parallel", 1)
    # Expert parallelism does not count: its ranks are a part of the data and sequence parallel ranks.
    inner = tp * pp * sp
    # by default all devices that the other degrees can use
    ranks = run.ranks or max(machine.devices // inner * inner, inner)
    if ranks % inner:
        degrees = f"tensor x pipeline x sequence degree {tp} x {pp} x {sp} = {inner}"
        hint = f"use --ranks {max(inner, ranks // inner * inner)}"
        problems.add("ranks", f"{ranks} ranks are not a multiple of {degrees}", hint, request.place("ranks"))
    stage = int(get(config, "zero_optimization.stage", 0))
    ep = merged.get("expert_parallel", run.expert_parallel)
    return Layout(dp=max(1, ranks // inner), tp=tp, pp=pp, sp=sp, ep=ep, zero_stage=stage)


def _filled(
    run: Run, merged: Mapping[str, Any], config: Mapping[str, Any], layout: Layout, batch: Batch, kind: Kind
) -> Run:
    """Return the run with all fields filled in that do not depend on the data."""
    # Values that the data decides, such as the learning rate, stay None here. `with_recipe` fills them in.
    offload = get(config, "zero_optimization.offload_optimizer.device", "none")
    optimizer = merged.get("optimizer", usual_optimizer(kind in CNNS, offload))
    offloaded = run.activation_offload or get(config, "activation_checkpointing.cpu_checkpointing") is True
    usual = OPTIMIZERS.get(optimizer, ADAMW)  # for another optimizer of the JSON: AdamW's values
    defaults = {"weight_decay": usual.weight_decay, "momentum": usual.momentum}
    if _has_optimizer(config):
        defaults = {k: v for k, v in defaults.items() if get(config, f"optimizer.params.{k}") == "auto"}
    return run.model_copy(
        update={
            "gradient_clipping": usual.clipping,
            **defaults,
            **merged,
            "ranks": layout.world_size,
            "tensor_parallel": layout.tp,
            "sequence_parallel": layout.sp,
            "expert_parallel": layout.ep,
            "micro_batch": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
            "global_batch": batch.total,
            "activation_checkpointing": run.activation_checkpointing or offloaded,
            "activation_offload": offloaded,
            "compile": run.compile or get(config, "compile.deepcompile") is True,
            "optimizer": optimizer if optimizer in OPTIMIZERS else None,  # None: the JSON's own type stays
        }
    )


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
    if run.optimizer is not None:
        put(resolved, "optimizer.type", OPTIMIZERS[run.optimizer].json_type)
    for field, key in DS_KEYS.items():
        if field not in DEGREES and (value := getattr(run, field)) is not None:
            put(resolved, key, value)
    if layout.tp > 1 or layout.combined or batch.total != batch.micro * batch.accumulation * batch.dp:
        # DeepSpeed counts tensor parallel ranks (runtime/config.py:471) and a combined layout's sequence ranks as data
        # parallel, and supports only one micro batch for all ranks
        drop(resolved, "train_batch_size")
    # A block in the file keeps its other keys, such as the loss scale, even if it is disabled.
    for name in ("bf16", "fp16"):
        if run.precision == name or name in resolved:
            put(resolved, f"{name}.enabled", run.precision == name)
    _fill_optimizer(resolved, machine, layout, with_defaults=not _has_optimizer(config))
    for key, (size, _) in ZERO_SIZES.items():
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


def _has_optimizer(config: Mapping[str, object]) -> bool:
    """Return whether a JSON names an optimizer. Keys that its block lacks get no defaults."""
    return get(config, "optimizer.type", "auto") != "auto"


def _fill_optimizer(config: dict[str, Any], machine: Machine, layout: Layout, *, with_defaults: bool) -> None:
    entry = of_json(get(config, "optimizer.type"))
    # These values replace only "auto". The optimizer's usual parameters below also fill in missing keys.
    for key, value in (entry.auto if entry else TORCH_PARAMS).items():
        if get(config, f"optimizer.params.{key}") == "auto":
            put(config, f"optimizer.params.{key}", value)
    for key, value in (entry.params if entry and with_defaults else {}).items():
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


def reasons(config: Mapping[str, object], job: Job) -> list[dict[str, Any]]:
    """Return `path`, `value` and `why` of each value of the job's JSON that is not in the file `config`, in order."""
    words = {
        "micro": job.batch.micro,
        "accumulation": job.batch.accumulation,
        "dp": job.batch.dp,
        "precision": job.run.precision,
        "params_why": OPTIMIZERS.get(job.run.optimizer or "", ADAMW).params_why,
    }
    missing = object()  # null is a value that a file can have
    return [
        {"path": path, "value": value, "why": REASONS.get(path, "").format(**words)}
        for path, value in leaves(job.ds_config)
        if get(config, path, missing) != value
    ]
