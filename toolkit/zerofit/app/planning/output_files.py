"""Write the files of a plan: a layout's configuration for its engine, and a step's trace."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zerofit.config.ds_json import read_for_run
from zerofit.features.checkpointing import Checkpointing
from zerofit.features.engines import ENGINES
from zerofit.plan.layout import OPTIONS, PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.plan.persistent import MASTER_BYTES
from zerofit.plan.rates import Rates
from zerofit.plan.space import stage3_sizes
from zerofit.plan.step_timeline import step_timeline
from zerofit.plan.step_trace import layer_memory, step_trace
from zerofit.plan.time import Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.files import write_text
from zerofit.spec.foreign import refused
from zerofit.spec.model_facts import bucket_elements, gives_loss, has_head
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run

NAMES = ("ds_config.json", "run.yaml", "accelerate.yaml", "torchtitan.sh", "verl.sh", "openrlhf.sh")
TITAN_KINDS: dict[Checkpointing, str] = {False: "none", "selective": "selective", True: "full"}
TRACE_FLAG = "--trace"


def refuse_existing(folder: Path) -> None:
    """Raise a UserError if the folder contains a file of a plan, or is a file itself."""
    problems = Problems()
    if folder.exists() and not folder.is_dir():
        problems.add("output-exists", f"{folder} is a file", "use a folder", "--write")
    for path in (folder / name for name in NAMES):
        if path.exists():
            problems.add("output-exists", f"{path} exists", "remove this file, or use another folder", "--write")
    problems.raise_if_any()


def write_plan(
    folder: Path, fields: Mapping[str, object], config: Mapping[str, object], comment: str
) -> tuple[Path, ...]:
    """Write a DeepSpeed JSON, and a run file that ends with `comment`; return their paths.

    Raises UserError.
    """
    # The path is relative to run.yaml, so that the folder can be moved or copied to another machine.
    run = yaml.safe_dump({**fields, "ds_config": NAMES[0]}, sort_keys=False) + comment
    return write_files(folder, {NAMES[0]: json.dumps(config, indent=2) + "\n", NAMES[1]: run})


def write_accelerate(folder: Path, layout: PlannedLayout, cluster: Cluster) -> tuple[Path, ...]:
    """Write an FSDP2 layout for `accelerate launch`; return the file's path. Raises UserError."""
    if layout.checkpointing == "selective":
        message, hint = "Accelerate's file cannot name selective checkpointing", "leave out --write or --engine fsdp2"
        raise UserError(Problem(kind="combination", message=message, hint=hint, where="--write"))
    batch = f"per_device_train_batch_size {layout.micro_batch}, gradient_accumulation_steps {layout.accumulation}"
    # Accelerate's file has no keys for these settings, so a comment tells the user to set them in the script.
    sync = "gradient_accumulation_kwargs {sync_each_batch: true}, " if layout.sync_each_batch else ""
    model = ", a model that is loaded with dtype=torch.bfloat16" if layout.weight_bytes == 2 else ""
    nodes = "; give --machine_rank, --main_process_ip and --main_process_port on each node" if cluster.nodes > 1 else ""
    comment = f"# with {sync}{batch}{model} in your script{nodes}\n"
    text = comment + yaml.safe_dump(accelerate_config(layout, cluster), sort_keys=False)
    return write_files(folder, {NAMES[2]: text})


def accelerate_config(layout: PlannedLayout, cluster: Cluster) -> dict[str, object]:
    """Return the content of the file that `accelerate launch --config_file` reads.

    Source of the names: commands/config/config_args.py of Accelerate.
    """
    # Without replicas Accelerate shards over all ranks by default, so the section is only written for hybrid sharding.
    sizes = {"dp_replicate_size": layout.replicas, "dp_shard_size": layout.shard_ranks}
    hybrid = {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": layout.precision if layout.element_bytes < layout.weight_bytes else "no",
        "num_machines": cluster.nodes,
        "num_processes": layout.world_size,
        "machine_rank": 0,
        "rdzv_backend": "static" if cluster.nodes == 1 else "c10d",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.reshard,
            "fsdp_offload_params": layout.offload_param == "cpu",
            "fsdp_activation_checkpointing": layout.checkpointing,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        **(hybrid if layout.replicas > 1 else {}),
    }


def write_torchtitan(folder: Path, layout: PlannedLayout, profile: Profile, cluster: Cluster) -> tuple[Path, ...]:
    """Write a script that starts torchtitan in this layout; return its path. Raises UserError."""
    configurations = ENGINES["torchtitan"].configurations  # by number of parameters
    if profile.parameters not in configurations:
        message = f"torchtitan has no configuration of {profile.model}"
        hint = f"plan for one of {', '.join(name for _, name in configurations.values())}, or leave out --write"
        raise UserError(Problem(kind="combination", message=message, hint=hint, where="--write"))
    module, name = configurations[profile.parameters]
    nodes = [f"--nnodes {cluster.nodes} --rdzv_backend c10d --rdzv_endpoint $FIRST_HOST:29500"]
    lines = [
        f"torchrun --nproc_per_node {cluster.gpus}",
        *(nodes if cluster.nodes > 1 else []),
        f"-m torchtitan.train --module {module} --config {name}",
        *(f"--{flag} {value}".rstrip() for flag, value in torchtitan_flags(layout, profile).items()),
        '"$@"',
        f"activation-checkpoint:{TITAN_KINDS[layout.checkpointing]}",
    ]
    comment = "for torchtitan 0.3; add --hf_assets_path and the data set's options"
    if cluster.nodes > 1:
        comment += "\n# run it on each node; FIRST_HOST is the address of one of them"
    return write_files(folder, {NAMES[3]: start_script(comment, lines)})


def start_script(comment: str, lines: Sequence[str]) -> str:
    """Return a bash script with one command, which continues over `lines`."""
    return f"#!/usr/bin/env bash\n# {comment}\nset -eu\n" + " \\\n  ".join(lines) + "\n"


def torchtitan_flags(layout: PlannedLayout, profile: Profile) -> dict[str, str | int]:
    """Return torchtitan's options and values; "" for switches (torchtitan/config/configs.py)."""
    return {
        "training.local_batch_size": layout.micro_batch,
        "training.global_batch_size": layout.global_batch,
        "training.seq_len": profile.seq_len or 0,
        "training.mixed_precision_param": "float32" if layout.element_bytes == MASTER_BYTES else "bfloat16",
        # CUDA graphs would keep a step's memory allocated, which plan's forecasts do not include
        "training.disable_cuda_graphs": "",
        **({"training.enable_cpu_offload": ""} if layout.offload_param == "cpu" else {}),
        "parallelism.data_parallel_replicate_degree": layout.replicas,
        "parallelism.data_parallel_shard_degree": layout.shard_ranks,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.fsdp_reshard_after_forward": "default" if layout.reshard else "never",
    }


def write_files(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Write the files in `texts` (names and contents); return their paths. Raises UserError."""
    refuse_existing(folder)
    with refused(folder, kind="output-unwritable", where="--write", doing="write to"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text)
    return tuple(folder / name for name in texts)


def ds_config(layout: PlannedLayout, profile: Profile, nvme_path: str) -> dict[str, Any]:
    """Return the bundled JSON of the layout's stage with the plan's values.

    Sizes that the run sets itself stay "auto".
    """
    base = "zero3_nvme" if "nvme" in (layout.offload_optimizer, layout.offload_param) else f"zero{layout.zero_stage}"
    config = read_for_run(base).config
    zero = config["zero_optimization"]
    if layout.zero_stage:
        zero["overlap_comm"] = layout.overlap
        # `zerofit train` fills in "auto" with the sizes from `stage3_sizes` and `bucket_elements`
        if layout.bucket != bucket_elements(profile.trained):
            for key in {"reduce_bucket_size", "allgather_bucket_size"} & set(zero):
                zero[key] = layout.bucket
        # sizes that differ from what "auto" becomes: the plan keeps more parameters gathered
        if layout.zero_stage == 3 and layout.persistence > stage3_sizes(profile).persistence:
            zero["stage3_prefetch_bucket_size"] = layout.prefetch
            zero["stage3_param_persistence_threshold"] = layout.persistence
    # The layout decides what is offloaded, whatever the bundled JSON offloads.
    for key, device, pinned in (
        ("offload_optimizer", layout.offload_optimizer, layout.pin_optimizer),
        ("offload_param", layout.offload_param, layout.pin_param),
    ):
        if device == "none":
            zero.pop(key, None)
        elif device == "cpu":
            zero[key] = {"device": "cpu", "pin_memory": pinned}
        else:
            zero[key] |= {"nvme_path": nvme_path, "pin_memory": pinned}
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": "auto"}
    if layout.sp > 1:
        config["sequence_parallel_size"] = "auto"
    return config


def for_trainer(config: Mapping[str, object], layout: PlannedLayout, profile: Profile) -> dict[str, object]:
    """Return a DeepSpeed JSON in which the HF Trainer can fill in each "auto"."""
    filled: dict[str, Any] = copy.deepcopy(dict(config))
    zero = filled["zero_optimization"]
    # The Trainer fills in `reduce_bucket_size` from the model's hidden size alone, and never `allgather_bucket_size`.
    sizes = {"reduce_bucket_size": layout.bucket, "allgather_bucket_size": layout.bucket}
    zero |= {name: size for name, size in sizes.items() if zero.get(name) == "auto"}
    if zero.get("offload_param", {}).get("buffer_size") == "auto":
        zero["offload_param"]["buffer_size"] = max(max(layer.matrices, default=0) for layer in profile.layers)
    if layout.offload_optimizer != "none":  # DeepSpeed offloads only the states of an optimizer that the JSON names
        names = ("lr", "betas", "eps", "weight_decay")
        filled.setdefault("optimizer", {"type": "AdamW", "params": dict.fromkeys(names, "auto")})
    return filled


def data_line(profile: Profile, image: str | None) -> str:
    """Return the comment line of the run file in which the user fills in the data."""
    if profile.task == "segmentation":
        return "# data: segmentation:/path/to/folder   # images/ and masks/; default: synthetic\n"
    if profile.task == "image":
        size = f"{image.rpartition(':')[2]} images" if image else "images"
        return f"# data: imagefolder:/path/to/folder   # {size}; default: digits\n"
    if profile.task == "table":
        return "# data: csv:/path/to/table.csv   # default: synthetic\n"
    if has_head(profile.task) or profile.task == "seq2seq-lm":
        return "# data: jsonl:/path/to/file.jsonl   # default: synthetic\n"
    if gives_loss(profile.task):
        return f"# data: synthetic   # the only data for {profile.task} models, to measure them\n"
    return "# data: text:/path/to/file.txt   # default: pysource\n"


def run_fields(
    layout: PlannedLayout, profile: Profile, model_args: dict[str, object], image: str | None
) -> dict[str, object]:
    """Return the fields of the planned run. `zerofit train` decides the other fields."""
    path = Path(profile.model)
    return {
        "model": str(path.absolute()) if path.exists() else profile.model,
        **({"model_args": model_args} if model_args else {}),
        **({"task": profile.task} if has_head(profile.task) else {}),
        **({"seq_len": profile.seq_len} if profile.seq_len else {}),
        **({"image_size": int(image.rpartition("x")[2])} if image and "x" in image else {}),
        "optimizer": layout.optimizer,
        **layout_fields(layout),
    }


def layout_fields(layout: PlannedLayout) -> dict[str, object]:
    """Return the fields of a run that this layout sets, except the optimizer."""
    options = {option: getattr(layout, attribute) for attribute, option in OPTIONS.items() if attribute != "optimizer"}
    fields = {option: value for option, value in options.items() if option in Run.model_fields}
    return {
        "ranks": layout.world_size,
        "precision": layout.precision,
        "activation_checkpointing": layout.checkpointing,
        **{name: value for name, value in fields.items() if value != Run.model_fields[name].default},
        **({"micro_batch_by_rank": ",".join(map(str, layout.by_rank))} if layout.by_rank else {}),
        **({"ema": layout.ema} if layout.ema else {}),
    }


def merged(planned: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's DeepSpeed JSON `own`, completed with the planned values."""
    completed = dict(copy.deepcopy(planned))
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(completed.get(key), dict):
            completed[key] = merged(completed[key], value)
        elif value != "auto" or key not in completed:
            completed[key] = copy.deepcopy(value)
    return completed


def write_trace(path: Path, trace: dict[str, object]) -> None:
    """Write a trace. Raises UserError if it cannot be written."""
    with refused(path, kind="unwritable", where=TRACE_FLAG, doing="write"):
        write_text(path, json.dumps(trace, separators=(",", ":")) + "\n")


def trace_of_layout(
    profile: Profile, cluster: Cluster, rates: Rates, layout: PlannedLayout, step_s: float
) -> dict[str, object]:
    """Return the trace of a planned step of `step_s` seconds, one rank of each pipeline stage."""
    timer = Timer(profile, cluster, rates)
    timeline = step_timeline(profile, timer, layout)
    # `step_s` can differ from the timer's forecast: trials, a measured speed or a trace correct the plan's times.
    timeline = timeline.scaled(step_s / timeline.step_s)
    forecaster = Forecaster(profile, cluster.accelerator, blas_workspace_bytes(cluster.device))
    ranks = {stage: stage * (layout.world_size // layout.pp) for stage in range(layout.pp)}
    memory = [sample for stage in ranks for sample in layer_memory(timeline, stage, forecaster.along(layout, stage))]
    return step_trace(timeline, memory, ranks, about(profile, cluster, layout))


def about(profile: Profile, cluster: Cluster, layout: PlannedLayout) -> dict[str, object]:
    """Return the description of a traced step: the layout, the model and the machine."""
    machine = {"gpu": cluster.device.kind, "gpus": cluster.gpus, "nodes": cluster.nodes}
    return {"forecast": str(layout), "model": profile.model, **machine, "layout": layout.to_dict()}
