"""The input of a search on one cluster: the profile, the fixed values, and the corrections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.app.planning.corrections import MeasuredScaling, TraceCalibration, calibrated, scaling_of
from zerofit.app.planning.layout_pins import DEGREES, batch_and_precision, fixed_attributes, savings_of
from zerofit.app.planning.profiles import ProfileRequest, get_profile, read_profile
from zerofit.app.planning.request import PlanningRequest
from zerofit.config.batch import solve_by_rank
from zerofit.features.checkpointing import alternatives
from zerofit.features.engines import ENGINES
from zerofit.models.hf_config import traced_args, weight_bytes
from zerofit.plan.degrees import ranks_problem
from zerofit.plan.fit import Forecast
from zerofit.plan.memory import Forecaster
from zerofit.plan.search import Correct
from zerofit.plan.software import Software
from zerofit.plan.space import PlanRequest
from zerofit.plan.tensor_split import with_split_sequence
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import Calibration, read_calibration
from zerofit.spec.model_facts import LIGER_TYPES, default_precision
from zerofit.spec.named_code import refuse_foreign_code
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run, micro_batches_of


@dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """A profile and the settings that all layouts share. It can trace other sequence lengths."""

    profile: Profile
    request: PlanRequest
    traced: ProfileRequest | None = None  # None if the profile came from a file
    top: int = 10
    correct: Correct | None = None  # corrects step times by measurements
    scaling: MeasuredScaling | None = None  # factor for all step times
    calibration: Calibration | None = None  # calibration of the device
    by_trace: TraceCalibration | None = None  # set if the calibration is from a trace


def setup_of(cluster: Cluster, request: PlanningRequest, report: Reporter) -> tuple[SearchSetup, Path | None]:
    """Return the setup for this cluster, and the file of its profile."""
    setup, file = _uncalibrated(cluster, request, report)
    setup = replace(setup, calibration=read_calibration(cluster.device.kind))
    if request.from_trace:
        by_trace = calibrated(request.from_trace, cluster, setup.calibration, report, request.trust_model_code)
        setup = replace(setup, calibration=by_trace.calibration, by_trace=by_trace)
    if request.measured is None:
        return setup, file
    profile, wanted = setup.profile, setup.request
    forecast = forecast_of(profile, cluster)
    scaling = scaling_of(request.measured, wanted, profile, cluster, forecast, setup.calibration)
    # The options described the measured layout. The search is free, except for what makes steps comparable.
    batch = scaling.layout.global_batch
    free = PlanRequest(precision=wanted.precision, global_batch=batch, software=wanted.software)
    return replace(setup, request=free, correct=scaling.correct, scaling=scaling), file


def _uncalibrated(cluster: Cluster, request: PlanningRequest, report: Reporter) -> tuple[SearchSetup, Path | None]:
    stored = read_profile(request.profile) if request.profile else None
    if request.profile and stored:
        # --confirm would build its model, and --write would name it in run.yaml, which `zerofit train` imports
        refuse_foreign_code(request.profile, request.trust_model_code, model=stored.model)
    pins, corrections = request.pins, request.corrections
    wanted = _search_request(cluster, request, stored)
    problem = None if request.minimum else ranks_problem(wanted.degrees, cluster.ranks)
    if problem:  # before the model is traced
        raise UserError(problem)
    correct = corrections.correct if corrections else None
    if stored is not None:
        request.refuse_meaningless(stored)
        if wanted.software.liger_kernel:
            report.note(
                f"--liger-kernel changes only step times: memory is that of the kernels traced in {request.profile}"
            )
        # a profile is stored as traced, without the split of sequences between tensor parallel ranks
        stored = with_split_sequence(stored) if wanted.software.tensor_sequence_parallel else stored
        setup = SearchSetup(profile=stored, request=wanted, top=request.top, correct=correct)
        return setup, request.profile
    assert isinstance(request.model, str)
    degrees = None  # all useful degrees
    if (wanted.tp or wanted.sp or wanted.ep) and not request.measured:
        # The search needs the costs at these degrees, and those of the plain model.
        degrees = wanted.degrees.beside_plain()
    traced = ProfileRequest(
        model=request.model,
        precision=wanted.precision,
        device=cluster.accelerator,
        seq_len=pins.get("seq_len"),
        image=request.image,
        model_args=traced_args(pins.get("model_args") or {}),
        degrees=degrees,
        checkpointings=alternatives(wanted.checkpointing),
        savings=savings_of(pins, request.ds_config),
        partial=Run(**request.part).partial,
        task=pins.get("task"),
        liger_kernel=wanted.software.liger_kernel,
        split_sequence=wanted.software.tensor_sequence_parallel,
        engines=tuple(engine for engine in request.engines if ENGINES[engine].own_models),
    )
    profile, file = get_profile(traced, report)
    request.refuse_meaningless(profile)
    if wanted.software.liger_kernel and profile.model_type not in LIGER_TYPES:
        report.note(f"Liger has no kernels for {profile.model_type or profile.model}: only its cross-entropy is used")
    traced = replace(traced, seq_len=profile.seq_len)
    setup = SearchSetup(profile=profile, request=wanted, traced=traced, top=request.top, correct=correct)
    return setup, file


def _search_request(cluster: Cluster, request: PlanningRequest, stored: Profile | None) -> PlanRequest:
    fixed = fixed_attributes(request.pins, request.ds_config)
    decided = batch_and_precision(request.pins, request.ds_config)
    if "nvme" in (fixed.get("offload_optimizer"), fixed.get("offload_param")) and not cluster.nvme_bytes:
        message = "offloading to disk needs a disk, but the cluster has none"
        raise UserError(Problem(kind="nvme", message=message, hint="add --nvme SIZE (per node)", where="--nvme"))
    own = {
        name: fixed.pop(name, None) for name in ("micro_batch", "accumulation", "checkpointing", "schedule", *DEGREES)
    }
    own |= _by_rank(request, own, decided, cluster)
    return PlanRequest(
        precision=_precision(decided.get("precision"), cluster, stored),
        global_batch=decided.get("global_batch"),
        fixed=fixed,
        software=Software.of(request.pins),
        engines=request.engines,
        weight_bytes=weight_bytes(request.pins.get("model_args") or {}),
        **own,
    )


def _by_rank(
    request: PlanningRequest, own: Mapping[str, Any], decided: dict[str, object], cluster: Cluster
) -> dict[str, Any]:
    """Return the fields of the request for --micro-batch-by-rank. Raises UserError.

    Each device is a data parallel rank. The micro batches determine the global batch, so it is removed from `decided`.
    """
    shares = request.pins.get("micro_batch_by_rank")
    if shares is None:
        return {}
    problems, flag = Problems(), "--micro-batch-by-rank"
    if request.maximum or request.minimum or request.measured:
        message = f"{flag} {shares} with --max, --min or --measured: these options search other batches or devices"
        problems.add("usage", message, f"remove {flag}", flag)
    if not micro_batches_of(shares):
        message = f"{flag} auto measures the speed of real ranks, but a plan has no ranks to measure"
        problems.add("batch-size", message, "remove it, or list the micro batches, like 4,2", flag)
        problems.raise_if_any()
    degrees = {name: own[name] for name in ("tp", "pp", "sp") if (own[name] or 1) > 1}
    if degrees:
        words = ", ".join(f"{name} {degree}" for name, degree in degrees.items())
        problems.add("layout", f"{flag} supports only data parallelism, not {words}", "remove it", flag)
    total, steps = decided.pop("global_batch", None), own["accumulation"]
    sizes = {"micro_batch": own["micro_batch"], "gradient_accumulation_steps": steps, "global_batch": total}
    # `micro` is the largest of the micro batches: the rank that has it determines step time and memory
    batch = solve_by_rank(shares, sizes, cluster.ranks, flag, flag, problems)
    problems.raise_if_any()
    return {
        "micro_batch": batch.micro,
        "accumulation": batch.accumulation,
        "by_rank": batch.by_rank,
        **dict.fromkeys(("tp", "pp", "sp"), 1),
    }


def forecast_of(profile: Profile, cluster: Cluster) -> Forecast:
    """Return the memory forecast for this kind of device."""
    return Forecaster(profile, cluster.accelerator, blas_workspace_bytes(cluster.device)).memory


def _precision(requested: str | None, cluster: Cluster, stored: Profile | None) -> str:
    """Return the requested precision, else the device's default or one that the profile has.

    Raises UserError.
    """
    tflops = cluster.device.tflops  # by precision
    if requested is None:
        default = default_precision(tflops, cluster.accelerator)
        traced = list(dict.fromkeys(key.split("/")[0] for key in stored.costs)) if stored else []
        requested = default if default in traced or not traced else traced[0]
    if requested in tflops:
        return requested
    message = f"{cluster.device.kind} has no {requested} arithmetic"
    hint = f"use --precision {' or '.join(tflops)}"
    raise UserError(Problem(kind="precision", message=message, hint=hint, where="--precision"))
