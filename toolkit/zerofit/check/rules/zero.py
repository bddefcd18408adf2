"""ZeRO stages and the keys that each reads, and ZeRO++."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.check.edit import Assignment, Removal
from zerofit.check.finding import Finding, Rule
from zerofit.check.subject import ZERO, CheckSubject
from zerofit.features.optimizers import of_json
from zerofit.features.zero import ZERO_FEATURES

ALLGATHER = f"{ZERO}.allgather_bucket_size"
# optimizers that ZeRO accepts by default (runtime/zero/utils.py:45); all others are "untested"
TESTED = ("adam", "adamw", "adagrad", "lion", "muon")

# keys that only some stages read (parameters of the constructors that engine.py:2638-2795 calls)
ONLY_3 = (
    "sub_group_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
)
ONLY_1_2 = ("round_robin_gradients", "parameter_alignment", "elastic_checkpoint")


def _hpz(c: CheckSubject) -> int:
    return int(c.number(f"{ZERO}.zero_hpz_partition_size") or 1) if c.stage == 3 else 1


def _old_size(c: CheckSubject) -> dict[str, int]:
    """Return the old top-level size that goes with `"zero_optimization": true`."""
    size = c.number("allgather_size")
    return {"allgather_bucket_size": int(size)} if size and c.get(ZERO) is True else {}


ZERO_RULES = (
    Rule(
        code="zero-flag",
        path=ZERO,
        when=lambda c: c.get(ZERO) is True,
        message="zero_optimization is {value} instead of an object",
        severity="warning",
        why="DeepSpeed still accepts this form of 2020: true means stage 1 with default sizes",
        fix='write {"stage": 1}, or another stage',
        edits=lambda c: (
            Assignment(ZERO, {"stage": int(c.get(ZERO) is True), **_old_size(c)}),
            Removal("allgather_size"),
        ),
        source="runtime/zero/config.py:60",
    ),
    Rule(
        code="zero-no-stage",
        path=ZERO,
        when=lambda c: c.section(ZERO) and not c.has(f"{ZERO}.stage"),
        message="zero_optimization has no stage",
        why="DeepSpeed uses stage 0: the section has no effect",
        fix="set the stage: 1 partitions optimizer states, 2 also gradients, 3 also parameters",
        source="runtime/zero/config.py:95",
    ),
    *(
        Rule(
            code="needs-cuda",
            path=f"{ZERO}.{key}",
            when=lambda c, key=key: c.on(f"{ZERO}.{key}") and c.stage == 3 and c.on_cpu,
            message=f"{key} without a GPU",
            why='DeepSpeed stops: "This op had not been implemented on CPU backend."',
            source="runtime/zero/partition_parameters.py:1153",
        )
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    Rule(
        code="legacy-stage1",
        path=f"{ZERO}.legacy_stage1",
        when=lambda c: c.on(f"{ZERO}.legacy_stage1") and c.stage > 0,
        message="legacy_stage1 selects an implementation that was removed",
        why='DeepSpeed stops: "The deprecated version of ZeRO Stage 1 is not supported"',
        source="runtime/engine.py:2650",
    ),
    Rule(
        code="elastic-checkpoint",
        severity="warning",
        path=f"{ZERO}.elastic_checkpoint",
        when=lambda c: c.on(f"{ZERO}.elastic_checkpoint") and c.stage == 3,
        message="elastic_checkpoint at ZeRO stage 3",
        why="DeepSpeed warns and ignores it",
        fix="remove it; use universal checkpoints to change the number of ranks",
        source="runtime/zero/config.py:404, stage3.py:3460",
    ),
    Rule(
        code="allgather-bucket-odd",
        path=ALLGATHER,
        when=lambda c: c.stage in (1, 2) and (c.number(ALLGATHER) or 0) % 2 == 1,
        message="allgather_bucket_size {value} is odd",
        why='DeepSpeed stops: "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2"',
        fix="use an even number",
        source="runtime/zero/stage_1_and_2.py:389",
    ),
    Rule(
        code="contiguous-gradients",
        severity="warning",
        path=f"{ZERO}.contiguous_gradients",
        when=lambda c: c.off(f"{ZERO}.contiguous_gradients") and c.stage in (1, 2) and c.offload("optimizer"),
        message="contiguous_gradients false with the optimizer offloaded",
        why="DeepSpeed sets it to true",
        source="runtime/zero/stage_1_and_2.py:300",
    ),
    Rule(
        code="pipeline-loading",
        path=f"{ZERO}.pipeline_loading_checkpoint",
        when=lambda c: c.on(f"{ZERO}.pipeline_loading_checkpoint") and c.stage != 3,
        message=lambda c: f"pipeline_loading_checkpoint at ZeRO stage {c.stage}",
        why='DeepSpeed stops when a checkpoint is loaded: "Only stage3 support for pipeline checkpoint loading"',
        source="runtime/engine.py:4738",
    ),
    Rule(
        code="hpz-ranks",
        path=f"{ZERO}.zero_hpz_partition_size",
        when=lambda c: c.ranks and _hpz(c) > 1 and c.ranks % min(_hpz(c), c.ranks) != 0,
        message=lambda c: f"zero_hpz_partition_size {{value}} does not divide {c.ranks} ranks",
        why="DeepSpeed stops with an assertion once the ranks run",
        fix="use the number of GPUs per node",
        source="runtime/utils/groups.py:944",
    ),
    Rule(
        code="quantized-reduce-scatter",
        path=f"{ZERO}.reduce_scatter",
        when=lambda c: (
            c.stage == 3
            and not ((entry := of_json(c.optimizer)) and entry.full_gradients)
            and c.on(f"{ZERO}.zero_quantized_gradients")
            and c.off(f"{ZERO}.reduce_scatter")
        ),
        message="zero_quantized_gradients with reduce_scatter off",
        why='DeepSpeed stops: "when enable all_to_all_reduce, reduce_scatter should also be enabled"',
        fix="remove reduce_scatter",
        source="runtime/zero/stage3.py:390",
    ),
    Rule(
        code="optimizer-untested",
        path="optimizer.type",
        when=lambda c: (
            c.stage > 0
            and c.optimizer in c.catalog.optimizers
            and c.optimizer not in TESTED
            and c.get("zero_allow_untested_optimizer") is not True
        ),
        message="optimizer {value} under ZeRO",
        why='DeepSpeed stops: "You are using an untested ZeRO Optimizer"',
        fix="set zero_allow_untested_optimizer to true",
        source="runtime/engine.py:2299",
    ),
    Rule(
        code="live-parameters-none",
        severity="warning",
        path=f"{ZERO}.stage3_max_live_parameters",
        when=lambda c: c.stage == 3 and c.number(f"{ZERO}.stage3_max_live_parameters") == 0,
        message="stage3_max_live_parameters is 0",
        why="DeepSpeed prefetches nothing: each module waits for its parameters",
        fix="remove it (the default is 1e9), or use the number of gathered parameters that fit",
        source="runtime/zero/partitioned_param_coordinator.py:453",
    ),
    Rule(
        code="pipeline-stage",
        path=f"{ZERO}.stage",
        when=lambda c: c.pipeline > 1 and c.stage >= 2,
        message=lambda c: f"ZeRO stage {c.stage} with a pipeline",
        why='DeepSpeed stops after every rank has built its engine: "ZeRO-2 and ZeRO-3 are incompatible with pipeline '
        'parallelism"',
        fix="use stage 1",
        source="runtime/pipe/engine.py:73",
    ),
    Rule(
        code="pipeline-overlap",
        severity="warning",
        path=f"{ZERO}.overlap_comm",
        when=lambda c: c.pipeline > 1 and c.stage == 1 and c.on(f"{ZERO}.overlap_comm"),
        message="overlap_comm with a pipeline",
        why="DeepSpeed warns and switches it off",
        source="runtime/engine.py:2665",
    ),
)


def other_stages(c: CheckSubject) -> Iterator[Finding]:
    """Yield findings about keys that the configured stage does not read; stage 0 reads none."""
    zero = c.section(ZERO)
    if not zero or not c.has(f"{ZERO}.stage") or c.get(f"{ZERO}.stage") == "auto":
        return
    for feature in ZERO_FEATURES:
        if feature.ignored_below_3 and c.stage < 3 and c.changed(feature.path):
            yield Finding(
                code="feature-stage",
                path=feature.path,
                message=f"{feature.path.removeprefix(f'{ZERO}.')} at ZeRO stage {c.stage}",
                why=f"DeepSpeed ignores it below stage 3: {feature.ignored_below_3}",
                fix="use stage 3, or remove it",
            )
    ignored = (*ONLY_3, *(ONLY_1_2 if c.stage == 0 else ())) if c.stage < 3 else ONLY_1_2
    for key in ignored:
        if c.changed(f"{ZERO}.{key}") and not (key == "elastic_checkpoint" and c.stage == 3):
            yield Finding(
                code="key-stage",
                severity="warning",
                path=f"{ZERO}.{key}",
                message=f"{key} at ZeRO stage {c.stage}",
                why=f"DeepSpeed reads it only at {'stage 3' if key in ONLY_3 else 'stages 1 and 2'}",
                fix="remove it",
            )
