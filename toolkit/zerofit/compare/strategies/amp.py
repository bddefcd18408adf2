"""Automatic mixed precision on one device: matrix products in 16 bits, a gradient scaler where they are fp16."""

import torch
from torch.amp.grad_scaler import GradScaler

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, whole_state


def train(work: BenchmarkTask, fp16: bool = False):
    """Train in bf16, whose exponents are wide enough to do without a scaler, or in fp16, whose small gradients are not.

    torch does both on a CPU, too; where its processor has no such products they are emulated, and slow.
    """
    kind, dtype = work.device.type, torch.float16 if fp16 else torch.bfloat16
    if kind == "cuda" and not fp16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotHereError("this GPU has no bf16 products; amp-fp16 takes fp16 and a gradient scaler")
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    scaler = GradScaler(kind, enabled=fp16)
    for x, y in work.batches():
        optimizer.zero_grad()
        with torch.autocast(kind, dtype):
            loss = work.loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return whole_state(model)
