"""Simulate one rank: the real trainer and engine on fake tensors.

The process does nothing else.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import deepspeed
import torch
import torch._dynamo  # zero.Init replaces Tensor.__new__: imported later, dynamo would fail in it
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerofit.data.mixing import mixes
from zerofit.features.optimizers import OPTIMIZERS
from zerofit.features.zero import features_on
from zerofit.models.build import UNCHECKED, build, empty_batch
from zerofit.models.catalog import PRETRAINED, ModelError, find, source_of
from zerofit.models.dtypes import DTYPES
from zerofit.models.hf_config import traced_args
from zerofit.models.inputs import ImageInputs, Inputs, are_packed, are_padded
from zerofit.models.layers import RotaryBlock, as_layers
from zerofit.models.quantized import PACKAGE
from zerofit.models.router_loss import router_loss
from zerofit.simulate.endings import first_lines
from zerofit.simulate.engine.partitions import GradientLog
from zerofit.simulate.engine.phases import PhaseLog, announce_phases, phase_name
from zerofit.simulate.engine.stage_input import Sizes, give_input
from zerofit.simulate.fakes import device
from zerofit.simulate.fakes.gpu_patches import apply_to_run
from zerofit.simulate.fakes.quantized import eight_bits, four_bits, moments_of_eight_bits
from zerofit.simulate.memory.categories import tag_owned_storages, watch_gradient
from zerofit.simulate.memory.snapshot import StackLog
from zerofit.simulate.ops.costs import Scratch, scratch_on
from zerofit.simulate.ops.tracker import AllocationTracker, is_own
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.memory_kinds import STATE
from zerofit.spec.mesh import coords_of
from zerofit.spec.run_folder import Job
from zerofit.train.engines import ZeroTrainer
from zerofit.train.pipeline import PipelineTrainer
from zerofit.train.trainer import own_tokens

Driver = ZeroTrainer | PipelineTrainer


# The simulation runs the code of real training. What it replaces, from the outside in:
#
#   trainer, DeepSpeed engine     unchanged (`drivers`, `phases` observe them)
#   torch's ops                   shapes only (FakeTensorMode), recorded by the tracker (`ops.tracker`)
#   device, process group         simulated (`fakes.device`, torch's "fake" backend); nothing is sent
#   files                         weights without values, NVMe as a temporary folder
def simulate_rank(
    target: SimulationTarget, scratch: Scratch | None = None, say: Callable[[str], None] = lambda text: None
) -> RankRecord:
    """Build, initialize and train a rank on fake tensors. Return the rank's record.

    Patches torch and DeepSpeed for the rest of this process. `scratch`: replaces the function that returns the
    scratch memory of the device's ops.
    """
    for feature in features_on(target.job.ds_config):
        if reason := feature.not_simulated:
            message, hint = reason.message, reason.hint
            raise UserError(Problem(kind="not-simulated", message=message, hint=hint, where=feature.path))
    _set_environment(target)
    gpu = target.accelerator == "cuda"
    chosen = scratch or scratch_on("cuda" if gpu else "cpu")
    meter = AllocationTracker(device.NAME if gpu else "cpu", chosen, target.workspace_bytes)
    meter.stacks = StackLog() if target.stacks else None
    device.install(gpu, meter, target.device_bytes)
    apply_to_run(gpu, meter, are_packed(target.inputs), are_padded(target.inputs))
    gradients = GradientLog(meter)
    if target.job.run.quantize:
        four_bits() if target.job.run.quantize == "nf4" else eight_bits()
    if (entry := OPTIMIZERS.get(target.job.run.optimizer or "")) and entry.library == PACKAGE:
        moments_of_eight_bits(gpu)
    try:
        with tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True), meter:
            # a process group that sends nothing
            world = target.job.layout.world_size
            dist.init_process_group("fake", store=FakeStore(), rank=target.rank, world_size=world)
            deepspeed.init_distributed("fake")
            log, engine = _live(_without_files(target, folder), meter, say)
            # ranks with as many samples per micro batch do the same work; [] if all ranks have equally many
            samples = target.job.batch.by_rank
            alike = [rank for rank, size in enumerate(samples) if size == samples[target.rank]]
            heavier = gradients.heavier_rank([engine], alike)
    except (UserError, ModelError):
        raise
    except RunFailed as error:  # real ranks would fail with the same error
        raise UserError(error.problem) from error
    except Exception as error:  # DeepSpeed, transformers and a user's model can raise anything
        traceback.print_exc()
        raise UserError(_not_simulated(target, meter, error)) from error
    return replace(meter.record(log.done, target.alloc_conf), heavier_rank=heavier)


def _not_simulated(target: SimulationTarget, meter: AllocationTracker, error: Exception) -> Problem:
    op, module = meter.last
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if is_own(f.filename)] or frames)[-1]
    return Problem(
        kind="not-simulated",
        message=f"{target.job.run.model} cannot be simulated: {type(error).__name__} in module {module or '(none)'} "
        f"at op {op}: {first_lines(error)}",
        hint="check that the model accepts the inputs of --data or --input. Code that reads values of tensors (item(), "
        "`if x.sum() > 0`) cannot be simulated: train the model for a step instead",
        where=f"{frame.filename}:{frame.lineno}",
    )


def _without_files(target: SimulationTarget, folder: str) -> SimulationTarget:
    """Return the target without pretrained weights, with `folder` as NVMe and torch's attention.

    A simulation needs the shapes of weights, not their values.
    """
    job = target.job
    source = find(job.run.model)
    if source.origin == PRETRAINED and not list(Path(source.path or "").glob("*.safetensors")):
        job = replace(job, run=job.run.model_copy(update={"model": f"{source.path}/config.json"}))
    shapes = {"pretrained": None, "model_args": traced_args(job.run.model_args)}
    job = replace(job, run=job.run.model_copy(update=shapes))
    zero = dict(job.ds_config.get("zero_optimization", {}))
    for part in ("offload_optimizer", "offload_param"):
        if zero.get(part, {}).get("device") == "nvme":
            zero[part] = {**zero[part], "nvme_path": folder}
    return replace(target, job=replace(job, ds_config={**job.ds_config, "zero_optimization": zero}))


def _set_environment(target: SimulationTarget) -> None:
    os.environ |= {
        "RANK": str(target.rank),
        "WORLD_SIZE": str(target.job.layout.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # threads do not inherit the fake mode
    } | UNCHECKED


def _live(target: SimulationTarget, meter: AllocationTracker, say: Callable[[str], None]) -> tuple[PhaseLog, object]:
    job, drivers = target.job, []

    def built(model: torch.nn.Module) -> None:
        meter.learn_names(model)
        for parameter in model.parameters():
            watch_gradient(meter.tag, parameter)

    def begin(name: str, step: int) -> None:
        for one in drivers:
            tag_owned_storages(meter.tag, one.engine)
            for average in one.averaged.tensors if one.averaged else ():
                meter.tag(average, STATE)
        meter.begin(name, step)
        say(phase_name(name, step))

    log = PhaseLog(meter, begin)
    driver = start(job, target.rank, target.inputs, log, on_built=built)
    if isinstance(driver, PipelineTrainer):
        sizes = [_part_input(driver, target.inputs, part.start) for part in driver.parts]

        def sent_by(stage: int) -> tuple[Sizes, bool]:
            sent = sizes[stage > driver.coords.pp_rank]
            return sent, len(sent) > 1

        give_input(driver.engine, sent_by)
    drivers.append(driver)
    meter.learn_names(driver.engine.module)  # tensor parallelism has replaced linear layers
    samples = job.batch.most_of(driver.coords.dp_rank)
    train_steps(driver, empty_batches(job, target.inputs, samples), target.steps, log)
    tag_owned_storages(meter.tag, driver.engine)
    return log, driver.engine


@torch.no_grad()
def _part_input(driver: PipelineTrainer, inputs: Inputs, first: int) -> list[tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor that enters the layer `first`.

    If the model has a router loss, each layer after the first block also gets the routers' sums.
    """
    # The layers before `first` run on the meta device. They are built again, since the trainer's layers may share
    # weights with layers of this stage. Decoder blocks are skipped: they keep shape and dtype, and their attention
    # may already exchange heads between ranks.
    run, dtype, layout = driver.job.run, DTYPES[driver.job.precision], driver.job.layout
    with torch.device("meta"):
        model = build(source_of(run), inputs, dict(run.model_args)).to(dtype)
        x = empty_batch(inputs, driver.job.batch.micro)["inputs"]
    x = x.to(dtype) if x.is_floating_point() else x
    if layout.sp > 1:
        x = x[:, own_tokens(x.shape[1], layout, driver.coords)]
    before, routers = as_layers(model)[:first], router_loss(model)
    for layer in before:
        x = x if isinstance(layer.module, RotaryBlock) else layer.module(x)
    entering = [(x.shape, x.dtype)]
    if routers is not None and any(layer.block for layer in before):
        entering.append((torch.Size((2, routers.experts)), torch.float32))
    return entering


def start(
    job: Job, rank: int, inputs: Inputs, log: PhaseLog, on_built: Callable[[nn.Module], None] = lambda model: None
) -> Driver:
    """Return a rank's trainer.

    The model is built in phase "build", and the engine in phase "init".
    """
    # the trainers build the model and the engine in one call, so the phase changes where they call DeepSpeed
    initialize = cast("Callable[..., object]", deepspeed.initialize)

    def announced(*args: object, model: nn.Module, **kwargs: object) -> object:
        on_built(model)
        log.begin("init")
        return initialize(*args, model=model, **kwargs)

    log.begin("build")
    kind = PipelineTrainer if job.layout.pp > 1 else ZeroTrainer
    with patch.object(deepspeed, "initialize", announced):
        return kind(job, coords_of(rank, job.layout), inputs)


def train_steps(driver: Driver, batches: Iterator[dict[str, object]], steps: int, log: PhaseLog) -> None:
    """Train `steps` steps, and record their phases in `log`."""

    def announced() -> Iterator[dict[str, object]]:
        while True:
            log.begin("forward")  # reading a micro batch belongs to its forward
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    announce_phases(driver.engine, log.begin)
    fetched = announced()
    for step in range(steps):
        log.step = step
        driver.train_step(fetched)
    log.end()


def empty_batches(job: Job, inputs: Inputs, samples: int = 0) -> Iterator[dict[str, object]]:
    """Yield micro batches without data, in the form of `zerofit.data.micro_batches`.

    `samples`: number of samples in a micro batch; 0: the job's number.
    """
    samples = samples or job.batch.micro
    while True:
        tensors = empty_batch(inputs, samples)
        batch: dict[str, object] = {**tensors, "weight": job.layout.sp / tensors["labels"].numel()}
        del tensors  # only the batch keeps them
        if mixes(job.run) and isinstance(inputs, ImageInputs):
            batch["labels"] = torch.zeros(samples, inputs.classes)
        yield batch
        del batch
