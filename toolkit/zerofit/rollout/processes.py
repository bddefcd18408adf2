"""The memory of a GPU that a trainer's and vLLM's processes share, as in verl and OpenRLHF."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from zerofit.rollout.phases import ENGINE, Phase, RolloutMemory

OLD, REFERENCE = "old log-probs", "reference log-probs"
PROCESS, FRAGMENTATION = "process", "fragmentation"  # neither is allocated by torch


@dataclass(frozen=True, kw_only=True)
class ProcessMemory(RolloutMemory):
    """The memory on one GPU in a step, if vLLM runs in its own process."""

    process_bytes: int  # context and communicators of the trainer's process
    host_room: float  # bytes of host memory for each rank

    @property
    @abstractmethod
    def carried_bytes(self) -> int:
        """Bytes of the actor that a step moves between GPU and host. Both directions count."""

    @property
    def fits(self) -> bool:
        """Whether all phases fit on GPU and host, and the cache can store a full sequence."""
        return super().fits and self.host_bytes <= self.host_room

    @property
    def scored(self) -> int:
        """Number of samples in a forward that computes log-probs."""
        return self.settings.log_prob_micro_batch_size_per_gpu or self.layout.micro_batch

    @property
    def engine_weights(self) -> int:
        """Bytes of vLLM's weights."""
        assert self.engine
        return self.engine.weights

    def _phase(self, name: str, parts: Mapping[str, int]) -> Phase:
        """Return a phase, and add the trainer's fragmentation to its parts."""
        kinds = {**self.resident, **parts}
        # Fragmentation is a share of what the trainer's torch has allocated in this phase, not of the step's peak:
        # before vLLM wakes, verl and OpenRLHF return free blocks to the GPU (verl/utils/memory_utils.py,
        # aggressive_empty_cache; openrlhf/trainer/ray/ppo_actor.py).
        allocated = sum(size for kind, size in kinds.items() if not kind.startswith(ENGINE) and kind != PROCESS)
        share = max(0.0, self.fit.margin_bytes - self.process_bytes) / self.memory.peak_bytes
        kinds[FRAGMENTATION] = round(share * allocated)
        return Phase(name=name, parts={kind: size for kind, size in kinds.items() if size})
