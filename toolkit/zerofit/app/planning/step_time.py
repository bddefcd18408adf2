"""Forecast of a job's step time from stored profiles and rates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from zerofit.app.planning.profiles import ProfileRequest, kept_profile
from zerofit.app.requests import input_option
from zerofit.app.resolve import ResolvedJob
from zerofit.check.dotted import get
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.time import Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.profile import Profile


def forecast_step_s(resolved: ResolvedJob) -> float | None:
    """Return the forecast seconds per step on this machine; None if they are not known at once.

    Nothing is traced or measured here: it needs a profile stored by `zerofit plan`, `tune` or `--fit`, and on CPUs
    `zerofit calibrate`.
    """
    job = resolved.job
    if job.layout.ep > 1 or get(job.ds_config, "zero_optimization.zenflow") is not None:
        return None
    try:
        cluster = replace(Cluster.here(), gpus=job.layout.world_size)
    except UserError:  # a GPU that is not in the catalogue
        return None
    calibration = read_calibration(cluster.device.kind)
    profile = _profile(resolved, cluster.accelerator)
    if profile is None or (cluster.on_cpu and calibration is None):
        return None
    timer = Timer(profile, cluster, rates_of(cluster, job.precision, calibration))
    layout = replace(PlannedLayout.of(job), micro_batch=max(job.batch.shares))  # the slowest
    return timer.step(layout).step_s


def _profile(resolved: ResolvedJob, device: str) -> Profile | None:
    """Return a stored profile of the job's model in its setting, whatever it was traced for."""
    job, inputs = resolved.job, resolved.inputs
    layout, run = job.layout, job.run
    key = PlannedLayout.of(job).setting
    image = input_option(inputs)
    asked = Degrees(layout.tp, layout.pp, layout.sp, layout.ep).beside_plain()
    for seq_len, degrees in product({run.seq_len, None}, (None, asked)):
        wanted = ProfileRequest.of_run(run, job.precision, device, image, degrees)
        profile = kept_profile(replace(wanted, seq_len=seq_len))
        if profile is not None and profile.seq_len == run.seq_len and key in profile.costs:
            return profile
    return None
