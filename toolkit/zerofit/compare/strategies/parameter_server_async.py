"""Train with an asynchronous parameter server.

The server applies each gradient as soon as it arrives. By then the server's weights may be newer than the weights from
which the worker computed the gradient. A gradient's staleness is the number of steps that the server takes between the
worker's pull and push.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu
from zerofit.compare.strategies.parameter_server import gradients, set_gradients


def train(work: BenchmarkTask):
    """Run a server, or one of its workers."""
    dist.init_process_group("gloo")
    server = dist.get_world_size() - 1
    return serve(work, server) if dist.get_rank() == server else push_and_pull(work, server)


def serve(work: BenchmarkTask, workers: int):
    """Take a step for each gradient, with the learning rate divided by the number of workers.

    The new weights are sent to the worker of the gradient.
    """
    model = work.model().cpu()
    optimizer = work.optimizer(model.parameters())
    # A synchronous server makes one step for all workers. This server makes one step per worker, with lr / workers.
    optimizer.param_groups[0]["lr"] /= workers
    # float32 represents each version up to 2^24, which no comparison reaches.
    pushed = torch.zeros(parameters_to_vector(model.parameters()).numel() + 1)  # a gradient, and the weights' version
    staleness = []
    dist.barrier()  # the clock starts when all are ready
    for version in range(work.job.steps * workers):
        work.keep(model, version / workers)
        worker = dist.recv(pushed)
        staleness.append(version - int(pushed[-1]))
        set_gradients(model, pushed[:-1])
        optimizer.step()
        weights = parameters_to_vector(model.parameters()).detach()
        dist.send(torch.cat([weights, torch.tensor([version + 1.0])]), worker)
    work.keep(model, work.job.steps)
    work.notes["staleness"] = staleness
    for statistics in running_statistics(model):  # from a worker: the server sees no samples
        dist.recv(statistics, 0)
    return state_on_cpu(model)


def push_and_pull(work: BenchmarkTask, server: int, last: int | None = None):
    """Send gradients with the version of their weights, until the end or version `last`."""
    model, version = work.model(), torch.zeros(1)
    dist.barrier()  # the clock starts when all are ready
    for x, y in work.batches(dist.get_rank(), server):
        model.zero_grad()
        work.loss(model(x), y).backward()
        dist.send(torch.cat([gradients(model), version]), server)
        pulled = torch.empty(parameters_to_vector(model.parameters()).numel() + 1)
        dist.recv(pulled, server)
        vector_to_parameters(pulled[:-1].to(work.device), model.parameters())
        version = pulled[-1:].clone()
        if int(version) == last:
            break
    for statistics in running_statistics(model) if dist.get_rank() == 0 else ():
        dist.send(statistics.cpu(), server)


def running_statistics(model):
    """Return batch norm's running statistics."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
