"""A session for people who keep their own training loop: engine, batches, records and checkpoints inside ranks."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofit.app.gate import MemoryGate
from zerofit.app.prepare_folder import make_ready, prepare
from zerofit.app.requests import as_request
from zerofit.app.resolve import find_model
from zerofit.app.supervision import TrainingResult
from zerofit.launch.host import this_machine
from zerofit.launch.hostfile import Host
from zerofit.launch.local import free_port
from zerofit.launch.run_lock import alive, held
from zerofit.spec.errors import DoesNotFit, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Job, RunFolder

if TYPE_CHECKING:
    from zerofit.train.callbacks import Callback
    from zerofit.train.run import RankRun

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Session:
    """One rank's part in a run whose loop is the user's own.

    Works in scripts that `deepspeed` or `torchrun` starts, and with plain `python` as one rank. The run folder gets
    what `zerofit train` writes: metrics, checkpoints as the run's `save_every` says, the model, the result; a run that
    is there already goes on from its newest checkpoint.

    >>> import torch, zerofit as zf
    >>> session = zf.Session(zf.Run(data="digits", steps=5, micro_batch=8, output="runs/own"))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> engine, batches = session.prepare(model)
    >>> for batch in batches:
    ...     loss = torch.nn.functional.cross_entropy(engine(batch["inputs"]), batch["labels"])
    ...     _ = engine.backward(loss)
    ...     engine.step()
    ...     session.step(loss)
    >>> session.result.steps
    5

    Pipelines, sequence parallelism and GANs need a loop of their own kind: they are refused. A model that the run names
    is held against the memory that is free, as in `zerofit train`; an object of the user's is not, since no other
    process can simulate it.
    """

    def __init__(
        self,
        run: Run | RunRequest | str | Path,
        *,
        on_event: OnEvent | None = None,
        callbacks: Sequence[Callback] = (),
        handle_signals: bool = False,
        anyway: bool = False,
    ):
        """Take this rank's `callbacks`; with `handle_signals`, SIGTERM and SIGUSR1 ask all ranks to save and stop.

        `anyway`: warn where the memory that is free is not enough for the run, instead of refusing it.
        """
        self._asked, self._report, self._anyway = as_request(run), Reporter(on_event), anyway
        self._callbacks, self._handle_signals = callbacks, handle_signals
        self._losses: list[Tensor] = []
        self._rank_run: RankRun | None = None
        self._locks = ExitStack()
        self._result: dict[str, Any] | None = None

    def prepare(self, model: nn.Module | None = None) -> tuple[Any, Iterator[dict[str, Any]]]:
        """Join the ranks, and return the DeepSpeed engine and the micro batches of this rank.

        `model`: an object of the user's, the same on all ranks; None: the model that the run names. A batch has
        `inputs` and `labels` on the rank's device (inputs in the run's precision) and `indices`, its samples' numbers.
        Raises UserError on all ranks with everything that is wrong, and DoesNotFit where memory is not enough.
        """
        job, folder = self._share_job(model)
        from zerofit.train.run import RankRun
        from zerofit.train.stop_signals import SignalNotes

        signals = SignalNotes() if self._handle_signals else None
        if signals:
            signals.listen()
        self._locks.enter_context(alive(folder))
        self._rank_run = RankRun(job, folder, signals, callbacks=self._callbacks, model=model)
        return self._rank_run.trainer.engine, self._batches(self._rank_run)

    def step(self, loss: Tensor) -> None:
        """Note the loss of a micro batch; call it after `engine.step()`."""
        self._losses.append(loss.detach().float())

    @property
    def result(self) -> TrainingResult | None:
        """The result once all batches were taken; None before, and where the run was stopped on request."""
        return TrainingResult.of(self._rank_run.folder, self._result) if self._rank_run and self._result else None

    def _batches(self, run: RankRun) -> Iterator[dict[str, Any]]:
        """Yield the micro batches of all steps; record and save between them, and write the result at the end."""
        from zerofit.train.engines import ZeroTrainer
        from zerofit.train.loop import LoopResult

        trainer = run.trainer
        assert isinstance(trainer, ZeroTrainer)
        run.begin()
        done, stopped = run.loop.first, False
        for step, batches, indices in run.loop.steps():
            self._losses, lr = [], trainer.engine.get_lr()[0]
            for batch in batches:
                inputs, labels, extra = trainer.to_device(batch)
                yield {"inputs": inputs, "labels": labels, **extra, "indices": batch["indices"]}
            if len(self._losses) != run.job.batch.accumulation:
                got = f"{len(self._losses)} losses for {run.job.batch.accumulation} micro batches"
                raise RuntimeError(f"step {step + 1} has {got}: call session.step(loss) once after each engine.step()")
            run.loop.record(step, torch.stack(self._losses), indices, lr)
            done, stopped = step + 1, run.loop.save_and_stop(step + 1)
            if stopped:
                break
        run.loop.recorder.flush()
        self._result = run.finish(LoopResult(step=done, stopped=stopped, figures={}))
        self._locks.close()

    def _share_job(self, model: nn.Module | None) -> tuple[Job, RunFolder]:
        """Have rank 0 check the run and make its folder; return the job and the folder on all ranks."""
        if "RANK" not in os.environ:
            os.environ.update(ALONE, MASTER_PORT=str(free_port()))
        machine = this_machine()
        os.environ.setdefault("DS_ACCELERATOR", machine.accelerator)  # read when deepspeed is imported
        from zerofit.train.process_group import leave, start

        if not dist.is_initialized():  # else the group is the script's own, to leave as well
            atexit.register(leave)
        start(timeout=timedelta(minutes=30))
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            machine = replace(machine, devices=max(machine.devices, dist.get_world_size()))
            try:
                gate = self._gate() if model is None else None
                prepared = prepare(self._request(model), self._report, machine, model=model, gate=gate)
                self._locks.enter_context(held(prepared.folder, self._report.status))
                for note in make_ready(prepared.folder, prepared.job.start):
                    self._report.note(note)
                found = [str(prepared.folder.path)]
            except (UserError, DoesNotFit) as error:
                self._locks.close()  # with what the gate has reserved
                found = [(type(error), error.problems)]
        dist.broadcast_object_list(found)
        if not isinstance(found[0], str):
            kind, problems = found[0]
            raise kind(*problems)
        folder = RunFolder(Path(found[0]))
        return Job.read(folder), folder

    def _gate(self) -> MemoryGate:
        """Return the gate for all ranks of this host; of others it is not known what is free."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or dist.get_world_size())
        hosts = [Host(socket.gethostname(), ranks)] if ranks < dist.get_world_size() else None
        return self._locks.enter_context(closing(MemoryGate(self._report, anyway=self._anyway, hosts=hosts)))

    def _request(self, model: nn.Module | None) -> RunRequest:
        """Return the run on as many ranks as there are. Raises UserError for what an own loop cannot do."""
        run, problems, world = self._asked.run, Problems(), dist.get_world_size()
        if run.ranks not in (None, world):
            message = f"{run.ranks} ranks are asked for, and {world} were started"
            problems.add("ranks", message, "leave ranks out", self._asked.place("ranks"))
        for field in ("pipeline", "sequence_parallel", "expert_parallel"):
            if getattr(run, field) != 1:
                message = f"{field} {getattr(run, field)}: the batches and the loss of such a layout are zerofit's own"
                problems.add("layout", message, "take `zerofit.train`", self._asked.place(field))
        if model is None and find_model(self._asked)[1] == "gan":
            problems.add("model-task", f"{run.model} trains two engines", "take `zerofit.train`", "model")
        problems.raise_if_any()
        changed: dict[str, Any] = {"ranks": world}
        if model is not None:
            changed["model"] = f"{type(model).__module__}:{type(model).__name__}"
        return replace(self._asked, run=run.model_copy(update=changed))
