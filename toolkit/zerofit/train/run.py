"""Train a job on one rank, from the run folder's job to the trained model in that folder.

With `--micro-batch-by-rank auto`, the ranks' speeds are measured first.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from zerofit.checkpoint.adapters import write_adapters
from zerofit.checkpoint.model_folder import CARD, ModelInfo
from zerofit.checkpoint.published import PublishedFiles, PublishedModel
from zerofit.config.batch import shared_out
from zerofit.data.base import Data
from zerofit.data.chat_template import tokenizer_files
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.models.catalog import source_of
from zerofit.models.dtypes import torch_name
from zerofit.models.inputs import Inputs, are_tokenized
from zerofit.models.sections import ModelSection, numbered, sections_of
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.mesh import RankCoords, coords_of
from zerofit.spec.model_facts import is_text
from zerofit.spec.profiling import Numbers
from zerofit.spec.run_folder import Batch, Job, RunFolder
from zerofit.train.build import build_on_meta, stored_by_engine
from zerofit.train.callbacks import Callback, EventLog, StepRecord, load_callbacks, make_loggers
from zerofit.train.check_loss import LossCheck
from zerofit.train.engines import ZeroTrainer
from zerofit.train.gan import EpochDrawings, GanTrainer
from zerofit.train.heartbeat import RankProgress
from zerofit.train.leaks import LeakWatch
from zerofit.train.loop import Loop, LoopResult
from zerofit.train.memory import ForecastFigure, MemoryWatch, memory_figures, record_allocations
from zerofit.train.metrics import MetricsRecorder
from zerofit.train.pipeline import PipelineTrainer
from zerofit.train.process_group import rank_device
from zerofit.train.restore import resume
from zerofit.train.saver import Saver, frozen_weights
from zerofit.train.step_profile import StepProfile
from zerofit.train.stop_signals import SignalNotes, StopRequests
from zerofit.train.tensor_split import share_of
from zerofit.train.trainer import EngineTrainer

# Ranks of different speed finish a step together if rank r gets samples in proportion to its speed:
#
#     samples_r = micro batch x ranks x speed_r / sum of speeds, rounded so that the sum stays the same
#
# The speed is that of forward passes alone; backward takes about twice as long on any device, so the ratio is the
# same.
WARM, PASSES = 2, 8  # uncounted and counted forward passes
MOST_S = 5.0  # limit of the counted passes


def train(
    job: Job,
    folder: RunFolder,
    signals: SignalNotes | None = None,
    progress: RankProgress | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, object]:
    """Train the job on this rank of an initialized process group. Return the run's result.

    It is the same on all ranks. If a signal or the file `folder.stop_request` stops the run, write `folder.stopped` and
    return {}.
    """
    return RankRun(job, folder, signals, progress, callbacks).run()


class RankRun:
    """One rank's run with its data, engine and loop built."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        signals: SignalNotes | None = None,
        progress: RankProgress | None = None,
        callbacks: Sequence[Callback] = (),
        model: nn.Module | None = None,
    ):
        """Build the run with further `callbacks` and, if given, `model` instead of the run's model."""
        self.job, self.folder, self.rank = job, folder, dist.get_rank()
        progress, coords = progress or RankProgress(), coords_of(self.rank, job.layout)
        self._events = events = EventLog(folder.events if self.rank == 0 else None, progress)
        self._watch = MemoryWatch(job.forecast, events.warning) if job.forecast else None
        if self.rank == 0:
            watches = [self._watch] if self._watch else []
            callbacks = [*make_loggers(job, folder), *watches, *load_callbacks(job.run.callbacks), *callbacks]
        if job.run.record_memory:
            self._record_memory()
        events.phase("reading the data")
        self.data = open_data(job.run, job.facts.task, job.run.seq_len, Reporter())
        events.phase("building the model and the DeepSpeed engine")
        self.trainer = _make_trainer(job, coords, self.data, model)
        if job.run.check_loss:
            self.trainer.loss_check = LossCheck(self.trainer.engines().values())
        if isinstance(self.trainer, PipelineTrainer) and job.run.pipeline_balance == "time":
            events.stages(self.trainer.stages)  # known only after the measurement
        if self.rank == 0 and isinstance(self.trainer, GanTrainer):
            callbacks = [*callbacks, EpochDrawings(self.trainer, folder, len(self.data.train))]
        # after the model was built, which seeds all ranks alike, and before a resume, which restores random states
        _seed_rank(job, coords)
        self.job = job = self._balanced(job)
        requests = StopRequests(job.run.save_every, signals, folder.stop_request if self.rank == 0 else None)
        recorder = MetricsRecorder(job, self.trainer.device, callbacks, requests, self.data.counts)
        self._saver = Saver(self.trainer, self.data.inputs, folder, events, callbacks)
        if job.start:
            events.phase(f"resuming from step {job.start.step}")
            recorder.last = resume(self.trainer, job.start, events.phase)
        self.loop = Loop(
            job=job,
            data=self.data,
            trainer=self.trainer,
            recorder=recorder,
            events=events,
            requests=requests,
            progress=progress,
            save=self._saver.save,
            callbacks=callbacks,
            profile=_profile_of(job, self.rank, self.trainer, folder),
            leaks=LeakWatch(self.trainer.device, events.warning) if self.rank == 0 and not job.run.compile else None,
        )

    def _record_memory(self) -> None:
        if rank_device().type == "cuda":
            record_allocations(self.folder.rank_memory(self.rank))
        else:
            self._events.note("--record-memory has no effect: it needs GPUs")

    def _balanced(self, job: Job) -> Job:
        """Return the job; if requested, with samples shared among ranks by their measured speeds."""
        trainer, shares = self.trainer, job.start and job.start.shares
        if job.batch.limit <= job.batch.micro or shares or not isinstance(trainer, ZeroTrainer):
            return job
        self._events.phase("measuring how fast each rank is")
        measured = measured_shares(job, trainer, self.data)
        self._events.note(str(measured))
        trainer.job = job = replace(job, batch=measured.batch)
        if self.rank == 0:
            job.write_batch(self.folder)
        return job

    def run(self) -> dict[str, object]:
        """Train, save the model and write the result. Return {} if the run was stopped on request."""
        self.begin()
        return self.finish(self.loop.run())

    def begin(self) -> None:
        """Record that training begins."""
        self._events.training(steps=self.job.steps, done=self.loop.first)

    def finish(self, ended: LoopResult) -> dict[str, object]:
        """Save the model, and write and return the result. Return {} after a requested stop."""
        job, folder, events = self.job, self.folder, self._events
        self._saver.wait()
        if ended.stopped:
            if self.rank == 0:
                write_json(folder.stopped, {"step": ended.step, "steps": job.steps})
            return {}
        events.phase("saving the model")
        check_replicas(self.trainer)
        save_model(self.trainer, job, self.data.inputs, folder.model, scratch=folder.model_parts)
        if self.trainer.averaged:
            with self.trainer.averaged.in_place():
                save_model(self.trainer, job, self.data.inputs, folder.averaged_model, scratch=folder.model_parts)
        assert self.loop.recorder.last
        result = _result(job, self.loop.recorder.last, ended.figures, self.data)
        if isinstance(self.trainer, PipelineTrainer):
            result["stages"] = [asdict(stage) for stage in self.trainer.stages]
        result["against_forecast"] = {name: figure.to_dict() for name, figure in self._against_forecast().items()}
        if self.rank == 0:
            write_json(folder.result, result)  # before samples and drawings are made, which may fail
        samples = self.trainer.after_training(self.data, folder, events.phase)
        if samples and self.rank == 0:
            write_json(folder.result, result | samples)
        return result

    def _against_forecast(self) -> dict[str, ForecastFigure]:
        """Return measured memory and step time with their forecasts. Check the memory a last time."""
        job, recorder = self.job, self.loop.recorder
        memory = recorder.memory_of_all_ranks()
        if self._watch and self.rank == 0:
            self._watch.look(memory, "at the end of the run")
        figures = memory_figures(memory, job.forecast)
        if recorder.step_s is not None:
            figures["step_s"] = ForecastFigure(measured=recorder.step_s, forecast=job.step_s)
        return figures


def _profile_of(job: Job, rank: int, trainer: EngineTrainer, folder: RunFolder) -> StepProfile | None:
    """Return the profiler for the chosen steps; None on ranks that are not profiled."""
    if job.run.profile is None or rank not in Numbers.parse(job.run.profile_ranks):
        return None
    sections = list[ModelSection]()
    if isinstance(trainer, PipelineTrainer):
        sections = trainer.sections()
    elif isinstance(trainer, ZeroTrainer) and not job.run.compile:  # hooks would break compiled graphs
        blocks = sections_of(trainer.engine.module)
        names = numbered([section.name for section in blocks])
        sections = [replace(section, name=name) for section, name in zip(blocks, names, strict=True)]
    return StepProfile(trainer, Numbers.parse(job.run.profile), partial(folder.rank_trace, rank), sections)


def _make_trainer(job: Job, coords: RankCoords, data: Data, model: nn.Module | None) -> EngineTrainer:
    if job.facts.task == "gan":
        return GanTrainer(job, coords, data.inputs)
    if job.layout.pp > 1:
        return PipelineTrainer(job, coords, data.inputs)
    return ZeroTrainer(job, coords, data.inputs, model)


def _seed_rank(job: Job, coords: RankCoords) -> None:
    """Seed dropout differently on data ranks and stages, and equally on tensor ranks."""
    # Primes keep the seeds of different ranks and starts apart. Tensor parallel ranks share a seed on purpose: they
    # compute slices of the same activations and must drop the same elements. The step is part of the seed for a resume
    # in another layout, where the random states of the checkpoint belong to other ranks.
    seed = job.run.seed * 1_000_003 + coords.dp_rank * 1009 + coords.pp_rank * 31 + coords.sp_rank
    seed = (seed + (job.start.step * 1_000_033 if job.start else 0)) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _result(job: Job, last: StepRecord, figures: dict[str, float], data: Data) -> dict[str, object]:
    """Return the keys that `zerofit train --json` prints, without the run folder."""
    samples = job.samples_after(job.steps)
    return {
        "steps": job.steps,
        "samples": samples,
        "tokens": samples * (job.run.seq_len or 0) if is_text(job.facts.task) else None,
        "train_loss": last["loss"],
        "eval": figures,
        "samples_per_s": last["samples_per_s"],
        "tokens_per_s": last["tokens_per_s"],
        "world_size": job.layout.world_size,
        "layout": job.layout.as_dict(),
        "resumed_from": job.start.checkpoint if job.start else None,
        "unigram_entropy_nats": data.unigram_entropy_nats,
        "conversations": dict(data.counts) or None,
    }


def save_model(trainer: EngineTrainer, job: Job, inputs: Inputs, folder: Path, scratch: Path) -> None:
    """Write the trained model into a folder. All ranks call this, and rank 0 writes.

    transformers models are written in their format, adapters in peft's, other models as a safetensors file. Rank 0
    needs host memory for one module at a time (transformers models) or for the full model (all others). `scratch`: see
    `EngineTrainer.weights`.
    """
    source, weights = source_of(job.run), trainer.weights(scratch)
    frozen = frozen_weights(trainer) if trainer.saves_adapters else None
    if dist.get_rank() != 0:
        deque(weights, maxlen=0)  # rank 0 gathers the weights from all ranks, so all must iterate
        dist.barrier()
        return
    folder.mkdir(exist_ok=True)
    dtype = stored_by_engine(job).dtype
    if trainer.saves_adapters:
        write_adapters(folder, build_on_meta(job, inputs), source, weights)
    elif source.family == "transformers":
        PublishedFiles(PublishedModel(build_on_meta(job, inputs), transformers=True), dtype).write(folder, weights)
    if source.family == "transformers" and are_tokenized(inputs):
        tokenizer_files(job.run.tokenizer, job.run.chat_template)(folder)
    # written before the weights, whose file gets the permissions of this one
    ModelInfo.of_run(job.run, job.facts.task, inputs, job.steps, torch_name(dtype), frozen).write(folder)
    if source.family != "transformers" and not trainer.saves_adapters:
        full, pointers, file = dict[str, Tensor](), set[int](), folder / "model.safetensors"
        for name, tensor in weights:
            full[name] = tensor.contiguous()
            pointer = full[name].untyped_storage().data_ptr()
            if pointer in pointers:  # safetensors cannot store tensors that share memory
                full[name] = full[name].clone()
            pointers.add(pointer)
        save_file(full, file)
        shutil.copymode(folder / CARD, file)  # safetensors makes it unreadable for other users
    dist.barrier()


def check_replicas(trainer: EngineTrainer) -> None:
    """Raise RunFailed if a parameter's float64 sum differs between ranks with a replica of it."""
    # replicas get the same gradients, so a difference means that a collective or a device has failed
    differing = replicas_apart(trainer)
    if differing:
        count = len(list(trainer.module.parameters()))
        message = f"{len(differing)} of {count} parameters differ between ranks, for example {differing[0]}"
        raise RunFailed(Problem(kind="ranks-apart", message=message, hint="check every rank's log and device"))


def replicas_apart(trainer: EngineTrainer) -> list[str]:
    """Return the names of parameters whose replicas differ. All ranks must call this."""
    if trainer.job.layout.zero_stage == 3:  # has no replicas
        return []
    engine, parameters = trainer.engine, dict(trainer.module.named_parameters())
    experts = {name: p for name, p in parameters.items() if share_of(p)}
    others = {name: p for name, p in parameters.items() if name not in experts}
    differing = _differing(others, engine.seq_data_parallel_group)
    if experts:
        (group,) = engine.expert_data_parallel_group.values()
        differing += _differing(experts, group)
    return differing


def _differing(parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None) -> list[str]:
    # one number for each parameter: two all-reduces of a few kB instead of the model's weights
    sums = torch.stack([p.detach().double().sum() for p in parameters.values()])
    # Equal replicas may have a sum of NaN, which is not equal to itself and which a maximum may leave out.
    sums = sums.nan_to_num(nan=torch.finfo(sums.dtype).max)
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [name for name, same in zip(parameters, (least == most).tolist(), strict=True) if not same]


@dataclass(frozen=True, kw_only=True)
class RankShares:
    """A batch with a micro batch size for each rank, and the measured speeds of the ranks."""

    batch: Batch
    samples_per_s: tuple[float, ...]  # of each rank, forward

    def __str__(self) -> str:
        speeds = ", ".join(f"{speed:,.3g}" for speed in self.samples_per_s)
        return f"micro batches by rank: {', '.join(map(str, self.batch.shares))} (forward, samples/s: {speeds})"


def measured_shares(job: Job, trainer: ZeroTrainer, data: Data) -> RankShares:
    """Share the samples of the job's batch among ranks in proportion to their measured speeds.

    The result is the same on all ranks. Weights, statistics and random states stay unchanged.
    """
    batch, speed = job.batch, _samples_per_s(job, trainer, data)
    speeds = torch.zeros(batch.dp, dtype=torch.float64, device=trainer.device)
    speeds[trainer.coords.dp_rank] = speed
    dist.all_reduce(speeds)
    samples_per_s = tuple(speeds.tolist())
    shares = shared_out(batch.micro * batch.dp, samples_per_s, batch.limit)
    return RankShares(batch=replace(batch, by_rank=shares), samples_per_s=samples_per_s)


@torch.no_grad()
def _samples_per_s(job: Job, trainer: ZeroTrainer, data: Data) -> float:
    order, positions = Order.of(data.train, job.run.seed), job.batch.positions(0, trainer.coords.dp_rank)
    start, stop = positions.start, positions.stop
    batch = data.train.batch(order.indices(start, stop), order.keys(start, stop))
    trainer.engine.eval()
    dist.barrier()  # all ranks measure at the same time, since the ranks of a host share its cores
    times: list[float] = []
    while len(times) < WARM + PASSES and sum(times[WARM:]) < MOST_S:
        began = time.perf_counter()
        trainer.eval_counts(batch).tolist()  # waits for the device
        times.append(time.perf_counter() - began)
    trainer.engine.train()
    return len(positions) / statistics.median(times[WARM:] or times)
