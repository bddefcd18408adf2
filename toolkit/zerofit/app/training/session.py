"""Run a custom training loop inside ranks: engine, batches, records and checkpoints."""

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

from zerofit.app.job.requests import as_request
from zerofit.app.job.resolve import find_model
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.app.training.prepare_folder import make_ready
from zerofit.app.training.result import TrainingResult
from zerofit.app.training.train import prepare
from zerofit.launch.host import this_machine
from zerofit.launch.hostfile import Host
from zerofit.launch.local import free_port
from zerofit.launch.run_lock import CommandLock, alive
from zerofit.spec.errors import DoesNotFit, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Job, RunFolder

if TYPE_CHECKING:
    from zerofit.train.callbacks import Callback
    from zerofit.train.run import RankRun

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


# The ranks of a session exist before zerofit is called, so no guard watches them:
#
#   rank 0 checks the run and prepares its folder; all ranks read the job from there   `_share_job`
#   each rank builds its engine                                                        `train.run.RankRun`
#   the user's loop gets batches; records and checkpoints are written between them     `_batches`
class Session:
    """One rank of a run with a custom training loop.

    Works in scripts started by `deepspeed` or `torchrun`, and with plain `python` as one rank. The run folder gets the
    files of `zerofit train`: metrics, checkpoints by the run's `save_every`, the model, the result. An existing
    run resumes from its newest checkpoint.

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

    Refused are layouts that need another kind of loop (pipelines, sequence parallelism, GANs) or another loss
    (different micro batches per rank). If the run names the model, its memory is checked as in `zerofit train`. The
    memory of a model object is not checked, since no other process can simulate it.
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
        """Set up this rank.

        `handle_signals`: SIGTERM and SIGUSR1 ask all ranks to save and stop. `callbacks`: called by this rank.
        `anyway`: warn instead of refusing if the free memory is too small for the run.
        """
        self._run_request, self._report, self._anyway = as_request(run), Reporter(on_event), anyway
        self._callbacks, self._handle_signals = callbacks, handle_signals
        self._losses: list[Tensor] = []
        self._rank_run: RankRun | None = None
        self._locks = ExitStack()
        self._result: dict[str, object] | None = None

    def prepare(self, model: nn.Module | None = None) -> tuple[Any, Iterator[dict[str, Any]]]:
        """Join the ranks, and return the DeepSpeed engine and this rank's micro batches.

        `model`: a model object, the same on all ranks; by default the model that the run names. A batch has `inputs`
        and `labels` on the rank's device (inputs in the run's precision) and `indices`, the indices of its samples in
        the data. Raises UserError on all ranks with all problems, and DoesNotFit if memory is too small.
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
        """Record the loss of a micro batch. Call this after `engine.step()`."""
        self._losses.append(loss.detach().float())

    @property
    def result(self) -> TrainingResult | None:
        """The result after the last batch; None before that, or if the run was stopped on request."""
        return TrainingResult.of(self._rank_run.folder, self._result) if self._rank_run and self._result else None

    def _batches(self, run: RankRun) -> Iterator[dict[str, Any]]:
        """Yield the micro batches of all steps; record and save between the steps.

        Write the result at the end.
        """
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
            # `engine.step()` was called by the user's loop, so the average of weights is updated here.
            if trainer.averaged:
                trainer.averaged.update()
            run.loop.record(step, torch.stack(self._losses), indices, lr)
            done, stopped = step + 1, run.loop.save_and_stop(step + 1)
            if stopped:
                break
        run.loop.recorder.flush()
        self._result = run.finish(LoopResult(step=done, stopped=stopped, figures={}))
        self._locks.close()

    def _share_job(self, model: nn.Module | None) -> tuple[Job, RunFolder]:
        """Let rank 0 prepare the run; return its job and folder. Raises UserError and DoesNotFit."""
        # Rank 0 prepares the run alone, because it writes into the folder. The other ranks read the job from there.
        if "RANK" not in os.environ:  # plain python
            os.environ.update(ALONE, MASTER_PORT=str(free_port()))
        local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")  # torchrun sets the first
        os.environ.setdefault("LOCAL_SIZE", local_size)  # read by loaders, which share this host's cores
        machine = this_machine()
        os.environ.setdefault("DS_ACCELERATOR", machine.accelerator)  # read when deepspeed is imported
        from zerofit.train.process_group import leave, start

        # DeepSpeed and the gate need a process group; a script may already have one.
        if not dist.is_initialized():  # otherwise the script has created the process group and has to destroy it
            atexit.register(leave)
        start(timeout=timedelta(minutes=30))
        # Rank 0 sends the path of the folder, or its error, so that no rank waits for a rank that has ended.
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            # this machine sees only its own devices; the ranks of other hosts have theirs
            machine = replace(machine, devices=max(machine.devices, dist.get_world_size()))
            try:
                # No other process can build a model object, so it cannot be simulated.
                gate = self._gate() if model is None else None
                lock = CommandLock(self._locks, self._report.status)
                prepared = prepare(self._request(model), self._report, machine, lock, model, gate)
                self._report.note(*make_ready(prepared.folder, prepared.job.start))
                message = [str(prepared.folder.path)]
            except (UserError, DoesNotFit) as error:
                self._locks.close()  # releases the gate's reservations
                message = [(type(error), error.problems)]
        dist.broadcast_object_list(message)
        if not isinstance(message[0], str):
            kind, problems = message[0]
            raise kind(*problems)
        folder = RunFolder(Path(message[0]))
        return Job.read(folder), folder

    def _gate(self) -> MemoryGate:
        """Return the gate for the ranks of this host. The free memory of other hosts is not known."""
        ranks = int(os.environ["LOCAL_SIZE"])
        hosts = [Host(socket.gethostname(), ranks)] if ranks < dist.get_world_size() else None
        return self._locks.enter_context(closing(MemoryGate(self._report, anyway=self._anyway, hosts=hosts)))

    def _request(self, model: nn.Module | None) -> RunRequest:
        """Return the request with the actual number of ranks.

        Raises UserError for layouts that need another kind of loop.
        """
        run, problems, world = self._run_request.run, Problems(), dist.get_world_size()
        if run.ranks not in (None, world):
            message = f"the run sets {run.ranks} ranks, but {world} were started"
            problems.add("ranks", message, "remove ranks", self._run_request.place("ranks"))
        for field in ("pipeline", "sequence_parallel", "expert_parallel", "micro_batch_by_rank"):
            if getattr(run, field) not in (1, None):
                message = f"{field} {getattr(run, field)}: a custom loop does not support this layout"
                problems.add("layout", message, "use `zerofit.train`", self._run_request.place(field))
        if model is None and find_model(self._run_request)[1] == "gan":
            problems.add("model-task", f"{run.model} trains two engines", "use `zerofit.train`", "model")
        problems.raise_if_any()
        # A model object cannot be built again from a name. run.json names its class for people.
        request = self._run_request.updated(ranks=world)
        return request if model is None else request.updated(model=f"{type(model).__module__}:{type(model).__name__}")
