"""Decide why memory ran out, from the figures of a message, its traceback and how far the run had got."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerofit.explain.advice import KERNEL_LOG, NVIDIA_SMI, RECORD
from zerofit.explain.messages import DEVICE, HOST, KERNEL, SHARED, Shortage
from zerofit.explain.progress import Progress
from zerofit.explain.result import UNKNOWN
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
    CodeFrame,
    gathers,
)
from zerofit.spec.units import shown_bytes

GIB = 1 << 30
CONTEXT_BYTES, CONTEXT_SHARE = GIB, 0.04  # usual memory of a process outside of torch's allocator: context, NCCL, BLAS
FULL_HOST = 0.8  # share of a host's memory from which its next large allocation may fail
USUAL_FRAGMENTS = 0.03  # share of reserved memory that is unused in most healthy runs (benchmarks/fragmentation.py)
LATER = 2  # steps after which the optimizer's states exist, so that a step needs no more than the one before


@dataclass(frozen=True, kw_only=True)
class LogEvidence:
    """All that a log shows about one error."""

    shortage: Shortage
    frames: Sequence[CodeFrame]
    phase: str
    progress: Progress
    sharers: tuple[str, ...] = ()  # ranks that ran out on the same device
    in_worker: bool = False  # of a DataLoader


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause, and what shows it."""

    name: str
    summary: str
    evidence: tuple[str, ...] = ()
    run_next: str = ""


def cause_of(evidence: LogEvidence) -> Cause:
    """Return the cause that the evidence shows; UNKNOWN, with what to run next, if it shows none."""
    for rule in _RULES[evidence.shortage.kind]:
        if cause := rule(evidence):
            return cause
    return Cause(name=UNKNOWN, summary="The log does not show what filled the memory.", run_next=RECORD)


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
    """Find other processes on the device without which the request would fit."""
    figures = evidence.shortage.figures
    others = sum(figures.other_bytes)
    if not others or figures.asked_bytes is None or figures.asked_bytes > (figures.free_bytes or 0) + others:
        return None
    shown = f"{_count(len(figures.other_bytes), 'other process', 'other processes')} on the device"
    if len(evidence.sharers) > 1:
        return Cause(
            name="ranks-share-device",
            summary=f"Ranks {', '.join(evidence.sharers)} use the same GPU.",
            evidence=(f"{shown}, {shown_bytes(others)}; each of these ranks ran out on GPU {evidence.shortage.gpu}",),
        )
    return Cause(
        name="another-process",
        summary=f"Another process uses {shown_bytes(others)} of the GPU; without it this run would have had room.",
        evidence=(f"{shown} {'has' if len(figures.other_bytes) == 1 else 'have'} {shown_bytes(others)}",),
    )


def _outside_torch(evidence: LogEvidence) -> Cause | None:
    """Find memory of this process, or of unknown processes, that torch's allocator did not allocate."""
    figures = evidence.shortage.figures
    beside, asked = figures.beside_bytes, figures.asked_bytes
    if beside is None or asked is None or figures.total_bytes is None:
        return None
    usual = CONTEXT_BYTES + int(CONTEXT_SHARE * figures.total_bytes)
    known = figures.process_bytes is not None and figures.reserved_bytes is not None
    if known:
        beside = figures.process_bytes - figures.reserved_bytes  # pyright: ignore[reportOperatorIssue] known is both
    if beside <= usual or asked > (figures.free_bytes or 0) + beside - usual:
        return None
    shown = f"{shown_bytes(beside)} of the device are used outside of torch's allocator"
    if known:
        return Cause(
            name="outside-torch",
            summary=f"Libraries of this process use {shown_bytes(beside)} outside of torch (NCCL, CUDA, others).",
            evidence=(f"{shown}; a context and communicators usually need less than {shown_bytes(usual)}",),
        )
    return Cause(
        name="not-from-torch",
        summary=f"{shown_bytes(beside)} of the GPU are not from torch: another process, or other libraries.",
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
    private = figures.private_bytes or 0
    if (
        not private
        or figures.asked_bytes is None
        or private < max(figures.asked_bytes, (figures.total_bytes or 0) // 5)
    ):
        return None
    return Cause(
        name="cuda-graphs",
        summary=f"{shown_bytes(private)} are in private pools, most often of CUDA graphs: nothing else can use them.",
        evidence=("a private pool keeps the memory of each captured shape",),
    )


def _fragmented(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    unused, asked, free = figures.unallocated_bytes, figures.asked_bytes, figures.free_bytes or 0
    if unused is None or asked is None or free >= asked or unused + free < asked:
        return None
    if unused < USUAL_FRAGMENTS * (figures.reserved_bytes or 0):
        return None
    reserved, pieces = shown_bytes(figures.reserved_bytes or 0), shown_bytes(asked)
    return Cause(
        name="fragmentation",
        summary=f"Of {reserved} reserved by torch, {shown_bytes(unused)} are unused, in pieces below {pieces}.",
        evidence=("torch returned whole unused segments to the driver before it gave up; the rest are fragments",),
    )


def _refused_though_free(evidence: LogEvidence) -> Cause | None:
    figures = evidence.shortage.figures
    if figures.asked_bytes is None or figures.free_bytes is None or figures.free_bytes < figures.asked_bytes:
        return None
    free, asked = shown_bytes(figures.free_bytes), shown_bytes(figures.asked_bytes)
    summary = f"The driver refused {asked} although {free} of the GPU were free when torch looked afterwards."
    note = "another process freed memory at that moment, or the driver has a limit of its own (Windows, WSL, MIG, vGPU)"
    return Cause(name=UNKNOWN, summary=summary, evidence=(note,), run_next=f"{NVIDIA_SMI} -l 1, while it runs")


# --- the phase in which a full device ran out ------------------------------------------------------------------------

_IN_PHASE = {
    INIT: ("states", "Master weights, gradients or optimizer states did not fit when the engine was created."),
    KEPT_LOGITS: ("evaluation-keeps-logits", "The evaluation keeps the logits of all its batches on the GPU."),
    EVALUATION: ("evaluation", "An evaluation's batch did not fit next to the training's weights and states."),
    GENERATION: ("generation", "Generation ran out: its key-value cache and logits grow with each token and sequence."),
    SAVING: ("saving", "Saving gathers parameters on the GPU, next to the training's weights and states."),
    DATA: ("data-on-device", "Input data did not fit on the GPU."),
    LOSS: ("logits", "The logits or the loss did not fit: [tokens, vocabulary] values, often a second time in fp32."),
    STEP: (
        "optimizer-state",
        "The optimizer's states did not fit: Adam allocates two fp32 values a parameter in its first step.",
    ),
    FORWARD: ("activations", "A micro batch's activations did not fit next to what was already on the GPU."),
    BACKWARD: ("activations", "Backward ran out: gradients are allocated while a micro batch's activations are alive."),
}


def _in_phase(evidence: LogEvidence) -> Cause | None:
    """Find the cause from where a device that torch's tensors fill ran out."""
    progress, phase = evidence.progress, evidence.phase
    shown = _filled(evidence.shortage)
    if leak := progress.leak:
        label, first, last = leak
        grown = f"allocated memory at {label!r} grew from {shown_bytes(first)} to {shown_bytes(last)}, step by step"
        return Cause(
            name="leak", summary="Memory grew with every step until the GPU was full.", evidence=(grown, *shown)
        )
    if phase in (FORWARD, BACKWARD, STEP) and progress.steps >= LATER:
        return Cause(
            name=UNKNOWN,
            summary=f"{progress.steps} steps had fitted. Since then memory grew, or this batch was longer than those "
            "before. The log does not show which.",
            evidence=(f"it ran out in {phase}", *shown),
            run_next=RECORD,
        )
    if phase == LOADING:
        return _loading(evidence, shown)
    if phase in (FORWARD, BACKWARD) and gathers(evidence.frames):
        summary = "A layer's parameters, gathered from all ranks, did not fit next to what was already on the GPU."
        return Cause(name="gathered-parameters", summary=summary, evidence=shown)
    if phase not in _IN_PHASE:
        summary = "Tensors of this program fill the GPU. Without a traceback the log does not show which."
        return Cause(name=UNKNOWN, summary=summary, evidence=shown, run_next=RECORD)
    name, summary = _IN_PHASE[phase]
    after = (f"{progress.steps} steps had fitted before",) if progress.steps >= LATER else ()
    return Cause(name=name, summary=summary, evidence=(*shown, *after))


def _loading(evidence: LogEvidence, shown: tuple[str, ...]) -> Cause:
    files = ("torch/serialization.py", "load_checkpoint")
    if any(mark in f"{frame.file}{frame.name}" for frame in evidence.frames for mark in files):
        summary = "A checkpoint was loaded onto the GPU, next to the model that is already there."
        return Cause(name="checkpoint-on-device", summary=summary, evidence=shown)
    return Cause(name="weights", summary="The model's weights did not fit on the GPU.", evidence=shown)


def _filled(shortage: Shortage) -> tuple[str, ...]:
    figures = shortage.figures
    if figures.allocated_bytes is None or not figures.total_bytes:
        return ()
    share = figures.allocated_bytes / figures.total_bytes
    shown = f"tensors use {shown_bytes(figures.allocated_bytes)} of {shown_bytes(figures.total_bytes)}"
    if share > 1:
        return (f"{shown}: the driver moves memory to the host (Windows, WSL), so the GPU was overfull before",)
    return (f"{shown} ({share:.0%})",)


# --- messages without figures ----------------------------------------------------------------------------------------


def _driver(evidence: LogEvidence) -> Cause | None:
    """Find why the driver itself had no memory, which torch's allocator does not explain."""
    names = {frame.name for frame in evidence.frames}
    if any("pin_memory" in f"{frame.name}{frame.code}" for frame in evidence.frames):
        return _pinned(evidence)
    if evidence.in_worker:
        return Cause(
            name="cuda-in-dataloader",
            summary="A DataLoader's worker used CUDA, so it needed a context of its own on the GPU.",
            evidence=("the error was raised in a worker process",),
        )
    if evidence.progress.steps < LATER and (
        evidence.phase in ("", LOADING, INIT) or names & {"_lazy_init", "set_device"}
    ):
        return Cause(
            name="device-full-at-start",
            summary="The GPU had no room for this program's first allocation: other processes fill it.",
            evidence=("the driver's error has no figures, and no step had begun",),
            run_next=NVIDIA_SMI,
        )
    return Cause(
        name=UNKNOWN,
        summary="The driver ran out outside of torch's allocator: a library, a custom kernel or another process.",
        run_next=f"{NVIDIA_SMI} -l 1, while it runs",
    )


def _pinned(evidence: LogEvidence) -> Cause | None:
    return Cause(
        name="pinned-memory",
        summary="Page-locked host memory ran out; CUDA reports it with the words of a full GPU.",
        evidence=("the error was raised while host memory was pinned",),
    )


def _nccl(evidence: LogEvidence) -> Cause | None:
    asked = evidence.shortage.figures.asked_bytes
    return Cause(
        name="nccl-buffers",
        summary="NCCL found no room for a communicator's buffers, which are outside of torch's memory.",
        evidence=(f"it asked for {shown_bytes(asked)}",) if asked else (),
        run_next=NVIDIA_SMI,
    )


def _blas(evidence: LogEvidence) -> Cause | None:
    if "ALLOC" in evidence.shortage.message or "memory_error" in evidence.shortage.message:
        return Cause(
            name="library-workspace",
            summary="A library found no room for its handle or workspace: torch or another process has the rest.",
            run_next=NVIDIA_SMI,
        )
    return Cause(
        name=UNKNOWN,
        summary="A CUDA library did not start: the GPU is full, an index was out of range, or libraries do not match.",
        run_next="CUDA_LAUNCH_BLOCKING=1 before the same command: an earlier error then shows its own line",
    )


_HOST_WORK = {
    "loading the model": (
        "weights-in-host-memory",
        "while the model was loaded: each rank of a host may load it whole",
    ),
    "creating the optimizer's states": ("offloaded-states", "while the optimizer's states were created in host memory"),
    "preparing data": ("data-in-host-memory", "while data was prepared"),
    "saving a checkpoint": ("saving-in-host-memory", "while a checkpoint was saved"),
}
_HOST_PHASES = {
    LOADING: "loading the model",
    INIT: "creating the optimizer's states",
    STEP: "creating the optimizer's states",
    SAVING: "saving a checkpoint",
}


def _host(evidence: LogEvidence) -> Cause | None:
    """Find what filled the host's memory."""
    figures, progress = evidence.shortage.figures, evidence.progress
    if any("pin_memory" in f"{frame.name}{frame.code}" for frame in evidence.frames) or (
        "cudaHost" in evidence.shortage.message
    ):
        return _pinned(evidence)
    shown = []
    if figures.process_bytes:
        shown.append(f"the killed process used {shown_bytes(figures.process_bytes)}")
    if figures.limit_bytes:
        shown.append(f"its control group may use {shown_bytes(figures.limit_bytes)}")
    if figures.asked_bytes:
        shown.append(f"it asked for {shown_bytes(figures.asked_bytes)}")
    if progress.readings and progress.readings[-1].host_share:
        last = progress.readings[-1]
        shown.append(f"{last.host_share:.0%} of the host's memory was used before ({shown_bytes(last.host_bytes)})")
    work = _HOST_PHASES.get(evidence.phase) or ("" if progress.started else progress.activity)
    name, when = _HOST_WORK.get(work, ("host-memory", f"in {evidence.phase}" if evidence.phase else ""))
    return Cause(name=name, summary=f"The host ran out of memory {when}".rstrip() + ".", evidence=tuple(shown))


def _killed(evidence: LogEvidence) -> Cause | None:
    """Judge a SIGKILL without a word of the kernel: it is most likely its memory if the work before needed much."""
    progress = evidence.progress
    full = bool(progress.readings) and progress.readings[-1].host_share >= FULL_HOST
    if full or (not progress.started and progress.activity in _HOST_WORK):
        found = _host(evidence)
        assert found is not None
        summary = found.summary.replace("The host ran", "Most likely the host ran")
        note = "the process was killed (SIGKILL); only the kernel's log is proof"
        return Cause(name=found.name, summary=summary, evidence=(*found.evidence, note), run_next=KERNEL_LOG)
    return Cause(
        name=UNKNOWN,
        summary="A process was killed (SIGKILL): by the kernel for its memory, by a scheduler, or by a person.",
        run_next=KERNEL_LOG,
    )


def _workers(evidence: LogEvidence) -> Cause | None:
    if "Killed" not in evidence.shortage.message:
        return Cause(name=UNKNOWN, summary="A DataLoader's worker ended without a message.", run_next=KERNEL_LOG)
    summary = "A DataLoader's worker was killed (SIGKILL), most likely because the host ran out of memory."
    return Cause(name="dataloader-workers", summary=summary, run_next=KERNEL_LOG)


def _shared(evidence: LogEvidence) -> Cause | None:
    summary = "Shared memory (/dev/shm) is full: DataLoader workers and NCCL use it. Containers have 64 MiB by default."
    return Cause(name="shared-memory", summary=summary)


def _kernel(evidence: LogEvidence) -> Cause | None:
    found = re.search(r"Required: (\d+), Hardware limit: (\d+)", evidence.shortage.message)
    shown = (f"it needs {found[1]} of {found[2]} bytes",) if found else ()
    summary = "A kernel needs more shared memory or registers than this GPU has. Its memory (HBM) is not full."
    return Cause(name="kernel-resources", summary=summary, evidence=shown)


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


Rule = Callable[[LogEvidence], Cause | None]
_TORCH: tuple[Rule, ...] = (
    *(
        _single_tensor,
        _limited,
        _refused_though_free,
        _other_processes,
        _outside_torch,
        _graphs,
        _fragmented,
        _in_phase,
    ),
)
_RULES: dict[str, tuple[Rule, ...]] = {
    "torch": _TORCH,
    "kernel-oom": (_host,),
    "scheduler": (_host,),
    "host-allocator": (_host,),
    "shared-memory": (_shared,),
    "kernel-resources": (_kernel,),
    "nccl": (_nccl,),
    "blas": (_blas,),
    "driver": (_driver,),
    "dataloader-killed": (_workers,),
    "killed": (_killed,),
}
PLACES = (DEVICE, HOST, SHARED, KERNEL)
