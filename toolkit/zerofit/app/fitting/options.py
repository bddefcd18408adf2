"""Every layout that `--fit` can choose for a run, fastest first."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.app.job.resolve import ResolvedJob, ds_document
from zerofit.app.planning.job_forecast import profile_of
from zerofit.app.planning.layout_pins import DEGREES, FIELDS, decided, savings_of
from zerofit.app.planning.output_files import ds_config as planned_config
from zerofit.app.planning.output_files import layout_fields, merged
from zerofit.app.planning.search_setup import forecast_of
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.result import plain
from zerofit.plan.search import search
from zerofit.plan.software import Software
from zerofit.plan.space import PlanRequest, stage3_sizes
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.profile import Profile, Savings, offered
from zerofit.spec.run import Run, RunRequest

ALL, AMPLE = 10**6, 10**18  # ALL: more layouts than a search finds; AMPLE: bytes of unlimited memory
CHOSEN = (*FIELDS.values(), "global_batch", *Savings._fields, "ds_config")  # fields of the run


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


def given_fields(request: RunRequest) -> dict[str, object]:
    """Return the fields that `--fit` does not change, with the DeepSpeed JSON as the user wrote it."""
    given = {name: getattr(request.run, name) for name in ("ranks", *CHOSEN) if name in request.places}
    given = {name: value for name, value in given.items() if value is not None}
    return given | ({"ds_config": ds_document(request.run).config} if "ds_config" in given else {})


def options_of(
    resolved: ResolvedJob, given: Mapping[str, object], cluster: Cluster, report: Reporter, *, lean: bool = False
) -> tuple[Profile, tuple[LayoutOption, ...]]:
    """Return the model's profile and all layouts with the run's global batch, fastest first by forecast.

    If layouts are equally fast, the simplest comes first. `lean`: try the options that make long sequences fit,
    instead of the usual options. Raises UserError and ModelError.
    """
    job, run, knobs = resolved.job, resolved.job.run, decided(given)
    degrees = {name: knobs[name] for name in DEGREES if knobs.get(name, 1) > 1}
    own = {name: knobs[name] for name in ("micro_batch", "accumulation", "checkpointing", "schedule") if name in knobs}
    keep = {name: value for name, value in knobs.items() if name not in {*own, *degrees}}
    keep |= {"ema": run.ema} if run.ema else {}
    keep |= {name: max(1, keep[name]) for name in ("tp", "sp", "ep") if name in keep}  # 0 means 1 in DeepSpeed
    request = PlanRequest(
        precision=job.precision,
        global_batch=job.batch.total,
        every=True,
        keep=keep,
        software=Software.of(dict(run)),
        **own,
        **degrees,
    )
    traced = None if not degrees else (Degrees(), Degrees(**{**degrees, "pp": 1}))
    ample = replace(cluster, host_memory=AMPLE, device_memory=AMPLE, nvme=_disk_bytes(given))
    profiles = {
        savings: profile_of(resolved, cluster, job.precision, report, degrees=traced, savings=_within(savings, run))
        for savings in (_leanest(resolved, given, cluster) if lean else _choices(resolved, given))
    }
    calibration, found = read_calibration(cluster.device.kind), []
    for savings, profile in profiles.items():
        wanted = replace(request, checkpointing=True) if savings.activation_offload else request
        result = search(profile, ample, wanted, forecast_of(profile, cluster), calibration, top=ALL)
        for ranked in result.layouts:
            if ranked.layout.persistence <= stage3_sizes(profile).persistence or "persistence" in keep:
                option = {"layout": ranked.layout, "memory": ranked.memory, "samples_per_s": ranked.samples_per_s}
                found.append(LayoutOption(savings=savings, **option))
    found.sort(key=lambda option: (-option.samples_per_s, *plain(option.layout), bool(option.savings.fields)))
    return next(iter(profiles.values())), tuple(found)


def _choices(resolved: ResolvedJob, given: Mapping[str, Any]) -> list[Savings]:
    """Return the given memory savings. If `loss_chunk` is not given, also return them with a chunked loss."""
    given_savings, chunk = savings_of(given, given.get("ds_config", {})), _able(resolved).loss_chunk
    return (
        [given_savings]
        if chunk is None or "loss_chunk" in given
        else [given_savings, given_savings._replace(loss_chunk=chunk)]
    )


def _leanest(resolved: ResolvedJob, given: Mapping[str, Any], cluster: Cluster) -> list[Savings]:
    """Return further memory savings that `given` allows: first tiled MLPs, then checkpoints in host memory too."""
    given_savings, able = savings_of(given, given.get("ds_config", {})), _able(resolved)
    kept = {name: getattr(given_savings, name) for name in Savings._fields if name in given}
    if cluster.on_cpu or given.get("activation_checkpointing") is False:
        able = able._replace(activation_offload=False)
    most = able._replace(**kept, activation_offload=kept.get("activation_offload", able.activation_offload))
    found = [most._replace(activation_offload=given_savings.activation_offload), most]
    return [savings for savings in dict.fromkeys(found) if savings not in _choices(resolved, given)]


def _able(resolved: ResolvedJob) -> Savings:
    run, facts = resolved.job.run, resolved.job.facts
    able = offered(facts.task, None if facts.own or run.compile else facts.model_type)
    return able._replace(loss_chunk=None) if run.loss == "mse" or (facts.own and run.loss is None) else able


def _within(savings: Savings, run: Run) -> Savings:
    chunk = savings.loss_chunk
    return savings._replace(loss_chunk=chunk and min(chunk, run.seq_len or chunk))


def _disk_bytes(given: Mapping[str, object]) -> int | None:
    """Return the free bytes of the disk that the DeepSpeed JSON offloads to; None if it names no disk."""
    path = _nvme_path(given)
    folder = next((place for place in (path, *path.absolute().parents) if place.is_dir()), None) if path else None
    return shutil.disk_usage(folder).free if folder else None


def _nvme_path(given: Mapping[str, Any]) -> Path | None:
    zero = given.get("ds_config", {}).get("zero_optimization", {})
    parts = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return next((Path(part["nvme_path"]) for part in parts if part.get("nvme_path")), None)


def chosen_fields(
    option: LayoutOption, profile: Profile, given: Mapping[str, Any], optimizer: str | None
) -> dict[str, object]:
    """Return the fields of the run for an option, including the full DeepSpeed JSON.

    `optimizer`: the run's optimizer. It is stored because the default may change with offloading.
    """
    config = planned_config(option.layout, profile, str(_nvme_path(given) or "/local_nvme"))
    degrees = {FIELDS[name]: getattr(option.layout, name) for name in DEGREES}
    return {
        **degrees,
        **layout_fields(option.layout),
        "global_batch": option.layout.global_batch,
        **option.savings._asdict(),
        "optimizer": optimizer,
        "ds_config": merged(config, given.get("ds_config", {})),
    }
