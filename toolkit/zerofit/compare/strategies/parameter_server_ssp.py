"""Train with bounded staleness: no worker gets too many steps ahead of the slowest.

Ho, Cipar, Cui and others (2013) call this method "stale synchronous parallel". With a bound of 0 all workers make the
same number of steps. Without a bound, the server works like the one in `parameter_server_async`. The workers run the
same code.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu
from zerofit.compare.strategies.parameter_server import set_gradients
from zerofit.compare.strategies.parameter_server_async import push_and_pull, running_statistics


def train(work: BenchmarkTask, bound: int):
    """Run a server, or one of its workers."""
    dist.init_process_group("gloo")
    server = dist.get_world_size() - 1
    return serve(work, server, bound) if dist.get_rank() == server else push_and_pull(work, server)


def serve(work: BenchmarkTask, workers: int, bound: int):
    """Take a step for each gradient. Workers too many steps ahead wait for their weights."""
    model = work.model().cpu()
    optimizer = work.optimizer(model.parameters())
    optimizer.param_groups[0]["lr"] /= workers
    pushed = torch.zeros(parameters_to_vector(model.parameters()).numel() + 1)
    staleness, clocks, held = [], [0] * workers, []
    dist.barrier()  # the clock starts when all are ready
    for version in range(work.job.steps * workers):
        work.keep(model, version / workers)
        worker = dist.recv(pushed)
        staleness.append(version - int(pushed[-1]))
        set_gradients(model, pushed[:-1])
        optimizer.step()
        clocks[worker] += 1
        held.append(worker)
        weights = parameters_to_vector(model.parameters()).detach()
        # The step of the slowest worker may release several waiting ones.
        for waiting in [w for w in held if clocks[w] - min(clocks) <= bound]:
            held.remove(waiting)
            dist.send(torch.cat([weights, torch.tensor([version + 1.0])]), waiting)
    work.keep(model, work.job.steps)
    work.notes["staleness"] = staleness
    for statistics in running_statistics(model):
        dist.recv(statistics, 0)
    return state_on_cpu(model)
