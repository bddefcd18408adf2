"""A run to be tuned: what it is, and every configuration of it that should fit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from zerofit.app.clusters.site import filled, machine_of
from zerofit.app.planning.files import ds_config as planned_config
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.app.planning.questions import forecast_of
from zerofit.app.resolve import resolve_job
from zerofit.app.tuning.space import allows, read_space
from zerofit.cli.console import EventConsole
from zerofit.data import open_data
from zerofit.launch.hostfile import Host
from zerofit.launch.machine import this_machine
from zerofit.plan.search import search
from zerofit.plan.space import PlanRequest
from zerofit.spec.calibration import read_calibration
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.load import RunRequest
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job
from zerofit.tune.trial import Candidate

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# of the run: what a trial does not need
QUIET = {"save_every": "0", "eval_every": 0, "eval_samples": 1, "tensorboard": False, "wandb": None, "epochs": None}
ENDLESS = 10**9  # steps: a trial is ended when enough is known


@dataclass(frozen=True)
class TuneJob:
    """What stays the same over all trials."""

    asked: RunRequest
    run: Run  # everything filled in
    ds_source: dict[str, Any]  # the DeepSpeed JSON as the user has it
    profiles: dict[str, Profile]  # by precision
    candidates: tuple[Candidate, ...]
    device: str  # kind
    hosts: tuple[Host, ...] = ()  # none: this machine
    host_flags: tuple[str, ...] = ()  # of `zerofit launch`, for trials on hosts

    @classmethod
    def of(
        cls, asked: RunRequest, space: Path | None, hosts: Sequence[Host] = (), host_flags: Sequence[str] = ()
    ) -> TuneJob:
        """Check the run, trace its model, forecast every configuration. Raises UserError and ModelError."""
        allowed = read_space(space) if space else {}
        machine = machine_of(hosts, None) if hosts else this_machine()
        resolved = resolve_job(asked, machine=machine, report=Reporter(EventConsole()))
        job, source = resolved.job, resolved.ds_source
        used = filled(hosts, job.layout.world_size) if hosts else ()
        run, cluster = job.run, _cluster(job, used)
        precisions = allowed.get("precision") or [run.precision or "fp32"]
        profiles = {precision: _profile(job, cluster, precision) for precision in precisions}
        candidates, considered = list[Candidate](), 0
        for precision, batch in product(precisions, allowed.get("global_batch") or [job.batch.total]):
            found = _forecast(profiles[precision], cluster, _wish(run, precision, batch))
            considered += found.considered
            for one in found.layouts:
                compiles = allowed.get("compile") or [run.compile]
                times = {"forecast_step_s": one.time.step_s, "peak_bytes": one.memory.peak_bytes}
                candidates += [Candidate(layout=one.layout, compiled=compiled, **times) for compiled in compiles]
        candidates = [c for c in candidates if allows(allowed, c.to_dict())]
        if not candidates:
            message = f"none of {considered} configurations fits" + (f" and is in {space}" if space else "")
            hint = "`zerofit plan` says what lacks" if not space else "allow more values"
            raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where=str(space or "MODEL")))
        kind = cluster.device.kind
        return cls(asked, run, source, profiles, tuple(candidates), kind, tuple(used), tuple(host_flags))

    def ds_config(self, candidate: Candidate) -> dict[str, Any]:
        """The user's DeepSpeed JSON with this configuration in it; batch sizes are the run's."""
        config, layout = copy.deepcopy(self.ds_source), candidate.layout
        for key in (*BATCH_KEYS, "tensor_parallel", "sequence_parallel_size"):
            config.pop(key, None)
        if layout.precision != self.run.precision:  # asked for by --space: run.yaml says which
            for key in ("fp16", "bf16"):
                config.pop(key, None)
        offload = config.get("zero_optimization", {}).get("offload_param", {})
        profile = self.profiles[layout.precision]
        planned = planned_config(layout, profile, offload.get("nvme_path") or "/local_nvme")
        for key in ("zero_optimization", "tensor_parallel", "sequence_parallel_size"):
            if key in planned:
                config[key] = planned[key]
        return config

    def knobs(self, candidate: Candidate) -> dict[str, Any]:
        """The keys of run.yaml that this configuration sets."""
        layout = candidate.layout
        degrees = {"tensor_parallel": layout.tp, "pipeline": layout.pp, "sequence_parallel": layout.sp}
        return {
            "ranks": layout.world_size,
            "micro_batch": layout.micro_batch,
            "gradient_accumulation_steps": layout.accumulation,
            "activation_checkpointing": layout.checkpointing,
            "precision": layout.precision,
            "compile": candidate.compiled,
            **{name: degree for name, degree in degrees.items() if degree > 1},
        }

    def trial_run(self, candidate: Candidate) -> dict[str, Any]:
        """run.yaml of a trial: the real run, without an end, saving and evaluating nothing."""
        run = self.run.model_dump(mode="json")
        drop = {"output": None, "resume": "never", "steps": ENDLESS, "global_batch": None}
        degrees = {"tensor_parallel": 1, "pipeline": 1, "sequence_parallel": 1}
        return {**run, **QUIET, **drop, **degrees, **self.knobs(candidate), "ds_config": self.ds_config(candidate)}


def _cluster(job: Job, hosts: Sequence[Host]) -> Cluster:
    """This machine, or hosts like it. Raises UserError where they differ in slots."""
    cluster = Cluster.here()
    ranks, nodes = job.layout.world_size, max(1, len(hosts))
    if len({host.slots for host in hosts}) > 1 or ranks % nodes:
        message = f"{ranks} ranks on {nodes} hosts of {', '.join(str(host.slots) for host in hosts)} slots"
        hint = "forecasts need as many ranks on every host: take --include, --exclude or --ranks"
        raise UserError(Problem(kind="hostfile", message=message, hint=hint, where="--hostfile"))
    return replace(cluster, gpus=ranks // nodes, nodes=nodes)


def _profile(job: Job, cluster: Cluster, precision: str) -> Profile:
    run = job.run
    wanted = ProfileRequest(
        model=run.model,
        precision=precision,
        device="cpu" if cluster.on_cpu else "cuda",
        seq_len=run.seq_len,
        image=_image(job),
        model_args=dict(run.model_args),
    )
    return get_profile(wanted, lambda text: click.echo(text, err=True))[0]


def _wish(run: Run, precision: str, batch: int) -> PlanRequest:
    degrees = {"tp": run.tensor_parallel, "pp": run.pipeline, "sp": run.sequence_parallel}
    fixed = {name: degree for name, degree in degrees.items() if degree > 1}
    return PlanRequest(precision=precision, global_batch=batch, every=True, **fixed)


def _forecast(profile: Profile, cluster: Cluster, wish: PlanRequest) -> Any:
    calibration = read_calibration(cluster.device.kind)
    return search(profile, cluster, wish, forecast_of(profile, cluster), calibration, top=10**6)


def _image(job: Job) -> str | None:
    if job.facts.task != "image":
        return None
    inputs = open_data(job.run, "image", None, Reporter()).inputs
    return f"image:{inputs.channels}x{inputs.size}x{inputs.size}"
