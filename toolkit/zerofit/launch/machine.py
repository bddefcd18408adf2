"""The local devices."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from zerofit.spec.model_facts import Machine


def usable_cores() -> int:
    """Physical cores that this process may use."""
    return min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))


def cpu_ranks(cores: int) -> int:
    """Ranks that make sense on the CPU: two, or one a NUMA node where there are more."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return max(1, min(cores, max(2, nodes)))


def this_machine() -> Machine:
    """What ranks can run on here: all GPUs, else the CPU."""
    import torch

    cores = usable_cores()
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability(0)
        return Machine(
            accelerator="cuda",
            devices=torch.cuda.device_count(),
            cores=cores,
            device_name=torch.cuda.get_device_name(0),
            fp16=True,
            bf16=major >= 8,
        )
    return Machine(
        accelerator="cpu",
        devices=cpu_ranks(cores),
        cores=cores,
        device_name=f"CPU ({platform.machine()})",
        fp16=torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # what DeepSpeed's CPU accelerator asks
        bf16=True,  # torch computes it everywhere, slowly where the processor has no instructions for it
    )
