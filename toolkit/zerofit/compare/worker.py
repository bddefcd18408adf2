"""One process of one strategy: `python -m zerofit.compare.worker FOLDER`, with RANK and its like in the environment.

It leaves `rank-N.json`: what was measured, or why it could not be. Whoever holds the whole model at the end
evaluates it, and the weights of the single device are what others are compared with.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError
from zerofit.compare.job import STRATEGIES, CompareJob
from zerofit.models.batch_norm import batch_norms
from zerofit.models.catalog import ModelError
from zerofit.models.without_dynamo import without_dynamo
from zerofit.spec.files import write_json
from zerofit.spec.local_machine import host_memory
from zerofit.spec.memory_limit import end_first, limit_memory

NOISE_EVERY = 8  # steps between measurements of the gradient's noise
REFERENCE = "single.safetensors"  # beside the strategies' folders


def train_to_target(work: BenchmarkTask) -> dict[str, Any]:
    """Return the curve over the epochs; seconds are those of training, without evaluations and measurements of noise.

    An epoch ends with the step that completes it, so that every size sees as many samples, but for less than a batch.
    """
    job, model = work.job, work.model()
    optimizer = work.optimizer(model.parameters())
    noise, curve, seconds, done = Noise(), list[dict[str, Any]](), 0.0, 0
    for epoch in range(1, job.epochs + 1):
        last = math.ceil(epoch * work.samples / job.global_batch)
        for step in range(done, last):
            x, y = work.batch(step * job.global_batch, job.global_batch)
            measured = step % NOISE_EVERY == 0
            if measured:
                noise.of_half(work, model, x, y)
            began = _now(work)
            optimizer.zero_grad()
            work.loss(model(x), y).backward()
            seconds += _now(work) - began
            if measured:
                noise.of_whole(model)
            began = _now(work)
            optimizer.step()
            seconds += _now(work) - began
            work.progress(f"epoch {epoch} of {job.epochs}, step {step + 1 - done} of {last - done}")
        done = last
        curve.append({"epoch": epoch, "seconds": seconds, **work.evaluate(model)})
    return {"curve": curve, "noise_scale": noise.scale}


def _now(work: BenchmarkTask) -> float:
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter()


class Noise:
    """The simple noise scale: the batch size at which a gradient's noise is as large as the gradient.

    McCandlish, Kaplan, Amodei and others, "An Empirical Model of Large-Batch Training" (2018), appendix A.1: from the
    gradient's squared norm over a whole batch and over its half, both averaged over many steps.
    """

    def __init__(self) -> None:
        self._half, self._whole, self._sizes = list[float](), list[float](), (0, 0)

    def of_half(self, work: BenchmarkTask, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Measure the gradient over the first half of a batch; it is not trained with, and running statistics stay."""
        half = len(x) // 2
        if half == 0:
            return
        norms = batch_norms(model)
        for module in norms:
            module.track_running_stats = False
        model.zero_grad()
        work.loss(model(x[:half]), y[:half]).backward()
        for module in norms:
            module.track_running_stats = True
        self._half.append(_squared_norm(model))
        self._sizes = (half, len(x))

    def of_whole(self, model: nn.Module) -> None:
        """Measure the gradient over the same batch, which is there by now."""
        if len(self._whole) < len(self._half):
            self._whole.append(_squared_norm(model))

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None where the gradient is lost in the noise, or nothing was measured."""
        if not self._whole:
            return None
        small, large = self._sizes
        of_small, of_large = (sum(values) / len(values) for values in (self._half, self._whole))
        squared = (large * of_large - small * of_small) / (large - small)  # of the true gradient
        spread = (of_small - of_large) / (1 / small - 1 / large)  # trace of the covariance of one sample's
        scale = spread / squared if squared > 0 else math.inf
        return scale if 0 < scale < math.inf else None


def _squared_norm(model: nn.Module) -> float:
    return sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)


def main() -> None:
    """Measure this process's part."""
    folder, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    job = CompareJob.read(folder / "job.json")
    end_first()
    if job.accelerator == "cpu":
        limit_memory(host_memory()[1])  # of one process: strategies do not share it out evenly
    try:
        with without_dynamo():
            word = _measured(job, folder, rank)
    except (NotHereError, ModelError) as reason:
        word = {"not_here": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        word = {"error": f"{type(error).__name__}: {str(error).strip() or 'no message'}"}
    write_json(folder / f"rank-{rank}.json", word)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in word else 0)  # tearing process groups down takes seconds


def _measured(job: CompareJob, folder: Path, rank: int) -> dict[str, Any]:
    work = BenchmarkTask(job, folder, rank)
    if job.epochs:
        return train_to_target(work)
    strategy = STRATEGIES[job.strategy]
    state = strategy.load().train(work, **strategy.options)
    word = work.told()
    if dist.is_initialized():
        dist.barrier()  # nobody goes while another still gathers
    if curve := work.curve():
        word["curve"] = curve
    if state is not None:
        word |= _judged(work, state, folder)
    return word


def _judged(work: BenchmarkTask, state: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """Return loss and accuracy of the trained model, and how far its weights are from the single device's."""
    model = work.model()
    model.load_state_dict(state)
    names = [name for name, _ in model.named_parameters()]
    reference = folder.parent / REFERENCE
    if work.job.strategy == "single":
        save_file({name: state[name].contiguous() for name in names}, reference)
    found: dict[str, Any] = {**work.evaluate(model), "batch_norm": bool(batch_norms(model))}
    if reference.exists():
        whole = load_file(reference)
        found["max_weight_difference"] = max(float((state[n].float() - whole[n].float()).abs().max()) for n in names)
    return found


if __name__ == "__main__":
    main()
