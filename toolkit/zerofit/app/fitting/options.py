"""Find every layout that `--fit` can choose for a run, fastest first."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.app.job.resolve import ResolvedJob, ds_document
from zerofit.app.planning.job_forecast import profile_of
from zerofit.app.planning.layout_pins import DEGREES, savings_of, written_attributes
from zerofit.app.planning.output_files import ds_config as planned_config
from zerofit.app.planning.output_files import layout_fields, merged
from zerofit.app.planning.search_setup import forecast_of
from zerofit.features.optimizers import has_weight_decay
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import OPTIONS, LayoutMemory, PlannedLayout
from zerofit.plan.result import plain
from zerofit.plan.search import search
from zerofit.plan.software import Software
from zerofit.plan.space import PlanRequest, stage3_sizes
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.profile import Profile, Savings, offered
from zerofit.spec.run import Run, RunRequest

ALL = 10**6  # more layouts than a search finds
AMPLE = 10**18  # bytes of memory that never limit a layout: what fits is decided later, by simulations
Given = dict[str, Any]  # fields of the run that `--fit` does not change, and the DeepSpeed JSON
CHOSEN = (  # fields of the run
    *(option for option in OPTIONS.values() if option in Run.model_fields),
    *("global_batch", *Savings._fields, "ds_config"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutOption:
    """A layout for a run, with plan's forecast."""

    layout: PlannedLayout
    savings: Savings
    memory: LayoutMemory
    samples_per_s: float

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        return self.layout.global_batch / self.samples_per_s

    def __str__(self) -> str:
        return ", ".join(filter(None, (str(self.layout), self.savings.flags)))


def given_fields(request: RunRequest) -> Given:
    """Return the fields that `--fit` does not change, with the DeepSpeed JSON as it was written."""
    given = {name: getattr(request.run, name) for name in ("ranks", *CHOSEN) if name in request.places}
    given = {name: value for name, value in given.items() if value is not None}
    return given | ({"ds_config": ds_document(request.run).config} if "ds_config" in given else {})


def options_of(
    resolved: ResolvedJob, given: Given, cluster: Cluster, report: Reporter, *, lean: bool = False
) -> tuple[Profile, tuple[LayoutOption, ...]]:
    """Return the model's profile and all layouts with the run's global batch, fastest first.

    If layouts are equally fast, the simplest comes first. `lean`: try the options that make long sequences fit,
    instead of the usual options. Raises UserError and ModelError.
    """
    job, run = resolved.job, resolved.job.run
    fixed = written_attributes(given, given.get("ds_config", {}))
    degrees = {name: fixed[name] for name in DEGREES if fixed.get(name, 1) > 1}
    fields = ("micro_batch", "accumulation", "checkpointing", "schedule")  # a request has these as fields of its own
    own = {name: fixed[name] for name in fields if name in fixed}
    fixed = {name: value for name, value in fixed.items() if name not in {*own, *degrees}}
    fixed |= {"ema": run.ema} if run.ema else {}
    fixed["has_weight_decay"] = has_weight_decay(job.ds_config)  # it may come from the run's weight decay
    request = PlanRequest(
        precision=job.precision,
        global_batch=job.batch.total,
        every=True,
        fixed=fixed,
        software=Software.of(dict(run)),
        **own,
        **degrees,
    )
    traced = None if not degrees else (Degrees(), Degrees(**{**degrees, "pp": 1}))
    disk = _nvme_path(given)
    folder = next((path for path in (disk, *disk.absolute().parents) if path.is_dir()), None) if disk else None
    disk_bytes = shutil.disk_usage(folder).free if folder else None  # None: the JSON names no disk to offload to
    ample = replace(cluster, host_memory=AMPLE, device_memory=AMPLE, nvme=disk_bytes)
    profiles: dict[Savings, Profile] = {}
    for savings in _lean_savings(resolved, given, cluster) if lean else _usual_savings(resolved, given):
        chunk = savings.loss_chunk  # a short sequence is one chunk
        traced_savings = savings._replace(loss_chunk=chunk and min(chunk, run.seq_len or chunk))
        profiles[savings] = profile_of(resolved, cluster, job.precision, report, degrees=traced, savings=traced_savings)
    calibration, options = read_calibration(cluster.device.kind), list[LayoutOption]()
    for savings, profile in profiles.items():
        wanted = replace(request, checkpointing=True) if savings.activation_offload else request
        result = search(profile, ample, wanted, forecast_of(profile, cluster), calibration, top=ALL)
        for ranked in result.layouts:
            if ranked.layout.persistence <= stage3_sizes(profile).persistence or "persistence" in fixed:
                option = {"layout": ranked.layout, "memory": ranked.memory, "samples_per_s": ranked.samples_per_s}
                options.append(LayoutOption(savings=savings, **option))
    options.sort(key=lambda option: (-option.samples_per_s, *plain(option.layout), bool(option.savings.fields)))
    return next(iter(profiles.values())), tuple(options)


def _usual_savings(resolved: ResolvedJob, given: Given) -> list[Savings]:
    """Return the given memory savings, and the same with a chunked loss if it is not given."""
    savings, chunk = savings_of(given, given.get("ds_config", {})), _supported_savings(resolved).loss_chunk
    if chunk is None or "loss_chunk" in given:
        return [savings]
    return [savings, savings._replace(loss_chunk=chunk)]


def _lean_savings(resolved: ResolvedJob, given: Given, cluster: Cluster) -> list[Savings]:
    """Return further memory savings: tiled MLPs, then checkpoints in host memory, too."""
    given_savings, supported = savings_of(given, given.get("ds_config", {})), _supported_savings(resolved)
    fixed = {name: getattr(given_savings, name) for name in Savings._fields if name in given}
    # On a CPU the host is the device. Without checkpoints there is nothing to offload.
    if cluster.on_cpu or given.get("activation_checkpointing") is False:
        supported = supported._replace(activation_offload=False)
    most = supported._replace(**fixed)
    choices = [most._replace(activation_offload=given_savings.activation_offload), most]
    return [savings for savings in dict.fromkeys(choices) if savings not in _usual_savings(resolved, given)]


def _supported_savings(resolved: ResolvedJob) -> Savings:
    run, facts = resolved.job.run, resolved.job.facts
    supported = offered(facts.task, None if facts.own or run.compile else facts.model_type)
    # only a loss over tokens can be computed in chunks, and zerofit does not know the loss of a user's own model
    if run.loss == "mse" or (facts.own and run.loss is None):
        supported = supported._replace(loss_chunk=None)
    return supported


def _nvme_path(given: Given) -> Path | None:
    zero = given.get("ds_config", {}).get("zero_optimization", {})
    parts = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return next((Path(part["nvme_path"]) for part in parts if part.get("nvme_path")), None)


def chosen_fields(option: LayoutOption, profile: Profile, given: Given, optimizer: str | None) -> dict[str, object]:
    """Return the fields of the run for an option, including the full DeepSpeed JSON."""
    config = planned_config(option.layout, profile, str(_nvme_path(given) or "/local_nvme"))
    degrees = {OPTIONS[name]: getattr(option.layout, name) for name in DEGREES}
    return {
        **degrees,
        **layout_fields(option.layout),
        "global_batch": option.layout.global_batch,
        **option.savings._asdict(),
        "optimizer": optimizer,  # stored, because the default may change with offloading
        "ds_config": merged(config, given.get("ds_config", {})),
    }
