"""One record a step: losses averaged over ranks in blocks, so that watching costs next to nothing.

A block is about half a second of steps. Its losses cross the ranks in one all-reduce, which also tells every rank alike
whether a loss was not finite, and whether one of them was asked to save or to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.spec.devices import peak_flops
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.model_facts import is_text
from zerofit.spec.run_folder import Job
from zerofit.train.callbacks import Callback, StepRecord, overridden
from zerofit.train.stop_signals import StopRequests

BLOCK_S = 0.5  # seconds between exchanges: below what a person notices
BLOCK_STEPS = 100
EXTRA = ("loss_d", "loss_g", "loss_scale", "skipped_steps")  # of a StepRecord, where `extra_metrics` gives them


@dataclass
class _Step:
    step: int
    losses: Tensor  # float32 (micro batches,) of this rank
    indices: Sequence[np.ndarray]  # sample indices of each micro batch of this rank
    seconds: float
    lr: float
    grad_norm: Any  # a number, a tensor that is read only when the block is exchanged, or None
    extra: dict[str, Any]


class MetricsRecorder:
    """Turns steps into metrics records on rank 0 and stops all ranks at a loss that is not finite."""

    def __init__(self, job: Job, device: torch.device, callbacks: Sequence[Callback], requests: StopRequests):
        self._job, self._device, self._requests = job, device, requests
        self._on_step = overridden(callbacks, "on_step")
        self.asked_to_stop = self.asked_to_save = False  # the same on all ranks, as of the last exchange
        self._block: list[_Step] = []
        self._block_steps = 1
        self._process = psutil.Process()
        self._stretch = 1.0  # a step's real time over the time it took to issue; above 1 where a device lags behind
        self._last_end = time.perf_counter()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak = peak_flops(name, job.precision)
        self.last: StepRecord | None = None  # this rank's newest record; of a resumed run the checkpoint's

    def add(
        self,
        step: int,
        losses: Tensor,
        indices: Sequence[np.ndarray],
        lr: float,
        grad_norm: Any,
        extra: dict[str, Any],
    ) -> None:
        """Note a step that has been issued; every so often, exchange and write what is pending."""
        now = time.perf_counter()
        self._block.append(_Step(step, losses, indices, now - self._last_end, lr, grad_norm, extra))
        self._last_end = now
        if len(self._block) >= self._block_steps:
            self.flush()

    def skip_time(self) -> None:
        """Leave out of the next step's time what was not training (an evaluation, say)."""
        self._last_end = time.perf_counter()

    def flush(self) -> None:
        """Exchange and write everything pending. Raises RunFailed on all ranks when a loss is not finite."""
        if not self._block:
            return
        block, self._block = self._block, []
        losses = torch.stack([s.losses for s in block]).mean(1).to(self._device)
        issued = sum(s.seconds for s in block)
        times = losses.new_tensor([s.seconds * self._stretch for s in block])
        shared = torch.cat([losses, times, losses.new_tensor(self._requests.mine())])  # (2 x steps + 2,)
        dist.all_reduce(shared)
        *both, stop, save = (shared / dist.get_world_size()).tolist()  # waits for the device
        means, seconds = both[: len(block)], both[len(block) :]
        self.asked_to_stop, self.asked_to_save = stop > 0, save > 0
        self._block_steps = max(1, min(BLOCK_STEPS, int(BLOCK_S * len(block) / max(sum(seconds), 1e-6))))
        synced = time.perf_counter()
        waited = synced - self._last_end
        stretch, self._stretch = (issued + waited) / issued / self._stretch, (issued + waited) / issued
        seconds = [step_s * stretch for step_s in seconds]
        host_bytes = self._process.memory_info().rss
        for step, loss, step_s in zip(block, means, seconds, strict=True):
            if not math.isfinite(loss):
                self._stop(step, loss)
            self.last = self._record(step, loss, step_s, host_bytes)
            for on_step in self._on_step:
                on_step(self.last)
        self._last_end = synced  # so that what watching costs is part of the next step

    def _record(self, step: _Step, loss: float, step_s: float, host_bytes: int) -> StepRecord:
        job = self._job
        samples_per_s = job.batch.total / step_s
        tokens = job.run.seq_len if is_text(job.facts.task) else None
        mfu = None
        if self._peak and job.facts.forward_flops:  # backward costs twice the forward
            mfu = 3 * job.facts.forward_flops * samples_per_s / (self._peak * job.layout.world_size)
        on_cpu = self._device.type == "cpu"
        norm = None if step.grad_norm is None else float(step.grad_norm)
        record: StepRecord = {
            "step": step.step + 1,
            "samples": job.samples_after(step.step + 1),
            "loss": loss,
            "lr": step.lr,
            "grad_norm": norm if norm is None or math.isfinite(norm) else None,  # none where fp16 overflowed
            "step_s": step_s,
            "samples_per_s": samples_per_s,
            "tokens_per_s": samples_per_s * tokens if tokens else None,
            "mfu": mfu,
            "memory_bytes": host_bytes if on_cpu else torch.cuda.max_memory_allocated(self._device),
            "host_bytes": host_bytes,
        }
        for name in EXTRA:
            if name in step.extra:
                record[name] = float(step.extra[name])
        return record

    def stop_at_evaluation(self, step: int, loss: float) -> None:
        """Raise RunFailed for a validation loss that is not finite (the same on all ranks)."""
        message = f"the validation loss after step {step + 1} is {loss}; {self._last_good()}"
        hint = "lower --lr, lengthen --warmup-steps, or set --gradient-clipping"
        raise RunFailed(Problem(kind="nan-loss", message=message, hint=hint, where=f"step {step + 1}"))

    def _last_good(self) -> str:
        good = self.last
        return f"last good: step {good['step']}, loss {good['loss']:.4f}" if good else "no step before it was good"

    def _stop(self, step: _Step, loss: float) -> None:
        """Raise RunFailed with the samples whose own loss was not finite; all ranks are here together."""
        finite = torch.isfinite(step.losses).tolist()  # of each micro batch, or of all together
        bad = [part for i, part in enumerate(step.indices) if not finite[i if len(finite) > 1 else 0]]
        gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, [int(n) for part in bad for n in part])
        samples = sorted({n for part in gathered for n in part})
        message = f"the loss of step {step.step + 1} is {loss}; sample indices of its batch: {samples}; "
        hint = "lower --lr, lengthen --warmup-steps, set --gradient-clipping, or look at these samples"
        problem = Problem(
            kind="nan-loss", message=message + self._last_good(), hint=hint, where=f"step {step.step + 1}"
        )
        raise RunFailed(problem)
