"""Find causes for errors without torch's figures, e.g. of the host, driver, NCCL or vLLM."""

from __future__ import annotations

import re

from zerofit.explain.advice import KERNEL_LOG, NVIDIA_SMI, PLAN_SERVE
from zerofit.explain.result import LATER, UNKNOWN, Cause, LogEvidence, Rule
from zerofit.explain.tracebacks import INIT, LOADING, SAVING, STEP, pins
from zerofit.spec.units import shown_bytes

_JOB_LIMIT = re.compile(
    r"oom[_-]kill event|OOM ?Killed|task \d+: Out Of Memory|memory limit|MEMLIMIT|OUT_OF_ME|cgroup|job killed: mem"
)
PINNED = Cause(
    name="pinned-memory",
    summary="Page-locked host memory ran out. CUDA reports this with the same message as for a full GPU.",
    evidence=("the error was raised while host memory was pinned",),
)
FULL_HOST = 0.8  # share of used host memory above which a large allocation may fail


def _driver(evidence: LogEvidence) -> Cause | None:
    """Find why the driver had no memory, if the message has no figures of torch's allocator."""
    # CUDA reports full page-locked host memory with the same message, so this cause is checked first.
    names = {frame.name for frame in evidence.frames}
    if pins(evidence.frames):
        return PINNED
    if evidence.in_worker:
        return Cause(
            name="cuda-in-dataloader",
            summary="A DataLoader worker used CUDA, so it created its own CUDA context on the GPU.",
            evidence=("the error was raised in a worker process",),
        )
    if (
        evidence.frames
        and evidence.progress.steps < LATER
        and (evidence.phase in ("", LOADING, INIT) or names & {"_lazy_init", "set_device"})
    ):
        return Cause(
            name="device-full-at-start",
            summary="The GPU had no room for this program's first allocation: other processes fill it.",
            evidence=("the driver's error has no figures, and no step had begun",),
            run_next=NVIDIA_SMI,
        )
    full = "out of resources, most often memory," if "RESOURCES" in evidence.shortage.message else "out of memory"
    return Cause(
        name=UNKNOWN,
        summary=f"The driver ran {full} outside of torch's allocator: in a library, a kernel or another process.",
        run_next=f"{NVIDIA_SMI} -l 1, while it runs",
    )


def _nccl(evidence: LogEvidence) -> Cause | None:
    asked = evidence.shortage.figures.asked_bytes
    return Cause(
        name="nccl-buffers",
        summary="NCCL found no memory for a communicator's buffers, which are outside of torch's memory.",
        evidence=(f"it requested {shown_bytes(asked)}",) if asked else (),
        run_next=NVIDIA_SMI,
    )


def _blas(evidence: LogEvidence) -> Cause | None:
    if "ALLOC" in evidence.shortage.message or "memory_error" in evidence.shortage.message:
        return Cause(
            name="library-workspace",
            summary="A library found no memory for its handle or workspace: torch or another process uses all memory.",
            run_next=NVIDIA_SMI,
        )
    return Cause(
        name=UNKNOWN,
        summary="A CUDA library failed: the GPU is full, an index was out of range, or libraries do not match.",
        run_next="write CUDA_LAUNCH_BLOCKING=1 before the command: the traceback then shows the line that failed",
    )


_HOST_WORK = {
    "loading the model": (
        "weights-in-host-memory",
        "while the model was loaded: each rank of a host may load all of it",
    ),
    "loading a checkpoint": ("loading-in-host-memory", "while a checkpoint was loaded"),
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


def host(evidence: LogEvidence) -> Cause | None:
    """Find the cause for full host memory."""
    figures, progress = evidence.shortage.figures, evidence.progress
    if pins(evidence.frames) or re.search("cudaHost|mlock", evidence.shortage.message):
        return PINNED
    shown = []
    if figures.total_bytes and figures.free_bytes is not None:
        used = shown_bytes(figures.total_bytes - figures.free_bytes)
        shown.append(f"all processes of the host used {used} of {shown_bytes(figures.total_bytes)}")
    if figures.process_bytes:
        shown.append(f"the killed process used {shown_bytes(figures.process_bytes)}")
    if figures.limit_bytes:
        shown.append(f"the control group of the process may use {shown_bytes(figures.limit_bytes)}")
    if figures.asked_bytes:
        shown.append(f"it requested {shown_bytes(figures.asked_bytes)}")
    if progress.readings and progress.readings[-1].host_share:
        last = progress.readings[-1]
        shown.append(f"last log reading: {last.host_share:.0%} of host memory used ({shown_bytes(last.host_bytes)})")
    # A killed process leaves no traceback. Then the last phase that the log names has to do.
    work = _HOST_PHASES.get(evidence.phase) or progress.activity
    name, when = _HOST_WORK.get(work, ("host-memory", f"in {evidence.phase}" if evidence.phase else ""))
    limited = figures.limit_bytes or _JOB_LIMIT.search(evidence.shortage.message)
    who = "The job reached its memory limit" if limited else "The host ran out of memory"
    return Cause(name=name, summary=f"{who} {when}".rstrip() + ".", evidence=tuple(shown))


def _killed(evidence: LogEvidence) -> Cause | None:
    """Explain a SIGKILL without a kernel message, which memory can have caused."""
    progress = evidence.progress
    # if the run had just used much host memory, the cause is memory
    full = bool(progress.readings) and progress.readings[-1].host_share >= FULL_HOST
    if full or progress.activity in _HOST_WORK:
        found = host(evidence)
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
        return Cause(name=UNKNOWN, summary="A DataLoader worker ended without a message.", run_next=KERNEL_LOG)
    summary = "A DataLoader worker was killed (SIGKILL), most likely because the host ran out of memory."
    return Cause(name="dataloader-workers", summary=summary, run_next=KERNEL_LOG)


def _kernel(evidence: LogEvidence) -> Cause | None:
    found = re.search(r"Required: (\d+), Hardware limit: (\d+)", evidence.shortage.message)
    shown = (f"the kernel needs {found[1]} bytes, but the GPU has {found[2]}",) if found else ()
    summary = "A kernel needs more shared memory or registers than this GPU has. Its memory (HBM) is not full."
    return Cause(name="kernel-resources", summary=summary, evidence=shown)


# --- engines of inference, which allocate their cache before the first token ----------------------------------------

# vLLM's errors are in vllm/v1/worker/utils.py (request_memory) and vllm/v1/core/kv_cache_utils.py
# (_check_enough_kv_cache_memory), and before 0.8 in vllm/worker/worker.py (raise_if_cache_size_invalid).
_FREE = re.compile(r"\(([\d.]+)/([\d.]+) ?GiB\) on startup .*?utilization \(([\d.]+), ([\d.]+) ?GiB\)")
_NEEDED = re.compile(r"max seq len \((\d+)\).*?([\d.]+) ?GiB KV cache is needed.*?KV cache memory \(([\d.]+) ?GiB\)")
_LONGEST = re.compile(r"estimated maximum model length is (\d+)")
_TOKENS = re.compile(r"max seq len \((\d+)\) is larger than .*? KV cache \((\d+)\)")


def _inference_engine(evidence: LogEvidence) -> Cause | None:
    """Find why vLLM's or SGLang's engine did not start."""
    text = evidence.shortage.message
    if "on startup" in text:
        return _not_free(text)
    if "mem-fraction-static" in text:
        summary = "SGLang's weights fill its share of the GPU. Nothing is left for the KV cache."
        return Cause(name="sglang-no-cache", summary=summary)
    if "max seq len" in text:
        return _too_long(text)
    if "warming up" in text:
        summary = "After vLLM had allocated its cache, too little memory was left to warm up the sampler."
        return Cause(name="vllm-warm-up", summary=summary, run_next=PLAN_SERVE)
    summary = "vLLM's weights and activations fill its share of the GPU. Nothing is left for the KV cache."
    return Cause(name="vllm-no-cache", summary=summary, run_next=PLAN_SERVE)


def _not_free(text: str) -> Cause:
    shown = []
    if found := _FREE.search(text):
        free, total, share, needed = found.groups()
        shown.append(f"{free} GiB of {total} GiB were free, and gpu_memory_utilization={share} needs {needed} GiB")
        try:
            fitting = int(100 * float(free) / float(total)) / 100  # needs the free memory, rounded down to hundredths
        except (ValueError, ZeroDivisionError):
            fitting = 0.0
        shown.append(f"to run vLLM without freeing memory, set gpu_memory_utilization={fitting:.2f}")
    summary = "vLLM needs a share of the whole GPU, and other tensors or processes use a part of that share."
    return Cause(name="vllm-gpu-not-free", summary=summary, evidence=tuple(shown), run_next=NVIDIA_SMI)


def _too_long(text: str) -> Cause:
    shown, longest = [], ""
    if found := _NEEDED.search(text):
        shown.append(f"one sequence of {found[1]} tokens needs {found[2]} GiB, and the cache has {found[3]} GiB")
    elif found := _TOKENS.search(text):
        shown.append(f"one sequence has up to {found[1]} tokens, and the cache holds {found[2]}")
        longest = found[2]
    if found := _LONGEST.search(text):
        longest = found[1]
    if longest:
        shown.append(f"vLLM starts with max_model_len={longest} or less")
    return Cause(
        name="vllm-sequence-too-long",
        summary="vLLM's KV cache is too small for one sequence of the maximum length.",
        evidence=tuple(shown),
        run_next=PLAN_SERVE,
    )


OTHER_RULES: dict[str, tuple[Rule, ...]] = {
    "vllm": (_inference_engine,),
    "kernel-oom": (host,),
    "scheduler": (host,),
    "kernel-resources": (_kernel,),
    "nccl": (_nccl,),
    "blas": (_blas,),
    "driver": (_driver,),
    "dataloader-killed": (_workers,),
    "killed": (_killed,),
}
# causes that the kind of a message shows without other evidence
CERTAIN = {
    "shared-memory": Cause(
        name="shared-memory",
        summary="Shared memory (/dev/shm) is full: DataLoader workers and NCCL use it. "
        "Containers have 64 MiB by default.",
    ),
    "notebook": Cause(
        name=UNKNOWN,
        summary="The notebook's process ended without a Python error: the host killed it, or a library crashed.",
        run_next=f"{KERNEL_LOG}; or run the same code as a script, which prints the error",
    ),
    "xla": Cause(
        name=UNKNOWN,
        summary="JAX or TensorFlow ran out of device memory. zerofit explains the messages and the memory of torch.",
        run_next='jax.profiler.save_device_memory_profile("memory.prof")',
    ),
}
