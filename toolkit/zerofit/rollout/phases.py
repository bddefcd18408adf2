"""The memory of a GPU in each phase of a reinforcement learning step, with TRL's trainers.

    phase          on the GPU besides what is resident
    generate       vLLM: weights, activations and KV cache
    reward         a forward of the reward model
    log-probs      a forward of the model and of its reference, without gradients
    train          a training step
    sync weights   vLLM's weights, and gathered parameters that are copied to them
    checkpoint     a gathered parameter

Outside "generate", vLLM sleeps or stays awake. A phase has the bytes of each kind, so that a table can show them.
Findings name problems, wasted memory, and the settings to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from zerofit.plan.fit import Fit
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.plan.timeline import FROZEN, StageTimeline, timeline
from zerofit.plan.zero3_gather import gathered_to_score
from zerofit.rollout.heads import TILE_TOKENS, TILE_WORDS
from zerofit.rollout.methods import RolloutMethod, RolloutSettings
from zerofit.rollout.vllm import GRAPHS_COUNTED, STEP, EngineMemory
from zerofit.spec.profile import LayerCost, ModuleCall, Profile, setting
from zerofit.spec.units import shown_bytes

GENERATE, REWARD, LOGPROBS, TRAIN, SYNC, SAVE = "generate", "reward", "log-probs", "train", "sync weights", "checkpoint"
SENT_BYTES, SENT_BUFFERS = 2**30, 2  # of weights for a server (vllm/distributed/weight_transfer/packed_tensor.py)
MERGED = "merged adapter"
ENGINE = "vLLM"  # names of parts that the engine allocates begin with this
LARGE = 0.08  # a part that needs more than this share of the GPU is a finding


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a step, with the bytes of each kind that it needs on one GPU."""

    name: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """The memory on one GPU in a step: training, frozen models, and vLLM if it shares the GPU."""

    method: RolloutMethod
    settings: RolloutSettings
    profile: Profile
    layout: PlannedLayout
    memory: LayoutMemory  # of the training
    fit: Fit  # of the training
    engine: EngineMemory | None  # None: vLLM runs on other GPUs, or nothing is generated
    context_bytes: int = 0  # of vLLM's own process; TRL's runs it in the trainer's

    @cached_property
    def resident(self) -> dict[str, int]:
        """Bytes that stay on the GPU in all phases, by kind: models and the forecast's margin."""
        share = self.layout.shard_ranks if self.layout.zero_stage == 3 else self.layout.tp
        parameters = self.profile.parameters - (self.profile.trained if self._adapts else 0)
        frozen = round(self.layout.element_bytes * parameters / share)
        kinds = {
            "trained model": self.memory.static_bytes,
            "critic": self.memory.static_bytes if self.method.critic else 0,
            "reference": frozen if self._reference else 0,
            "reward model or teacher": frozen if self.method.scorer else 0,
            "workspaces": self.memory.breakdown.get("workspaces", 0),
            "margin": round(self.fit.margin_bytes),
        }
        return {kind: size for kind, size in kinds.items() if size}

    @property
    def _reference(self) -> bool:
        """Whether a frozen copy is needed; with adapters, the base model is the reference."""
        return self.settings.needs_reference(self.method) and not self._adapts

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step, in order."""
        gradients = self._accumulated if self.method.pairs else {}  # TRL generates for each micro batch
        parts = {GENERATE: self._awake() | gradients} if self.engine else {}
        if self.method.scores_first:
            if self.method.scorer:
                parts[REWARD] = {**self._asleep, **self._forward(scores=True)}
            parts[LOGPROBS] = {**self._asleep, **self._forward()}
        # The training's peak without what is resident; a frozen model's forward within the step may need more.
        resident = self.memory.static_bytes + self.resident.get("workspaces", 0)
        step = max(self.memory.peak_bytes - resident, 0 if self.method.scores_first else self._frozen_forward)
        parts[TRAIN] = {**self._asleep, "training step": step}
        if self.engine:
            running = {} if self.settings.vllm_enable_sleep_mode else self._awake()
            weights = {f"{ENGINE} weights": self.engine.weights}
            parts[SYNC] = {**self._asleep, **weights, **self._gathered(), **gradients, **running}
        elif self.method.generates:
            parts[SYNC] = self._sent()
        parts[SAVE] = {**self._asleep, "gathered parameter": self._largest}
        return tuple(Phase(name=name, parts={**self.resident, **sizes}) for name, sizes in parts.items())

    @property
    def highest(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def room(self) -> int:
        """Bytes that are free on the GPU in the highest phase; negative if this phase does not fit."""
        return self.fit.device_available_bytes - self.highest.bytes

    @property
    def fits(self) -> bool:
        """Whether all phases fit, and a sequence of full length fits into the engine's cache."""
        return self.room >= 0 and self.fit.exceeded is None and (self.engine is None or self.engine.sequences >= 1)

    @property
    def largest_utilization(self) -> float:
        """The largest `gpu_memory_utilization` that is safe in every phase, a multiple of 0.01."""
        assert self.engine
        total, of_engine = self.fit.device_available_bytes, max(self.engine.requested, self.engine.counted)
        # In phases with a KV cache, all that is not vLLM's own stays when the utilization changes.
        others = [phase.bytes - of_engine for phase in self.phases if f"{ENGINE} KV cache" in phase.parts]
        return max(0.0, math.floor(STEP * (total - max(others)) / total) / STEP)

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank: offloaded states and, at sleep level 1, the engine's weights."""
        sleeping = self.engine and self.settings.vllm_enable_sleep_mode and self.settings.sleep_level == 1
        return self.memory.host_bytes + (self.engine.weights if self.engine and sleeping else 0)  # page-locked

    def _awake(self) -> dict[str, int]:
        """Return the running engine's memory by kind."""
        assert self.engine
        engine = self.engine
        kinds = {
            f"{ENGINE} weights": engine.weights,
            f"{ENGINE} activations": engine.counted - engine.weights,
            f"{ENGINE} KV cache": max(0, engine.cache_bytes),
        }
        # Old releases do not count CUDA graphs in their budget, so these come on top of it.
        if engine.graphs and engine.settings.release < GRAPHS_COUNTED:
            kinds[f"{ENGINE} graphs"] = engine.graphs
        return kinds | self._context

    @cached_property
    def _asleep(self) -> dict[str, int]:
        """The memory of an engine that is not generating, by kind."""
        if self.engine is None:
            return {}
        if not self.settings.vllm_enable_sleep_mode:
            return self._awake()
        # A sleeping engine keeps CUDA graphs and memory outside torch.
        return {f"{ENGINE} asleep": self.engine.graphs + self.engine.outside} | self._context

    @property
    def _context(self) -> dict[str, int]:
        return {f"{ENGINE} context": self.context_bytes} if self.context_bytes else {}

    @property
    def _key(self) -> str:
        """The key in `Profile.costs` for a forward without gradients."""
        layout = self.layout
        # Like checkpointing, such a forward frees activations.
        keys = [setting(layout.precision, checkpoint, layout.tp, layout.sp, layout.ep) for checkpoint in (True, False)]
        return next(key for key in keys if key in self.profile.costs)

    def _forward(self, scores: bool = False) -> dict[str, int]:
        """Return the peak of a forward without gradients: in a block, or at the logits' log-softmax.

        `scores`: whether the forward is that of the reward model or teacher, instead of the trained model and its
        reference.
        """
        layout, key = self.layout, self._key
        costs = self.profile.costs_of(key)
        gathered = 0
        if layout.zero_stage == 3:
            line = timeline(self.profile, key)
            copied = _scorer(line) if scores else line if self._reference else None
            gathered = gathered_to_score(line, layout, copied)
        length = self.profile.seq_len or 0
        scored = self.settings.max_completion_length if self.method.generates else length
        tokens = layout.micro_batch * (scored + 1)
        token_bytes = self._largest // (self.profile.hidden_size or 1)  # of a token's logits
        logits = 2 * tokens * token_bytes  # the logits and their log-softmax
        if scores:
            logits = 0
        elif self.method.head == "whole":
            logits += layout.micro_batch * length * token_bytes
        elif self.method.head:
            logits = layout.element_bytes * min(tokens, TILE_TOKENS) * TILE_WORDS
        size = round(max(logits, self._block_peak(costs, layout.micro_batch)))
        kinds = {"logits" if size == logits else "activations": size, "gathered parameters": gathered}
        return {kind: size for kind, size in kinds.items() if size}

    def _block_peak(self, costs: Sequence[LayerCost], samples: int) -> float:
        """Return the peak within the model's blocks in a forward without gradients."""
        # During a block, the model also keeps the embeddings and the block's input.
        inputs = 2 * costs[0].output_bytes.at(samples)
        blocks = [cost for layer, cost in zip(self.profile.layers, costs, strict=True) if layer.count > 1]
        return max((inputs + cost.forward_peak_bytes.at(samples) for cost in blocks), default=0.0)

    @property
    def _frozen_forward(self) -> int:
        """Bytes of the training while a frozen model runs between forward and backward."""
        layout = self.layout
        costs = self.profile.costs_of(layout.setting)
        pairs = zip(self.profile.layers, costs, strict=True)
        saved = sum(layer.count * cost.saved_bytes.at(layout.micro_batch) for layer, cost in pairs)
        models = (False, True) if self.method.scorer else (False,)
        forward = max(sum(self._forward(scores).values()) for scores in models)
        return sum((round(saved), *self._accumulated.values(), forward))

    @cached_property
    def _accumulated(self) -> dict[str, int]:
        """Gradients of earlier micro batches during the forward of a later one, by kind."""
        if self.layout.zero_stage == 3:
            return {}  # they are already part of the trained model
        moments = Forecaster(self.profile).along(self.layout)
        kinds = [moment.bytes for moment in moments if moment.phase == "forward"][-1]
        return {kind: kinds[kind] for kind in ("gradients", "communication buckets") if kind in kinds}

    @property
    def _largest(self) -> int:
        """Bytes of the largest parameter."""
        sizes = [size for layer in self.profile.layers for size in layer.matrices + layer.frozen]
        return self.layout.element_bytes * max(sizes, default=0)

    def _sent(self) -> dict[str, int]:
        """Return rank 0's buffers for sending weights to a server."""
        weights = round(self.layout.element_bytes * self.profile.parameters)
        gathered = self._gathered()
        if size := gathered.get("gathered parameters"):
            # Stage 3 gathers all weights of a buffer at once.
            gathered["gathered parameters"] = max(min(SENT_BYTES, weights), size)
        return {"weight buffers": min(SENT_BUFFERS * SENT_BYTES, weights), **gathered}

    def _gathered(self) -> dict[str, int]:
        """Return the memory for copying weights to vLLM, by kind."""
        kinds = {MERGED: self._merged} if self._adapts else {}
        if self.layout.zero_stage == 3:
            # With adapters, all parameters are gathered before the adapters are merged; else one after the other.
            size = self.layout.element_bytes * self.profile.parameters if self._adapts else self._largest
            kinds["gathered parameters"] = size
        return kinds

    @property
    def _adapts(self) -> bool:
        """Whether only adapters are trained."""
        return self.profile.trained < self.profile.parameters

    @property
    def _merged(self) -> int:
        """Bytes of an adapter's product for the largest matrix of a block, before and after scaling."""
        blocks = [layer.frozen + layer.quantized for layer in self.profile.layers if layer.count > 1]
        return 2 * self.layout.element_bytes * max((size for sizes in blocks for size in sizes), default=0)


@lru_cache(maxsize=64)
def _scorer(line: StageTimeline) -> StageTimeline:
    """Return the timeline of a reward model or teacher, which has no adapters."""
    calls = []
    for parameters, layer in zip(line.layers, line.calls, strict=True):
        trained = {n for n, parameter in enumerate(parameters) if parameter.group != FROZEN} if line.frozen else set()
        # Without `others`, since TRL reads a teacher's head in the loss, not in its model.
        calls.append(tuple(call._replace(others=()) for call in _without_adapters(layer, trained)))
    return replace(line, calls=tuple(calls), scored="never")


# A module with adapters is called inside peft's module, which is left out with its adapters:
#
#     begin peft | base | adapter A | adapter B | end peft   ->   base
def _without_adapters(calls: Iterable[ModuleCall], trained: Set[int]) -> list[ModuleCall]:
    """Return a layer's calls without adapters. `trained`: places of the adapters' parameters."""
    open_modules: list[list[list[ModuleCall]]] = [[]]  # the calls of each child; the first child is the begin itself
    for call in calls:
        if call.begins:
            open_modules.append([[call]])
            continue
        if len(open_modules) == 1:  # the module began in an earlier layer
            open_modules[-1].append([call])
            continue
        begin, *children = open_modules.pop()
        adapted = [child for child in children if child[0].places and trained >= set(child[0].places)]
        base = [child for child in children if child[0].places and child not in adapted]
        kept = chain(*base) if adapted and base else chain(begin, *children, [call])
        open_modules[-1].append(list(kept))
    return list(chain(*chain(*open_modules)))


def findings(memory: RolloutMemory) -> Iterator[tuple[str, str]]:
    """Yield a slug and a message for each problem, most urgent first."""
    # Each finding is a rule of its own. They do not exclude one another, since several settings may be wrong.
    engine, trainer = memory.engine, memory.settings.trainer
    total, highest = memory.fit.device_available_bytes, memory.highest
    if memory.room < 0:
        kind, size = max(highest.parts.items(), key=lambda part: part[1])
        text = f"{highest.name} needs {shown_bytes(-memory.room)} more than each GPU has"
        yield "phase", f"{text}; its largest part is {kind}, {shown_bytes(size)}"
    if engine and engine.sequences < 1:
        least, most = engine.smallest_utilization, memory.largest_utilization
        yield "no-cache", f"vLLM needs gpu_memory_utilization {least:.2f} or more, but only {most:.2f} is safe"
    if engine and not memory.settings.vllm_enable_sleep_mode:
        text = "weights and KV cache of vLLM stay on the GPU during training"
        yield "cache-awake", f"{text}; sleep mode would free {shown_bytes(engine.requested)}"
    if engine and engine.requested > total - sum(memory.resident.values()):
        text = "gpu_memory_utilization is a share of the whole GPU"
        yield "budget-of-total", f"{text}: vLLM does not start if the training leaves less free"
    logits = max((phase.parts.get("logits", 0) for phase in memory.phases), default=0)
    if logits > LARGE * total:
        size = shown_bytes(logits)
        change = "set use_fused_kernels=true, which avoids them, or " if trainer == "verl" else ""
        twice = " (twice that in float32)" if trainer == "trl" else ""
        yield "logits", f"computing log-probs needs {size} for logits{twice}: {change}lower the micro batch"
    if trainer == "verl" and memory.layout.keeps_full_gradients:
        size = shown_bytes(memory.layout.full_gradient_bytes * memory.profile.trained)
        text = f"each GPU keeps gradients of all weights, {size}, until the last micro batch"
        change = "use_no_sync_for_gradient_accumulation=false avoids it (0.9.0 has no such setting)"
        yield "full-gradients", f"{text}: {change}"
    weights = memory.layout.element_bytes * memory.profile.parameters
    if memory.profile.scored == "reentrant" and memory.layout.zero_stage == 3 and weights > LARGE * total:
        text = "the reference runs in the engine between forward and backward, so ZeRO-3 gathers all weights, "
        text += f"{shown_bytes(weights)}, and keeps them until the end of the backward"
        yield "reference-in-engine", f"{text}; with precompute_ref_log_probs=true, it runs before the training"
    if frozen := memory.resident.get("reference", 0):
        size = shown_bytes(frozen)
        change = " (twice that if dtype is float32); beta=0 or LoRA avoids it"
        change = "; ref.offload=true or algo.kl.init_coef=0 avoids it" if trainer == "openrlhf" else change
        yield "reference", f"the reference needs {size} in 16 bits{change}"
    merging = (phase.parts for phase in memory.phases if MERGED in phase.parts)
    if any(parts.get("gathered parameters", 0) > LARGE * total for parts in merging):
        yield "weights-twice", "to merge adapters, ZeRO-3 gathers all weights next to vLLM's copy: use ZeRO-2"
    if engine and 0 <= memory.room < 0.03 * total:
        yield "fragmentation", f"only {shown_bytes(memory.room)} are left for fragmentation after vLLM wakes up"
