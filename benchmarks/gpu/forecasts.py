"""What zerofit says of the trainings that a GPU has run, on any machine and without one.

python -m benchmarks.gpu.forecasts DIR

Each case of DIR/training.json gets {"forecast", "errors"}: memory by `zerofit simulate`, the time of a step by `zerofit
plan` with the catalog's figures and with those that `zerofit calibrate` measured there (DIR/environment.json).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import zerofit as zf
from benchmarks.meter.configurations import MODELS as SMALL
from benchmarks.meter.configurations import options
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models.inputs import ImageInputs
from zerofit.plan.degrees import Degrees
from zerofit.plan.kernels import kernel_s
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import Rates, rates_of
from zerofit.plan.time import Timer
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import by_name
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.local_machine import Calibration
from zerofit.spec.profile import Profile, Savings, setting

from .part import read
from .training import MODELS, NAMES


def main() -> None:
    """Forecast what has been trained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="as `run --out` has filled it")
    folder = parser.parse_args().folder
    found = read(folder / "training.json")
    measured = read(folder / "environment.json").get("cases", {}).get("calibrate", {}).get("answer")
    calibration = (
        Calibration.from_dict({name: value for name, value in measured.items() if name not in ("file", "seconds")})
        if measured
        else None
    )
    for case, answer in found["cases"].items():
        if "real" in answer:
            found["cases"][case] = answer | beside(case, answer, found["hardware"], calibration)
            print(case, {name: f"{error:+.2%}" for name, error in found["cases"][case]["errors"].items()}, flush=True)
            write_json(folder / "training.json", found)


def beside(
    case: str, answer: dict[str, Any], hardware: dict[str, Any], calibration: Calibration | None
) -> dict[str, Any]:
    """Return {"forecast", "errors"} of a training that has been measured on a device: relative errors."""
    real, cluster = answer["real"], Cluster("cpu", gpus=1)
    if hardware["accelerator"] == "cuda":
        device = by_name(hardware["device"], real["total_bytes"])
        assert device
        cluster = Cluster(device.kind, gpus=1)
    forecast = _simulated(case, cluster) | _planned(SimulationTarget.from_dict(answer["target"]), cluster, calibration)
    errors = {name: forecast[name] / real[name] - 1 for name in forecast if name.endswith("_bytes") and name in real}
    for name in ("step_s", "calibrated_step_s"):
        if name in forecast:
            errors[name] = forecast[name] / statistics.median(real["step_s"]) - 1
    return {"forecast": forecast, "errors": errors}


def _simulated(case: str, cluster: Cluster) -> dict[str, Any]:
    began, models = time.monotonic(), MODELS if case in NAMES else SMALL
    asked = zf.simulate(zf.Run(**{**options(case, models), "ranks": None}), cluster)
    found = {"allocated_bytes": asked.peak_bytes, "fits": asked.fits, "verdict": asked.verdict}
    if not cluster.on_cpu:
        found |= {"reserved_bytes": asked.reserved_bytes, "used_bytes": asked.smi_bytes}
    return {**found, "simulated_in_s": round(time.monotonic() - began, 1)}


def _planned(asked: SimulationTarget, cluster: Cluster, calibration: Calibration | None) -> dict[str, Any]:
    """Return the time of a step by `zerofit plan`, and of its kernels; nothing on a CPU that was not calibrated."""
    job, inputs, found = asked.job, asked.inputs, {}
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
    layout = PlannedLayout.of(job)
    known = {"": None, "calibrated_": calibration} if calibration else {"": None}
    if cluster.on_cpu:
        del known[""]
    for word, of in known.items():
        rates = rates_of(cluster, job.precision, of)
        found[f"{word}step_s"] = Timer(profile, cluster, rates).step(layout).step_s
        found[f"{word}kernels"] = _kernels(profile, layout, rates)
    return found


def _kernels(profile: Profile, layout: PlannedLayout, rates: Rates) -> dict[str, float]:
    """Return the forecast seconds of one step's kernels by class, without the engine's own (optimizer, collectives)."""
    costs = profile.costs[setting(layout.precision, layout.checkpointing, layout.tp, layout.sp)]
    found: defaultdict[str, float] = defaultdict(float)
    for layer, cost in zip(profile.layers, costs, strict=True):
        for kernel in (*cost.forward_kernels, *cost.backward_kernels):
            times = layer.count * layout.accumulation
            found[kernel.kind] += times * kernel_s(kernel, layout.micro_batch, rates)
    return {kind: round(seconds, 6) for kind, seconds in sorted(found.items())}


if __name__ == "__main__":
    main()
