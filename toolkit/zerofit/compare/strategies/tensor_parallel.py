"""Train tensor parallel: each rank has the batch and some columns of every linear layer."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, tied


def train(work: BenchmarkTask):
    """Gather outputs after each linear layer. Every rank computes all other layers in full."""
    dist.init_process_group(work.backend)
    model, mesh = work.model(), init_device_mesh(work.device.type, (dist.get_world_size(),))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names or tied(model):
        raise NotHereError("needs linear layers that do not share their matrix with another layer")
    parallelize_module(model, mesh, {name: ColwiseParallel(output_layouts=Replicate()) for name in names})
    optimizer = work.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["foreach"] = False  # sharded and full parameters cannot be mixed
    for x, y in work.batches():
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    weights = {key: full(value).detach().cpu() for key, value in model.state_dict().items()}
    return weights if dist.get_rank() == 0 else None


def full(tensor):
    """Return all columns of a tensor; gather them if they are divided."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
