"""The plan of a resolved run: the profile of its model, and the nodes of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerofit.app.job.requests import input_option
from zerofit.app.job.resolve import ResolvedJob
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.launch.hostfile import Host
from zerofit.plan.degrees import Degrees
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.profile import NOTHING_SAVED, Profile, Savings


def cluster_of(ranks: int, hosts: Sequence[Host]) -> Cluster:
    """Return this machine, or hosts like it, as a cluster. Raises UserError if hosts have different slots."""
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
    """Return the stored profile of a run's model with its inputs, or trace it now. Raises UserError and ModelError."""
    run, inputs = resolved.job.run, resolved.inputs
    request = ProfileRequest.of_run(run, precision, cluster.accelerator, input_option(inputs), degrees)
    return get_profile(replace(request, savings=savings), report)[0]
