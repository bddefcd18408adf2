"""Refuses combinations that DeepSpeed does not support or silently ignores.

This happens before a process starts. Each rule was observed with DeepSpeed 0.19.8. If DeepSpeed has its own error for a
rule, the rule gives its source line.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerofit.check.dotted import get
from zerofit.config.batch import check_weighted
from zerofit.features.optimizer import TrainingSetting
from zerofit.features.optimizers import refusals
from zerofit.features.zero import features_on
from zerofit.spec.errors import Problems
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.model_facts import (
    EXPERT_TYPES,
    SEQUENCE_PARALLEL_TYPES,
    TENSOR_PARALLEL_TYPES,
    TENSOR_PLAN_TYPES,
    TILED_MLP_TYPES,
    Machine,
    ModelFacts,
    has_head,
    is_image,
)
from zerofit.spec.run import Run, flag
from zerofit.spec.run_folder import Layout

IMAGE_FIELDS = ("mixup", "cutmix", "random_erasing", "image_sizes", "sync_batch_norm")  # only for images
LORA_FIELDS = ("lora_alpha", "lora_dropout", "lora_targets", "lora_init")
PIPE_PARTITIONED = ("pipe_partitioned", "grad_partitioned")  # keys of "pipeline" that split activations
UNVERIFIED = "is not supported: it was not verified against training on one device"


def check_combination(layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check that the JSON's keys work in this layout, if zerofit creates the layout's groups."""
    if not layout.combined:
        return
    # zerofit creates the process groups of a combined layout itself, since DeepSpeed's keys are for one degree each.
    used, instead = " and ".join(layout.by_flag), "keep one of " if len(layout.by_flag) > 1 else "leave out "
    for feature in features_on(config):
        if not feature.tested_combined:
            message = f"{feature.path} with {used} {UNVERIFIED}"
            problems.add("layout", message, f"remove the key, or {instead}{used}", feature.path)
    # of these blocks only the degree is read: the split follows transformers' plans, or zerofit's for experts
    for block, degree in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        for key in set(get(config, block) or {}) - {"enabled", degree}:
            message = f"{block}.{key} with {used}: zerofit splits the layers itself"
            problems.add("layout", message, "remove the key", f"{block}.{key}")
    if layout.ep > 1:
        _check_experts(layout, problems)


def _check_experts(layout: Layout, problems: Problems) -> None:
    # ranks that share a layer's experts are data and sequence parallel ranks, which have equal weights otherwise
    name, others = f"--expert-parallel {layout.ep}", layout.dp * layout.sp
    if layout.tp > 1:
        message = f"{name} with --tensor-parallel {layout.tp}: DeepSpeed only counts the experts of the first tensor "
        message += "rank in the gradient norm, and at stage 2 accumulates gradients wrongly"
        hint = "leave --tensor-parallel at 1; --sequence-parallel also reduces attention's memory"
        problems.add("layout", message, hint, "--expert-parallel")
    if layout.zero_stage == 0:
        message = f"{name} at ZeRO stage 0: DeepSpeed averages the gradient norm over ranks with different experts, so "
        message += "the norm is too small and clipping starts too late"
        problems.add("layout", message, "use --ds-config zero1, zero2 or zero3", "zero_optimization.stage")
    if others % layout.ep:
        fitting = [degree for degree in range(1, others + 1) if others % degree == 0]
        message = f"{name} does not divide the {others} data and sequence parallel ranks"
        problems.add("layout", message, f"allowed: {', '.join(map(str, fitting))}", "--expert-parallel")


def check_optimizer(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check the optimizer with clipping and the layout. `run` has all defaults filled in."""
    accumulation = run.gradient_accumulation_steps or 1
    setting = TrainingSetting(
        precision=run.precision,
        offload=get(config, "zero_optimization.offload_optimizer.device", "none"),
        zero_stage=layout.zero_stage,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        combined=layout.combined,
        clipping=run.gradient_clipping,
        elastic=bool(get(config, "zero_optimization.elastic_checkpoint")),
        part=part_flag(run),
        momentum=run.momentum,
    )
    for refusal in refusals(run.optimizer, setting):
        problems.add(refusal.kind, refusal.message, refusal.hint, refusal.where)
    if isinstance(get(config, "zero_optimization.zenflow"), Mapping) and accumulation > 1:
        message = f"ZenFlow with {accumulation} accumulation steps: DeepSpeed uses update_interval instead"
        problems.add("layout", message, "use --gradient-accumulation-steps 1", "--gradient-accumulation-steps")
    if run.compile and layout.combined:
        message = f"--compile with --expert-parallel or more than one kind of parallelism {UNVERIFIED}"
        problems.add("layout", message, "leave it out", "--compile")


def check_model(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that the layout divides the model's dimensions and supports its kind."""
    if layout.tp > 1:
        _check_tensor_parallel(layout, run, facts, problems)
    if layout.sp > 1:
        _check_sequence_parallel(layout, run, facts, problems)
    if layout.ep > 1:
        _check_expert_model(layout, run, facts, problems)
    check_images(run, layout, facts, problems)
    check_layers(run, layout, facts, problems)
    if has_head(facts.task):
        _check_pairs(run, layout, facts, problems)
    check_weighted(run, facts, problems)
    if facts.packed:
        _check_packing(run, layout, facts, problems)
    if run.loss == "mse" and not facts.own:
        problems.add("loss", f"--loss mse with {run.model}, which returns class logits", "leave --loss out", "--loss")
    if run.activation_checkpointing == "selective":
        _check_selective(run, layout, problems)
    if run.loss_chunk and (run.loss == "mse" or not facts.gives_logits or (facts.own and run.loss is None)):
        message = f"--loss-chunk {run.loss_chunk} needs a cross entropy loss, which {run.model} does not have here"
        hint = "leave it out" + (", or give --loss cross-entropy" if facts.own and run.loss is None else "")
        problems.add("loss", message, hint, "--loss-chunk")
    if run.mlp_chunk and (facts.own or facts.model_type not in TILED_MLP_TYPES):
        message = f"--mlp-chunk {run.mlp_chunk} needs MLPs that map each token separately, without dropout; "
        message += f"{run.model} ({facts.model_type or facts.task}) has none that zerofit supports"
        hint = f"leave it out; supported model types: {', '.join(TILED_MLP_TYPES)}"
        problems.add("layout", message, hint, "--mlp-chunk")
    if run.mlp_chunk and run.compile:
        message = "--mlp-chunk with --compile may not save memory (not tested): the compiler decides what to keep"
        problems.add("layout", message, "leave one of them out", "--mlp-chunk")
    if layout.pp > 1 and (facts.own or facts.task in ("gan", "segmentation")):
        message = f"--pipeline {layout.pp} needs a model that is a list of layers, which {run.model} is not"
        problems.add("layout", message, "leave it at 1", "--pipeline")
    if facts.task == "gan" and run.partial:
        hint = "leave --lora, --train and --freeze out"
        problems.add("layout", "parts of a GAN cannot be frozen", hint, "MODEL")
    if facts.task == "gan" and layout.zero_stage == 3:
        message = "a GAN passes gradients through both networks' weights, which ZeRO-3 releases"
        problems.add("layout", message, "use stage 0, 1 or 2", "zero_optimization.stage")


# For example, in-place collectives change tensors that it keeps.
def _check_selective(run: Run, layout: Layout, problems: Problems) -> None:
    """Refuse settings untested with selective checkpointing."""
    used = {"--compile": run.compile, "--quantize": run.quantize, "--activation-offload": run.activation_offload}
    degrees = [name for name in layout.by_flag if name != "--pipeline"]
    for name in [*degrees, *(name for name, value in used.items() if value)]:
        message = f"selective checkpointing with {name} is not supported: it was not verified against plain training"
        problems.add("layout", message, "use --activation-checkpointing", f"activation_checkpointing, {name}")


def _check_pairs(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check the layout of models with padded, labelled texts."""
    what = f"{run.model} ({facts.task})"
    for name, degree in layout.by_flag.items():
        message = f"{name} {degree} is not supported for {what}: it was not verified with a head and padded samples"
        problems.add("layout", message, f"leave {name} at 1; use ZeRO stages 1 to 3 and offload instead", name)
    if run.loss_chunk:
        message = f"--loss-chunk {run.loss_chunk}: {what} has too few logits to save memory"
        problems.add("loss", message, "leave it out", "--loss-chunk")


def _check_packing(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that every layer can detect the beginnings of packed documents."""
    name, why = "", ""
    if layout.sp > 1:
        name, why = f"--sequence-parallel {layout.sp}", "Ulysses attention uses one causal mask for the full sample"
    elif layout.pp > 1:
        name, why = f"--pipeline {layout.pp}", "stages get hidden states, but not where conversations begin"
    elif facts.own:
        name, why = run.model, "your own model gets only tokens"
    if name:
        message = f"{name} with several conversations per sample, which must not attend to each other: {why}"
        problems.add("packing", message, "use --no-packing: one conversation per sample", "--packing")


def _check_tensor_parallel(layout: Layout, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name, degree = "--tensor-parallel", layout.tp
    # Combined with another degree, zerofit splits the layers by transformers' plans, which fewer model types have.
    fitting = TENSOR_PLAN_TYPES if layout.combined else TENSOR_PARALLEL_TYPES
    # without heads no layout helps, so `_check_heads` has the better message
    if facts.attention_heads is not None and (facts.own or facts.model_type not in fitting):
        others = " with another kind of parallelism" if layout.combined else ""
        what = f"zerofit does not support DeepSpeed's AutoTP for {facts.model_type or run.model}"
        hint = f"supported model types: {', '.join(fitting)}"
        problems.add("layout", f"{name} {degree}{others}: {what}", hint, name)
        return
    _check_heads(name, layout, facts, problems)


def _check_heads(name: str, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that the degrees divide the heads: the tensor degree, then the sequence degree."""
    sequence = name == "--sequence-parallel"
    degree, sharers = (layout.sp, layout.tp) if sequence else (layout.tp, 1)
    if facts.attention_heads is None:
        message = f"{name} {degree} splits attention heads and MLP columns, which this model does not have"
        problems.add("layout", message, "leave it at 1; use data parallelism and ZeRO", name)
        return
    counts = ((facts.attention_heads, "attention heads", False), (facts.kv_heads, "key-value heads", sequence))
    for count, what, repeatable in counts:
        # With both degrees, tensor parallelism splits the heads first. Ulysses then divides each tensor rank's part.
        share = (count or 0) // sharers
        # Ulysses repeats key-value heads for more ranks than heads (ulysses_sp.py:128)
        repeated = repeatable and share and degree % share == 0
        if share % degree and not repeated:
            fitting = [d for d in range(1, share + 1) if share % d == 0]
            of = f" of each of {sharers} tensor parallel ranks" if sharers > 1 else ""
            message = f"{name} {degree} does not divide the {share} {what}{of}"
            problems.add("layout", message, f"allowed: {', '.join(map(str, fitting))}", name)


def _check_sequence_parallel(layout: Layout, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name, degree = "--sequence-parallel", layout.sp
    if facts.own or facts.model_type not in SEQUENCE_PARALLEL_TYPES:
        message = f"{name} {degree}: DeepSpeed's Ulysses attention does not support {facts.model_type or 'this model'}"
        problems.add("layout", message, f"supported model types: {', '.join(SEQUENCE_PARALLEL_TYPES)}", name)
        return
    if run.model_args.get("attn_implementation") == "eager":
        message = f"{name} {degree} with eager attention, which DeepSpeed's Ulysses does not support"
        where = f"{name}, --attn-implementation"
        problems.add("layout", message, "use --attn-implementation sdpa or a flash_attention", where)
    _check_heads(name, layout, facts, problems)
    if run.seq_len and run.seq_len % degree:
        message = f"{name} {degree} does not divide --seq-len {run.seq_len}"
        problems.add("layout", message, f"use --seq-len {run.seq_len // degree * degree or degree}", name)


def _check_expert_model(layout: Layout, run: Run, facts: ModelFacts, problems: Problems) -> None:
    name, degree = "--expert-parallel", layout.ep
    if facts.own or facts.model_type not in EXPERT_TYPES or facts.experts is None:
        message = f"{name} {degree}: zerofit does not support DeepSpeed's AutoEP for {facts.model_type or run.model}"
        problems.add("layout", message, f"supported model types: {', '.join(EXPERT_TYPES)}", name)
    elif facts.experts % degree:
        fitting = [d for d in range(1, facts.experts + 1) if facts.experts % d == 0]
        message = f"{name} {degree} does not divide the {facts.experts} experts of a layer"
        problems.add("layout", message, f"allowed: {', '.join(map(str, fitting))}", name)


def check_machine(run: Run, layout: Layout, machine: Machine, problems: Problems) -> None:
    """Check the run against the local devices."""
    # CPU ranks may share cores, so that any number of them is allowed
    if machine.accelerator == "cuda" and layout.world_size > machine.devices:
        message = f"--ranks {layout.world_size} on {machine.devices} GPU(s): NCCL needs one GPU per rank"
        problems.add("ranks", message, f"use --ranks {machine.devices} or less", "--ranks")
    for precision, able in (("fp16", machine.fp16), ("bf16", machine.bf16)):
        if run.precision == precision and not able:
            half = {"fp16": machine.bf16, "bf16": machine.fp16}[precision]
            other = {"fp16": "bf16", "bf16": "fp16"}[precision] if half else "fp32"
            message = f"{precision} is not supported on {machine.device_name}"
            problems.add("precision", message, f"use --precision {other}", "--precision")


def check_averages(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check that the layout and the DeepSpeed JSON allow averaged weights (--ema)."""
    if run.ema is None:
        return
    for name, degree in layout.by_flag.items():
        message = f"--ema with {name} {degree}: averages only work with data parallelism, at ZeRO 0 to 3"
        problems.add("layout", message, f"set {name} to 1, or remove --ema", "--ema")
    apart = [feature.path for feature in features_on(config) if not feature.keeps_masters]
    # a value of a key that works with averages: on NVMe, master weights lie in files between two steps
    apart += ["offload_optimizer.device"] * (get(config, "zero_optimization.offload_optimizer.device") == "nvme")
    for path in apart:
        message = f"--ema with {path}: averages need float32 master weights in memory after each step"
        problems.add("layout", message, "leave one of them out", "--ema")


def check_images(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check image augmentation against the model's kind and the layout."""
    asked = [name for name in IMAGE_FIELDS if getattr(run, name)]
    for name in asked if not is_image(facts.task) else ():
        message = f"{flag(name)}: {run.model} ({facts.task}) is not an image classifier"
        problems.add("conflict", message, "leave it out", flag(name))
    if facts.task == "gan" and run.ema:
        problems.add("conflict", "--ema is not supported for a GAN", "leave it out", "--ema")
    _check_targets(run, facts, problems)
    if run.image_sizes and run.image_size:
        message = f"--image-sizes {run.image_sizes} and --image-size {run.image_size} are both given"
        problems.add("conflict", message, "leave --image-size out: evaluation uses the last size", "--image-size")
    for name, why in {
        "image_sizes": "the first step sets the shape of all later messages between stages",
        "sync_batch_norm": "each stage would have to synchronize batch norm among its own replicas",
    }.items():
        if layout.pp > 1 and getattr(run, name):
            problems.add("layout", f"{flag(name)} with --pipeline {layout.pp}: {why}", "leave one out", flag(name))


def _check_targets(run: Run, facts: ModelFacts, problems: Problems) -> None:
    mixed = [name for name in ("mixup", "cutmix") if getattr(run, name)]
    for name in [*mixed, *(["label_smoothing"] if run.label_smoothing else [])]:
        if not facts.gives_logits or run.loss == "mse" or (facts.own and run.loss is None):
            message = f"{flag(name)} needs a cross entropy loss, which {run.model} does not have here"
            hint = "leave it out" + (", or give --loss cross-entropy" if facts.own and run.loss is None else "")
            problems.add("loss", message, hint, flag(name))
        if run.loss_chunk:
            message = f"{flag(name)} with --loss-chunk: the chunked loss supports one class per target"
            problems.add("loss", message, "leave --loss-chunk out: images have few targets", "--loss-chunk")
    for name in [*mixed, *(["random_erasing"] if run.random_erasing else [])]:
        if facts.task == "segmentation":
            message = f"{flag(name)}: each pixel has its own class, and this augmentation would not change the mask"
            hint = "leave it out; crops and flips are applied to image and mask together"
            problems.add("conflict", message, hint, flag(name))


def part_flag(run: Run) -> str | None:
    """Return the flag by which the run trains only a part of the model, or None."""
    partial = run.partial
    return partial and ("--lora" if partial.lora else "--train" if partial.train else "--freeze")


def check_part(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check that adapters, frozen weights and the layout can be combined."""
    fields = type(run).model_fields
    # run.json has every field, so only another value than the default shows that somebody asked for it
    of_lora = [name for name in (*LORA_FIELDS, "dora", "rslora") if getattr(run, name) != fields[name].default]
    if run.lora is None and of_lora:
        named = ", ".join(map(flag, of_lora))
        problems.add("conflict", f"{named} without --lora", "give --lora RANK, or leave it out", flag(of_lora[0]))
    _check_quantized(run, layout, config, problems)
    partial, asked = run.partial, part_flag(run)
    if partial is None or asked is None:
        return
    if partial.lora and (partial.train or partial.freeze):
        message = "--lora freezes the model, so --train and --freeze cannot be combined with it"
        problems.add("conflict", message, "give --lora, or patterns", "--train" if partial.train else "--freeze")
    if layout.tp > 1:
        why = "DeepSpeed's AutoTP replaces the layers that have adapters, and silently drops the adapters"
        if not partial.lora:
            why = "DeepSpeed's AutoTP rebuilds the layers that it splits, and trains all of them"
        hint = "leave --tensor-parallel at 1; ZeRO-3 partitions frozen weights over all ranks"
        problems.add("layout", f"{asked} with --tensor-parallel {layout.tp}: {why} (auto_tp.py:1079)", hint, asked)
    if layout.ep > 1:
        message = f"{asked} with --expert-parallel {layout.ep} {UNVERIFIED}"
        problems.add("layout", message, "leave --expert-parallel at 1", asked)
    if run.mlp_chunk and run.lora_dropout:
        message = f"--lora-dropout {run.lora_dropout} with --mlp-chunk: recomputation would use another dropout mask"
        problems.add("conflict", message, "leave one of them out", "--lora-dropout")
    apart = [feature.path for feature in features_on(config) if not feature.tested_frozen]
    for path in apart + ["expert_parallel.enabled"] * bool(get(config, "expert_parallel.enabled")):
        problems.add("layout", f"{asked} with {path} {UNVERIFIED}", "remove the key", path)


def _check_quantized(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check quantized weights: they need adapters, and layouts that keep their bytes unchanged."""
    if run.double_quant and run.quantize != "nf4":
        message, hint = "--double-quant without --quantize nf4", "add --quantize nf4, or leave --double-quant out"
        problems.add("conflict", message, hint, "--double-quant")
    if run.quantize is None:
        return
    asked = f"--quantize {run.quantize}"
    if run.lora is None:
        message = f"{asked} without --lora: quantized weights have no gradient"
        problems.add("conflict", message, "add --lora RANK to train adapters", "--quantize")
    if run.quantize == "int8" and layout.zero_stage == 3:
        message = f"{asked} at ZeRO stage 3: bitsandbytes' Linear8bitLt keeps a second reference to the full weight"
        message += " (nn/modules.py, init_8bit_state), which is never freed"
        problems.add("layout", message, "use nf4, or --ds-config zero2", "--quantize")
    if get(config, "zero_optimization.offload_param.device") == "nvme":
        message = f"{asked} with offload_param on NVMe: DeepSpeed reads into buffers of the training precision"
        message += " (swap_tensor/partitioned_param_swapper.py), but quantized weights are bytes"
        problems.add("layout", message, "use --ds-config zero3_offload, which keeps them in host memory", "--quantize")
    if run.quantize == "int8" and run.dora:
        message = f"{asked} with --dora: peft computes weight norms when Linear8bitLt has no scales yet"
        problems.add("conflict", message, "use --quantize nf4, or leave --dora out", "--dora")
    if run.quantize == "nf4" and run.dora and layout.zero_stage == 3:
        message = f"{asked} with --dora at ZeRO stage 3: peft needs the norm of full weights, but these are partitioned"
        problems.add("layout", message, "use --ds-config zero2, or leave --dora out", "--dora")
    if run.compile:
        problems.add("layout", f"{asked} with --compile {UNVERIFIED}", "leave --compile out", "--compile")


def most_stages(run: Run, ranks: int, layers: int | None) -> int:
    """Return the number of stages for `--pipeline auto`.

    It is the ranks divided by the tensor and sequence degrees. If the model has too few layers, the number is smaller,
    and the other ranks are data parallel. `layers`: None if unknown.
    """
    most = max(1, ranks // (run.tensor_parallel * run.sequence_parallel))
    # stages divide the ranks, so that all stages have equally many data parallel replicas
    for stages in range(most, 1, -1):
        if most % stages == 0 and (layers is None or pipeline_parts(stages, run.pipeline_schedule) <= layers):
            return stages
    return 1


def check_schedule(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check the requirements of DualPipeV (DeepSpeed 0.19.8, runtime/pipe/dualpipev.py:97-104).

    If `run.gradient_accumulation_steps` is None, it counts as 1.
    """
    if run.pipeline_schedule != "dualpipev":
        return
    asked, place = "--pipeline-schedule dualpipev", "--pipeline-schedule"
    if layout.pp == 1:
        message = f"{asked} needs a pipeline, but --pipeline is 1"
        problems.add("layout", message, "use --pipeline 2 or more, or leave the schedule out", place)
        return
    if layout.zero_stage == 0:
        message = f"{asked} at ZeRO stage 0 is not supported: only stage 1 was verified against training on one device"
        problems.add("layout", message, "use --ds-config pipeline (stage 1)", "zero_optimization.stage")
    least, steps = pipeline_parts(layout.pp, run.pipeline_schedule), run.gradient_accumulation_steps or 1
    if steps < least:
        name = "--gradient-accumulation-steps"
        message = f"{asked} with {steps} gradient accumulation steps: {layout.pp} stages have {least} parts and need "
        message += f"at least {least} micro batches"
        problems.add("layout", message, f"use {name} {least} or more (and a smaller --micro-batch)", name)
    for key in PIPE_PARTITIONED:
        if layout.tp > 1 and get(config, f"pipeline.{key}") is True:
            message = f"pipeline.{key} with {asked}: stages send full activations in this schedule"
            problems.add("layout", message, "remove the key", f"pipeline.{key}")
    if run.compile:
        problems.add("layout", f"--compile with {asked} {UNVERIFIED}", "leave one of them out", "--compile")


def check_layers(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that each part of a pipeline has a layer."""
    parts = pipeline_parts(layout.pp, run.pipeline_schedule)
    if layout.pp == 1 or facts.layers is None or parts <= facts.layers:
        return
    # DualPipeV folds the layers into a V: each stage has two parts, one of each half of the model.
    parts_per_stage = parts // layout.pp
    needs = f"{parts} layers"
    if parts_per_stage > 1:
        needs += " (two per stage with --pipeline-schedule dualpipev)"
    message = f"--pipeline {layout.pp} needs at least {needs}, but {run.model} has {facts.layers}"
    fewer = facts.layers // parts_per_stage
    hint = f"use --pipeline {fewer} or less" if fewer > 1 or parts_per_stage == 1 else "leave --pipeline-schedule out"
    problems.add("layout", message, hint, "--pipeline")
