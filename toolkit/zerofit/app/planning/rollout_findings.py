"""Find problems and wasted memory of a trainer with its engine; name the settings to change."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.rollout.phases import MERGED, RolloutMemory
from zerofit.spec.units import shown_bytes

LARGE = 0.08  # a part that needs more than this share of the GPU is a finding


def findings(memory: RolloutMemory) -> Iterator[tuple[str, str]]:
    """Yield a slug and a message for each problem, most urgent first."""
    # Each finding is a rule of its own. They do not exclude one another, since several settings may be wrong.
    engine, trainer = memory.engine, memory.settings.trainer
    total, highest = memory.fit.device_available_bytes, memory.highest
    if memory.room < 0:
        kind, size = max(highest.parts.items(), key=lambda part: part[1])
        lacks = shown_bytes(-memory.room)
        yield (
            "phase",
            f"{highest.name} needs {lacks} more than each GPU has; its largest part is {kind}, {shown_bytes(size)}",
        )
    if engine and engine.sequences < 1:
        yield (
            "no-cache",
            f"vLLM needs gpu_memory_utilization {engine.smallest_utilization:.2f} or more, but only "
            f"{memory.largest_utilization:.2f} is safe",
        )
    if engine and not memory.settings.vllm_enable_sleep_mode:
        size = shown_bytes(engine.requested)
        yield (
            "cache-awake",
            f"weights and KV cache of vLLM stay on the GPU during training; sleep mode would free {size}",
        )
    if engine and engine.requested > total - sum(memory.resident.values()):
        yield (
            "budget-of-total",
            "gpu_memory_utilization is a share of the whole GPU: vLLM does not start if the training leaves less free",
        )
    logits = max((phase.parts.get("logits", 0) for phase in memory.phases), default=0)
    if logits > LARGE * total:
        size = shown_bytes(logits)
        change = "set use_fused_kernels=true, which avoids them, or " if trainer == "verl" else ""
        twice = " (twice that in float32)" if trainer == "trl" else ""
        yield "logits", f"computing log-probs needs {size} for logits{twice}: {change}lower the micro batch"
    if trainer == "verl" and memory.layout.keeps_full_gradients:
        size = shown_bytes(memory.layout.full_gradient_bytes * memory.profile.trained)
        yield (
            "full-gradients",
            f"each GPU keeps gradients of all weights, {size}, until the last micro batch: "
            "use_no_sync_for_gradient_accumulation=false avoids it (0.9.0 has no such setting)",
        )
    weights = memory.layout.element_bytes * memory.profile.parameters
    if memory.profile.scored == "reentrant" and memory.layout.zero_stage == 3 and weights > LARGE * total:
        yield (
            "reference-in-engine",
            "the reference runs in the engine between forward and backward, so ZeRO-3 gathers all weights, "
            f"{shown_bytes(weights)}, and keeps them until the end of the backward; "
            "with precompute_ref_log_probs=true, it runs before the training",
        )
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
