"""Choose the changes that help against a cause (shortages.yaml), and commands to find one."""

from __future__ import annotations

import re

from zerofit.explain.data import read_data

NVIDIA_SMI = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
RSS = "print psutil.Process().memory_info().rss after each step: steady growth is a leak, a jump is a longer batch"
PLAN_SERVE = (
    "zerofit plan MODEL --serve --gpus N --gpu KIND prints the least utilization and the longest sequence that fit"
)
KERNEL_LOG = "sudo dmesg -T | grep -i -E 'killed process|oom'"
# The observer is called before the error is raised, so the snapshot has all live blocks. torch.cuda.init comes first:
# an observer that is attached before CUDA starts is lost.
SNAPSHOT_LINE = (
    "import torch; torch.cuda.init(); torch.cuda.memory._record_memory_history(max_entries=200000); "
    "torch._C._cuda_attach_out_of_memory_observer("
    "lambda gpu, *_: torch.cuda.memory._dump_snapshot(f'oom-gpu{gpu}.pickle'))"
)
RECORD = f"put this line first in the script, then run `zerofit explain` on the file it writes: {SNAPSHOT_LINE}"

# device of an error message -> its tool that lists processes, and how to look at torch's memory; CUDA has a snapshot
_TOOLS = {
    "HIP": ("rocm-smi --showpids", ""),
    "XPU": ("xpu-smi ps", "print torch.xpu.memory_allocated() and torch.xpu.mem_get_info()"),
    "NPU": ("npu-smi info", "print torch.npu.memory_summary()"),
    "MLU": ("cnmon", "print torch.mlu.memory_summary()"),
    "MPS": ("top -o mem", "print torch.mps.current_allocated_memory() and torch.mps.driver_allocated_memory()"),
}
_DEVICES = {"HIP": r"\bHIP|ROCBLAS|rocblas", "XPU": r"\bXPU|level_zero|_RESULT_ERROR|\bPI_ERROR", "MPS": "MPS backend"}


def for_device(text: str, message: str) -> str:
    """Return the advice `text` with the tools of the device that `message` names, if not CUDA."""
    device = next((name for name in _TOOLS if re.search(_DEVICES.get(name, rf"\b{name}"), message)), "")
    if not device:
        return text
    tool, look = _TOOLS[device]
    text = text.replace(f"{NVIDIA_SMI} -l 1", tool)
    if device == "HIP":
        text = text.replace("CUDA_LAUNCH_BLOCKING=1", "AMD_SERIALIZE_KERNEL=3")
        return text.replace(NVIDIA_SMI, tool).replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    text = text.replace(RECORD, f"{look} before the line that fails").replace(NVIDIA_SMI, tool)
    return text.replace("torch.cuda.", f"torch.{device.lower()}.")


def changes_for(cause: str, message: str = "") -> tuple[str, ...]:
    """Return the changes that help against a cause on the device of `message`."""
    data = read_data("shortages.yaml")
    shared, changes = data["shared"], data["changes"].get(cause, ())
    useless = ()  # on a Mac or a CPU rank
    if "MPS backend" in message:  # CUDA has a service of that name
        useless = (shared["shard"], shared["offload"])
    elif "you tried to allocate" in message:  # torch's CPU allocator
        useless = (shared["offload"],)
    return tuple(for_device(text, message) for text in changes if text not in useless)
