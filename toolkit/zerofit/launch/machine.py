"""The local devices."""

from __future__ import annotations

import platform

from zerofit.spec.local_machine import cpu_ranks, usable_cores
from zerofit.spec.model_facts import Machine


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
