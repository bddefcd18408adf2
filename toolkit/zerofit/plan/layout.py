"""One layout that a plan considers, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """Everything that decides memory and time of a run, besides model and machine."""

    zero_stage: int
    micro_batch: int  # samples
    accumulation: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    precision: str = "bf16"
    checkpointing: bool = False
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    bucket: int = 50_000_000  # elements of reduce_bucket_size and allgather_bucket_size
    prefetch: int = 0  # elements of stage3_prefetch_bucket_size
    persistence: int = 0  # elements of stage3_param_persistence_threshold
    max_live: int = 1_000_000_000  # elements of stage3_max_live_parameters
    overlap: bool = False  # overlap_comm: a second bucket

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.sp

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch * self.accumulation * self.dp


@dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """Bytes on the rank that needs most."""

    peak_bytes: int  # device, allocated
    peak_phase: str  # "init", "forward", "backward" or "step"
    static_bytes: int  # device, between steps
    host_bytes: int  # of this rank's process
    nvme_bytes: int
    breakdown: dict[str, int]  # kind -> bytes at the peak; sums to peak_bytes
