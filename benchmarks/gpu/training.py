"""Memory and step times of real runs, beside what zerofit forecasts of them without a GPU."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zerofit as zf
from benchmarks.meter.configurations import MODELS as SMALL
from benchmarks.meter.configurations import options, target
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models.inputs import ImageInputs
from zerofit.plan.degrees import Degrees
from zerofit.plan.kernels import kernel_s
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import Rates, rates_of
from zerofit.plan.time import Timer
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.profile import Profile, Savings, setting

from .part import Measure
from .rank import train

MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"model": "resnet50", "image_size": 224},
    "vit": {"model": "vit-l-16-hf", "image_size": 224},
    "bert": {"model": "bert-large", "seq_len": 512},
    "gpt2": {"model": "gpt2", "seq_len": 1024},
    "llama-1b": {"model": "llama-3.2-1b", "seq_len": 2048},
    "llama-8b": {"model": "llama-3.1-8b", "seq_len": 4096},
}
NAMES: list[str] = list(
    """
llama-1b zero2 bf16 mb2 x1
resnet50 zero0 bf16 mb64 x1
llama-1b zero3 bf16 mb2 x1
llama-8b zero2 bf16 mb1 ckpt offload x1
gpt2 zero0 bf16 mb8 x1
bert zero1 bf16 mb8 ga2 x1
vit zero2 bf16 mb32 ckpt x1
llama-1b zero1 fp16 mb2 x1
llama-1b zero2 bf16 mb4 ckpt x1
llama-1b zero2 bf16 mb2 offload x1
llama-1b zero1 bf16 mb2 chunk x1
llama-1b zero3 bf16 mb4 ckpt offload-all x1
llama-8b zero3 bf16 mb1 ckpt offload-all x1
resnet50 zero0 fp32 mb64 x1
resnet50 zero2 fp16 mb64 offload x1
gpt2 zero0 fp32 mb4 x1
gpt2 zero3 bf16 mb8 ckpt offload-all x1
bert zero2 fp16 mb8 x1
vit zero0 bf16 mb32 x1
llama-1b zero0 bf16 mb2 x1
""".strip().splitlines()
)
REHEARSED = ["lenet zero0 fp32 mb8 x1", "llama zero2 bf16 mb2 ckpt x1"]


def cases(rehearse: bool) -> list[str]:
    """Configurations as `meter.configurations` names them."""
    return REHEARSED if rehearse else NAMES


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Simulate and plan all cases first, side by side on the CPUs; then each one can be trained with them idle."""
    models = SMALL if rehearse else MODELS
    targets = {case: target(case, models) for case in cases}
    with ThreadPoolExecutor(4) as threads:
        simulated = {case: threads.submit(_simulated, case, models) for case in cases}
    planned = {case: _planned(targets[case]) for case in cases}
    yield lambda case: _measure(targets[case], simulated[case], planned[case], folder)


def _measure(
    asked: SimulationTarget, simulated: Future[dict[str, Any]], planned: dict[str, Any], folder: Path
) -> dict[str, Any]:
    forecast = simulated.result() | planned
    if not forecast["fits"]:
        return {"forecast": forecast}
    real = train(asked, folder)
    errors = {name: forecast[name] / real[name] - 1 for name in forecast if name.endswith("_bytes") and name in real}
    if forecast["step_s"]:
        errors["step_s"] = forecast["step_s"] / statistics.median(real["step_s"]) - 1
    return {"forecast": forecast, "real": real, "errors": errors}


def _simulated(case: str, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    asked = zf.simulate(zf.Run(**{**options(case, models), "ranks": None}), here())
    found = {"allocated_bytes": asked.peak_bytes, "fits": asked.fits, "verdict": asked.verdict}
    if not here().on_cpu:
        found |= {"reserved_bytes": asked.reserved_bytes, "used_bytes": asked.smi_bytes}
    return {**found, "simulated_in_s": round(time.monotonic() - began, 1)}


def _planned(asked: SimulationTarget) -> dict[str, Any]:
    """Return the time of a step by `zerofit plan`, and of its kernels; None on a CPU that was not calibrated."""
    job, cluster = asked.job, here()
    calibration = read_calibration(cluster.device.kind)
    if cluster.on_cpu and calibration is None:
        return {"step_s": None}
    inputs = asked.inputs
    image = f"image:{inputs.channels}x{inputs.size}x{inputs.size}" if isinstance(inputs, ImageInputs) else None
    wanted = ProfileRequest(
        model=job.run.model,
        precision=job.precision,
        device=asked.accelerator,
        seq_len=job.run.seq_len,
        image=image,
        model_args=dict(job.run.model_args),
        checkpointings=(job.run.activation_checkpointing,),
        degrees=(Degrees(),),
        savings=Savings.of(job.run),
    )
    profile, _ = get_profile(wanted, Reporter())
    rates, layout = rates_of(cluster, job.precision, calibration), PlannedLayout.of(job)
    return {"step_s": Timer(profile, cluster, rates).step(layout).step_s, "kernels": _kernels(profile, layout, rates)}


def _kernels(profile: Profile, layout: PlannedLayout, rates: Rates) -> dict[str, float]:
    """Return the forecast seconds of one step's kernels by class, without the engine's own (optimizer, collectives)."""
    costs = profile.costs[setting(layout.precision, layout.checkpointing, layout.tp, layout.sp)]
    found: defaultdict[str, float] = defaultdict(float)
    for layer, cost in zip(profile.layers, costs, strict=True):
        for kernel in (*cost.forward_kernels, *cost.backward_kernels):
            times = layer.count * layout.accumulation
            found[kernel.kind] += times * kernel_s(kernel, layout.micro_batch, rates)
    return {kind: round(seconds, 6) for kind, seconds in sorted(found.items())}


def here() -> Cluster:
    """Return this machine with one device."""
    return replace(Cluster.here(), gpus=1)
