"""Automatic mixed precision on one device: matrix products in 16 bits, a gradient scaler where they are fp16."""

import torch

from zerofit.compare.benchmark_task import BenchmarkTask, whole_state


def train(work: BenchmarkTask):
    """Train in fp16 on a GPU, or on a CPU in bf16, whose exponents are wide enough to do without a scaler."""
    kind, dtype = work.device.type, torch.float16 if work.device.type == "cuda" else torch.bfloat16
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    for x, y in work.batches():
        optimizer.zero_grad()
        with torch.autocast(kind, dtype):
            loss = work.loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return whole_state(model)
