"""A run to tune, and all its configurations that should fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from zerofit.app.clusters.hosts import filled, machine_of
from zerofit.app.job.resolve import ds_document, resolve_job
from zerofit.app.planning.job_forecast import cluster_of, profile_of
from zerofit.app.planning.output_files import ds_config as planned_config
from zerofit.app.planning.output_files import layout_fields
from zerofit.app.planning.search_setup import forecast_of
from zerofit.features.zero import features_on
from zerofit.launch.hostfile import Host, read_hostfile
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.search import search
from zerofit.plan.software import Software
from zerofit.plan.space import PlanRequest
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.foreign_yaml import read_own_values
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.model_facts import PRECISIONS
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Job
from zerofit.tune.trial import Candidate

# Type of each knob's values. Precision, global_batch and compile stay as in the run unless the space names them.
KNOBS: dict[str, type] = {
    **dict.fromkeys(("zero_stage", "micro_batch", "gradient_accumulation_steps", "tp", "pp", "sp", "ep"), int),
    **dict.fromkeys(("bucket_elements", "prefetch_elements", "persistence_elements", "global_batch"), int),
    **dict.fromkeys(("activation_checkpointing", "overlap_comm", "compile"), bool),
    **dict.fromkeys(("offload", "precision"), str),
}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# fields of the run that trials turn off
QUIET = {"save_every": "0", "eval_every": 0, "eval_samples": 1, "epochs": None}
QUIET |= {"callbacks": [], "tensorboard": False, "wandb": None, "profile": None}
ENDLESS = 10**9  # steps; a trial is stopped once its step time is known
ALL = 10**6  # layouts


def read_space(space: Path | str | Mapping[str, object]) -> dict[str, list[Any]]:
    """Return the allowed values of each knob, from a mapping or from a YAML file.

    Raises UserError with all problems.
    """
    place = "space" if isinstance(space, Mapping) else str(space)
    problems, allowed = Problems(), dict[str, list[Any]]()
    if not isinstance(space, Mapping):
        hint = "write lines like `zero_stage: [1, 2]`"
        space = read_own_values(Path(space), kind="space", hint=hint, where="--space")
    for key, value in space.items():
        if key not in KNOBS:
            problems.add("unknown-key", f"unknown knob {key!r}", nearest(str(key), KNOBS), place)
            continue
        allowed[key] = list(value) if isinstance(value, list | tuple) else [value]
        for value in allowed[key]:
            _check_value(key, value, place, problems)
    problems.raise_if_any()
    return allowed


def _check_value(key: str, value: Any, place: str, problems: Problems) -> None:
    kind = KNOBS[key]
    if type(value) is not kind:  # True is an instance of int, too
        words = {int: "an integer", bool: "true or false", str: "a word"}[kind]
        problems.add("space", f"{key}: {value!r} is not {words}", f"write {key}: [value, value]", place)
    elif key == "global_batch" and value < 1:
        problems.add("space", f"global_batch: {value}", "use 1 or more samples", place)
    elif key == "precision" and value not in PRECISIONS:
        problems.add("space", f"precision: {value!r}", f"use {', '.join(PRECISIONS)}", place)


def allows(allowed: Mapping[str, list[object]], row: Mapping[str, object]) -> bool:
    """Return whether all values of a configuration (as in --json) are allowed."""
    return all(row[knob] in values for knob, values in allowed.items())


@dataclass(frozen=True, kw_only=True)
class TrialHosts:
    """Hosts for trials, and the flags of `zerofit launch` that name them."""

    hosts: tuple[Host, ...]
    flags: tuple[str, ...]

    @classmethod
    def of(cls, hosts: Path | str | TrialHosts | None) -> TrialHosts:
        """Return the hosts of a hostfile; without one, trials run on this machine. Raises UserError."""
        if isinstance(hosts, str | Path):
            return cls(hosts=read_hostfile(Path(hosts)), flags=(f"--hostfile={hosts}",))
        return hosts or cls(hosts=(), flags=())


def _refuse_untried(request: RunRequest) -> None:
    if request.run.micro_batch_by_rank:
        message = f"{request.place('micro_batch_by_rank')}: trials give every rank the same micro batch"
        hint = "remove it here, and add it when you run `zerofit train` with the result"
        raise UserError(Problem(kind="conflict", message=message, hint=hint, where="--micro-batch-by-rank"))
    for feature in features_on(ds_document(request.run).config):
        if not feature.tuned:
            key = feature.path.removeprefix("zero_optimization.")
            message = f"trials set zero_optimization themselves, and none of them has {key}"
            hint = "remove --ds-config, and compare the result with `zerofit train --ds-config ...`"
            raise UserError(Problem(kind="conflict", message=message, hint=hint, where="--ds-config"))


def _forecast(
    job: Job, cluster: Cluster, profiles: Mapping[str, Profile], allowed: Mapping[str, list[Any]]
) -> tuple[list[Candidate], int]:
    run, calibration = job.run, read_calibration(cluster.device.kind)
    degrees = {"tp": run.tensor_parallel, "pp": run.stages, "sp": run.sequence_parallel, "ep": run.expert_parallel}
    fixed: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    planned = PlannedLayout.of(job)
    own = {"optimizer": planned.optimizer, "has_weight_decay": planned.has_weight_decay}
    fixed |= {"fixed": own, "schedule": run.pipeline_schedule, "every": True}
    # If trials may turn compilation on and off, forecasts are for runs without it. Then they are comparable.
    software = replace(Software.of(dict(run)), compile=run.compile and "compile" not in allowed)
    candidates, considered = list[Candidate](), 0
    for (precision, profile), batch in product(profiles.items(), allowed.get("global_batch") or [job.batch.total]):
        request = PlanRequest(precision=precision, global_batch=batch, software=software, **fixed)
        result = search(profile, cluster, request, forecast_of(profile, cluster), calibration, top=ALL)
        considered += result.considered
        for ranked, compiled in product(result.layouts, allowed.get("compile") or [run.compile]):
            forecast = {"forecast_step_s": ranked.time.step_s, "peak_bytes": ranked.memory.peak_bytes}
            candidates.append(Candidate(layout=ranked.layout, compiled=compiled, **forecast))
    return candidates, considered


@dataclass(frozen=True, kw_only=True)
class TuneJob:
    """The part of a tuning that all trials share."""

    request: RunRequest
    run: Run  # with all values filled in
    ds_source: dict[str, Any]  # the DeepSpeed JSON as the user wrote it
    profiles: dict[str, Profile]  # by precision
    candidates: tuple[Candidate, ...]
    device: str  # device kind
    hosts: tuple[Host, ...]  # empty: this machine
    host_flags: tuple[str, ...]  # flags of `zerofit launch` for trials on hosts
    anyway: bool = False  # also start trials that do not fit into free memory

    @classmethod
    def of(
        cls,
        request: RunRequest,
        *,
        space: Path | str | Mapping[str, object] | None = None,
        hosts: Path | str | TrialHosts | None = None,
        anyway: bool = False,
        report: Reporter | None = None,
    ) -> TuneJob:
        """Check the run, trace its model and forecast every configuration.

        Raises UserError and ModelError.
        """
        report, trial_hosts = report or Reporter(), TrialHosts.of(hosts)
        _refuse_untried(request)
        allowed = read_space(space) if space else {}
        machine = machine_of(trial_hosts.hosts, None) if trial_hosts.hosts else None
        resolved = resolve_job(request, machine=machine, report=report)
        job, run = resolved.job, resolved.job.run
        used = filled(trial_hosts.hosts, job.layout.world_size) if trial_hosts.hosts else ()
        cluster = cluster_of(job.layout.world_size, used)
        precisions = allowed.get("precision") or [job.precision]
        own_degrees = (Degrees(), Degrees(run.tensor_parallel, 1, run.sequence_parallel, run.expert_parallel))
        traced = own_degrees if run.expert_parallel > 1 else None  # a degree that the search does not cover
        profiles = {
            precision: profile_of(resolved, cluster, precision, report, degrees=traced) for precision in precisions
        }
        candidates, considered = _forecast(job, cluster, profiles, allowed)
        candidates = [c for c in candidates if allows(allowed, c.to_dict())]
        if not candidates:
            place = "space" if isinstance(space, Mapping) else str(space)
            message = f"none of {considered} configurations fits" + (f" and is allowed by {place}" if space else "")
            hint = "`zerofit plan` shows what is missing" if not space else "allow more values"
            raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where=place if space else "MODEL"))
        return cls(
            request=request,
            run=run,
            ds_source=resolved.ds_source,
            profiles=profiles,
            candidates=tuple(candidates),
            device=cluster.device.kind,
            hosts=tuple(used),
            host_flags=trial_hosts.flags,
            anyway=anyway,
        )

    def ds_config(self, candidate: Candidate) -> dict[str, Any]:
        """Return the user's DeepSpeed JSON with this configuration, without batch sizes."""
        config, layout = copy.deepcopy(self.ds_source), candidate.layout
        for key in (*BATCH_KEYS, "tensor_parallel", "sequence_parallel_size", "expert_parallel"):
            config.pop(key, None)
        if layout.precision != self.run.precision:  # set by the space, so run.yaml sets it
            for key in ("fp16", "bf16"):
                config.pop(key, None)
        offload = config.get("zero_optimization", {}).get("offload_param") or {}
        profile = self.profiles[layout.precision]
        planned = planned_config(layout, profile, offload.get("nvme_path") or "/local_nvme")
        for key in ("zero_optimization", "tensor_parallel", "sequence_parallel_size"):
            if key in planned:
                config[key] = planned[key]
        return config

    def run_fields(self, candidate: Candidate) -> dict[str, object]:
        """Return the fields of the run that this configuration sets."""
        return {**layout_fields(candidate.layout), "compile": candidate.compiled}

    def trial_run(self, candidate: Candidate) -> dict[str, object]:
        """Return a trial's run.yaml: the user's run without an end, saves and evaluations."""
        run = self.run.model_dump(mode="json")
        endless = {"output": None, "resume": "never", "steps": ENDLESS, "global_batch": None}
        degrees = {"tensor_parallel": 1, "pipeline": 1, "sequence_parallel": 1, "expert_parallel": 1}
        chosen = {**self.run_fields(candidate), "ds_config": self.ds_config(candidate)}
        return {**run, **QUIET, **endless, **degrees, **chosen}
