"""Run one rank of `zerofit replay`: repeat steps, and find where numbers stop being finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.spec.errors import RunFailed
from zerofit.spec.files import write_json
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.first_not_finite import FirstNotFinite, TensorFacts
from zerofit.train.heartbeat import RankProgress
from zerofit.train.run import RankRun, replicas_apart
from zerofit.train.shard_index import indexed_shards
from zerofit.train.stop_signals import SignalNotes
from zerofit.train.trainer import Batch, EngineTrainer
from zerofit.train.zero_layouts import Unsupported, states_of

# The steps before the fault run as in training, so their losses equal the run's losses. Each step uses --check-loss. If
# it stops a step, the weights are still good. The micro batches of this step then run again, and each op is watched.


def replay(
    job: Job, folder: RunFolder, signals: SignalNotes | None = None, progress: RankProgress | None = None
) -> dict[str, object]:
    """Repeat the job's steps up to `job.replay.step`. Write and return all ranks' findings."""
    assert job.replay
    run = RankRun(job, folder, signals, progress)
    if job.replay.double:
        _widen(run.trainer)
    run.begin()
    findings = _RankReplay(run).findings(job.replay.step)
    run.loop.recorder.flush()
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, findings)
    result: dict[str, object] = {"ranks": gathered}
    if dist.get_rank() == 0:
        write_json(folder.result, result)
    return result


class _RankReplay:
    def __init__(self, run: RankRun):
        self._run, self._trainer = run, run.trainer
        self._bad_weights: list[dict[str, object]] = []
        self._sizes: list[float] = []  # root mean square of all weights, before the first and after each step
        self._findings: dict[str, object] = {"rank": dist.get_rank(), "weights": self._bad_weights}
        self._findings |= {"sizes": self._sizes, "done": run.loop.first}

    def findings(self, last: int) -> dict[str, object]:
        """Repeat the steps up to `last`. Return the findings of this rank.

        Stops at a number that is not finite, and if replicas differ between ranks.
        """
        self._look_at_weights(states=True)  # the checkpoint itself may have bad numbers
        if self._on_any_rank(bool(self._bad_weights)):
            return self._findings
        loop = self._run.loop
        for step, batches, indices in loop.steps():
            if step >= last:
                break
            if self._is_stopped(step, list(batches), indices):
                return self._findings
            self._findings["done"] = step + 1
            self._look_at_weights()
            apart = replicas_apart(self._trainer)
            if apart:
                self._findings |= {"apart": apart, "step": step + 1}
            if self._on_any_rank(bool(apart or self._bad_weights)):
                return self._findings | {"step": step + 1}
        return self._findings

    def _is_stopped(self, step: int, batches: list[Batch], indices: list[np.ndarray]) -> bool:
        """Make a step as in training. If --check-loss stops it, run it again under watch."""
        trainer, engines = self._trainer, self._trainer.engines().values()
        before = trainer.rank_state()  # random states and buffers
        micro_steps = [engine.micro_steps for engine in engines]
        lr = trainer.engine.get_lr()[0]
        try:
            losses = self._run.loop.train_step(iter(batches))
        except RunFailed as error:
            self._findings |= {"step": step + 1, "stopped": error.problem.message, "lr": lr}
            if trainer.job.precision == "fp16":
                self._findings["loss_scale"] = float(trainer.engine.optimizer.loss_scale)
        else:
            self._run.loop.record(step, losses, indices, lr)
            return False
        # the step's update was not taken, so with these states the same micro batches give the same numbers
        trainer.restore_rank_state(before)
        for engine, count in zip(engines, micro_steps, strict=True):
            engine.micro_steps = count
            engine.optimizer.zero_grad()
        self._watch(batches)
        classes: int | None = getattr(self._run.data.inputs, "classes", None)
        self._findings["batch"] = list(_bad_samples(batches, classes))
        return True

    def _watch(self, batches: list[Batch]) -> None:
        """Run the stopped step's micro batches again. Record the first op with a bad result."""
        check = self._trainer.loss_check
        assert check
        check.losses.clear()
        watch = FirstNotFinite(self._trainer.module)
        with watch.watching(), suppress(RunFailed):  # stopped again, before the update
            self._trainer.train_step(watch.batches(batches))
        bad = [loss for loss in check.losses if not torch.isfinite(loss).all()]
        origin = watch.origin_of(bad[0]) if bad else None
        if watch.gradient and origin is None:
            self._findings["gradient"], origin = watch.gradient
        origin = origin or (watch.first_nan if bad else None)
        if origin:
            samples = batches[origin.micro]["indices"]
            rows = [int(samples[row]) for row in origin.rows if row < len(samples)]
            self._findings["origin"] = asdict(origin) | {"samples": rows, "of_samples": len(samples)}

    @torch.no_grad()
    def _look_at_weights(self, states: bool = False) -> None:
        """Record weights (with `states`, also states) that are not finite, and the size of weights."""
        total, count = 0.0, 0
        for name, kind, tensor in _tensors(self._trainer, states):
            bad = int(torch.isfinite(tensor).logical_not().sum())
            if bad:
                self._bad_weights.append({"name": name, "kind": kind, "bad": bad, "of": tensor.numel()})
            elif kind == "weight":
                total, count = total + float(tensor.double().square().sum()), count + tensor.numel()
        self._sizes.append((total / max(1, count)) ** 0.5)

    def _on_any_rank(self, flag: bool) -> bool:
        shared = torch.tensor(float(flag), device=self._trainer.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return bool(shared)


def _tensors(trainer: EngineTrainer, states: bool) -> Iterator[tuple[str, str, Tensor]]:
    """Yield name, kind and values of this rank's weights and, with `states`, optimizer states."""
    for name, parameter in trainer.module.named_parameters():
        tensor: Tensor = getattr(parameter, "ds_tensor", parameter)
        if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
            yield name, "weight", tensor
    for tag, engine in trainer.engines().items() if states else ():
        try:
            for indexed in indexed_shards(trainer, engine, tag):
                slots = indexed.shard.slots(states_of(engine, indexed.shard.master))
                yield from ((indexed.name, kind, slot.live) for kind, slot in slots.items() if slot.tensor.numel())
        except Unsupported:  # then only the weights are known by name
            continue


def _bad_samples(batches: Sequence[Batch], classes: int | None) -> Iterator[dict[str, object]]:
    """Yield a step's samples with values that are not finite or with a label that is no class."""
    for batch in batches:
        for name, tensor in batch.items():
            if not isinstance(tensor, Tensor) or not tensor.dim():
                continue
            rows = tensor.reshape(len(tensor), -1)
            if tensor.is_floating_point():
                wrong, why = torch.isfinite(rows).logical_not().any(1), "not finite"
            elif name == "labels" and classes is not None:
                wrong = ((rows < 0) | (rows >= classes)) & (rows != IGNORE_INDEX)
                wrong, why = wrong.any(1), f"not in 0 to {classes - 1}"
            else:
                continue
            for row in wrong.nonzero().flatten().tolist():
                facts = asdict(TensorFacts.of(rows[row]))
                yield {"sample": int(batch["indices"][row]), "tensor": name, "why": why, "values": facts}


def _widen(trainer: EngineTrainer) -> None:
    """Make an engine without ZeRO compute in float64, for the rest of this process."""
    from zerofit.models.dtypes import DTYPES

    DTYPES["fp32"] = torch.float64  # dtype of inputs
    Tensor.float = Tensor.double  # the loss is computed in "float"
    trainer.module.double()
    trainer.engine.enable_backward_allreduce = False  # DeepSpeed's all-reduce refuses float64, and there is one rank
    for states in trainer.engine.optimizer.state.values():
        for kind, value in states.items():
            if isinstance(value, Tensor) and kind != "step":
                states[kind] = value.double()
