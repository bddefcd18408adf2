"""ZeRO: what each stage reads, offload, ZeRO++, ZenFlow, SuperOffload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from zerofit.check.edit import Remove, Set
from zerofit.check.finding import Finding
from zerofit.check.rules.rule import Rule
from zerofit.check.subject import ZERO, Subject

OPTIMIZER, PARAM, ZENFLOW = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", f"{ZERO}.zenflow"

# optimizers that ZeRO takes without being told to (runtime/zero/utils.py:45); all others are "untested"
TESTED = ("adam", "adamw", "adagrad", "lion", "muon")

# sizes and switches that only some stages read (parameters of the constructors that engine.py:2638-2795 calls)
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
# features whose point is lost where they are ignored
FEATURES_3 = {
    "zero_quantized_weights": "weights are gathered unquantized",
    "zero_quantized_nontrainable_weights": "weights are kept unquantized",
    "zero_quantized_gradients": "gradients are reduced unquantized",
    "zero_hpz_partition_size": "no secondary partition is kept",
}


def _ratio(c: Subject) -> bool:
    ratio = c.number(f"{OPTIMIZER}.ratio")
    return ratio is not None and 0 <= ratio < 1 and c.stage != 3


def _odd_bucket(c: Subject) -> bool:
    size = c.number(f"{ZERO}.allgather_bucket_size")
    return c.stage in (1, 2) and size is not None and size % 2 == 1


def _hpz(c: Subject) -> int:
    return int(c.number(f"{ZERO}.zero_hpz_partition_size") or 1) if c.stage == 3 else 1


def _interval(c: Subject) -> float | None:
    return c.number(f"{ZENFLOW}.select_interval")


def _clips(c: Subject) -> bool:
    clipping = c.get("gradient_clipping")
    return clipping == "auto" or clipping is None or bool(c.number("gradient_clipping"))


ZERO_RULES = (
    Rule(
        code="zero-flag",
        path=ZERO,
        when=lambda c: isinstance(c.get(ZERO), bool),
        message="zero_optimization is {value} instead of an object",
        why="DeepSpeed still takes this form of 2020: true means stage 1, with all sizes at their defaults",
        fix='write {"stage": 1}, or the stage that you want',
        edits=lambda c: (Set(ZERO, {"stage": int(c.get(ZERO) is True)}),),
        source="runtime/zero/config.py:60",
    ),
    Rule(
        code="zero-no-stage",
        path=ZERO,
        when=lambda c: bool(c.section(ZERO)) and not c.has(f"{ZERO}.stage"),
        message="zero_optimization has no stage",
        why="DeepSpeed takes stage 0: the whole section has no effect",
        fix="give the stage: 1 optimizer states, 2 and gradients, 3 and parameters",
        edits=lambda c: (Set(f"{ZERO}.stage", 3 if c.has(PARAM) else 2),),
        source="runtime/zero/config.py:95",
    ),
    Rule(
        code="offload-param-stage",
        path=PARAM,
        when=lambda c: c.offload("param") is not None and c.stage < 3,
        message=lambda c: f"offload_param at ZeRO stage {c.stage}",
        why="DeepSpeed ignores it: only stage 3 partitions parameters, so that all of them stay on the device",
        fix="take stage 3, or remove the block",
        edits=(Remove(PARAM),),
        source="runtime/engine.py:2749-2788",
    ),
    Rule(
        code="offload-without-zero",
        path=OPTIMIZER,
        when=lambda c: c.offload("optimizer") is not None and c.stage == 0,
        message="offload_optimizer without ZeRO",
        why="DeepSpeed offloads nothing at stage 0; the device only makes it choose its CPU Adam",
        fix="take stage 1 or higher, or remove the block",
        edits=(Set(f"{ZERO}.stage", 2),),
        source="runtime/engine.py:2384",
    ),
    Rule(
        code="nvme-stage",
        path=f"{OPTIMIZER}.device",
        when=lambda c: c.offload("optimizer") == "nvme" and c.stage in (1, 2),
        message=lambda c: f"offload_optimizer to NVMe at ZeRO stage {c.stage}",
        why="DeepSpeed keeps the states in host memory and never touches the path, even one that does not exist",
        fix="take stage 3, or device cpu",
        edits=(Set(f"{OPTIMIZER}.device", "cpu"),),
        source="runtime/zero/stage_1_and_2.py:220",
    ),
    Rule(
        code="offload-ratio",
        path=f"{OPTIMIZER}.ratio",
        when=_ratio,
        message="offload_optimizer.ratio {value} below stage 3",
        why='DeepSpeed stops: "Partial offloading only supported for ZeRO Stage 3."',
        fix="remove it, or take stage 3",
        edits=(Remove(f"{OPTIMIZER}.ratio"),),
        source="runtime/zero/config.py:399",
    ),
    Rule(
        code="offload-ratio-optimizer",
        path=f"{OPTIMIZER}.ratio",
        when=lambda c: (
            c.stage == 3 and (c.number(f"{OPTIMIZER}.ratio") or 1) < 1 and c.on("optimizer.params.torch_adam")
        ),
        message="offload_optimizer.ratio {value} with torch's Adam",
        why='DeepSpeed stops: "Hybrid Optimizer Only Supports DeepSpeedCPUAdam"',
        fix="remove torch_adam",
        edits=(Remove("optimizer.params.torch_adam"),),
        source="runtime/zero/stage3.py:316",
    ),
    Rule(
        code="super-offload-stage",
        path=f"{OPTIMIZER}.super_offload",
        when=lambda c: c.on(f"{OPTIMIZER}.super_offload") and c.stage < 3,
        message=lambda c: f"super_offload at ZeRO stage {c.stage}",
        why="DeepSpeed ignores it below stage 3",
        fix="take stage 3, or remove it",
        edits=(Remove(f"{OPTIMIZER}.super_offload"),),
        source="runtime/engine.py:2749",
    ),
    Rule(
        code="needs-cuda",
        path=f"{OPTIMIZER}.super_offload",
        when=lambda c: c.on(f"{OPTIMIZER}.super_offload") and c.stage == 3 and c.setting.accelerator == "cpu",
        message="super_offload without a GPU",
        why='DeepSpeed stops: "SuperOffload only supports NVIDIA CUDA GPUs"',
        fix="remove it",
        edits=(Remove(f"{OPTIMIZER}.super_offload"),),
        source="runtime/superoffload/superoffload_stage3.py:23",
    ),
    Rule(
        code="needs-cuda",
        path=f"{ZERO}.zero_quantized_weights",
        when=lambda c: c.on(f"{ZERO}.zero_quantized_weights") and c.stage == 3 and c.setting.accelerator == "cpu",
        message="zero_quantized_weights without a GPU",
        why='DeepSpeed stops: "This op had not been implemented on CPU backend."',
        fix="remove it",
        edits=(Remove(f"{ZERO}.zero_quantized_weights"),),
        source="runtime/zero/partition_parameters.py:1153",
    ),
    Rule(
        code="legacy-stage1",
        path=f"{ZERO}.legacy_stage1",
        when=lambda c: c.on(f"{ZERO}.legacy_stage1") and c.stage > 0,
        message="legacy_stage1 asks for an implementation that is gone",
        why='DeepSpeed stops: "The deprecated version of ZeRO Stage 1 is not supported"',
        fix="remove it",
        edits=(Remove(f"{ZERO}.legacy_stage1"),),
        source="runtime/engine.py:2650",
    ),
    Rule(
        code="elastic-checkpoint",
        severity="warning",
        path=f"{ZERO}.elastic_checkpoint",
        when=lambda c: c.on(f"{ZERO}.elastic_checkpoint") and c.stage == 3,
        message="elastic_checkpoint at ZeRO stage 3",
        why="DeepSpeed warns, and refuses once a checkpoint is saved",
        fix="remove it; universal checkpoints change the number of ranks",
        edits=(Remove(f"{ZERO}.elastic_checkpoint"),),
        source="runtime/zero/config.py:404, stage3.py:3460",
    ),
    Rule(
        code="allgather-bucket-odd",
        path=f"{ZERO}.allgather_bucket_size",
        when=_odd_bucket,
        message="allgather_bucket_size {value} is odd",
        why='DeepSpeed stops: "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2"',
        fix="take an even number",
        edits=lambda c: (
            Set(f"{ZERO}.allgather_bucket_size", int(c.number(f"{ZERO}.allgather_bucket_size") or 1) + 1),
        ),
        source="runtime/zero/stage_1_and_2.py:389",
    ),
    Rule(
        code="gradient-norm-stage",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: c.get(f"{ZERO}.compute_grad_norm") is False and c.stage in (0, 3),
        message=lambda c: f"compute_grad_norm false at ZeRO stage {c.stage}",
        why='DeepSpeed stops: "compute_grad_norm=false is supported only with ZeRO Stage 1 or 2"',
        fix="remove it",
        edits=(Remove(f"{ZERO}.compute_grad_norm"),),
        source="runtime/zero/config.py:391",
    ),
    Rule(
        code="gradient-norm-clipping",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: c.get(f"{ZERO}.compute_grad_norm") is False and c.stage in (1, 2) and _clips(c),
        message="compute_grad_norm false with gradient clipping, which is 1.0 where gradient_clipping is not given",
        why='DeepSpeed stops: "zero_optimization.compute_grad_norm=false requires gradient_clipping=0"',
        fix="set gradient_clipping to 0, or leave compute_grad_norm true",
        edits=(Remove(f"{ZERO}.compute_grad_norm"),),
        source="runtime/zero/stage_1_and_2.py:212",
    ),
    Rule(
        code="gradient-norm-offload",
        path=f"{ZERO}.compute_grad_norm",
        when=lambda c: (
            c.get(f"{ZERO}.compute_grad_norm") is False
            and c.stage in (1, 2)
            and not _clips(c)
            and (c.offload("optimizer") is not None or c.zenflow)
        ),
        message="compute_grad_norm false with the optimizer offloaded",
        why='DeepSpeed stops: "compute_grad_norm=false does not support optimizer offload"',
        fix="remove it",
        edits=(Remove(f"{ZERO}.compute_grad_norm"),),
        source="runtime/zero/stage_1_and_2.py:214-216",
    ),
    Rule(
        code="contiguous-gradients",
        severity="warning",
        path=f"{ZERO}.contiguous_gradients",
        when=lambda c: (
            c.get(f"{ZERO}.contiguous_gradients") is False and c.stage in (1, 2) and c.offload("optimizer") is not None
        ),
        message="contiguous_gradients false with the optimizer offloaded",
        why="DeepSpeed sets it to true",
        fix="remove it",
        edits=(Remove(f"{ZERO}.contiguous_gradients"),),
        source="runtime/zero/stage_1_and_2.py:300",
    ),
    Rule(
        code="pipeline-loading",
        path=f"{ZERO}.pipeline_loading_checkpoint",
        when=lambda c: c.on(f"{ZERO}.pipeline_loading_checkpoint") and c.stage != 3,
        message=lambda c: f"pipeline_loading_checkpoint at ZeRO stage {c.stage}",
        why='DeepSpeed stops when a checkpoint is loaded: "Only stage3 support for pipeline checkpoint loading"',
        fix="remove it",
        edits=(Remove(f"{ZERO}.pipeline_loading_checkpoint"),),
        source="runtime/engine.py:4738",
    ),
    Rule(
        code="hpz-ranks",
        path=f"{ZERO}.zero_hpz_partition_size",
        when=lambda c: bool(c.setting.ranks) and _hpz(c) > 1 and c.setting.ranks % min(_hpz(c), c.setting.ranks) != 0,
        message=lambda c: f"zero_hpz_partition_size {{value}} does not divide {c.setting.ranks} ranks",
        why="DeepSpeed stops by an assertion once the ranks run",
        fix="take the GPUs of one node",
        edits=(Set(f"{ZERO}.zero_hpz_partition_size", 1),),
        source="runtime/utils/groups.py:944",
    ),
    Rule(
        code="quantized-reduce-scatter",
        path=f"{ZERO}.reduce_scatter",
        when=lambda c: (
            c.stage == 3 and c.on(f"{ZERO}.zero_quantized_gradients") and c.get(f"{ZERO}.reduce_scatter") is False
        ),
        message="zero_quantized_gradients with reduce_scatter off",
        why='DeepSpeed stops: "when enable all_to_all_reduce, reduce_scatter should also be enabled"',
        fix="remove reduce_scatter",
        edits=(Remove(f"{ZERO}.reduce_scatter"),),
        source="runtime/zero/stage3.py:390",
    ),
    Rule(
        code="zenflow-stage",
        path=ZENFLOW,
        when=lambda c: c.zenflow and c.stage < 3,
        message=lambda c: f"zenflow at ZeRO stage {c.stage}",
        why="DeepSpeed fails at the first step without ZeRO; at stages 1 and 2 it mixes up the order of the matrices' "
        "elements when the engine starts (a toy's loss stays at 0.9 instead of 0.0004)",
        fix="take stage 3 with the optimizer offloaded to the CPU",
        edits=(Set(f"{ZERO}.stage", 3), Set(f"{OPTIMIZER}.device", "cpu")),
        source="runtime/zenflow/engine.py:25, runtime/zero/stage_1_and_2.py:894",
    ),
    Rule(
        code="zenflow-interval-auto",
        path=f"{ZENFLOW}.update_interval",
        when=lambda c: c.zenflow and c.stage == 3 and c.number(f"{ZENFLOW}.update_interval") is None,
        message="zenflow without a whole number as update_interval",
        why="DeepSpeed takes it as the gradient accumulation steps, 0 for auto, and divides the loss by it",
        fix="give the number of steps between updates on the CPU",
        edits=(Set(f"{ZENFLOW}.update_interval", 4),),
        source="runtime/zenflow/engine.py:69",
    ),
    Rule(
        code="zenflow-select-auto",
        path=f"{ZENFLOW}.select_interval",
        when=lambda c: c.zenflow and c.get(f"{ZENFLOW}.select_strategy") in (None, "auto") and _interval(c) is not None,
        message="zenflow.select_interval {value} with the strategy auto",
        why="DeepSpeed raises its own warning as an exception",
        fix="remove select_interval, or take select_strategy step or epoch",
        edits=(Set(f"{ZENFLOW}.select_strategy", "step"),),
        source="runtime/zenflow/engine.py:39",
    ),
    Rule(
        code="zenflow-select-interval",
        path=f"{ZENFLOW}.select_strategy",
        when=lambda c: c.zenflow and c.word(f"{ZENFLOW}.select_strategy") in ("step", "epoch") and _interval(c) is None,
        message="zenflow.select_strategy {value} without a whole number as select_interval",
        why='DeepSpeed stops: "If don\'t use auto select strategy, select_interval must be a number."',
        fix="give the interval",
        edits=(Set(f"{ZENFLOW}.select_strategy", "auto"), Remove(f"{ZENFLOW}.select_interval")),
        source="runtime/zenflow/engine.py:45",
    ),
    Rule(
        code="zenflow-order",
        path=f"{ZENFLOW}.update_interval",
        when=lambda c: (
            c.zenflow
            and _interval(c) is not None
            and (c.number(f"{ZENFLOW}.update_interval") or 0) > (_interval(c) or 0)
        ),
        message=lambda c: f"zenflow.update_interval {{value}} is above select_interval {_interval(c)}",
        why='DeepSpeed stops: "Select interval must be greater or equal to update interval"',
        fix="make update_interval the smaller one",
        edits=lambda c: (Set(f"{ZENFLOW}.update_interval", max(1, int(_interval(c) or 1))),),
        source="runtime/zenflow/engine.py:63",
    ),
    Rule(
        code="zenflow-optimizer",
        path="optimizer.params.torch_adam",
        when=lambda c: c.zenflow and c.stage > 0 and c.has("optimizer.params.torch_adam"),
        message="zenflow with optimizer.params.torch_adam",
        why='DeepSpeed hands the parameters to a torch optimizer as they are: "unexpected keyword argument '
        "'torch_adam'\"",
        fix="remove it: ZenFlow is about DeepSpeed's own Adam on the CPU",
        edits=(Remove("optimizer.params.torch_adam"),),
        source="runtime/zenflow/zenflow_stage_1_and_2.py:81",
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
        edits=(Set("zero_allow_untested_optimizer", True),),
        source="runtime/engine.py:2299",
    ),
    Rule(
        code="muon-reduce-scatter",
        path=f"{ZERO}.reduce_scatter",
        when=lambda c: c.optimizer == "muon" and c.stage == 3 and c.on(f"{ZERO}.reduce_scatter"),
        message="Muon at ZeRO stage 3 with reduce_scatter, which is on where it is not given",
        why='DeepSpeed stops: "Muon and reduce scatter cannot be used together"',
        fix="set reduce_scatter to false",
        edits=(Set(f"{ZERO}.reduce_scatter", False),),
        source="runtime/zero/stage3.py:361",
    ),
    Rule(
        code="pipeline-stage",
        path=f"{ZERO}.stage",
        when=lambda c: c.pipeline > 1 and c.stage >= 2,
        message=lambda c: f"ZeRO stage {c.stage} with a pipeline",
        why='DeepSpeed stops once every rank has built its engine: "ZeRO-2 and ZeRO-3 are incompatible with pipeline '
        'parallelism"',
        fix="take stage 1",
        edits=(Set(f"{ZERO}.stage", 1),),
        source="runtime/pipe/engine.py:73",
    ),
    Rule(
        code="pipeline-overlap",
        severity="warning",
        path=f"{ZERO}.overlap_comm",
        when=lambda c: c.pipeline > 1 and c.stage == 1 and c.on(f"{ZERO}.overlap_comm"),
        message="overlap_comm with a pipeline",
        why="DeepSpeed warns and switches it off",
        fix="remove it",
        edits=(Remove(f"{ZERO}.overlap_comm"),),
        source="runtime/engine.py:2665",
    ),
)


def other_stages(c: Subject) -> Iterator[Finding]:
    """Keys that the configured stage does not read. At stage 0 the section is read by nobody."""
    zero = c.section(ZERO)
    if not zero or not c.has(f"{ZERO}.stage") or c.get(f"{ZERO}.stage") == "auto":
        return
    for key, lost in FEATURES_3.items():
        if c.stage < 3 and c.changed(f"{ZERO}.{key}"):
            yield Finding(
                code="feature-stage",
                severity="error",
                path=f"{ZERO}.{key}",
                message=f"{key} at ZeRO stage {c.stage}",
                why=f"DeepSpeed ignores it below stage 3: {lost}",
                fix="take stage 3, or remove it",
                edits=(Remove(f"{ZERO}.{key}"),),
            )
    ignored = (*ONLY_3, *(ONLY_1_2 if c.stage == 0 else ())) if c.stage < 3 else ONLY_1_2
    for key in ignored:
        if c.changed(f"{ZERO}.{key}") and not (key == "elastic_checkpoint" and c.stage == 3):
            yield Finding(
                code="key-stage",
                severity="warning",
                path=f"{ZERO}.{key}",
                message=f"{key} at ZeRO stage {c.stage}",
                why=f"DeepSpeed reads it at {'stage 3' if key in ONLY_3 else 'stages 1 and 2'} only",
                fix="remove it",
                edits=(Remove(f"{ZERO}.{key}"),),
            )


def nvme(c: Subject) -> Iterator[Finding]:
    """Paths of NVMe offload: given, a folder, and on a disk that is one."""
    for what, part in (("optimizer", OPTIMIZER), ("param", PARAM)):
        if c.offload(what) != "nvme" or c.stage != 3:
            continue
        path = c.get(f"{part}.nvme_path")
        if path == "auto":
            continue
        common = {"path": f"{part}.nvme_path", "edits": (Set(f"{part}.device", "cpu"), Remove(f"{part}.nvme_path"))}
        if not isinstance(path, str) or not path:
            yield Finding(
                code="nvme-path-missing",
                severity="error",
                message=f"offload_{what} to NVMe without nvme_path",
                why="DeepSpeed stops once the ranks run: it has no folder to write to",
                fix="name a folder on the NVMe disk, or offload to the CPU",
                **common,
            )
        elif not Path(path).is_dir():
            yield Finding(
                code="nvme-path",
                severity="warning",
                message=f"nvme_path {path} is no folder on this machine",
                why="DeepSpeed makes it where it may, on whatever disk that is, and fails where it may not",
                fix="make the folder on the NVMe disk, or offload to the CPU",
                **common,
            )
        elif not is_nvme(Path(path)):
            yield Finding(
                code="nvme-disk",
                severity="warning",
                message=f"nvme_path {path} lies on {_device(Path(path)) or 'an unknown device'}, which is no NVMe disk",
                why="DeepSpeed does not look; every step then waits for that disk",
                fix="name a folder on an NVMe disk, or offload to the CPU",
                **common,
            )


def _device(path: Path) -> str | None:
    """The device of the file system that a path is on."""
    real = path.resolve()
    mounts = {Path(p.mountpoint): p.device for p in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (real, *real.parents) if parent in mounts), None)


def is_nvme(path: Path) -> bool:
    """Whether a folder's file system is on an NVMe device, as far as the mount table tells."""
    device = _device(path)
    if device is None:
        return False
    name = Path(device).name
    holders = Path("/sys/class/block") / name / "slaves"  # of a RAID or a logical volume
    below = [p.name for p in holders.iterdir()] if holders.is_dir() else []
    return any(n.startswith("nvme") for n in (name, *below))
