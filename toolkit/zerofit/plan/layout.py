"""Define the layouts that a plan considers, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from zerofit.features.checkpointing import WORDS, Checkpointing
from zerofit.features.engines import ENGINES, Engine
from zerofit.features.optimizer import TrainingSetting
from zerofit.features.optimizers import PLANNED, Optimizer, has_weight_decay
from zerofit.features.zero import ZERO
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.overhead import CPU_PROCESS_HIGH_BYTES
from zerofit.spec.profile import setting
from zerofit.spec.run import DS_KEYS, PipelineSchedule
from zerofit.spec.run_folder import Job

Offload = Literal["none", "cpu", "nvme"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
LIVE = REUSE = 1_000_000_000  # elements: DeepSpeed's defaults (runtime/zero/config.py)
# attribute of a layout -> the option of a run or of `plan` that fixes it
OPTIONS = {
    "micro_batch": "micro_batch",
    "accumulation": "gradient_accumulation_steps",
    "checkpointing": "activation_checkpointing",
    "optimizer": "optimizer",
    "tp": "tensor_parallel",
    "pp": "pipeline",
    "sp": "sequence_parallel",
    "ep": "expert_parallel",
    "schedule": "pipeline_schedule",
    "zero_stage": "zero_stage",
    "offload_optimizer": "offload",
    "offload_param": "offload_param",
    "pin_optimizer": "pin_memory",
    "pin_param": "pin_memory",
    "overlap": "overlap_comm",
}
# attribute of a layout -> dotted key of the DeepSpeed JSON
KEYS = {
    **{attribute: DS_KEYS[option] for attribute, option in OPTIONS.items() if option in DS_KEYS},
    "optimizer": "optimizer.type",
    "zero_stage": f"{ZERO}.stage",
    "offload_optimizer": f"{ZERO}.offload_optimizer.device",
    "offload_param": f"{ZERO}.offload_param.device",
    "pin_optimizer": f"{ZERO}.offload_optimizer.pin_memory",
    "pin_param": f"{ZERO}.offload_param.pin_memory",
    "bucket": f"{ZERO}.reduce_bucket_size",
    "overlap": f"{ZERO}.overlap_comm",
    "prefetch": f"{ZERO}.stage3_prefetch_bucket_size",
    "persistence": f"{ZERO}.stage3_param_persistence_threshold",
    "live": f"{ZERO}.stage3_max_live_parameters",
    "reuse": f"{ZERO}.stage3_max_reuse_distance",
}
_ZERO_KEYS = {  # directly in `zero_optimization`
    attribute: key.removeprefix(f"{ZERO}.")
    for attribute, key in KEYS.items()
    if key.rpartition(".")[0] == ZERO and attribute != "zero_stage"
}
# sizes of a layout that a DeepSpeed JSON may leave to zerofit ("auto") or to DeepSpeed (UNSET)
SIZES = ("bucket", "overlap", "prefetch", "persistence")
UNSET = "unset"
# names in --json of FSDP2's options, and the attributes of PlannedLayout
OF_FSDP2 = {
    "reshard_after_forward": "reshard",
    "replicas": "replicas",
    "sync_each_batch": "sync_each_batch",
    "weight_bytes": "weight_bytes",
}


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """The settings, besides model and machine, that decide a run's memory and time."""

    zero_stage: int
    micro_batch: int  # samples of the rank with the most samples; it needs most memory and, on equal devices, most time
    accumulation: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1  # data and sequence parallel ranks that hold a mixture's experts together
    precision: str = "bf16"
    optimizer: Optimizer = "adamw"
    has_weight_decay: bool = True  # else all parameters are one group
    checkpointing: Checkpointing = False
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    pin_optimizer: bool = True  # offloaded states in page-locked memory
    pin_param: bool = True
    steps_early: bool = False  # SuperOffload without clipping: the host steps groups during backward
    bucket: int = 50_000_000  # elements of reduce_bucket_size and allgather_bucket_size
    prefetch: int = 0  # elements of stage3_prefetch_bucket_size
    persistence: int = 0  # elements of stage3_param_persistence_threshold
    live: int = LIVE  # elements of stage3_max_live_parameters
    reuse: int = REUSE  # elements of stage3_max_reuse_distance
    overlap: bool = False  # overlap_comm, which needs a second bucket
    ema: float | None = None  # decay of averaged weights, if any
    by_rank: tuple[int, ...] = ()  # samples of each data parallel rank, if they are not all `micro_batch`
    schedule: PipelineSchedule = "1f1b"
    engine: Engine = "deepspeed"
    reshard: bool = True  # FSDP2: whether layers are gathered again for backward
    replicas: int = 1  # FSDP2: groups of ranks that each hold all parameters (HSDP)
    sync_each_batch: bool = False  # FSDP2: whether every micro batch ends with a reduction
    weight_bytes: int = 4  # FSDP2: bytes of an element of trained weights, of their gradients and of each moment

    def __str__(self) -> str:
        degrees = [
            f"{name} {getattr(self, name)}" for name in ("dp", "tp", "pp", "sp", "ep") if getattr(self, name) > 1
        ]
        first = f"ZeRO-{self.zero_stage}" if self.engine == "deepspeed" else ENGINES[self.engine].title
        words = [first, *degrees, f"micro batch {self.micro_batch}"]
        words += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        words += [] if self.reshard else ["no reshard"]
        words += ["sync each batch"] if self.sync_each_batch else []
        words += ["bf16 weights"] if self.weight_bytes == 2 else []
        words += [self.schedule] if self.schedule != "1f1b" else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += [f"by rank {', '.join(map(str, self.by_rank))}"] if self.by_rank else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        return ", ".join(filter(None, [*words, WORDS[self.checkpointing]]))

    def with_sizes(self, wanted: Mapping[str, object]) -> PlannedLayout:
        """Return the layout with the sizes in `wanted`.

        "auto" keeps the layout's value. UNSET stands for DeepSpeed's default.
        """
        unset = {"bucket": self.bucket, **unset_sizes(self.zero_stage)}
        sizes = {name: unset[name] if value == UNSET else value for name, value in wanted.items() if value != "auto"}
        return replace(self, **sizes)

    @classmethod
    def of(cls, job: Job) -> PlannedLayout:
        """Return a job's layout."""
        zero, layout = job.ds_config.get(ZERO, {}), job.layout
        offload = {part: zero.get(f"offload_{part}") or {} for part in ("optimizer", "param")}
        devices = {part: settings.get("device", "none") for part, settings in offload.items()}
        if devices["optimizer"] == "nvme" and layout.zero_stage < 3:
            devices["optimizer"] = "cpu"  # as DeepSpeed does (stage_1_and_2.py:220)
        optimizer = job.run.optimizer if job.run.optimizer in PLANNED else "adamw"  # others' states are unknown
        written = {name: zero[key] for name, key in _ZERO_KEYS.items() if key in zero} if layout.zero_stage else {}
        return cls(
            zero_stage=layout.zero_stage,
            micro_batch=job.batch.most,
            by_rank=job.batch.by_rank,
            accumulation=job.batch.accumulation,
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            sp=layout.sp,
            ep=layout.ep,
            schedule=job.run.pipeline_schedule,
            precision=job.precision,
            optimizer=optimizer,
            has_weight_decay=has_weight_decay(job.ds_config),
            checkpointing=job.run.activation_checkpointing,
            ema=job.run.ema,
            **{f"offload_{part}": device for part, device in devices.items()},
            **{f"pin_{part}": settings.get("pin_memory", True) for part, settings in offload.items()},
            steps_early=steps_early(job.ds_config),
            **(unset_sizes(layout.zero_stage) | written),
        )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.sp

    @property
    def combined(self) -> bool:
        """Whether zerofit creates the process groups itself.

        This is so with expert parallelism, and with at least two of tensor, pipeline and sequence parallelism.
        """
        return self.ep > 1 or sum(degree > 1 for degree in (self.tp, self.pp, self.sp)) > 1

    @property
    def optimizer_setting(self) -> TrainingSetting:
        """The settings that decide whether an optimizer gives the same results as on one device."""
        return TrainingSetting(
            precision=self.precision,
            offload=self.offload_optimizer,
            zero_stage=self.zero_stage,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            combined=self.combined,
        )

    @property
    def setting(self) -> str:
        """The key of the layout's costs in `Profile.costs`."""
        return setting(self.precision, self.checkpointing, self.tp, self.sp, self.ep)

    @property
    def zero_ranks(self) -> int:
        """The number of ranks that ZeRO partitions among (DeepSpeed's seq_data_parallel_group)."""
        return self.dp * self.sp

    @property
    def by_layer(self) -> bool:
        """Whether the engine is FSDP, which gathers parameters layer by layer."""
        return self.engine != "deepspeed"

    @property
    def flattens(self) -> bool:
        """Whether the engine is FSDP 1, which flattens the parameters of a block into one."""
        return ENGINES[self.engine].flattens

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that divide parameters among them: FSDP's shards, or ZeRO's ranks."""
        return self.zero_ranks // self.replicas

    @property
    def reduced_bytes(self) -> int:
        """Bytes per element of the gradients that FSDP reduces."""
        return 4 if ENGINES[self.engine].reduces_in_float32 else self.element_bytes

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes per element of the full gradients that FSDP accumulates."""
        # FSDP 1 converts gradients only in the reduction
        return self.element_bytes if self.flattens else self.reduced_bytes

    @property
    def keeps_full_gradients(self) -> bool:
        """Whether FSDP accumulates full gradients and reduces them once per step."""
        return self.accumulation > 1 and not self.sync_each_batch and ENGINES[self.engine].accumulates_full_gradients

    @property
    def element_bytes(self) -> int:
        """Bytes per element in the layout's precision."""
        return ELEMENT_BYTES[self.precision]

    @property
    def global_batch(self) -> int:
        """The number of samples per optimizer step."""
        return self.accumulation * (sum(self.by_rank) or self.micro_batch * self.dp)

    @property
    def offload(self) -> str:
        """What is offloaded, and where: "none", "optimizer:cpu", "optimizer:cpu+param:cpu", ..."""
        places = {"optimizer": self.offload_optimizer, "param": self.offload_param}
        return "+".join(f"{what}:{where}" for what, where in places.items() if where != "none") or "none"

    def to_dict(self) -> dict[str, object]:
        """Return the layout's settings, under the names that `--json` and `--space` use."""
        return {
            "engine": self.engine,
            "zero_stage": self.zero_stage,
            **({name: getattr(self, field) for name, field in OF_FSDP2.items()} if self.by_layer else {}),
            "offload": self.offload,
            "micro_batch": self.micro_batch,
            **({"micro_batch_by_rank": list(self.by_rank)} if self.by_rank else {}),
            "gradient_accumulation_steps": self.accumulation,
            "global_batch": self.global_batch,
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.pp,
            "sp": self.sp,
            "ep": self.ep,
            **({"pipeline_schedule": self.schedule} if self.schedule != "1f1b" else {}),
            "activation_checkpointing": self.checkpointing,
            "precision": self.precision,
            **({"optimizer": self.optimizer} if self.optimizer != "adamw" else {}),
            "bucket_elements": self.bucket,
            "overlap_comm": self.overlap,
            "prefetch_elements": self.prefetch,
            "persistence_elements": self.persistence,
        }


def unset_sizes(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's defaults of SIZES at a ZeRO stage (runtime/zero/config.py)."""
    zero3 = {"prefetch": 50_000_000, "persistence": 100_000} if stage == 3 else {"prefetch": 0, "persistence": 0}
    return {**zero3, "overlap": stage == 3, **({"bucket": 500_000_000} if stage else {})}


def steps_early(config: Mapping[str, Any]) -> bool:
    """Return whether `config` (DeepSpeed's JSON) uses SuperOffload without gradient clipping.

    DeepSpeed then steps before all gradients exist.
    """
    offload = config.get(ZERO, {}).get("offload_optimizer") or {}
    return offload.get("super_offload") is True and config.get("gradient_clipping") == 0


@dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """Memory of the rank that needs most, in bytes."""

    peak_bytes: int  # device, allocated
    peak_phase: str  # "init", "forward", "backward" or "step"
    static_bytes: int  # device, between steps
    host_bytes: int  # of this rank's process
    nvme_bytes: int
    breakdown: dict[str, int]  # kind -> bytes at the peak; sums to peak_bytes
    large_bytes: int = 0  # the largest block of each kind that is allocated and freed within a step (`plan.fit`)
    more_communicators: int = 0  # besides the communicators for its parallel degrees (`plan.fit`)
    cpu_process_bytes: int = CPU_PROCESS_HIGH_BYTES  # largest private memory of a CPU rank without its tensors
