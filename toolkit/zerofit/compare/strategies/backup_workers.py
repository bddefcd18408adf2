"""Train with backup workers: a synchronous parameter server waits only for the fastest.

The source is Chen, Pan, Monga, Bengio and Jozefowicz (2016). The server drops late gradients. No gradient is stale, but
the work of the slowest workers is lost.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu
from zerofit.compare.strategies.parameter_server import set_gradients
from zerofit.compare.strategies.parameter_server_async import push_and_pull, running_statistics


def train(work: BenchmarkTask, spare: int):
    """Run a server that does not wait for the `spare` slowest workers of a step, or a worker."""
    dist.init_process_group("gloo")
    server = dist.get_world_size() - 1
    if dist.get_rank() == server:
        return serve(work, server, server - spare)
    return push_and_pull(work, server, last=work.job.steps)


def serve(work: BenchmarkTask, workers: int, needed: int):
    """Take a step as soon as `needed` workers have sent gradients of the current weights."""
    model = work.model().cpu()
    optimizer = work.optimizer(model.parameters())
    # A worker pushes its gradients and, at the end, the version of the weights that they are for.
    pushed = torch.zeros(parameters_to_vector(model.parameters()).numel() + 1)
    dropped, early = 0, set()
    dist.barrier()  # the clock starts when all are ready
    for version in range(work.job.steps):
        work.keep(model, version)
        total, early = torch.zeros_like(pushed[:-1]), set()
        while len(early) < needed:
            # Without a source, recv takes the next message of any rank and returns the rank.
            worker = dist.recv(pushed)
            # Gradients of older weights come too late. Their worker gets the current weights and computes anew.
            if int(pushed[-1]) == version:
                total += pushed[:-1]
                early.add(worker)
            else:
                dropped += 1
                answer(model, version, worker)
        set_gradients(model, total / needed)
        optimizer.step()
        for worker in early:
            answer(model, version + 1, worker)
    for _ in range(workers - len(early)):  # the others push once more, and learn that training is over
        answer(model, work.job.steps, dist.recv(pushed))
        dropped += 1
    work.keep(model, work.job.steps)
    work.notes["dropped"] = dropped
    for statistics in running_statistics(model):
        dist.recv(statistics, 0)
    return state_on_cpu(model)


def answer(model, version, worker):
    """Send a worker the weights and their version."""
    weights = parameters_to_vector(model.parameters()).detach()
    dist.send(torch.cat([weights, torch.tensor([float(version)])]), worker)
