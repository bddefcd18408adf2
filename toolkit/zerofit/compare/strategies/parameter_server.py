"""Train with a synchronous parameter server.

Workers push gradients, the server steps, and workers pull weights. The last process is the server. All traffic goes
through the server. All-reduce avoids this bottleneck.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu


def train(work: BenchmarkTask):
    """Run a server, or one of its workers."""
    dist.init_process_group("gloo")  # gradients meet in the server's host memory
    server = dist.get_world_size() - 1
    return serve(work, server) if dist.get_rank() == server else push_and_pull(work, server)


def serve(work: BenchmarkTask, workers: int):
    """Repeat: add up the gradients of all workers, take a step, send the new weights to all."""
    model = work.model().cpu()
    optimizer = work.optimizer(model.parameters())
    pushed = torch.zeros_like(parameters_to_vector(model.parameters()))
    dist.barrier()  # the clock starts when all are ready
    for step in range(work.job.steps):
        work.keep(model, step)
        total = torch.zeros_like(pushed)
        for worker in range(workers):
            dist.recv(pushed, worker)
            total += pushed
        set_gradients(model, total / workers)
        optimizer.step()
        for worker in range(workers):
            dist.send(parameters_to_vector(model.parameters()).detach(), worker)
    work.keep(model, work.job.steps)


def push_and_pull(work: BenchmarkTask, server: int):
    """Send gradients and receive weights; only the server steps."""
    model = work.model()
    dist.barrier()  # the clock starts when all are ready
    for x, y in work.batches(dist.get_rank(), server):
        model.zero_grad()
        work.loss(model(x), y).backward()
        # No worker can be ahead: the server answers only when all have pushed.
        dist.send(gradients(model), server)
        pulled = parameters_to_vector(model.parameters()).detach().cpu()
        dist.recv(pulled, server)
        vector_to_parameters(pulled.to(work.device), model.parameters())
    return state_on_cpu(model) if dist.get_rank() == 0 else None  # with a worker's own running statistics


def gradients(model):
    """Return all gradients as one vector; zeros for parameters that were not used."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts]).cpu()


def set_gradients(model, vector):
    """Split a vector into the parameters' gradients."""
    parts = vector.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
