"""Decides degrees, batch sizes, precision and optimizer from a run and a DeepSpeed JSON.

A value may be in the run or in the JSON. If their values differ, the error names both places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from zerofit.check.aliases import documented_config
from zerofit.check.check import check
from zerofit.check.document import Document
from zerofit.check.dotted import get
from zerofit.check.finding import Finding
from zerofit.check.subject import TargetHardware
from zerofit.config.batch import check_shares, solve, solve_by_rank
from zerofit.config.validate import check_averages, check_combination, check_optimizer, check_part, check_schedule
from zerofit.features.optimizers import OPTIMIZERS, of_json, run_name, usual_optimizer
from zerofit.features.optimizers.adamw import ADAMW
from zerofit.spec.errors import Problems
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.model_facts import Machine, ModelFacts, default_precision
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Batch, Layout

# findings that do not stop a run, since it fills, fixes or checks the value itself (here, config.resolve,
# config.validate, train.engines)
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

# field of the run -> dotted path in the DeepSpeed JSON
PAIRS = {
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
    "gradient_clipping": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "momentum": "optimizer.params.momentum",
    "tensor_parallel": "tensor_parallel.autotp_size",
    "sequence_parallel": "sequence_parallel_size",
    "expert_parallel": "expert_parallel.autoep_size",
}
SIZES = ("global_batch", "micro_batch", "gradient_accumulation_steps")
DEGREES = ("tensor_parallel", "sequence_parallel", "expert_parallel")
Kind = Literal["cnn", "transformer", "pretrained", "pretrained-cnn", "adapters", "gan"]  # first two: from scratch

CNNS: tuple[Kind, ...] = ("cnn", "pretrained-cnn")
BATCH, PARAMETERS = 16, 1.2e6  # the rates are for this number of samples per step and this model size (llama-tiny)
SIZE_EXPONENT = -0.22  # between 6e-4 at 125 million parameters (Brown et al., 2020) and 1.5e-4 at 70 billion (Llama 3)
LARGEST_SMALL = 3.0  # limit for smaller models, relative to the rate for 1.2 million parameters
SGD_LINEAR_FROM, SGD_LINEAR_TO = 256, 8192  # samples

# Loshchilov & Hutter, 2019, appendix B.1: the best decay falls with the square root of the steps. This gives the usual
# 5e-4 and 2e-4 of CIFAR-10 and ImageNet (78,000 and 450,000 steps), and was best for LeNet on digits (1,800 steps).
CNN_DECAY = 0.16


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
    size_places = ", ".join(request.places.get(f, f"{ds_place}: {PAIRS[f]}") for f in SIZES if f in merged)
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
    """Merge run and JSON: `optimizer`, `precision`, and the fields that PAIRS lists.

    The result contains no "auto". Values that differ are added to `problems` with both places.
    """
    from_json = {field: (get(config, path, "auto"), path) for field, path in PAIRS.items()}
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
    if get(config, "optimizer.type", "auto") != "auto":  # the user's own optimizer block: no defaults for missing keys
        defaults = {k: v for k, v in defaults.items() if get(config, f"optimizer.params.{k}") == "auto"}
    return run.model_copy(
        update={
            "ranks": layout.world_size,
            "tensor_parallel": layout.tp,
            "sequence_parallel": layout.sp,
            "expert_parallel": layout.ep,
            "micro_batch": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
            "global_batch": batch.total,
            "precision": merged["precision"],
            "activation_checkpointing": run.activation_checkpointing or offloaded,
            "activation_offload": offloaded,
            "compile": run.compile or get(config, "compile.deepcompile") is True,
            "optimizer": optimizer if optimizer in OPTIMIZERS else None,  # None: the JSON's own type stays
            "lr": merged.get("lr"),
            "momentum": merged.get("momentum", defaults.get("momentum")),
            "weight_decay": merged.get("weight_decay", defaults.get("weight_decay")),
            "gradient_clipping": merged.get("gradient_clipping", usual.clipping),
        }
    )


def peak_lr(kind: Kind, optimizer: str, batch: int, parameters: int) -> float:
    """Return the default peak learning rate, to two digits.

    The rate depends on the optimizer:
    - SGD: the rate grows linearly above 256 samples (Goyal et al., 2017).
    - Adafactor: the rate is fixed and relative to the weights.
    - Other optimizers normalize their step. The rate grows with the square root of the batch between 4 and 64 samples
      (Malladi et al., 2022). Above 64, good rates of language models hardly depend on the batch.

    With these other optimizers, larger models from scratch get a lower rate, except with Muon. The rate of pretrained
    models does not depend on their size. A GAN's rate is fixed, except with SGD.
    """
    rates = OPTIMIZERS.get(optimizer, ADAMW).rates
    if rates.by_batch == "linear":
        scale = min(max(batch, SGD_LINEAR_FROM), SGD_LINEAR_TO) / SGD_LINEAR_FROM
    elif kind == "gan" or rates.by_batch == "fixed":
        scale = 1.0
    else:
        scale = math.sqrt(min(max(batch / BATCH, 0.25), 4.0))
        if kind not in ("pretrained", "pretrained-cnn", "adapters") and rates.by_size:
            scale *= min((parameters / PARAMETERS) ** SIZE_EXPONENT, LARGEST_SMALL)
    # the rate for a batch of BATCH samples and a model of PARAMETERS parameters; fine-tuning uses smaller steps
    own = {"pretrained": rates.pretrained, "adapters": rates.adapters, "gan": rates.gan}
    base = rates.scratch / 10 if kind == "pretrained-cnn" else own.get(kind)
    return float(f"{(base or rates.scratch) * scale:.2g}")


def weight_decay(kind: Kind, optimizer: str | None, steps: int) -> float:
    """Return the default weight decay, to two digits."""
    entry = OPTIMIZERS.get(optimizer or "", ADAMW)
    if kind in CNNS and entry.coupled_decay:
        return min(entry.weight_decay, float(f"{CNN_DECAY / math.sqrt(steps):.2g}"))
    return entry.weight_decay
