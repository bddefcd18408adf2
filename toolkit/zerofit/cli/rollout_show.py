"""The printed answers of `zerofit plan --serve` and `--method`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerofit.cli.console import fitting_table, out, print_facts, print_verdict
from zerofit.rollout.methods import METHODS, WITH_PROCESSES
from zerofit.spec.units import counted, shown_bytes

if TYPE_CHECKING:
    from zerofit.app.planning.rollouts import Arrangement, RolloutPlan
    from zerofit.app.planning.serving import ServingPlan

PARTS = 3  # of a phase's memory that its row names


def show_serving(plan: ServingPlan) -> None:
    """Print whether a model fits in vLLM, what uses the memory, and which settings are safe."""
    engine, settings, console = plan.engine, plan.engine.settings, out()
    memory = shown_bytes(plan.cluster.device.memory_bytes)
    where = f"{settings.tensor_parallel_size} x {plan.cluster.label} ({memory})"
    verdict = "FITS" if engine.fits else "DOES NOT FIT"
    release = ".".join(map(str, settings.release))
    print_verdict(console, verdict, f"{engine.model.name} in vLLM {release} on {where}", engine.fits)
    print_facts(console, _serving_facts(plan))


def _serving_facts(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    engine, settings = plan.engine, plan.engine.settings
    if plan.problem:
        yield "because", plan.problem
    for remedy in plan.remedies if plan.problem else ():
        yield "try", f"--rollout {remedy}"
    # vLLM divides the memory that is left into blocks of the KV cache. Their number limits the sequences at once.
    if engine.blocks:
        tokens = engine.cache.tokens(engine.blocks, engine.need)
        blocks = f"{engine.blocks:,} blocks, {tokens:,} tokens"
        yield "KV cache", f"{shown_bytes(engine.cache_bytes)} on each GPU: {blocks}"
        sequences = f"{engine.sequences:,.1f} sequences of {settings.max_model_len:,} tokens"
        limit = f", at most {settings.max_num_seqs:,} of any length (max_num_seqs)"
        copies = f"; {plan.copies} engines on {plan.cluster.ranks} GPUs" if plan.copies > 1 else ""
        yield "at once", f"{sequences}{limit}{copies}"
    parts = ", ".join(f"{part.name} {shown_bytes(part.bytes)}" for part in engine.parts)
    allowed = f"{settings.gpu_memory_utilization:g} of {shown_bytes(plan.cluster.device.memory_bytes)}"
    yield "memory", f"{shown_bytes(engine.requested)} ({allowed}): {parts}"
    if engine.fits:
        low, high = engine.smallest_utilization, engine.largest_utilization
        yield "safe", f"gpu_memory_utilization {low:.2f} to {high:.2f}; max_model_len up to {engine.longest:,}"
    batch = f"{settings.max_num_batched_tokens:,} tokens per step (max_num_batched_tokens), {settings.dtype}"
    if settings.quantization:
        published = " as published" if settings.quantization == engine.model.published else ""
        batch += f", weights in {settings.quantization}{published}"
    if engine.model.reads_images:
        yield "note", "without the activations of the image encoder, as with --limit-mm-per-prompt image=0"
    yield "assumed", f"{batch}; other releases and settings: --rollout release=0.19,enforce_eager=true,..."


def show_rollouts(plan: RolloutPlan) -> None:
    """Print whether a method fits, its memory by phase, and how it can share the GPUs with vLLM."""
    best, console = plan.best, out()
    total = shown_bytes(plan.cluster.device.memory_bytes)
    where = f"{plan.cluster.ranks} x {plan.cluster.label} ({total})"
    verdict = "FITS" if best.fits else "DOES NOT FIT"
    print_verdict(console, verdict, f"{plan.name} of {plan.setup.profile.model} on {where}: {best.name}", best.fits)
    console.print()
    rows = []
    for phase in best.memory.phases:
        largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:PARTS]
        parts = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in largest)
        rows.append({"phase": phase.name, "memory": shown_bytes(phase.bytes), "largest parts": parts})
    highest = best.memory.highest.name
    styles = ["bold" if row["phase"] == highest else None for row in rows]
    console.print(fitting_table(console, rows, ("memory",), tuple(rows[0]), "largest parts", styles))
    console.print()
    # An arrangement is a way in which trainer and vLLM share the GPUs.
    rows = [_arrangement(row) for row in plan.arrangements]
    styles = [None if row.fits else "red" for row in plan.arrangements]
    console.print(fitting_table(console, rows, tuple(rows[0])[2:], tuple(rows[0]), "training", styles))
    console.print()
    print_facts(console, _rollout_facts(plan))


def _arrangement(row: Arrangement) -> dict[str, str]:
    """Return the cells of an arrangement; those about vLLM only if it is used."""
    cells = {
        "arrangement": row.name,
        "training": str(row.ranked.layout),
        "step": f"{row.time.step_s:.3g} s",
        "highest": shown_bytes(row.memory.highest.bytes),
    }
    if row.engine is None:
        return cells
    return cells | {
        "generate": f"{row.time.generate_s:.3g} s",
        "utilization": f"{row.engine.settings.gpu_memory_utilization:.2f}",
        "tokens/s": f"{row.time.tokens_per_s:,.0f}",
    }


def _rollout_facts(plan: RolloutPlan) -> Iterator[tuple[str, str]]:
    best, settings = plan.best, plan.settings
    highest = best.memory.highest
    free = best.memory.room
    balance = f"{shown_bytes(free)} are left" if free >= 0 else f"{shown_bytes(-free)} are missing"
    yield "highest", f"{highest.name}: {shown_bytes(highest.bytes)} on each GPU; {balance}"
    for _, message in plan.findings:
        yield "note", message
    if best.memory.engine and best.fits:
        engine = best.memory.engine
        largest, smallest = best.memory.largest_utilization, engine.smallest_utilization
        sequences = f"{min(engine.sequences, engine.settings.max_num_seqs or 0):,.0f} completions at once"
        share = f"{settings.own_name('vllm_gpu_memory_utilization')} {engine.settings.gpu_memory_utilization:.2f}"
        yield "vLLM", f"{share}: {sequences}; {smallest:.2f} to {largest:.2f} are safe"
    if best.memory.host_bytes:
        yield "host", f"{shown_bytes(best.memory.host_bytes)} per rank"
    batch = f"{counted(best.ranked.layout.global_batch, 'sequence')} of {plan.setup.profile.seq_len:,} tokens per step"
    lengths = f" (each with {settings.max_completion_length:,} generated tokens)" if best.engine else ""
    # Which models are in memory in which phase depends on the trainer.
    trl = "TRL 1.16"
    if plan.name in WITH_PROCESSES:
        trl = "TRL 1.15 and later; others: --rollout trainer=verl or openrlhf"
    elif METHODS[plan.name].head is None:
        trl = "GRPO in TRL with critic and reward model, since TRL 1.16 has no PPO"
    other = " (FSDP 1, the default; or fsdp2)" if settings.strategy == "fsdp" else ""
    trainer = {
        "trl": trl,
        "verl": f"verl {settings.trainer_release} with strategy={settings.strategy}{other}",
        "openrlhf": "OpenRLHF with --train.colocate_all and --ds.packing_samples",
    }[settings.trainer]
    yield "assumed", f"{batch}{lengths}; all have the full length; the phases are those of {trainer}"
    for path in plan.written:
        yield "written", str(path)
    if best.fits and plan.files:
        names = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
        yield "next", plan.command or f"--write DIR writes {plan.files} for {names[settings.trainer]}"
