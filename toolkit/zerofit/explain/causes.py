"""Decide why memory ran out, from a message's figures, traceback and the run's progress."""

from __future__ import annotations

from dataclasses import replace

from zerofit.explain.advice import NVIDIA_SMI, RECORD, RSS
from zerofit.explain.messages import Shortage
from zerofit.explain.other_causes import CERTAIN, OTHER_RULES, host
from zerofit.explain.result import LATER, UNKNOWN, Cause, LogEvidence, Rule
from zerofit.explain.tracebacks import (
    BACKWARD,
    DATA,
    EVALUATION,
    FORWARD,
    GENERATION,
    INIT,
    KEPT_LOGITS,
    LOADING,
    LOSS,
    SAVING,
    STEP,
    fills_bucket,
    gathers,
)
from zerofit.spec.units import counted, shown_bytes

CONTEXT_BYTES, CONTEXT_SHARE = 1 << 30, 0.04  # usually outside of torch's allocator: context, NCCL, BLAS
USUAL_FRAGMENTS = 0.05  # share of reserved memory that is unused in most healthy runs (benchmarks/fragmentation.py)


def cause_of(evidence: LogEvidence) -> Cause:
    """Return the cause that the evidence shows, or UNKNOWN with what to run next."""
    kind = evidence.shortage.sign.kind
    for rule in _RULES.get(kind, ()):
        if cause := rule(evidence):
            return cause
    unknown = Cause(name=UNKNOWN, summary="The log does not show what filled the memory.", run_next=RECORD)
    return CERTAIN.get(kind, unknown)


# --- figures of torch's message -----------------------------------------------------------------------------------


def _single_tensor(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    most = figures.limit_bytes or figures.total_bytes
    if most is None or figures.asked_bytes is None or figures.asked_bytes <= most:
        return None
    asked = shown_bytes(figures.asked_bytes)
    return Cause(
        name="single-tensor",
        summary=f"One tensor of {asked} is larger than the device ({shown_bytes(most)}).",
        evidence=("a shape or a length on that line is much larger than expected",),
    )


def _other_processes(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    others = sum(figures.other_bytes)
    # without the other processes, the allocation would have fitted
    if not others or figures.asked_bytes is None or figures.asked_bytes > (figures.free_bytes or 0) + others:
        return None
    if max(figures.other_bytes) < CONTEXT_BYTES:
        return None  # contexts only: `_filled` mentions them
    shown = f"{counted(len(figures.other_bytes), 'other process')} on the device"
    if len(evidence.sharers) > 1:
        return Cause(
            name="ranks-share-device",
            summary=f"Ranks {', '.join(evidence.sharers)} use the same GPU.",
            evidence=(
                f"{shown}, {shown_bytes(others)}; each of these ranks ran out of memory on GPU {evidence.shortage.gpu}",
            ),
        )
    return Cause(
        name="another-process",
        summary=f"Another process uses {shown_bytes(others)} of the GPU; without it this run would have had room.",
        evidence=(f"{shown} {'has' if len(figures.other_bytes) == 1 else 'have'} {shown_bytes(others)}",),
    )


def _outside_torch(evidence: LogEvidence) -> Cause | None:
    """Find memory of this process, or of unknown ones, that torch's allocator did not allocate."""
    figures = evidence.shortage.figures
    outside, asked = figures.beside_bytes, figures.asked_bytes
    if outside is None or asked is None or figures.total_bytes is None:
        return None
    # Every process needs some memory outside of torch's allocator. Only more than this usual amount is a cause.
    usual = CONTEXT_BYTES + int(CONTEXT_SHARE * figures.total_bytes)
    of_this_process = figures.process_bytes is not None and figures.reserved_bytes is not None
    if figures.process_bytes is not None and figures.reserved_bytes is not None:
        outside = figures.process_bytes - figures.reserved_bytes
    # without this memory, the allocation would have fitted
    if outside <= usual or asked > (figures.free_bytes or 0) + outside - usual:
        return None
    shown = f"{shown_bytes(outside)} of the device are used outside of torch's allocator"
    if "MPS backend" in evidence.shortage.message:
        summary = f"Metal uses {shown_bytes(outside)} for this process outside of torch: graphs, workspaces and others."
        return Cause(name="metal-memory", summary=summary, evidence=(shown,), run_next=RECORD)
    if of_this_process:
        return Cause(
            name="outside-torch",
            summary=f"Libraries of this process use {shown_bytes(outside)} outside of torch (NCCL, CUDA, others).",
            evidence=(f"{shown}; a context and communicators usually need less than {shown_bytes(usual)}",),
        )
    return Cause(
        name="not-from-torch",
        summary=f"{shown_bytes(outside)} of the GPU are not from torch: another process, or other libraries.",
        evidence=(f"{shown}, and this version of torch does not list processes",),
        run_next=NVIDIA_SMI,
    )


def _limited(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    if figures.limit_bytes is None or figures.asked_bytes is None or (figures.free_bytes or 0) < figures.asked_bytes:
        return None
    return Cause(
        name="memory-fraction",
        summary=f"This process may use {shown_bytes(figures.limit_bytes)} only (set_per_process_memory_fraction).",
        evidence=(f"{shown_bytes(figures.free_bytes or 0)} of the device are free",),
    )


def _graphs(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    private, asked = figures.private_bytes or 0, figures.asked_bytes
    # Small pools are normal. A pool is named only if it would have had room for the allocation, and fills a fifth.
    if not private or asked is None or private < max(asked, (figures.total_bytes or 0) // 5):
        return None
    return Cause(
        name="cuda-graphs",
        summary=f"{shown_bytes(private)} are in private pools, most often of CUDA graphs: nothing else can use them.",
        evidence=("a private pool keeps the memory of each captured shape",),
    )


def _fragmented(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    unused, asked, free = figures.unallocated_bytes, figures.asked_bytes, figures.free_bytes or 0
    # the unused memory would have been enough, had it been in one piece
    if unused is None or asked is None or free >= asked or unused + free < asked:
        return None
    # Healthy runs have this share of fragments, too, so it does not explain the failure.
    if unused < USUAL_FRAGMENTS * (figures.reserved_bytes or 0):
        return None
    if figures.total_bytes is not None and (figures.reserved_bytes or 0) > figures.total_bytes:
        return None  # torch also counts memory that is not on the device
    reserved, pieces = shown_bytes(figures.reserved_bytes or 0), shown_bytes(asked)
    return Cause(
        name="fragmentation",
        summary=f"Of {reserved} reserved by torch, {shown_bytes(unused)} are unused, in pieces below {pieces}.",
        evidence=("torch returned whole unused segments to the driver before it gave up; the rest are fragments",),
    )


def _refused_though_free(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    asked, free = figures.asked_bytes, figures.free_bytes
    when, usual = "were free when torch looked afterwards", 0
    if free is None and figures.total_bytes and figures.reserved_bytes is not None:  # XPU up to torch 2.8
        free, usual = figures.total_bytes - figures.reserved_bytes, CONTEXT_BYTES
        when = "were not used by torch"
    if asked is None or free is None or free < asked + usual:
        return None
    summary = f"The driver refused {shown_bytes(asked)} although {shown_bytes(free)} of the GPU {when}."
    note = "another process used memory at that moment, or the driver has its own limit (Windows, WSL, MIG, vGPU; "
    note += "4 GiB for one allocation on Intel's Arc)"
    return Cause(name=UNKNOWN, summary=summary, evidence=(note,), run_next=f"{NVIDIA_SMI} -l 1, while it runs")


# --- the phase in which memory ran out -------------------------------------------------------------------------------

_IN_PHASE = {
    INIT: ("states", "Master weights, gradients or optimizer states did not fit when the engine was created."),
    KEPT_LOGITS: ("evaluation-keeps-logits", "The evaluation keeps the logits of all its batches."),
    EVALUATION: (
        "evaluation",
        "An evaluation's batch did not fit next to the training states and the outputs of earlier batches.",
    ),
    GENERATION: ("generation", "Generation did not fit: its KV cache and logits grow with each token and sequence."),
    SAVING: ("saving", "Saving gathers parameters, in addition to the weights and states of training."),
    DATA: ("data-on-device", "Input data did not fit."),
    LOSS: ("logits", "The logits or the loss did not fit: [tokens, vocabulary] values, often also in fp32."),
    STEP: (
        "optimizer-state",
        "The optimizer's states did not fit: Adam allocates two fp32 values per parameter in its first step.",
    ),
    FORWARD: ("activations", "A micro batch's activations did not fit next to the memory already in use."),
    BACKWARD: ("activations", "Backward did not fit: gradients are allocated while activations are alive."),
}


def _on_cpu(evidence: LogEvidence) -> Cause | None:
    in_training = (FORWARD, BACKWARD, LOSS, EVALUATION, KEPT_LOGITS, GENERATION, STEP, INIT)
    offloading = "/runtime/zero/" if evidence.phase == INIT else "cpu_adam"  # only ZeRO offloads
    offloaded = any(offloading in frame.file or "offload" in frame.name for frame in evidence.frames)
    if "you tried to allocate" not in evidence.shortage.message or evidence.phase not in in_training or offloaded:
        return None
    cause = _in_phase(evidence)
    return replace(cause, run_next=RSS) if cause and cause.run_next else cause


def _in_phase(evidence: LogEvidence) -> Cause | None:
    # The phase alone names a cause only for the first steps. A leak, or a failure after equal steps, comes first.
    progress, phase = evidence.progress, evidence.phase
    shown = _filled(evidence.shortage)
    if leak := progress.leak:
        label, first, last = leak
        grown = f"allocated memory at {label!r} grew from {shown_bytes(first)} to {shown_bytes(last)}, step by step"
        return Cause(name="leak", summary="Memory grew with every step until it was full.", evidence=(grown, *shown))
    # Equal steps need equal memory once the optimizer's states exist. So something differs from the earlier steps.
    if phase in (FORWARD, BACKWARD, STEP) and progress.steps >= LATER:
        return Cause(
            name=UNKNOWN,
            summary=f"{progress.steps} steps fit into memory. Then memory grew, or this batch was longer than "
            "earlier ones. The log does not show which.",
            evidence=(f"memory ran out in {phase}", *shown),
            run_next=RECORD,
        )
    if phase == LOADING:
        files = ("torch/serialization.py", "load_checkpoint")
        if any(mark in f"{frame.file}{frame.name}" for frame in evidence.frames for mark in files):
            summary = "A checkpoint was loaded onto the GPU, next to the model that is already there."
            return Cause(name="checkpoint-on-device", summary=summary, evidence=shown)
        return Cause(name="weights", summary="The model's weights did not fit on the GPU.", evidence=shown)
    if phase == STEP and any("_multi_tensor" in frame.name or "_foreach" in frame.code for frame in evidence.frames):
        summary = "The optimizer's step computes temporary values for all parameters at once (foreach)."
        return Cause(name="optimizer-temporaries", summary=summary, evidence=shown)
    if fills_bucket(evidence.frames):
        summary = "ZeRO's buffers for gradients did not fit: each has reduce_bucket_size elements."
        return Cause(name="communication-buckets", summary=summary, evidence=shown)
    if phase in (FORWARD, BACKWARD, "") and gathers(evidence.frames):
        summary = "A layer's parameters, gathered from all ranks, did not fit next to the memory already in use."
        return Cause(name="gathered-parameters", summary=summary, evidence=shown)
    if phase not in _IN_PHASE:
        source = "The traceback" if evidence.frames else "Without a traceback the log"
        summary = f"Tensors of this program fill the GPU. {source} does not show which."
        return Cause(name=UNKNOWN, summary=summary, evidence=shown, run_next=RECORD)
    name, summary = _IN_PHASE[phase]
    after = (f"{progress.steps} steps fit into memory before this one",) if progress.steps >= LATER else ()
    return Cause(name=name, summary=summary, evidence=(*shown, *after))


def _filled(shortage: Shortage) -> tuple[str, ...]:
    figures = shortage.figures
    if figures.allocated_bytes is None or not figures.total_bytes:
        return ()
    # evidence for every cause in a phase: how full the GPU was, and with what besides tensors
    share, reserved = figures.allocated_bytes / figures.total_bytes, figures.reserved_bytes or 0
    shown = [f"tensors use {shown_bytes(figures.allocated_bytes)} of {shown_bytes(figures.total_bytes)} ({share:.0%})"]
    if reserved > figures.total_bytes:
        shown.append(
            f"torch counts {shown_bytes(reserved)}, more than the GPU has: some is paged out (WSL, vLLM's sleep)"
        )
    elif figures.unallocated_bytes and figures.unallocated_bytes > (figures.asked_bytes or 0):
        shown.append(f"{shown_bytes(figures.unallocated_bytes)} more are unused fragments")
    if figures.other_bytes:
        have, size = "has" if len(figures.other_bytes) == 1 else "have", shown_bytes(sum(figures.other_bytes))
        others = f"{counted(len(figures.other_bytes), 'other process')} {have} {size}"
        shown.append(f"{others}, perhaps CUDA contexts of ranks that use the wrong GPU")
    return tuple(shown)


# The first rule that finds a cause is the answer. Those whose figures leave no doubt come first.
_TORCH: tuple[Rule, ...] = (_single_tensor, _limited, _refused_though_free, _other_processes, _outside_torch)
_TORCH = (*_TORCH, _graphs, _fragmented, _in_phase)
# On CPU ranks the host is the device: torch's CPU allocator names no figures, but its traceback has the phase.
_RULES: dict[str, tuple[Rule, ...]] = {"torch": _TORCH, **OTHER_RULES, "host-allocator": (_on_cpu, host)}
