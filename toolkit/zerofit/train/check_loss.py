"""Stop all ranks before a step whose loss or gradients are not finite (`--check-loss`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zerofit.spec.errors import Problem, RunFailed
from zerofit.train.metrics import NAN_HINT, NAN_LOSS
from zerofit.train.zero_layouts import Engine, inner_optimizer, loss_scaler


# The gradients' norm is the same on all ranks, and DeepSpeed computes it before the update. So the check needs no
# exchange for gradients. Losses differ between ranks, so one number of each micro batch is exchanged during backward.
class LossCheck:
    """Raises RunFailed on every rank before a bad update. Weights and states stay unchanged."""

    def __init__(self, engines: Iterable[Engine]):
        self._engines = list(engines)
        self._pending: list[tuple[Tensor, dist.Work]] = []  # whether a loss of any rank is not finite, and the exchange
        self.losses: list[Tensor] = []  # of this rank's micro batches since the last update
        for engine in self._engines:
            inner_optimizer(engine).register_step_pre_hook(partial(self._before_update, engine))

    def see(self, loss: Tensor) -> None:
        """Start to tell all ranks whether a micro batch's loss is finite. Call this before backward."""
        self.losses.append(loss.detach())
        flag = torch.isfinite(loss.detach()).all().logical_not().float()
        exchange = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        assert exchange is not None  # every rank is in the default group
        self._pending.append((flag, exchange))

    def after_step(self) -> None:
        """Raise RunFailed for a bad loss or, without a dynamic loss scale, for a skipped update."""
        self._stop_at_loss(self._engines[0].global_steps)
        for engine in self._engines:
            if getattr(engine.optimizer, "overflow", False) and loss_scaler(engine) is None:
                raise _failure(engine.global_steps, "the gradient norm", "inf or nan")
        self.losses.clear()

    def _before_update(self, engine: Engine, optimizer: Optimizer, *_: object) -> None:
        self._stop_at_loss(engine.global_steps + 1)
        norm = getattr(engine.optimizer, "_global_grad_norm", None)
        if norm is None and engine.gradient_clipping() > 0:
            norm = engine.get_global_grad_norm()
        if norm is None:
            # Without clipping in fp32, DeepSpeed computes no norm. Instead, use this rank's largest gradient, and
            # infinity if a gradient of any rank is not finite.
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            largest = torch.stack([g.abs().max().float() for g in gradients]).max()
            bad = torch.isfinite(largest).logical_not().float()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            norm = torch.where(bad > 0, torch.inf, largest)
        if not 0 <= float(norm) < float("inf"):  # DeepSpeed returns -1 for a norm that is not finite
            raise _failure(engine.global_steps + 1, "the gradient norm", "inf or nan" if norm < 0 else str(float(norm)))

    def _stop_at_loss(self, step: int) -> None:
        pending, self._pending = self._pending, []
        for flag, exchange in pending:
            exchange.wait()
            if flag:
                bad = [loss for loss in map(float, self.losses) if not math.isfinite(loss)]
                value = str(bad[0]) if bad else "not finite on another rank"
                raise _failure(step, "the loss", value)


def _failure(step: int, quantity: str, value: str) -> RunFailed:
    message = f"{quantity} of step {step} is {value}; the optimizer step was not taken"
    return RunFailed(Problem(kind=NAN_LOSS, message=message, hint=NAN_HINT, where=f"step {step}"))
