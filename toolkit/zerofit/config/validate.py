"""Combinations that DeepSpeed cannot do or silently ignores, refused with the reason before a process starts.

Each rule was seen on DeepSpeed 0.19.8 (its source line where it raises one itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.check.dotted import get
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import SEQUENCE_PARALLEL_TYPES, TENSOR_PARALLEL_TYPES, Machine, ModelFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout


def check_combination(layout: Layout, problems: Problems) -> None:
    """Check degrees against each other; the JSON by itself has been checked already."""
    degrees = {"--tensor-parallel": layout.tp, "--pipeline": layout.pp, "--sequence-parallel": layout.sp}
    used = [name for name, degree in degrees.items() if degree > 1]
    if len(used) > 1:
        problems.add(
            "layout",
            f"{' and '.join(used)} cannot be combined: DeepSpeed builds the process groups of only one of them",
            "keep one; data parallelism fills the remaining ranks",
            " and ".join(used),
        )


def check_optimizer(run: Run, layout: Layout, config: Mapping[str, Any], problems: Problems) -> None:
    """Check the optimizer against clipping and layout; `run` has everything settled."""
    accumulation = run.gradient_accumulation_steps or 1
    if layout.pp > 1 and layout.zero_stage == 0 and run.precision == "fp32" and run.gradient_clipping:
        problems.add(
            "layout",
            "a pipeline at ZeRO stage 0 in fp32 clips by the first stage's gradient norm alone (runtime/utils.py:394)",
            "take stage 1 (--ds-config pipeline), or --gradient-clipping 0",
            "zero_optimization.stage",
        )
    if run.momentum is not None and run.optimizer == "adamw":
        problems.add(
            "conflict", "AdamW takes no momentum, it has betas", "leave it out, or take --optimizer sgd", "--momentum"
        )
    if run.optimizer == "muon" and layout.zero_stage and run.gradient_clipping:
        problems.add(
            "layout",
            f"gradient clipping {run.gradient_clipping} with muon at ZeRO stage {layout.zero_stage}: DeepSpeed clips "
            "the orthogonalised update, whose norm is always large, and so shrinks every step",
            "take --gradient-clipping 0",
            "--gradient-clipping",
        )
    if isinstance(get(config, "zero_optimization.zenflow"), Mapping) and accumulation > 1:
        problems.add(
            "layout",
            f"ZenFlow with accumulation over {accumulation} micro batches: DeepSpeed takes its update_interval for it",
            "take --gradient-accumulation-steps 1",
            "--gradient-accumulation-steps",
        )
    if run.optimizer == "muon" and layout.pp > 1:
        problems.add(
            "layout",
            "muon with --pipeline: DeepSpeed cannot tell embedding and head by name there, and Muon trains them too",
            "take another optimizer, or leave --pipeline at 1",
            "--optimizer",
        )


def check_model(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check the layout against the model: what must divide, and what a kind of model cannot do."""
    if layout.tp > 1:
        _check_tensor_parallel(layout.tp, run, facts, problems)
    if layout.sp > 1:
        _check_sequence_parallel(layout.sp, run, facts, problems)
    if layout.pp > 1 and facts.layers is not None and layout.pp > facts.layers:
        problems.add(
            "layout",
            f"--pipeline {layout.pp} needs at least as many layers, and {run.model} has {facts.layers}",
            f"take --pipeline {facts.layers} or less",
            "--pipeline",
        )
    if run.loss == "mse" and not facts.own:
        problems.add("loss", f"--loss mse on {run.model}, which gives logits of classes", "leave --loss out", "--loss")
    if run.loss_chunk and (run.loss == "mse" or facts.task == "gan" or (facts.own and run.loss is None)):
        problems.add(
            "loss",
            f"--loss-chunk {run.loss_chunk} cuts up the cross entropy of logits, which is not what {run.model} is "
            "trained with here",
            "leave it out" + (", or give --loss cross-entropy" if facts.own and run.loss is None else ""),
            "--loss-chunk",
        )
    if layout.pp > 1 and (facts.own or facts.task == "gan"):
        problems.add(
            "layout",
            f"--pipeline {layout.pp} needs a model that is a list of layers, which {run.model} is not",
            "leave it at 1",
            "--pipeline",
        )
    if facts.task == "gan" and layout.zero_stage == 3:
        problems.add(
            "layout",
            "a GAN trains two engines that pass gradients through each other's weights, which ZeRO-3 takes away",
            "take stage 0, 1 or 2",
            "zero_optimization.stage",
        )


def _check_tensor_parallel(degree: int, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name = "--tensor-parallel"
    if facts.attention_heads is not None and (facts.own or facts.model_type not in TENSOR_PARALLEL_TYPES):
        problems.add(
            "layout",
            f"{name} {degree}: DeepSpeed's AutoTP is not known to split {facts.model_type or run.model} rightly",
            f"model types that it splits: {', '.join(TENSOR_PARALLEL_TYPES)}",
            name,
        )
        return
    _check_heads(name, degree, facts, problems)


def _check_heads(name: str, degree: int, facts: ModelFacts, problems: Problems) -> None:
    if facts.attention_heads is None:
        problems.add(
            "layout",
            f"{name} {degree} splits attention heads and MLP columns, and this model has none",
            "data parallelism and ZeRO do what this model needs: leave it at 1",
            name,
        )
        return
    for count, what in ((facts.attention_heads, "attention heads"), (facts.kv_heads, "key-value heads")):
        if count and count % degree:
            fitting = [d for d in range(1, count + 1) if count % d == 0]
            problems.add(
                "layout",
                f"{name} {degree} does not divide the {count} {what}",
                f"degrees that do: {', '.join(map(str, fitting))}",
                name,
            )


def _check_sequence_parallel(degree: int, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name = "--sequence-parallel"
    if facts.own or facts.model_type not in SEQUENCE_PARALLEL_TYPES:
        problems.add(
            "layout",
            f"{name} {degree}: DeepSpeed's Ulysses attention does not fit {facts.model_type or 'this model'}",
            f"model types that it fits: {', '.join(SEQUENCE_PARALLEL_TYPES)}",
            name,
        )
        return
    _check_heads(name, degree, facts, problems)
    if run.seq_len and run.seq_len % degree:
        problems.add(
            "layout",
            f"{name} {degree} does not divide --seq-len {run.seq_len}",
            f"take --seq-len {run.seq_len // degree * degree or degree}",
            name,
        )


def check_machine(run: Run, layout: Layout, machine: Machine, problems: Problems) -> None:
    """Check the run against the local devices."""
    if machine.accelerator == "cuda" and layout.world_size > machine.devices:
        problems.add(
            "ranks",
            f"--ranks {layout.world_size} on {machine.devices} GPU(s): NCCL takes one rank a GPU",
            f"take --ranks {machine.devices} or less",
            "--ranks",
        )
    for precision, able in (("fp16", machine.fp16), ("bf16", machine.bf16)):
        if run.precision == precision and not able:
            half = {"fp16": machine.bf16, "bf16": machine.fp16}[precision]
            other = {"fp16": "bf16", "bf16": "fp16"}[precision] if half else "fp32"
            problems.add(
                "precision",
                f"{precision} is not supported on {machine.device_name}",
                f"take --precision {other}",
                "--precision",
            )
