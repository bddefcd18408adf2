"""Forecasts for a resolved job, as in `zerofit plan`: its cluster, profile and step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from zerofit.app.job.requests import input_option
from zerofit.app.job.resolve import ResolvedJob
from zerofit.app.planning.profiles import ProfileRequest, get_profile, stored_profile
from zerofit.features.zero import features_on
from zerofit.launch.hostfile import Host
from zerofit.models.inputs import Inputs
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.software import Software
from zerofit.plan.time import Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import ModelError, Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.profile import NOTHING_SAVED, Profile, Savings
from zerofit.spec.run_folder import Job


def cluster_of(ranks: int, hosts: Sequence[Host]) -> Cluster:
    """Return this machine, or several hosts like it, as a cluster.

    Raises UserError if the hosts have different numbers of slots.
    """
    nodes = max(1, len(hosts))
    if len({host.slots for host in hosts}) > 1 or ranks % nodes:
        message = f"{ranks} ranks on {nodes} hosts with {', '.join(str(host.slots) for host in hosts)} slots"
        hint = "forecasts need the same number of ranks on every host: use --include, --exclude or --ranks"
        raise UserError(Problem(kind="hostfile", message=message, hint=hint, where="--hostfile"))
    return replace(Cluster.here(), gpus=ranks // nodes, nodes=nodes)


def profile_of(
    resolved: ResolvedJob,
    cluster: Cluster,
    precision: str,
    report: Reporter,
    *,
    degrees: tuple[Degrees, ...] | None = None,
    savings: Savings = NOTHING_SAVED,
) -> Profile:
    """Return the stored profile of a run's model with its inputs, or trace the model now.

    Raises UserError and ModelError.
    """
    run, inputs = resolved.job.run, resolved.inputs
    request = ProfileRequest.of_run(run, precision, cluster.accelerator, input_option(inputs), degrees)
    return get_profile(replace(request, savings=savings), report)[0]


def forecast_step_s(resolved: ResolvedJob) -> float | None:
    """Return the forecast seconds per step on this machine; None if they need a measurement.

    Nothing is traced or measured here. The function needs a profile stored by `zerofit plan`, `tune` or `--fit`,
    and on CPUs the rates of `zerofit calibrate`.
    """
    job, inputs = resolved.job, resolved.inputs
    try:
        cluster = replace(Cluster.here(), gpus=job.layout.world_size)
    except UserError:  # a GPU that is not in the catalog
        return None
    # Commands store profiles with and without the sequence length, and of all degrees or only the job's. Each is
    # good enough if it has the costs of the job's setting.
    key, wanted = PlannedLayout.of(job).setting, ProfileRequest.of_job(job, cluster.accelerator, input_option(inputs))
    for seq_len, degrees in product({job.run.seq_len, None}, (None, wanted.degrees)):
        profile = stored_profile(replace(wanted, seq_len=seq_len, degrees=degrees))
        if profile is not None and profile.seq_len == job.run.seq_len and key in profile.costs:
            return step_s_of(job, profile, cluster)
    return None


def traced_step_s(job: Job, inputs: Inputs, cluster: Cluster, report: Reporter) -> float | None:
    """Return the forecast seconds per step of a job; trace the model if no profile is stored.

    Return None if no rate or formula describes the step, or if the model cannot be traced.
    """
    # CPUs differ too much for a catalog's rates. Their step times are forecast only after `zerofit calibrate`.
    if cluster.on_cpu and read_calibration(cluster.device.kind) is None:
        return None
    wanted = ProfileRequest.of_job(job, cluster.accelerator, input_option(inputs))
    try:
        return step_s_of(job, get_profile(wanted, report)[0], cluster)
    except (UserError, ModelError):
        return None


def step_s_of(job: Job, profile: Profile, cluster: Cluster) -> float | None:
    """Return the forecast seconds per step of a job on a cluster.

    None if the profile, the rates or the formulas do not cover the job.
    """
    layout, calibration = PlannedLayout.of(job), read_calibration(cluster.device.kind)
    unknown = job.layout.ep > 1 or any(feature.not_planned for feature in features_on(job.ds_config))
    if unknown or layout.setting not in profile.costs or (cluster.on_cpu and calibration is None):
        return None
    timer = Timer(profile, cluster, rates_of(cluster, job.precision, calibration, Software.of(dict(job.run))))
    return timer.step(replace(layout, micro_batch=max(job.batch.shares))).step_s  # of the slowest, on equal devices
