"""From a run and a DeepSpeed JSON with "auto" values to the plain DeepSpeed JSON that the engine gets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerofit.check.document import Document
from zerofit.check.dotted import autos, drop, get, put
from zerofit.check.finding import Finding
from zerofit.config.batch import solve
from zerofit.config.derived_sizes import SIZES
from zerofit.config.json_findings import examine
from zerofit.config.merge import OPTIMIZER_TYPES, PAIRS, merge
from zerofit.config.recipes import MOMENTUM, OPTIMIZER, WEIGHT_DECAY, Kind, peak_lr, weight_decay
from zerofit.config.validate import check_combination, check_optimizer
from zerofit.spec.errors import Problems
from zerofit.spec.layout import Batch, Layout
from zerofit.spec.load import RunRequest
from zerofit.spec.model_facts import Machine, ModelFacts
from zerofit.spec.run import Run


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What run and JSON together decide before the model and the data are known in detail."""

    run: Run
    layout: Layout
    batch: Batch
    open: frozenset[str] = frozenset()  # fields of the run that `with_recipe` settles
    warnings: tuple[Finding, ...] = ()  # about the JSON


def decide(
    asked: RunRequest,
    document: Document,
    ds_place: str,
    machine: Machine,
    problems: Problems,
    kind: Kind = "transformer",
) -> Decision:
    """Check the JSON, settle degrees, batch sizes, precision and optimizer; notes what is wrong in `problems`.

    Where the JSON has errors of its own, those are noted, and the answer is of no use.
    """
    warnings = examine(document, asked.run, machine, ds_place, problems)
    config = {} if warnings is None else document.config
    merged = merge(asked, config, ds_place, problems)
    layout = _layout(asked, merged, config, machine, problems)
    sizes = ("global_batch", "micro_batch", "gradient_accumulation_steps")
    where = ", ".join(asked.places.get(f, f"{ds_place}: {PAIRS[f]}") for f in sizes if f in merged)
    batch = solve(merged, layout.dp, layout.pp, where, problems)
    run = _settled(asked.run, merged, config, layout, batch, kind)
    check_combination(layout, problems)
    if warnings is not None:
        check_optimizer(run, layout, config, problems)
    if "scheduler" in config:
        for field in {"schedule", "warmup_steps", "min_lr"} & set(asked.places):
            if getattr(asked.run, field) == type(asked.run).model_fields[field].default:
                continue  # run.json has them all
            problems.add(
                "conflict",
                f"{asked.place(field)} and the scheduler block of {ds_place} both set the learning rate's curve",
                "remove the scheduler block, or leave the schedule to it",
                f"{asked.place(field)} and {ds_place}: scheduler",
            )
    unnamed = {field for field in ("lr", "weight_decay") if field not in merged}
    if run.weight_decay is None:  # a block of the user's own keeps what it leaves out
        unnamed.discard("weight_decay")
    return Decision(run=run, layout=layout, batch=batch, open=frozenset(unnamed), warnings=tuple(warnings or ()))


def _layout(
    asked: RunRequest, merged: Mapping[str, Any], config: Mapping[str, Any], machine: Machine, problems: Problems
) -> Layout:
    run = asked.run
    tp, pp, sp = merged.get("tensor_parallel", 1), run.pipeline, merged.get("sequence_parallel", 1)
    inner = tp * pp * sp
    ranks = run.ranks or max(machine.devices // inner * inner, inner)
    if ranks % inner:
        problems.add(
            "ranks",
            f"{ranks} ranks are not a multiple of tensor x pipeline x sequence degree {tp} x {pp} x {sp} = {inner}",
            f"take --ranks {max(inner, ranks // inner * inner)}",
            asked.place("ranks"),
        )
    stage = int(get(config, "zero_optimization.stage", 0))
    return Layout(dp=max(1, ranks // inner), tp=tp, pp=pp, sp=sp, zero_stage=stage)


def _settled(
    run: Run, merged: Mapping[str, Any], config: Mapping[str, Any], layout: Layout, batch: Batch, kind: Kind
) -> Run:
    """The run with everything filled in that does not depend on the data."""
    offloads = get(config, "zero_optimization.offload_optimizer.device", "none") != "none"  # which is for Adam
    optimizer = merged.get("optimizer", "adamw" if offloads else OPTIMIZER[kind])
    clipping = 0.0 if optimizer == "muon" else 1.0  # Muon's update has a fixed norm of its own
    defaults = {"weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM.get(optimizer)}
    if get(config, "optimizer.type", "auto") != "auto":  # a block of the user's own keeps what it leaves out
        defaults = {k: v for k, v in defaults.items() if get(config, f"optimizer.params.{k}") == "auto"}
    return run.model_copy(
        update={
            "ranks": layout.world_size,
            "tensor_parallel": layout.tp,
            "sequence_parallel": layout.sp,
            "micro_batch": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
            "global_batch": batch.total,
            "precision": merged.get("precision", "fp32"),
            "activation_checkpointing": run.activation_checkpointing
            or get(config, "activation_checkpointing.cpu_checkpointing") is True,
            "compile": run.compile or get(config, "compile.deepcompile") is True,
            "optimizer": optimizer if optimizer in OPTIMIZER_TYPES else None,
            "lr": merged.get("lr"),
            "momentum": merged.get("momentum", defaults.get("momentum")),
            "weight_decay": merged.get("weight_decay", defaults.get("weight_decay")),
            "gradient_clipping": merged.get("gradient_clipping", clipping),
        }
    )


def with_recipe(decision: Decision, kind: Kind, facts: ModelFacts, steps: int) -> Decision:
    """Return the decision with the learning rate and weight decay that the model, the batch and the steps suggest."""
    run, values = decision.run, {}
    if "lr" in decision.open:
        values["lr"] = peak_lr(kind, run.optimizer or "adamw", decision.batch.total, facts.parameters)
    if "weight_decay" in decision.open:
        values["weight_decay"] = weight_decay(kind, run.optimizer, steps)
    return replace(decision, run=run.model_copy(update=values), open=frozenset())


def resolve(
    config: Mapping[str, Any],
    decision: Decision,
    facts: ModelFacts,
    machine: Machine,
    steps: int,
    problems: Problems,
) -> dict[str, Any]:
    """The plain DeepSpeed JSON of this run; every "auto" is filled, or noted as one that nothing fills."""
    resolved = copy.deepcopy(dict(config))
    run, layout = decision.run, decision.layout
    _fill_batch(resolved, decision)
    _fill_precision(resolved, run.precision)
    _fill_optimizer(resolved, run, machine, layout)
    _fill_sizes(resolved, facts)
    _fill_scheduler(resolved, run, steps)
    put(resolved, "gradient_clipping", run.gradient_clipping)
    for path, degree in (("tensor_parallel.autotp_size", layout.tp), ("sequence_parallel_size", layout.sp)):
        if degree > 1 or get(resolved, path) is not None:
            put(resolved, path, degree)
    if layout.tp > 1:
        _keep_logits_whole(resolved, problems)
    for path in autos(resolved):
        problems.add("auto", f'{path} is "auto", which nothing fills', "write a value, or remove the key", path)
    return resolved


def _fill_batch(config: dict[str, Any], decision: Decision) -> None:
    put(config, "train_micro_batch_size_per_gpu", decision.batch.micro)
    put(config, "gradient_accumulation_steps", decision.batch.accumulation)
    if decision.layout.tp > 1:
        # DeepSpeed does not take the tensor parallel degree off the batch's world size (runtime/config.py:471)
        drop(config, "train_batch_size")
    else:
        put(config, "train_batch_size", decision.batch.total)


def _keep_logits_whole(config: dict[str, Any], problems: Problems) -> None:
    """Each rank computes the loss from all logits.

    Left to itself DeepSpeed splits the vocabulary of a model with tied embeddings over the ranks and expects that its
    own loss is taken (runtime/engine.py:1125): one rank's part alone gives a wrong loss without a word.
    """
    path = "tensor_parallel.vocab_parallel_lm_head"
    if get(config, path) is True:
        message = f"{path} leaves each rank a part of the logits, and the loss needs all of them"
        problems.add("vocab-parallel", message, "remove the key", path)
    put(config, path, False)


def _fill_precision(config: dict[str, Any], precision: str | None) -> None:
    for name in ("bf16", "fp16"):
        if precision == name or name in config:
            put(config, f"{name}.enabled", precision == name)


def _fill_optimizer(config: dict[str, Any], run: Run, machine: Machine, layout: Layout) -> None:
    if run.optimizer is not None:
        put(config, "optimizer.type", OPTIMIZER_TYPES[run.optimizer])
    params = {"lr": run.lr, "weight_decay": run.weight_decay, "momentum": run.momentum}
    for key, value in params.items():
        if value is not None:
            put(config, f"optimizer.params.{key}", value)
    for key, value in {"betas": [0.9, 0.999], "eps": 1e-8}.items():  # torch's defaults
        if get(config, f"optimizer.params.{key}") == "auto":
            put(config, f"optimizer.params.{key}", value)
    kind = get(config, "optimizer.type", "").lower()
    zenflow = get(config, "zero_optimization.zenflow") is not None  # its optimizer is the C++ one
    if machine.accelerator == "cpu" and kind in ("adam", "adamw", "muon") and not zenflow:
        # torch's own Adam: DeepSpeed's fused one is a C++ op that takes minutes to compile
        config["optimizer"]["params"].setdefault("torch_adam", True)
        if get(config, "zero_optimization.offload_optimizer.device", "none") != "none":
            config.setdefault("zero_force_ds_cpu_optimizer", False)
    if layout.zero_stage and kind not in ("adam", "adamw"):
        config.setdefault("zero_allow_untested_optimizer", True)
    if layout.zero_stage == 3 and kind == "muon":
        # Muon needs whole matrices of gradients, DeepSpeed refuses the default (runtime/zero/stage3.py:361)
        config["zero_optimization"].setdefault("reduce_scatter", False)


def _fill_sizes(config: dict[str, Any], facts: ModelFacts) -> None:
    """Buckets no larger than the model; prefetch and persistence by its width."""
    for key, size in SIZES.items():
        if get(config, f"zero_optimization.{key}") == "auto":
            put(config, f"zero_optimization.{key}", size.of(facts))


def _fill_scheduler(config: dict[str, Any], run: Run, steps: int) -> None:
    params = get(config, "scheduler.params", {})
    values = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": run.lr,
        "warmup_num_steps": warmup_steps(run, steps),
        "total_num_steps": steps,
    }
    for key, value in values.items():
        if params.get(key) == "auto":
            params[key] = value


def warmup_steps(run: Run, steps: int) -> int:
    """Steps of linear warm-up: as asked, else 5 % of the run, rounded up."""
    return -(-steps // 20) if run.warmup_steps is None else run.warmup_steps
