"""Join and leave the ranks' process group."""

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
    compile_no_collectives()
    if accelerator().device_name() != "cpu":
        accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # DeepSpeed sets it only when it makes its engine
    deepspeed.init_distributed(timeout=timeout)


def compile_no_collectives() -> None:
    """Keep DeepSpeed from compiling its shared memory all-reduce on CPUs, which takes 45 s."""
    # Only its inference uses this op (deepspeed/comm/torch.py, inference_all_reduce). This also skips the compiler
    # probe of every other op, which the first compatibility check runs (deepspeed/ops/__init__.py).
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def stop() -> None:
    """Leave the group when all ranks are done."""
    dist.barrier()
    leave()


def leave() -> None:
    """Leave the group if this process is in one."""
    # a process that exits while the group's threads run may abort
    if dist.is_initialized():
        dist.destroy_process_group()


def accelerator() -> Any:  # Any: in DeepSpeed's abstract class device_name() needs an argument
    """Return DeepSpeed's accelerator, its interface to the kind of device that ranks train on."""
    return get_accelerator()


def rank_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(accelerator().current_device_name())
