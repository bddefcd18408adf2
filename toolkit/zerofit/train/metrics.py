"""Record the metrics of each step. Ranks exchange them in blocks of steps."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.spec.devices import peak_flops
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.model_facts import is_text
from zerofit.spec.run_folder import Job
from zerofit.train.callbacks import Callback, MeasuredMemory, StepRecord, overridden
from zerofit.train.memory import RankMemory, memory_figures
from zerofit.train.stop_signals import StopRequests

# An exchange for each step would cost time, so it covers a block: about half a second of steps. One all-reduce sums
# these numbers over ranks. Every rank then has the same losses, so all ranks stop at a loss that is not finite.
#
#     [ loss of each step | seconds of each step | stop? save? | 5 memory figures of each rank, zero elsewhere ]
#
# On a GPU the host only issues a step; the device may be behind. The seconds of a block are therefore the time until
# the exchange returns, divided among its steps in proportion to the time to issue each step (`_stretch`).
BLOCK_S = 0.5  # seconds between exchanges: below what a person notices
BLOCK_STEPS = 100
TIMED_STEPS = 1000  # the run's step time is the median of the last 1000
NAN_LOSS = "nan-loss"  # kind of the failure of a run whose loss or gradients are not finite
NAN_HINT = "lower --lr, lengthen --warmup-steps, or set --gradient-clipping"
# keys of a StepRecord that `extra_metrics` may return
EXTRA = ("loss_d", "loss_g", "loss_scale", "skipped_steps", "router_loss", "expert_load_most", "expert_load_least")
OF_DATA = ("truncated", "dropped")  # keys of a StepRecord, if the data has conversations


@dataclass
class _Step:
    step: int
    losses: Tensor  # float32 (micro batches,) of this rank
    indices: Sequence[np.ndarray]  # sample indices of each micro batch of this rank
    seconds: float
    lr: float
    grad_norm: Tensor | float | None  # a tensor is read when the block is exchanged
    extra: Mapping[str, Tensor | float]


class MetricsRecorder:
    """Turns steps into metrics records on rank 0, and stops all ranks if a loss is not finite."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        callbacks: Sequence[Callback],
        requests: StopRequests,
        counts: Mapping[str, int] | None = None,
    ):
        """Start recording. `counts`: the counts of the run's data (see `zerofit.data.base.Data`)."""
        self._job, self._device, self._requests = job, device, requests
        self._counts = counts or {}
        self._on_step = overridden(callbacks, "on_step")
        self.stop_requested = self.save_requested = False  # set by the last exchange, the same on all ranks
        self._block: list[_Step] = []
        self._block_steps = 1
        self._memory = RankMemory(device, job.forecast.free_bytes if job.forecast else None)
        self._times: deque[float] = deque(maxlen=TIMED_STEPS)
        self._stretch = 1.0  # real time of a step over the time to issue it; above 1 if the device lags behind
        self._last_end = time.perf_counter()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak = peak_flops(name, job.precision)
        self.last: StepRecord | None = None  # this rank's newest record, or the checkpoint's after a resume

    def add(
        self,
        step: int,
        losses: Tensor,
        indices: Sequence[np.ndarray],
        lr: float,
        grad_norm: Tensor | float | None,
        extra: Mapping[str, Tensor | float],
    ) -> None:
        """Add a step that was issued to the device. If the block is now full, flush it."""
        now = time.perf_counter()
        self._block.append(_Step(step, losses, indices, now - self._last_end, lr, grad_norm, extra))
        self._last_end = now
        if len(self._block) >= self._block_steps:
            self.flush()

    def skip_time(self) -> None:
        """Exclude the time until now, e.g. of an evaluation, from the next step's time."""
        self._last_end = time.perf_counter()

    def flush(self) -> None:
        """Exchange and write all pending steps.

        Raises RunFailed on all ranks if a loss is not finite.
        """
        if not self._block:
            return
        block, self._block = self._block, []
        # One reduction exchanges everything about a block of steps: losses, times, stop requests and memory. A
        # reduction in each step would make the host wait for the device.
        losses = torch.stack([s.losses for s in block]).mean(1).to(self._device)
        issued = sum(s.seconds for s in block)
        times = losses.new_tensor([s.seconds * self._stretch for s in block])
        requests, n = self._requests.of_this_rank(), len(block)
        requests_and_memory = losses.new_tensor([*requests, *self._memory.slots()])
        shared = torch.cat([losses, times, requests_and_memory])  # (2 x steps + 2 + 5 x ranks,)
        dist.all_reduce(shared)
        values = (shared / dist.get_world_size()).tolist()  # waits for the device
        means, seconds, (stop, save) = values[:n], values[n : 2 * n], values[2 * n : 2 * n + 2]
        # of the memory only one rank fills a slot, so its figure is the sum, not the mean
        memory = self._memory.most([value * dist.get_world_size() for value in values[2 * n + 2 :]])
        self.stop_requested, self.save_requested = stop > 0, save > 0
        # as many steps as take BLOCK_S, at the seconds of this block
        self._block_steps = max(1, min(BLOCK_STEPS, int(BLOCK_S * len(block) / max(sum(seconds), 1e-6))))
        synced = time.perf_counter()
        # The exchanged times contain the last block's stretch. They are corrected to the stretch of this block.
        stretch = (issued + synced - self._last_end) / issued
        seconds = [step_s * stretch / self._stretch for step_s in seconds]
        self._stretch = stretch
        for step, loss, step_s in zip(block, means, seconds, strict=True):
            if not math.isfinite(loss):
                self._stop(step, loss)
            self.last = self._record(step, loss, step_s, memory)
            self._times.append(step_s)
            for on_step in self._on_step:
                on_step(self.last)
        self._last_end = synced  # the cost of recording counts as part of the next step

    def exchange_stop(self, seconds: float) -> float:
        """Exchange stop requests between steps. Return the mean of all ranks' `seconds`."""
        shared = torch.tensor([seconds, self._requests.of_this_rank()[0]], device=self._device)
        dist.all_reduce(shared)
        mean_s, stop = (shared / dist.get_world_size()).tolist()
        self.stop_requested = stop > 0
        return mean_s

    def _record(self, step: _Step, loss: float, step_s: float, memory: MeasuredMemory) -> StepRecord:
        job = self._job
        samples_per_s = job.batch.total / step_s
        tokens = job.run.seq_len if is_text(job.facts.task) else None
        mfu = None
        if self._peak and job.facts.forward_flops:  # backward costs twice the forward
            mfu = 3 * job.facts.forward_flops * samples_per_s / (self._peak * job.layout.world_size)
        figures = memory_figures(memory, job.forecast)
        forecasts = {name: figure.forecast for name, figure in figures.items()}
        norm = None if step.grad_norm is None else float(step.grad_norm)
        record: StepRecord = {
            "step": step.step + 1,
            "samples": job.samples_after(step.step + 1),
            "loss": loss,
            "lr": step.lr,
            "grad_norm": norm if norm is None or math.isfinite(norm) else None,  # None if fp16 overflowed
            "step_s": step_s,
            "samples_per_s": samples_per_s,
            "tokens_per_s": samples_per_s * tokens if tokens else None,
            "mfu": mfu,
            **memory,
            "forecast_bytes": forecasts.get("reserved_bytes", forecasts["memory_bytes"]),
            "forecast_host_bytes": forecasts.get("host_bytes"),
        }
        for name in EXTRA:
            if name in step.extra:
                record[name] = float(step.extra[name])
        for name in OF_DATA:
            if name in self._counts:
                record[name] = self._counts[name]
        return record

    @property
    def step_s(self) -> float | None:
        """Median step time since this start; None before any step."""
        times = list(self._times)  # the first step is slow, so it counts only if there is no other
        return statistics.median(times[1:] or times) if times else None

    def memory_of_all_ranks(self) -> MeasuredMemory:
        """Return the highest memory use of any rank so far. All ranks call this."""
        slots = torch.tensor(self._memory.slots(), dtype=torch.float64, device=self._device)
        dist.all_reduce(slots)
        return self._memory.most(slots.tolist())

    def stop_at_evaluation(self, step: int, loss: float) -> None:
        """Raise RunFailed for a validation loss of inf or nan, which is the same on all ranks."""
        message = f"the validation loss after step {step + 1} is {loss}; {self._last_good()}"
        raise RunFailed(Problem(kind=NAN_LOSS, message=message, hint=NAN_HINT, where=f"step {step + 1}"))

    def _last_good(self) -> str:
        good = self.last
        return f"the last good step was {good['step']}, loss {good['loss']:.4f}" if good else "no earlier step was good"

    def _stop(self, step: _Step, loss: float) -> None:
        """Raise RunFailed with the samples whose loss is not finite. All ranks must call this."""
        finite = torch.isfinite(step.losses).tolist()  # one loss for each micro batch, or one for all micro batches
        bad = [part for i, part in enumerate(step.indices) if not finite[i if len(finite) > 1 else 0]]
        gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, [int(n) for part in bad for n in part])
        samples = sorted({n for part in gathered for n in part})
        message = f"the loss of step {step.step + 1} is {loss}; sample indices: {samples}; "
        hint = "lower --lr, lengthen --warmup-steps, set --gradient-clipping, or inspect these samples"
        problem = Problem(kind=NAN_LOSS, message=message + self._last_good(), hint=hint, where=f"step {step.step + 1}")
        raise RunFailed(problem)
