"""One rank's whole run, from the job in the run folder to the trained model in it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zerofit.data import Data, open_data
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.spec.task import is_text
from zerofit.train.engines import ZeroTrainer
from zerofit.train.gan import GanTrainer
from zerofit.train.loggers import Events, make_sinks
from zerofit.train.loop import EngineTrainer, Loop
from zerofit.train.metrics import MetricsRecorder
from zerofit.train.pipeline import PipelineTrainer
from zerofit.train.rank_coords import RankCoords, place_of
from zerofit.train.restore import resume
from zerofit.train.sample import continue_text
from zerofit.train.saver import Saver
from zerofit.train.stop_signals import SignalNotes, StopRequests
from zerofit.train.weights import check_replicas, save_model

SAMPLE_TOKENS = 240
PROMPT = "def "
DRAWINGS = 64


def train(job: Job, folder: RunFolder, signals: SignalNotes | None = None) -> dict[str, Any]:
    """Train the job on this rank of an initialised process group; the run's result (the same on all ranks).

    A run that was asked to stop (by a signal, or the file `folder.stop_request`) leaves `folder.stopped` instead.
    """
    rank = dist.get_rank()
    place = place_of(rank, job.layout)
    events = Events(folder.events if rank == 0 else None)
    events("phase", text="reading the data")
    data = open_data(job.run, job.facts.task, job.run.seq_len, Reporter())
    events("phase", text="building the model and the DeepSpeed engine")
    driver = _driver(job)(job, place, data.inputs)
    _seed_rank(job, place)
    requests = StopRequests(job.run.save_every, signals, folder.stop_request if rank == 0 else None)
    recorder = MetricsRecorder(job, driver.device, make_sinks(job, folder) if rank == 0 else [], requests)
    saver = Saver(driver, data.inputs, folder, events)
    if job.start:
        events("phase", text=f"going on from step {job.start.step}")
        recorder.last = resume(driver, job.start, lambda text: events("phase", text=text)).figures
    events("training", steps=job.steps, done=job.start.step if job.start else 0)
    loop = Loop(
        job=job,
        place=place,
        data=data,
        driver=driver,
        recorder=recorder,
        events=events,
        requests=requests,
        save=saver.save,
    )
    ended = loop.run()
    saver.wait()
    if ended.stopped:
        if rank == 0:
            write_json(folder.stopped, {"step": ended.step, "steps": job.steps})
        return {}
    events("phase", text="saving the model")
    check_replicas(driver)
    save_model(driver, job, data.inputs, folder.model)
    result = _result(job, recorder, ended.figures, data)
    if rank == 0:
        write_json(folder.result, result)
    if isinstance(driver, GanTrainer) and rank == 0:
        driver.draw(DRAWINGS, folder.path / "drawings.png")
    if _can_write(driver, job, data):
        events("phase", text="writing a sample")
        tokens = continue_text(driver, data.encode(PROMPT), SAMPLE_TOKENS, job.run.seed)
        if rank == 0:
            write_json(folder.result, result | {"sample": data.decode(tokens)})
    return result


def _can_write(driver: EngineTrainer, job: Job, data: Data) -> bool:
    """Whether one call of the engine gives the next token: not for stages, slices of sequences, and own models."""
    whole = isinstance(driver, ZeroTrainer) and job.layout.sp == 1 and not job.facts.own
    return whole and job.facts.task == "causal-lm" and data.encode is not None


def _driver(job: Job) -> type[EngineTrainer]:
    if job.facts.task == "gan":
        return GanTrainer
    return PipelineTrainer if job.layout.pp > 1 else ZeroTrainer


def _seed_rank(job: Job, place: RankCoords) -> None:
    """Dropout differs between data parallel ranks and stages; tensor parallel ranks must draw alike.

    A checkpoint taken up in another layout draws anew: its random states belong to ranks that are no more.
    """
    own = job.run.seed * 1_000_003 + place.dp_rank * 1009 + place.pp_rank * 31 + place.sp_rank
    own = (own + (job.start.step * 1_000_033 if job.start else 0)) % 2**32
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


def _result(job: Job, recorder: MetricsRecorder, figures: dict[str, float], data: Data) -> dict[str, Any]:
    """The keys that `zerofit train --json` prints, but for the run folder."""
    last = recorder.last
    samples = job.samples_after(job.steps)
    text = is_text(job.facts.task)
    return {
        "steps": job.steps,
        "samples": samples,
        "tokens": samples * job.run.seq_len if text else None,
        "train_loss": last["loss"],
        "eval": figures,
        "samples_per_s": last["samples_per_s"],
        "tokens_per_s": last["tokens_per_s"],
        "world_size": job.layout.world_size,
        "layout": job.layout.as_dict(),
        "resumed_from": job.start.checkpoint if job.start else None,
        "unigram_entropy_nats": data.unigram_entropy_nats,
    }
