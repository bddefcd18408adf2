"""torch.nn.DataParallel: one process, a thread a device; weights are copied out and gradients in at every step."""

import torch

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, whole_state


def train(work: BenchmarkTask):
    """Train with one line more than on one device."""
    if len(work.devices) < 2:
        raise NotHereError("needs two CUDA devices in one process, and finds fewer: on a CPU it would do nothing")
    model = torch.nn.DataParallel(work.model(), device_ids=work.devices)
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return whole_state(model.module)
