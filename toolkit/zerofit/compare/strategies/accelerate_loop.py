"""Train with Accelerate, which turns a loop for one device into data parallel training."""

from typing import cast

from accelerate import Accelerator
from torch import nn

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu


def train(work: BenchmarkTask):
    """Train data parallel, as in Accelerate's documentation."""
    accelerator = Accelerator(cpu=work.device.type == "cpu")
    model = work.model()
    # No data loader is prepared, since the task's batches are already this rank's share.
    model, optimizer = accelerator.prepare(model, work.optimizer(model.parameters()))
    for x, y in work.batches(accelerator.process_index, accelerator.num_processes):
        optimizer.zero_grad()
        accelerator.backward(work.loss(model(x), y))
        optimizer.step()
    plain = cast(nn.Module, accelerator.unwrap_model(model))  # its return type is too wide
    return state_on_cpu(plain) if accelerator.is_main_process else None
