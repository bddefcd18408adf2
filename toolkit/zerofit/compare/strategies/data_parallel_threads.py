"""torch.nn.DataParallel: one process, a thread a device; weights are copied out and gradients in at every step."""

import torch

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, whole_state

NEEDS = """needs two CUDA devices in one process, and finds fewer. On a CPU it calls the model as it is, and what it is
made of refuses (torch.nn.parallel.replicate: 'Expected a non cpu device'); the row `threads` does the same by hand"""


def train(work: BenchmarkTask):
    """Train with one line more than on one device."""
    if len(work.devices) < 2:
        raise NotHereError(" ".join(NEEDS.split()))
    model = torch.nn.DataParallel(work.model(), device_ids=work.devices)
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return whole_state(model.module)
