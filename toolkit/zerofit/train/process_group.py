"""Joining and leaving the ranks' process group."""

from __future__ import annotations

import os
from datetime import timedelta

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def start(timeout: timedelta) -> None:
    """Join the group that the launcher's environment describes (NCCL on GPUs, gloo on CPUs)."""
    # on CPUs DeepSpeed would compile its shared memory all-reduce for 45 s; only its inference code calls it
    # (comm/torch.py, inference_all_reduce)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))  # DeepSpeed does so only when it makes its engine
    deepspeed.init_distributed(timeout=timeout)


def stop() -> None:
    """Leave the group once all ranks are done."""
    dist.barrier()
    dist.destroy_process_group()
