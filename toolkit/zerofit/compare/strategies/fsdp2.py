"""Train with FSDP2: every rank keeps a share of each parameter, and gathers it when needed."""

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zerofit.compare.benchmark_task import BenchmarkTask, tied


def train(work: BenchmarkTask):
    """Train with sharded layers."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(work.device.type, (ranks,))
    model = work.model()
    # Shard layers first, then the other parameters. But a shared parameter must be in one group of shards, and both
    # networks of a GAN run in one forward: then shard the complete model at once.
    for layer in [] if tied(model) or work.task == "gan" else model.children():
        # fully_shard refuses lists of modules, which have no forward (_fsdp_init.py:42).
        if any(True for _ in layer.parameters()) and not isinstance(layer, nn.ModuleList | nn.ModuleDict):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches(rank, ranks):
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    return full if rank == 0 else None
