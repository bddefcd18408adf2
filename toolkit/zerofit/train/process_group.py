"""Joining and leaving the ranks' process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def start(timeout: timedelta) -> None:
    """Join the group that the launcher's environment describes (NCCL on GPUs, gloo on CPUs)."""
    # on CPUs DeepSpeed would compile its shared memory all-reduce for 45 s; only its inference code calls it
    # (comm/torch.py, inference_all_reduce)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if accelerator().device_name() != "cpu":
        accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # DeepSpeed does so only when it makes its engine
    deepspeed.init_distributed(timeout=timeout)


def stop() -> None:
    """Leave the group once all ranks are done."""
    dist.barrier()
    dist.destroy_process_group()


def accelerator() -> Any:  # as DeepSpeed's abstract class has it, device_name() needs an argument
    """Return DeepSpeed's interface to the kind of device that ranks train on."""
    return get_accelerator()


def rank_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(accelerator().current_device_name())
