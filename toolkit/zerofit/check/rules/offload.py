"""Offload to host memory and NVMe, SuperOffload and ZenFlow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from zerofit.check.finding import Finding, Rule
from zerofit.check.subject import ZERO, CheckSubject

OPTIMIZER, PARAM, ZENFLOW = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", f"{ZERO}.zenflow"
UPDATE = f"{ZENFLOW}.update_interval"
STRATEGY = f"{ZENFLOW}.select_strategy"

# keys that are read only for the device nvme
NVME_KEYS = {
    "optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
    "param": ("nvme_path", "buffer_count"),
}


def _interval(c: CheckSubject) -> float | None:
    return c.number(f"{ZENFLOW}.select_interval")


OFFLOAD = (
    Rule(
        code="offload-param-stage",
        path=PARAM,
        when=lambda c: c.offload("param") and c.stage < 3,
        message=lambda c: f"offload_param at ZeRO stage {c.stage}",
        why="DeepSpeed ignores it and keeps all parameters on the device: only stage 3 partitions them",
        fix="use stage 3, or remove the block",
        source="runtime/engine.py:2749-2788",
    ),
    Rule(
        code="offload-without-zero",
        path=OPTIMIZER,
        when=lambda c: c.offload("optimizer") and c.stage == 0,
        message="offload_optimizer without ZeRO",
        why="DeepSpeed offloads nothing at stage 0; it only switches to its CPU Adam",
        fix="use stage 1 or higher, or remove the block",
        source="runtime/engine.py:2384",
    ),
    Rule(
        code="offload-own-optimizer",
        severity="warning",  # the code may pass the right one
        path=OPTIMIZER,
        when=lambda c: (
            c.setting.reader in ("deepspeed", "lightning")
            and c.offload("optimizer")
            and c.stage > 0
            and not c.has("optimizer")
            and not c.has("zero_force_ds_cpu_optimizer")  # its author is aware of this
        ),
        message="the optimizer is offloaded, but the JSON has no optimizer",
        why='DeepSpeed stops if the code passes a torch optimizer: "You are using ZeRO-Offload with a client provided '
        'optimizer"',
        fix="name the optimizer in the JSON, pass DeepSpeedCPUAdam, or set zero_force_ds_cpu_optimizer to false",
        source="runtime/engine.py:2345",
    ),
    Rule(
        code="offload-one-thread",
        severity="warning",
        path=f"{OPTIMIZER}.device",
        when=lambda c: c.offload("optimizer") and c.setting.one_thread,
        message=lambda c: f"the optimizer is offloaded, but {c.setting.one_thread} gives each rank one thread",
        why="DeepSpeed's CPU Adam is slow: one core updates 0.8 billion parameters a second, 16 cores 4.8 billion",
        fix="set OMP_NUM_THREADS to the host's cores divided by its ranks",
        source="torch distributed/run.py:980",
    ),
    *(
        Rule(
            code="offload-pageable",
            severity="warning",
            path=f"{section}.pin_memory",
            when=lambda c, what=what, section=section, least=least: (
                c.stage >= least and c.offload(what) == "cpu" and c.off(f"{section}.pin_memory") and not c.on_cpu
            ),
            message=lambda _, what=what: f"offload_{what} in memory that is not page-locked",
            why="each copy goes through a driver buffer and nothing overlaps it: 7 GB/s on an H100 instead of 54 GB/s",
            fix="set pin_memory to true, unless `ulimit -l` is too low",
            source="runtime/zero/offload_config.py:45",
        )
        for what, section, least in (("optimizer", OPTIMIZER, 1), ("param", PARAM, 3))
    ),
    Rule(
        code="nvme-stage",
        path=f"{OPTIMIZER}.device",
        when=lambda c: c.offload("optimizer") == "nvme" and c.stage in (1, 2),
        message=lambda c: f"offload_optimizer to NVMe at ZeRO stage {c.stage}",
        why="DeepSpeed keeps the states in host memory and never uses the path, even if it does not exist",
        fix="use stage 3, or device cpu",
        source="runtime/zero/stage_1_and_2.py:220",
    ),
    Rule(
        code="offload-ratio",
        path=f"{OPTIMIZER}.ratio",
        when=lambda c: (ratio := c.number(f"{OPTIMIZER}.ratio")) is not None and 0 <= ratio < 1 and c.stage != 3,
        message="offload_optimizer.ratio {value} below stage 3",
        why='DeepSpeed stops: "Partial offloading only supported for ZeRO Stage 3."',
        fix="remove it, or use stage 3",
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
        source="runtime/zero/stage3.py:316",
    ),
    Rule(
        code="super-offload-stage",
        path=f"{OPTIMIZER}.super_offload",
        when=lambda c: c.on(f"{OPTIMIZER}.super_offload") and c.stage < 3,
        message=lambda c: f"super_offload at ZeRO stage {c.stage}",
        why="DeepSpeed ignores it below stage 3",
        fix="use stage 3, or remove it",
        source="runtime/engine.py:2749",
    ),
    Rule(
        code="needs-cuda",
        path=f"{OPTIMIZER}.super_offload",
        when=lambda c: c.on(f"{OPTIMIZER}.super_offload") and c.stage == 3 and c.on_cpu,
        message="super_offload without a GPU",
        why='DeepSpeed stops: "SuperOffload only supports NVIDIA CUDA GPUs"',
        source="runtime/superoffload/superoffload_stage3.py:23",
    ),
    Rule(
        code="zenflow-stage",
        path=ZENFLOW,
        when=lambda c: c.zenflow and c.stage < 3,
        message=lambda c: f"zenflow at ZeRO stage {c.stage}",
        why=lambda c: (
            "DeepSpeed mixes up the elements of matrices when the engine starts (a toy model's loss stays at 0.9 "
            "instead of 0.0004)"
            if c.stage and c.offload("optimizer")
            else 'DeepSpeed stops: "Zenflow must be used with cpu offload"'
            if c.stage
            else "DeepSpeed fails at the first step"
        ),
        fix="use stage 3 and offload the optimizer to the CPU",
        source="runtime/zenflow/engine.py:25, runtime/zero/stage_1_and_2.py:894",
    ),
    Rule(
        code="zenflow-interval-auto",
        path=UPDATE,
        when=lambda c: c.zenflow and c.stage == 3 and c.number(UPDATE) is None,
        message="zenflow.update_interval is not a whole number",
        why="DeepSpeed uses it as gradient accumulation steps (0 for auto) and divides the loss by it",
        fix="set the number of steps between updates on the CPU",
        source="runtime/zenflow/engine.py:69",
    ),
    Rule(
        code="zenflow-select-auto",
        path=f"{ZENFLOW}.select_interval",
        when=lambda c: c.zenflow and c.get(STRATEGY) in (None, "auto") and _interval(c) is not None,
        message="zenflow.select_interval {value} with select_strategy auto",
        why="DeepSpeed raises its own warning as an exception",
        fix="remove select_interval, or set select_strategy to step or epoch",
        source="runtime/zenflow/engine.py:39",
    ),
    Rule(
        code="zenflow-select-interval",
        path=STRATEGY,
        when=lambda c: c.zenflow and c.word(STRATEGY) in ("step", "epoch") and _interval(c) is None,
        message="zenflow.select_strategy {value}, but select_interval is not a whole number",
        why='DeepSpeed stops: "If don\'t use auto select strategy, select_interval must be a number."',
        fix="set select_interval",
        source="runtime/zenflow/engine.py:45",
    ),
    Rule(
        code="zenflow-order",
        path=UPDATE,
        when=lambda c: c.zenflow and _interval(c) is not None and (c.number(UPDATE) or 0) > (_interval(c) or 0),
        message=lambda c: f"zenflow.update_interval {{value}} is above select_interval {_interval(c)}",
        why='DeepSpeed stops: "Select interval must be greater or equal to update interval"',
        fix="make update_interval smaller than select_interval",
        source="runtime/zenflow/engine.py:63",
    ),
    Rule(
        code="zenflow-overlap",
        path=f"{ZERO}.overlap_comm",
        when=lambda c: c.zenflow and c.stage == 3 and c.on(f"{ZENFLOW}.offload") and c.off(f"{ZERO}.overlap_comm"),
        message="zenflow.offload with overlap_comm off",
        why='DeepSpeed stops: "offload selective optimizer should be used with overlap_comm"',
        fix="remove overlap_comm: it is on at stage 3",
        source="runtime/zenflow/engine_stage3.py:101",
    ),
    *(
        Rule(
            code="offload-nvme-keys",
            severity="warning",
            path=f"{ZERO}.offload_{what}.{key}",
            when=lambda c, what=what, key=key: (
                c.stage == 3 and c.offload(what) == "cpu" and c.changed(f"{ZERO}.offload_{what}.{key}")
            ),
            message=f"offload_{what}.{key} while the device is cpu",
            why="DeepSpeed reads it for offload to NVMe only",
            source="runtime/swap_tensor/optimizer_utils.py:188, runtime/swap_tensor/partitioned_param_swapper.py:86",
        )
        for what, keys in NVME_KEYS.items()
        for key in keys
    ),
)


def nvme(c: CheckSubject) -> Iterator[Finding]:
    """Check that the paths of NVMe offload are given, are folders, and are on an NVMe disk."""
    for what, part in (("optimizer", OPTIMIZER), ("param", PARAM)):
        if c.offload(what) != "nvme" or c.stage != 3:
            continue
        path = c.get(f"{part}.nvme_path")
        if path == "auto":
            continue
        if not isinstance(path, str) or not path:
            yield Finding(
                code="nvme-path-missing",
                path=f"{part}.nvme_path",
                message=f"offload_{what} to NVMe has no nvme_path",
                why="DeepSpeed stops once the ranks run: it has no folder to write to",
                fix="name a folder on the NVMe disk, or offload to the CPU",
            )
        elif not Path(path).is_dir():
            yield Finding(
                code="nvme-path",
                severity="warning",
                path=f"{part}.nvme_path",
                message=f"nvme_path {path} is not a folder on this machine",
                why="DeepSpeed creates it, on whatever disk that is, or fails if it may not",
                fix="create the folder on the NVMe disk, or offload to the CPU",
            )
        elif not is_nvme(Path(path)):
            yield Finding(
                code="nvme-disk",
                severity="warning",
                path=f"{part}.nvme_path",
                message=f"nvme_path {path} is on {_device(Path(path)) or 'an unknown device'}, not on an NVMe disk",
                why="DeepSpeed does not check; every step then waits for that disk",
                fix="name a folder on an NVMe disk, or offload to the CPU",
            )


def _device(path: Path) -> str | None:
    """Return the device of the file system that a path is on."""
    real = path.resolve()
    mounts = {Path(p.mountpoint): p.device for p in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (real, *real.parents) if parent in mounts), None)


def is_nvme(path: Path) -> bool:
    """Return whether a folder's file system is on an NVMe device, according to the mount table."""
    device = _device(path)
    if device is None:
        return False
    name = Path(device).name
    holders = Path("/sys/class/block") / name / "slaves"  # of a RAID or a logical volume
    below = [p.name for p in holders.iterdir()] if holders.is_dir() else []
    return any(n.startswith("nvme") for n in (name, *below))
