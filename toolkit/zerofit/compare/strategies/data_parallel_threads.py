"""Train with torch.nn.DataParallel: one process with one thread per device."""

import torch

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, state_on_cpu

NEEDS = """needs two CUDA devices in one process, but there are fewer. On a CPU, torch's DataParallel does not
split the batch, and torch.nn.parallel.replicate fails ('Expected a non cpu device'). The row `threads` is data
parallelism for CPU cores"""


def train(work: BenchmarkTask):
    """Train as on one device, with one more line of code."""
    if len(work.devices) < 2:
        raise NotHereError(" ".join(NEEDS.split()))
    # Each forward copies the weights to all devices and the outputs back, hence the memory of the first device.
    model = torch.nn.DataParallel(work.model(), device_ids=work.devices)
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return state_on_cpu(model.module)
