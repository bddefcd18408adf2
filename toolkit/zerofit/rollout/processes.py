"""The memory of a GPU that a trainer's and vLLM's processes share, as in verl and OpenRLHF."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from zerofit.plan.fsdp2 import block_moments, block_persistent, block_step, root_elements
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import NOTHING, Point, StageTimeline, add, timeline
from zerofit.plan.zero3_gather import gathered_to_score
from zerofit.rollout.phases import ENGINE, GENERATE, SAVE, SYNC, TRAIN, Phase, RolloutMemory

OLD, REFERENCE = "old log-probs", "reference log-probs"
PROCESS, FRAGMENTATION = "process", "fragmentation"  # neither is allocated by torch
STATES, FROZEN = "actor states", "reference"
BUCKET_BYTES = 2**31  # update_weights_bucket_megabytes (trainer/config/rollout/rollout.yaml)
WEIGHTS, MOMENTS = "actor weights", "actor moments"
ROOT, REFERENCE_ROOT = "actor's gathered root", "reference's gathered root"  # left by a forward of FSDP 1


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
        block = self._block_peak(costs, samples)
        logits = 2 * costs[0].output_bytes.at(samples) + costs[-1].forward_peak_bytes.at(samples)
        kinds = {"logits" if logits > block else "activations": round(max(logits, block))}
        if self.layout.zero_stage == 3:
            line = timeline(self.profile, self._key)
            kinds["gathered parameters"] = gathered_to_score(line, self.layout)
        return kinds


@dataclass(frozen=True, kw_only=True)
class VerlMemory(ProcessMemory):
    """The memory on one GPU in a step of verl."""

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step, in order."""
        parts: dict[str, Mapping[str, int]] = {GENERATE: self._awake()}
        embeddings = self.profile.costs_of(self._key)[0].output_bytes
        inputs = 2 * embeddings.fixed, 2 * embeddings.per_sample  # the embeddings and a layer's input
        parts[OLD] = self._weights | self._asleep | scoring(self._line, self.layout, inputs, self.scored)
        if self._reference:
            host = replace(self.layout, offload_optimizer="cpu", offload_param="cpu")
            # The reference's own root is counted in its forward; the actor's is left by the old log-probs.
            roots = {REFERENCE_ROOT: 0, ROOT: 0 if self.layout.replicas > 1 else self._root_bytes}
            parts[REFERENCE] = self._asleep | roots | scoring(self._line, host, inputs, self.scored)
        parts[TRAIN] = self._weights | self._moments | self._asleep | {"training step": self._step}
        copied = {"copied parameter": self._largest_stored // self.layout.shard_ranks} if self._unfolds else {}
        parts[SAVE] = self._weights | self._asleep | self._full_root | copied
        parts[SYNC] = {**self._asleep, f"{ENGINE} weights": self.engine_weights, **self._sent}
        return tuple(self._phase(name, sizes) for name, sizes in parts.items())

    @cached_property
    def resident(self) -> dict[str, int]:
        """Bytes that stay on the GPU in all phases: the context, and what is not offloaded."""
        kinds: dict[str, int] = {}
        if not self._offloads("param_offload"):
            kinds |= self._weights
        if not self._offloads("optimizer_offload"):
            kinds |= self._moments
        if self._reference:
            kinds[REFERENCE_ROOT] = self._root_bytes
        kinds |= {"workspaces": self.memory.breakdown.get("workspaces", 0), PROCESS: self.process_bytes}
        return {kind: size for kind, size in kinds.items() if size}

    @property
    def carried_bytes(self) -> int:
        """Bytes of the actor that a step moves between GPU and host. Both directions count."""
        # Weights are moved to the GPU and back twice, moments once.
        weights = 2 * sum(self._weights.values()) if self._offloads("param_offload") else 0
        moments = sum(self._moments.values()) if self._offloads("optimizer_offload") else 0
        return 2 * (weights + moments)

    # Copies on the host are page-locked (utils/fsdp_utils.py, offload_fsdp2_model_to_cpu). The reference always uses
    # FSDP's offload policy. Like the actor, it is in float32 (`forward_only`).
    @property
    def host_bytes(self) -> int:
        """Host bytes of a rank: offloaded states, the reference and, with adapters, vLLM's weights."""
        host = replace(self.layout, offload_optimizer="cpu", offload_param="cpu")
        parts = block_persistent(self._line, host).host
        total = self.memory.host_bytes if self.layout.offload_param != "none" else 0
        if self._offloads("param_offload"):
            total += parts["parameters"]
        if self._offloads("optimizer_offload"):
            total += self._moments.get(MOMENTS, 0)
        if self._reference:  # FSDP 1 also allocates its gradients (init_flat_param_attributes)
            total += parts["parameters"] + (parts["gradients"] if self.layout.flattens else 0)
        if self.settings.vllm_enable_sleep_mode and self._adapts:
            total += self.engine_weights
        return total

    def _offloads(self, name: str) -> bool:
        """Return whether the setting `name` offloads the actor between phases."""
        # FSDP's offload policy replaces this setting.
        return bool(getattr(self.settings, name)) and self.layout.offload_param == "none"

    @cached_property
    def _line(self) -> StageTimeline:
        return timeline(self.profile, self._key)

    @cached_property
    def _weights(self) -> dict[str, int]:
        """The actor's shard of the weights."""
        kept = block_persistent(self._line, self.layout).device
        if self.layout.offload_param != "none":
            return {}
        # With adapters, frozen weights are also in float32 (`_build_module`).
        wider = self.layout.weight_bytes - self.layout.element_bytes
        frozen = sum(parameter.numel for parameter in self._line.frozen)
        return {WEIGHTS: kept["parameters"] + wider * frozen // self.layout.shard_ranks}

    @cached_property
    def _moments(self) -> dict[str, int]:
        """The actor's shard of the optimizer state."""
        kept = block_persistent(self._line, self.layout).device
        return {MOMENTS: kept["optimizer state"]} if "optimizer state" in kept else {}

    @property
    def _step(self) -> int:
        """Bytes of training without weights and moments: the peak of the passes or of AdamW."""
        passes = self.memory.peak_bytes - self.memory.static_bytes - self.memory.breakdown.get("workspaces", 0)
        # torch's `foreach` AdamW is not fused: it takes the square root of all second moments at once, beside the
        # gradients (torch/optim/adamw.py).
        gradients = next(block_step(self._line, self.layout)).gradients
        return max(passes, 2 * gradients)

    @property
    def _sent(self) -> dict[str, int]:
        """What a weight sync allocates beside vLLM's weights, by kind (`get_per_tensor_param`)."""
        layout, bucket = self.layout, {"weight bucket": BUCKET_BYTES}  # both processes share the bucket
        if self._adapts:
            # An offloaded actor is on the GPU during the transfer. FSDP 1 gathers all weights in their own precision to
            # read adapters (`summon_full_params`), and copies a rank's part of the blocks.
            blocks = self._line.elements - root_elements(self._line, layout)
            unfolded = layout.weight_bytes * (self._line.elements + blocks // layout.shard_ranks)
            return self._weights | ({"gathered parameters": unfolded} if self._unfolds else bucket)
        gathered = {"gathered parameter": self._largest_stored}
        sent = bucket | gathered | (self._weights if self.settings.is_early else {})
        if not layout.flattens:
            return sent
        # FSDP 1 copies a rank's part of all weights, the root's last, while the root is gathered. This copy stays
        # during the transfer.
        tied = self._largest_stored if self._line.tied else 0  # the state dict has a tied matrix twice
        copied = {"copied weights": (layout.weight_bytes * self._line.elements + tied) // layout.shard_ranks}
        copying = self._weights | copied | self._full_root
        return max(copying, sent | copied, key=lambda parts: sum((self.resident | parts).values()))

    @property
    def _unfolds(self) -> bool:
        """Whether the engine is FSDP 1 with several ranks, which gathers flat parameters."""
        return self.layout.flattens and self.layout.shard_ranks > 1

    @property
    def _largest_stored(self) -> int:
        """Bytes of the largest parameter in the precision of the weights."""
        return self.layout.weight_bytes * self._largest // self.layout.element_bytes

    @property
    def _root_bytes(self) -> int:
        """Bytes of the gathered root in 16 bits. Only FSDP 1 leaves it gathered."""
        return self.layout.element_bytes * root_elements(self._line, self.layout) if self._unfolds else 0

    @property
    def _full_root(self) -> dict[str, int]:
        """The root that FSDP 1 gathers for a state dict, and a copy of its largest parameter."""
        stored = self._root_bytes * self.layout.weight_bytes // self.layout.element_bytes
        return {"gathered root": stored + self._largest_stored} if self._unfolds else {}


def scoring(line: StageTimeline, layout: PlannedLayout, inputs: Point, samples: int) -> dict[str, int]:
    """Return the peak of a forward without gradients, with the parameters gathered for it.

    `samples`: number of samples in the forward. `inputs`: bytes of the embeddings and of a layer's input, which the
    model keeps besides the layer's activations.
    """
    forward = []
    for layer, before, points in line.forward:
        base = inputs if layer else NOTHING
        unsaved = add(base, (-before[0], -before[1]))  # in place of what earlier layers save for the backward
        forward.append((layer, base, tuple(add(point, unsaved) for point in points)))
    head = forward[-1][0]
    without_backward = replace(line, forward=tuple(forward))
    moments = [
        (live.activations[0] + live.activations[1] * samples, live.gathered, live.layer == head)
        for live in block_moments(without_backward, replace(layout, accumulation=1))[0]
    ]
    activations, gathered, in_head = max(moments, key=lambda moment: moment[0] + moment[1])
    kinds = {"logits" if in_head else "activations": round(activations), "gathered parameters": gathered}
    return {kind: size for kind, size in kinds.items() if size}
