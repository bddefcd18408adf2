"""What `zerofit plan --serve` and `--method` print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerofit.cli.console import out, print_facts, print_verdict
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.planning.serving import ServingPlan


def show_serving(plan: ServingPlan) -> None:
    """Print whether a model fits in vLLM, what its memory holds, and which settings are safe."""
    engine, s, console = plan.engine, plan.engine.settings, out()
    where = f"{s.tensor_parallel_size} x {plan.cluster.label} ({shown_bytes(plan.cluster.device.memory_bytes)})"
    verdict = "FITS" if engine.fits else "DOES NOT FIT"
    release = ".".join(map(str, s.release))
    print_verdict(console, verdict, f"{engine.model.name} in vLLM {release} on {where}", engine.fits)
    print_facts(console, _serving(plan))


def _serving(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    engine, s = plan.engine, plan.engine.settings
    if plan.problem:
        yield "because", plan.problem
    for remedy in plan.remedies if plan.problem else ():
        yield "try", f"--rollout {remedy}"
    if engine.blocks:
        tokens = engine.cache.tokens(engine.blocks, engine.need)
        blocks = f"{engine.blocks:,} blocks, {tokens:,} tokens"
        yield "KV cache", f"{shown_bytes(engine.cache_bytes)} on each GPU: {blocks}"
        each = f"{engine.sequences:,.1f} sequences of {s.max_model_len:,} tokens"
        limit = f", at most {s.max_num_seqs:,} of any length (max_num_seqs)"
        copies = f"; {plan.copies} such engines on {plan.cluster.ranks} GPUs" if plan.copies > 1 else ""
        yield "at once", f"{each}{limit}{copies}"
    parts = ", ".join(f"{part.name} {shown_bytes(part.bytes)}" for part in engine.parts)
    allowed = f"{s.gpu_memory_utilization:g} of {shown_bytes(plan.cluster.device.memory_bytes)}"
    yield "memory", f"{shown_bytes(engine.requested)} ({allowed}): {parts}"
    if engine.fits:
        low, high = engine.smallest_utilization, engine.largest_utilization
        yield "safe", f"gpu_memory_utilization {low:.2f} to {high:.2f}; max_model_len up to {engine.longest:,}"
    batch = f"{s.max_num_batched_tokens:,} tokens a step (max_num_batched_tokens), {s.dtype}"
    yield "assumed", f"{batch}; other releases and settings: --rollout release=0.19,enforce_eager=true,..."
