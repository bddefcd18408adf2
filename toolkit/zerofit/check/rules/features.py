"""Features around training: activation checkpointing, checkpoints, monitors, profilers, data."""

from __future__ import annotations

import importlib.util

from zerofit.check.finding import Rule
from zerofit.check.subject import ZERO

ACT, DATA = "activation_checkpointing", "data_efficiency"
CURRICULUM = f"{DATA}.data_sampling.curriculum_learning"
DYNAMIC = f"{DATA}.data_sampling.dynamic_batching"

# keys that DeepSpeed accepts and no code of it reads (found by searching for readers)
NEVER_READ = {
    "disable_allgather": "runtime/config.py:257",
    "vocabulary_size": "runtime/config.py:717 (a warning)",
    f"{ZERO}.allgather_partitions": "runtime/engine.py:1745",
    "pipeline.stages": "runtime/config.py:275; the PipelineModule's argument decides",
    "pipeline.partition": "runtime/config.py:276; the PipelineModule's argument decides",
    "pipeline.seed_layers": "runtime/config.py:277; the PipelineModule's argument decides",
    "tensor_parallel.kernel_inject": "module_inject/replace_module.py:333 (inference)",
    "tensor_parallel.injection_policy_tuple": "runtime/engine.py:1220",
    f"{ZERO}.zenflow.steps_per_epoch": "runtime/zenflow/engine.py:57",
}


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None


FEATURES = (
    Rule(
        code="comms-logger-off",
        path="comms_logger.enabled",
        when=lambda c: c.off("comms_logger.enabled"),
        message="comms_logger.enabled is false, which does not switch the logger off",
        why="DeepSpeed only checks whether the section exists: the logger runs and synchronises every collective",
        fix="remove the section",
        source="comm/config.py:22",
    ),
    Rule(
        code="autotuning-on",
        severity="warning",  # the file may be meant for autotuning
        path="autotuning.enabled",
        when=lambda c: c.on("autotuning.enabled"),
        message="autotuning is on, which is only for `deepspeed --autotuning`",
        why="DeepSpeed ends an ordinary run in its sixth step with exit status 0",
        fix="remove the section from the JSON of a real run",
        source="runtime/engine.py:3657",
    ),
    Rule(
        code="activations-contiguous",
        severity="warning",  # Megatron passes both in code
        path=f"{ACT}.contiguous_memory_optimization",
        when=lambda c: (
            c.setting.reader != "lightning"
            and c.on(f"{ACT}.contiguous_memory_optimization")
            and (not c.on(f"{ACT}.partition_activations") or c.number(f"{ACT}.number_checkpoints") is None)
        ),
        message="contiguous_memory_optimization without partition_activations and number_checkpoints",
        why='DeepSpeed stops in deepspeed.checkpointing.configure: "Contiguous Checkpointing is only available with '
        'partitioned activations"',
        fix="set both (here or in deepspeed.checkpointing.configure), or remove it",
        source="runtime/activation_checkpointing/checkpointing.py:1229",
    ),
    *(
        Rule(
            code=code,
            severity="warning",
            path=f"{ACT}.{key}",
            when=lambda c, key=key, does=does: c.on(f"{ACT}.{key}") and c.setting.reader not in does,
            message=f"activation_checkpointing.{key} has no effect by itself",
            why="DeepSpeed reads it only if your code calls deepspeed.checkpointing.configure and checkpoints layers "
            "with deepspeed.checkpointing.checkpoint",
            fix=fix,
            source="runtime/activation_checkpointing/checkpointing.py:1121",
        )
        for code, key, fix, does in (  # programs that call it, or implement the key themselves
            (
                "activations-host",
                "cpu_checkpointing",
                "call it in your code, or use zerofit train, which needs no call",
                ("lightning", "zerofit"),
            ),
            ("activations-partition", "partition_activations", "remove it, or call it in your code", ("lightning",)),
        )
    ),
    Rule(
        code="checkpoint-writer",
        path="checkpoint.writer",
        when=lambda c: c.section("checkpoint.writer"),
        message="checkpoint.writer is set",
        why="DeepSpeed's fast writer saves files that torch 2.6 and later cannot load; without the deepspeed launcher "
        "it fails with KeyError 'CROSS_SIZE'",
        source="runtime/model_checkpointing/utils.py:76",
    ),
    Rule(
        code="datastates-on",
        path="datastates_ckpt",
        when=lambda c: c.has("datastates_ckpt") and c.get("datastates_ckpt") is not False and _absent("datastates"),
        message='datastates_ckpt is on: any value except false switches it on, even {"enabled": false}',
        why="DeepSpeed stops: the package DataStates is not installed",
        source="datastates/config.py:20",
    ),
    Rule(
        code="aio-unused",
        severity="warning",
        path="aio",
        when=lambda c: c.section("aio") and "nvme" not in (c.offload("optimizer"), c.offload("param")),
        message="aio without NVMe offload",
        why="DeepSpeed reads it only for offload to NVMe",
        source="runtime/swap_tensor/aio_config.py:20",
    ),
    Rule(
        code="needs-cuda",
        path="aio.use_gds",
        when=lambda c: c.on("aio.use_gds") and c.on_cpu,
        message="aio.use_gds without a GPU",
        why='DeepSpeed stops: "GDS currently only supported for CUDA accelerator"',
        fix="set it to false",
        source="runtime/swap_tensor/aio_config.py:39",
    ),
    *(
        Rule(
            code="data-efficiency-off",
            path=f"{DATA}.enabled",
            when=lambda c, inner=inner: c.off(f"{DATA}.enabled") and c.on(f"{inner}.enabled"),
            message=f"data_efficiency.enabled is false, which does not switch off its {inner.rpartition('.')[2]}",
            why="DeepSpeed only checks the inner switch",
            fix=f"set {inner.rpartition('.')[2]}.enabled to false",
            source="runtime/engine.py:1402-1421",
        )
        for inner in (CURRICULUM, f"{DATA}.data_routing.random_ltd")
    ),
    Rule(
        code="curriculum-metrics",
        path=CURRICULUM,
        when=lambda c: c.on(f"{CURRICULUM}.enabled") and not c.has(f"{CURRICULUM}.curriculum_metrics"),
        message="curriculum_learning without curriculum_metrics",
        why='DeepSpeed stops: "Curriculum learning is enabled, curriculum_metrics must be specified"',
        fix="set curriculum_metrics, or disable it",
        source="runtime/data_pipeline/config.py:88",
    ),
    Rule(
        code="dynamic-batching-tokens",
        path=DYNAMIC,
        when=lambda c: c.on(f"{DYNAMIC}.enabled") and not c.has(f"{DYNAMIC}.max_tokens"),
        message="dynamic_batching without max_tokens",
        why='DeepSpeed stops: "Dynamic batching is enabled, so max_tokens must be specified"',
        fix="set max_tokens, or disable it",
        source="runtime/data_pipeline/config.py:108",
    ),
    *(
        Rule(
            code="monitor-package",
            severity="warning",  # the training machine may have it
            path=f"{section}.enabled",
            when=lambda c, section=section, package=package: c.on(f"{section}.enabled") and _absent(package),
            message=f"{section} needs the package {package}, which is not installed",
            why="DeepSpeed fails only on rank 0, and the other ranks hang or time out",
            fix=f"pip install {package}, or disable it",
            source="monitor/utils.py:9, monitor/monitor.py:40",
        )
        for section, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml"))
    ),
    Rule(
        code="profile-step",
        severity="warning",
        path="flops_profiler.profile_step",
        when=lambda c: c.on("flops_profiler.enabled") and (c.number("flops_profiler.profile_step") or 1) < 0,
        message="flops_profiler.profile_step is {value}",
        why="DeepSpeed counts steps from 0, so nothing is profiled",
        fix="use 1, or a step after the warm-up",
        source="runtime/engine.py:3583",
    ),
    *(
        Rule(
            code="never-read",
            severity="warning",
            path=path,
            when=lambda c, path=path: c.changed(path),
            message=f"{path} has no effect",
            why=f"DeepSpeed accepts it, and nothing reads it ({source})",
            source=source,
        )
        for path, source in NEVER_READ.items()
    ),
)
