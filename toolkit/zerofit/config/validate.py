"""Combinations that DeepSpeed cannot do or silently ignores, refused with the reason before a process starts.

Each rule was seen on DeepSpeed 0.19.8 (its source line where it raises one itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.check.dotted import get
from zerofit.config.images import check_images
from zerofit.config.pipelines import check_layers
from zerofit.config.shares import check_weighted
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import (
    EXPERT_TYPES,
    SEQUENCE_PARALLEL_TYPES,
    TENSOR_PARALLEL_TYPES,
    TENSOR_PLAN_TYPES,
    TILED_MLP_TYPES,
    Machine,
    ModelFacts,
    has_head,
)
from zerofit.spec.optimizers import EIGHT_BIT, OPTIMIZER_TYPES, refusals
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout

# keys of the DeepSpeed JSON whose groups or kernels know nothing of groups and slices that zerofit makes
_ALONE = (
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.super_offload",
    "compile.deepcompile",
)


def check_combination(layout: Layout, config: Mapping[str, Any], problems: Problems) -> None:
    """Check what cannot stand in a layout whose groups zerofit makes; the JSON by itself has been checked already."""
    if not layout.combined:
        return
    degrees = {"--tensor-parallel": layout.tp, "--pipeline": layout.pp, "--sequence-parallel": layout.sp}
    degrees["--expert-parallel"] = layout.ep
    dimensions = [name for name, degree in degrees.items() if degree > 1]
    used, instead = " and ".join(dimensions), "keep one of " if len(dimensions) > 1 else "leave out "
    for path in _ALONE:
        asked = get(config, path)
        if asked is True or (asked and asked != 1):
            problems.add(
                "layout",
                f"{path} beside {used}: it has not been seen to train there like one device does",
                f"remove the key, or {instead}{used}",
                path,
            )
    for block, degree in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        for key in set(get(config, block) or {}) - {"enabled", degree}:
            problems.add(
                "layout",
                f"{block}.{key} beside {used}: zerofit splits the layers there itself, as their kind of model needs it",
                "remove the key",
                f"{block}.{key}",
            )
    if layout.ep > 1:
        _check_experts(layout, problems)


def _check_experts(layout: Layout, problems: Problems) -> None:
    """Check the expert parallel degree against the other ones and the ZeRO stage."""
    name, others = f"--expert-parallel {layout.ep}", layout.dp * layout.sp
    if layout.tp > 1:
        problems.add(
            "layout",
            f"{name} beside --tensor-parallel {layout.tp}: DeepSpeed counts the experts of the first tensor rank alone "
            "in the gradients' norm, and at stage 2 gets accumulated gradients wrong",
            "leave --tensor-parallel at 1; --sequence-parallel divides what attention takes",
            "--expert-parallel",
        )
    if layout.zero_stage == 0:
        problems.add(
            "layout",
            f"{name} at ZeRO stage 0: DeepSpeed averages the gradients' norm over ranks that hold different experts, "
            "so that it is too small and clips too late",
            "take --ds-config zero1, 2 or 3",
            "zero_optimization.stage",
        )
    if others % layout.ep:
        fitting = [degree for degree in range(1, others + 1) if others % degree == 0]
        problems.add(
            "layout",
            f"{name} does not divide the {others} data and sequence parallel ranks",
            f"degrees that do: {', '.join(map(str, fitting))}",
            "--expert-parallel",
        )


def check_optimizer(run: Run, layout: Layout, config: Mapping[str, Any], problems: Problems) -> None:
    """Check the optimizer against clipping and layout; `run` has everything settled."""
    accumulation = run.gradient_accumulation_steps or 1
    if run.momentum is not None and run.optimizer not in (None, "sgd", "muon"):
        message = f"{OPTIMIZER_TYPES[run.optimizer]} takes no momentum"
        problems.add("conflict", message, "leave it out, or take --optimizer sgd", "--momentum")
    device = get(config, "zero_optimization.offload_optimizer.device", "none")
    for message, hint in refusals(run.optimizer, run.precision, device, layout):
        problems.add("layout", message, hint, "--optimizer")
    if run.optimizer in EIGHT_BIT and get(config, "zero_optimization.elastic_checkpoint"):
        why = "elastic_checkpoint, for which DeepSpeed cuts states weight by weight, and blocks cannot be"
        hint = "remove the key: zerofit's checkpoints have an index of their own"
        problems.add("layout", f"--optimizer {run.optimizer} with {why}", hint, "zero_optimization.elastic_checkpoint")
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
    if run.compile and layout.combined:
        problems.add(
            "layout",
            "--compile with spread experts or more than one parallel dimension has not been seen to train like one "
            "device does",
            "leave it out",
            "--compile",
        )
    if run.optimizer == "muon" and layout.combined and layout.tp > 1:
        problems.add(
            "layout",
            "muon makes whole matrices orthogonal, and tensor parallel ranks hold slices of them",
            "take another optimizer, or leave --tensor-parallel at 1",
            "--optimizer",
        )
    if run.optimizer == "muon" and layout.ep > 1:
        problems.add(
            "layout",
            "muon with --expert-parallel has not been seen to train like one device does",
            "take another optimizer, or leave --expert-parallel at 1",
            "--optimizer",
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
        _check_tensor_parallel(layout, run, facts, problems)
    if layout.sp > 1:
        _check_sequence_parallel(layout, run, facts, problems)
    if layout.ep > 1:
        _check_expert_model(layout, run, facts, problems)
    check_images(run, layout, facts, problems)
    check_layers(run, layout, facts, problems)
    if has_head(facts.task) or facts.task == "seq2seq-lm":
        _check_pairs(run, layout, facts, problems)
    check_weighted(run, facts, problems)
    if facts.packed:
        _check_packing(run, layout, facts, problems)
    if run.loss == "mse" and not facts.own:
        problems.add("loss", f"--loss mse on {run.model}, which gives logits of classes", "leave --loss out", "--loss")
    if run.loss_chunk and (run.loss == "mse" or not facts.gives_logits or (facts.own and run.loss is None)):
        problems.add(
            "loss",
            f"--loss-chunk {run.loss_chunk} cuts up the cross entropy of logits, which is not what {run.model} is "
            "trained with here",
            "leave it out" + (", or give --loss cross-entropy" if facts.own and run.loss is None else ""),
            "--loss-chunk",
        )
    if run.mlp_chunk and (facts.own or facts.model_type not in TILED_MLP_TYPES):
        problems.add(
            "layout",
            f"--mlp-chunk {run.mlp_chunk} needs MLPs that map each token by itself and drop nothing out, which "
            f"{run.model} ({facts.model_type or facts.task}) is not known to have",
            f"leave it out; model types that have: {', '.join(TILED_MLP_TYPES)}",
            "--mlp-chunk",
        )
    if run.mlp_chunk and run.compile:
        problems.add(
            "layout",
            "--mlp-chunk with --compile has not been seen to save memory: the compiler decides what is kept",
            "leave one of them out",
            "--mlp-chunk",
        )
    if layout.pp > 1 and (facts.own or facts.task in ("gan", "segmentation")):
        problems.add(
            "layout",
            f"--pipeline {layout.pp} needs a model that is a list of layers, which {run.model} is not",
            "leave it at 1",
            "--pipeline",
        )
    if facts.task == "gan" and run.partial:
        hint = "leave --lora, --train and --freeze out"
        problems.add("layout", "a GAN's two networks are trained whole", hint, "MODEL")
    if facts.task == "gan" and layout.zero_stage == 3:
        problems.add(
            "layout",
            "a GAN trains two engines that pass gradients through each other's weights, which ZeRO-3 takes away",
            "take stage 0, 1 or 2",
            "zero_optimization.stage",
        )


def _check_pairs(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check what padded texts with labels go with."""
    what = f"{run.model} ({facts.task})"
    degrees = {"--tensor-parallel": layout.tp, "--sequence-parallel": layout.sp, "--pipeline": layout.pp}
    degrees["--expert-parallel"] = layout.ep
    for name, degree in degrees.items():
        if degree > 1 and has_head(facts.task):
            problems.add(
                "layout",
                f"{name} {degree}: {what} has a head and padded samples, which have not been seen to train there like "
                "one device does",
                f"leave {name} at 1; ZeRO stages 1 to 3 and offload divide what this model needs",
                name,
            )
    if run.loss_chunk and has_head(facts.task):
        message = f"--loss-chunk {run.loss_chunk}: {what} gives few logits, which are not worth cutting up"
        problems.add("loss", message, "leave it out", "--loss-chunk")


def _check_packing(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that every layer learns where packed documents begin."""
    name, why = "", ""
    if layout.sp > 1:
        name, why = f"--sequence-parallel {layout.sp}", "Ulysses attention has one causal mask for the whole sample"
    elif layout.pp > 1:
        name, why = f"--pipeline {layout.pp}", "stages hand on hidden states alone, not where a conversation begins"
    elif facts.own:
        name, why = run.model, "a model of your own is given its tokens alone"
    if name:
        message = f"{name} with several conversations in a sample, which must not see each other: {why}"
        problems.add("packing", message, "--no-packing: each conversation in a sample of its own", "--packing")


def _check_tensor_parallel(layout: Layout, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name, degree = "--tensor-parallel", layout.tp
    fitting = TENSOR_PLAN_TYPES if layout.combined else TENSOR_PARALLEL_TYPES
    if facts.attention_heads is not None and (facts.own or facts.model_type not in fitting):
        beside = " beside another parallel dimension" if layout.combined else ""
        problems.add(
            "layout",
            f"{name} {degree}{beside}: DeepSpeed's AutoTP is not known to split {facts.model_type or run.model} "
            "rightly",
            f"model types that it splits: {', '.join(fitting)}",
            name,
        )
        return
    _check_heads(name, layout, facts, problems)


def _check_heads(name: str, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that heads divide: all of them over tensor ranks, and what each has over its sequence ranks."""
    sequence = name == "--sequence-parallel"
    degree, sharers = (layout.sp, layout.tp) if sequence else (layout.tp, 1)
    if facts.attention_heads is None:
        problems.add(
            "layout",
            f"{name} {degree} splits attention heads and MLP columns, and this model has none",
            "data parallelism and ZeRO do what this model needs: leave it at 1",
            name,
        )
        return
    counts = ((facts.attention_heads, "attention heads", False), (facts.kv_heads, "key-value heads", sequence))
    for count, what, repeatable in counts:
        share = (count or 0) // sharers
        repeated = repeatable and share and degree % share == 0  # ulysses_sp.py:128
        if share % degree and not repeated:
            fitting = [d for d in range(1, share + 1) if share % d == 0]
            of = f" that each of {sharers} tensor parallel ranks has" if sharers > 1 else ""
            problems.add(
                "layout",
                f"{name} {degree} does not divide the {share} {what}{of}",
                f"degrees that do: {', '.join(map(str, fitting))}",
                name,
            )


def _check_sequence_parallel(layout: Layout, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name, degree = "--sequence-parallel", layout.sp
    if facts.own or facts.model_type not in SEQUENCE_PARALLEL_TYPES:
        problems.add(
            "layout",
            f"{name} {degree}: DeepSpeed's Ulysses attention does not fit {facts.model_type or 'this model'}",
            f"model types that it fits: {', '.join(SEQUENCE_PARALLEL_TYPES)}",
            name,
        )
        return
    _check_heads(name, layout, facts, problems)
    if run.seq_len and run.seq_len % degree:
        problems.add(
            "layout",
            f"{name} {degree} does not divide --seq-len {run.seq_len}",
            f"take --seq-len {run.seq_len // degree * degree or degree}",
            name,
        )


def _check_expert_model(layout: Layout, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name, degree = "--expert-parallel", layout.ep
    if facts.own or facts.model_type not in EXPERT_TYPES or facts.experts is None:
        problems.add(
            "layout",
            f"{name} {degree}: DeepSpeed's AutoEP is not known to spread experts of {facts.model_type or run.model} "
            "rightly",
            f"model types that it spreads: {', '.join(EXPERT_TYPES)}",
            name,
        )
    elif facts.experts % degree:
        fitting = [d for d in range(1, facts.experts + 1) if facts.experts % d == 0]
        problems.add(
            "layout",
            f"{name} {degree} does not divide the {facts.experts} experts of a layer",
            f"degrees that do: {', '.join(map(str, fitting))}",
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
