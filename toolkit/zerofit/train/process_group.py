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
    compile_no_collectives()
    if accelerator().device_name() != "cpu":
        accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # DeepSpeed does so only when it makes its engine
    deepspeed.init_distributed(timeout=timeout)


def compile_no_collectives() -> None:
    """Spare CPUs the 45 s in which DeepSpeed would compile its shared memory all-reduce; only its inference calls it.

    Nor is every other op probed with the compiler, as the first look at what is compatible does.
    (deepspeed/comm/torch.py, inference_all_reduce; deepspeed/ops/__init__.py)
    """
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def stop() -> None:
    """Leave the group once all ranks are done."""
    dist.barrier()
    leave()


def leave() -> None:
    """Leave the group if this process is in one: where its threads run to the end of a process, that may be aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()


def accelerator() -> Any:  # as DeepSpeed's abstract class has it, device_name() needs an argument
    """Return DeepSpeed's interface to the kind of device that ranks train on."""
    return get_accelerator()


def rank_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(accelerator().current_device_name())
