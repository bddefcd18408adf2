"""One process as rank r of N: a process group that sends nothing, and an accelerator that has no memory."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerofit.simulate.target import SimulationTarget


def set_environment(target: SimulationTarget) -> None:
    """The launcher's variables, as the rank would find them. Before deepspeed is imported."""
    world = target.job.layout.world_size
    os.environ |= {
        "RANK": str(target.rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def join(target: SimulationTarget) -> None:
    """Enter the group as the target's rank."""
    import deepspeed

    dist.init_process_group("fake", store=FakeStore(), rank=target.rank, world_size=target.job.layout.world_size)
    deepspeed.init_distributed("fake")
