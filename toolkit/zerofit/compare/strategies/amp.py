"""Train with automatic mixed precision on one device, with a gradient scaler for fp16."""

import torch
from torch.amp.grad_scaler import GradScaler

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, state_on_cpu


def train(work: BenchmarkTask, fp16: bool = False):
    """Train with matrix multiplications in bf16 or fp16.

    torch supports both on a CPU, too; without hardware support they are emulated and slow.
    """
    # Small gradients become 0 in fp16 without a scaler. bf16 has the exponent range of float32.
    kind, dtype = work.device.type, torch.float16 if fp16 else torch.bfloat16
    if kind == "cuda" and not fp16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotHereError("this GPU has no bf16 matrix multiplication; amp-fp16 uses fp16 and a gradient scaler")
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
    return state_on_cpu(model)
