"""One simulated rank: the real driver and the real engine on fake tensors, in a process that is of no other use."""

from __future__ import annotations

import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
import torch._dynamo  # zero.Init replaces Tensor.__new__: imported later, dynamo would fail in it
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofit.models.catalog import PRETRAINED, ModelError, find
from zerofit.simulate import device
from zerofit.simulate.allocator import replay
from zerofit.simulate.analysis import device_events, host_peak, kind_peaks, timeline
from zerofit.simulate.batches import batches
from zerofit.simulate.categories import classify
from zerofit.simulate.fake_process_group import join, set_environment
from zerofit.simulate.ownership import tag_owned_storages, watch_gradients
from zerofit.simulate.patches import apply_all
from zerofit.simulate.phases import PhaseLog, start, train_steps
from zerofit.simulate.pipeline_input import set_stage_input_shape
from zerofit.simulate.record import CollectiveCalls, GroupUse, PhaseFlops, RankRecord
from zerofit.simulate.scratch import scratch_of
from zerofit.simulate.target import SimulationTarget
from zerofit.simulate.tracker import AllocationTracker, Scratch, is_own
from zerofit.spec.errors import Problem, UserError
from zerofit.train.pipeline import PipelineTrainer

LINES = 3  # of an exception's message


def simulate(
    target: SimulationTarget, scratch: Scratch | None = None, say: Callable[[str], None] = lambda text: None
) -> RankRecord:
    """Build, init and train on fake tensors.

    This process's torch and DeepSpeed are changed for good. `scratch` stands in for the device's own table.
    """
    set_environment(target)
    gpu = target.accelerator == "cuda"
    meter = AllocationTracker(device.NAME if gpu else "cpu", scratch or scratch_of(target))
    (device.install_gpu if gpu else device.install_host)(meter, target.device_bytes)
    apply_all(gpu, meter)
    try:
        with tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True), meter:
            join(target)
            log = _live(_without_files(target, folder), meter, say)
    except (UserError, ModelError):
        raise
    except Exception as error:  # DeepSpeed, transformers and a user's model can raise anything
        traceback.print_exc()
        raise UserError(_not_simulated(target, meter, error)) from error
    return _record(target, meter, log)


def _not_simulated(target: SimulationTarget, meter: AllocationTracker, error: Exception) -> Problem:
    """Where the simulation has stopped: the op, the module that ran and the line that raised."""
    op, module = meter.last
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    frame = (own or frames)[-1]
    first = "; ".join(line.strip() for line in str(error).strip().splitlines()[:LINES])
    return Problem(
        kind="not-simulated",
        message=f"{target.job.run.model} cannot be simulated: {type(error).__name__} in module {module or '(none)'} "
        f"at op {op}: {first}",
        hint="does it take what --data or --input give? Code that needs the values of tensors (item(), "
        "`if x.sum() > 0`) cannot be simulated: train it for a step instead",
        where=f"{frame.filename}:{frame.lineno}",
    )


def _without_files(target: SimulationTarget, folder: str) -> SimulationTarget:
    """A pretrained model's weights are not read, and what is swapped goes nowhere: shapes are all that counts."""
    job = target.job
    source = find(job.run.model)
    if source.origin == PRETRAINED:
        job = replace(job, run=job.run.model_copy(update={"model": f"{source.path}/config.json"}))
    zero = dict(job.ds_config.get("zero_optimization", {}))
    for part in ("offload_optimizer", "offload_param"):
        if zero.get(part, {}).get("device") == "nvme":
            zero[part] = {**zero[part], "nvme_path": folder}
    return replace(target, job=replace(job, ds_config={**job.ds_config, "zero_optimization": zero}))


def _live(target: SimulationTarget, meter: AllocationTracker, say: Callable[[str], None]) -> PhaseLog:
    job, engines = target.job, []

    def built(model: torch.nn.Module) -> None:
        meter.names(model)
        watch_gradients(meter, model)

    def begin(name: str, step: int) -> None:
        for engine in engines:
            tag_owned_storages(meter, engine)
        meter.begin(name, step)
        say(name if step < 0 else f"step {step + 1}: {name}")

    log = PhaseLog(meter, begin)
    driver = start(job, target.rank, target.inputs, log, on_built=built)
    if isinstance(driver, PipelineTrainer):
        set_stage_input_shape(driver, target.inputs)
    engines.append(driver.engine)
    train_steps(driver, batches(job, target.inputs), target.steps, log)
    tag_owned_storages(meter, driver.engine)
    return log


def _record(target: SimulationTarget, meter: AllocationTracker, log: PhaseLog) -> RankRecord:
    ledger = meter.ledger
    for storage in ledger.storages:
        storage.kind = storage.kind or classify(storage)
    events = device_events(ledger, target.workspaces)
    return RankRecord(
        phases=log.done,
        peaks=kind_peaks(ledger),
        host=host_peak(ledger),
        nvme_bytes=sum(meter.files.values()),
        reserved_bytes=replay(events).peak_reserved_bytes,
        sent=_sent(meter),
        groups=[GroupUse(ranks=ranks, ops=tuple(sorted(ops))) for ranks, ops in meter.groups.values()],
        flops=[PhaseFlops(phase=phase, step=step, flops=n) for (phase, step), n in meter.flops.items()],
        timeline=timeline(ledger),
        events=events,
    )


def _sent(meter: AllocationTracker) -> list[CollectiveCalls]:
    """Sum up collectives by op, group size, phase and step."""
    calls: Counter[tuple[str, int, str, int]] = Counter()
    sizes: Counter[tuple[str, int, str, int]] = Counter()
    for (op, size, ranks, phase, step), count in meter.sent.items():
        calls[op, ranks, phase, step] += count
        sizes[op, ranks, phase, step] += size * count
    return [
        CollectiveCalls(op=op, group_size=ranks, phase=phase, step=step, count=n, bytes=sizes[op, ranks, phase, step])
        for (op, ranks, phase, step), n in calls.items()
    ]
