"""The memory of a GPU that a trainer's and vLLM's processes share, as in verl and OpenRLHF."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zerofit.plan.timeline import timeline
from zerofit.plan.zero3_gather import gathered_to_score
from zerofit.rollout.phases import ENGINE, GENERATE, SAVE, SYNC, TRAIN, Phase, RolloutMemory

OLD, REFERENCE = "old log-probs", "reference log-probs"
PROCESS, FRAGMENTATION = "process", "fragmentation"  # neither is allocated by torch
STATES, FROZEN = "actor states", "reference"


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


@dataclass(frozen=True, kw_only=True)
class OpenRlhfMemory(ProcessMemory):
    """The memory on one GPU in a step of OpenRLHF."""

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step, in order."""
        states = {} if STATES in self.resident else {STATES: self._states}
        resident = self.memory.static_bytes + self.memory.breakdown.get("workspaces", 0)
        weights = {f"{ENGINE} weights": self.engine_weights}
        # of one parameter, which CUDA IPC shares (trainer/ray/ppo_actor.py, _handle_cuda_ipc)
        sent = {"copied parameter": self._largest}
        if self.layout.zero_stage == 3:
            sent["gathered parameter"] = self._largest
        parts: dict[str, Mapping[str, int]] = {GENERATE: self._awake(), OLD: self._asleep | self._scoring}
        if self._reference:
            parts[REFERENCE] = self._asleep | self._scoring
        parts[TRAIN] = states | self._asleep | {"training step": self.memory.peak_bytes - resident}
        parts[SYNC] = {**self._asleep, **weights, **sent}
        parts[SAVE] = {**self._asleep, **weights}
        return tuple(self._phase(name, sizes) for name, sizes in parts.items())

    @cached_property
    def resident(self) -> dict[str, int]:
        """Bytes that stay on the GPU in all phases, by kind: what is not offloaded."""
        kinds = {
            "actor weights": self._weights,
            # --ds.enable_sleep offloads all states but the 16-bit weights (utils/deepspeed/deepspeed_utils.py)
            STATES: 0 if self.settings.optimizer_offload else self._states,
            FROZEN: self._frozen if self._reference and not self.settings.reference_offload else 0,
            "workspaces": self.memory.breakdown.get("workspaces", 0),
            # the reference's process has a context, too
            PROCESS: self.process_bytes + (self.context_bytes if self._reference else 0),
        }
        return {kind: size for kind, size in kinds.items() if size}

    @property
    def carried_bytes(self) -> int:
        """Bytes of the actor's states that a step moves between GPU and host. Both directions count."""
        return 2 * self._states if self.settings.optimizer_offload else 0

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank: what is offloaded, and a sleeping vLLM's weights."""
        total = self.memory.host_bytes + (self._states if self.settings.optimizer_offload else 0)
        total += self._frozen if self._reference and self.settings.reference_offload else 0
        return total + (self.engine_weights if self.settings.vllm_enable_sleep_mode else 0)

    @property
    def _weights(self) -> int:
        """Bytes of the actor's 16-bit weights, which only stage 3 divides."""
        share = self.layout.zero_ranks if self.layout.zero_stage == 3 else 1
        return round(self.layout.element_bytes * self.profile.parameters / share)

    @property
    def _frozen(self) -> int:
        """Bytes of the reference's weights."""
        return self._weights  # stage 3 divides them like the actor's weights (deepspeed.py, get_ds_eval_config)

    @property
    def _states(self) -> int:
        """Bytes of the actor's states other than the 16-bit weights."""
        return max(0, self.memory.static_bytes - self._weights)

    @cached_property
    def _scoring(self) -> dict[str, int]:
        """Memory at the peak of a forward without gradients, which is in a block or in the head."""
        samples, costs = self.scored, self.profile.costs_of(self._key)
        # During a block, the model also keeps the embeddings and the block's input.
        inputs = 2 * costs[0].output_bytes.at(samples)
        blocks = [cost for layer, cost in zip(self.profile.layers, costs, strict=True) if layer.count > 1]
        layers = [inputs + cost.forward_peak_bytes.at(samples) for cost in blocks]
        logits = inputs + costs[-1].forward_peak_bytes.at(samples)
        kinds = {"logits" if logits > max(layers, default=0) else "activations": round(max((logits, *layers)))}
        if self.layout.zero_stage == 3:
            line = timeline(self.profile, self._key)
            kinds["gathered parameters"] = gathered_to_score(line, self.layout)
        return kinds
