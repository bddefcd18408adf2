"""`zerofit.plan`: which layouts of a model fit a cluster, and how fast they are, before any GPU is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from zerofit.app.planning.answers import FewestDevices, LargestFit, Plan
from zerofit.app.planning.confirm import confirm as confirm_layouts
from zerofit.app.planning.confirm import confirm_written, settle
from zerofit.app.planning.profiles import ProfileRequest, get_profile, longest_sequence, read_profile, trace
from zerofit.app.planning.request import LayoutPins, Maximum, Minimum, PlanningRequest, refuse_other_device
from zerofit.plan import inverse
from zerofit.plan.fit import Forecast
from zerofit.plan.inverse import MOST_GPUS, largest, repeated_layer, with_layers
from zerofit.plan.memory import Forecaster
from zerofit.plan.search import Correct, host_needed, pressure, search
from zerofit.plan.space import Degrees, PlanRequest
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import DEVICES
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run
from zerofit.spec.units import shown_bytes

MOST_TOKENS = 2**24  # of a sequence
MOST_LAYERS = 4096
MOST_SAMPLES = 2**16  # of a micro batch
TOKENS = 256  # steps in which sequence lengths are looked for


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """A profile, what is asked of its layouts, and how it can be traced again for another sequence length."""

    profile: Profile
    request: PlanRequest
    traced: ProfileRequest | None = None  # None: the profile came from a file
    top: int = 10
    correct: Correct | None = None  # step times, by what a tuning has measured


def plan(
    model: str | Run | None = None,
    cluster: Cluster | Sequence[Cluster] | None = None,
    *,
    profile: Path | str | None = None,
    image: str | None = None,
    maximum: Maximum | None = None,
    minimum: Minimum | None = None,
    tuned: Path | str | None = None,
    top: int = 10,
    nvme_path: str = "/local_nvme",
    confirm: int = 0,
    on_event: OnEvent | None = None,
    **pins: Unpack[LayoutPins],
) -> Plan:
    """Rank the layouts of a model that fit a cluster, with memory and speed, and say why the others do not.

    Args:
        model: a model's name, or a run, of which every field that was set and that `pins` could name is kept.
        cluster: what to plan for; of several the plan of the fastest is returned, with all as its `boxes`.
            None: this machine.
        profile: a stored profile (`Plan.profile_file`) in place of a model; then torch is not imported.
        image: "image:3x224x224", what an image model is fed.
        maximum: "seq-len", "micro-batch" or "layers": plan for the largest that fits (`Plan.answer`).
        minimum: "gpus": plan for the fewest devices that are enough (`Plan.answer`).
        tuned: folder of `zerofit tune`, whose trials correct step times.
        top: layouts to return.
        nvme_path: folder of layouts that offload to disks.
        confirm: simulate so many of the best layouts as well (`Plan.confirmed`); `Plan.write` takes none refused.
        on_event: hears what is being done.
        **pins: what is fixed of the layouts: `global_batch`, `micro_batch`, `gradient_accumulation_steps`, `seq_len`,
            `precision`, `activation_checkpointing`, `tensor_parallel`, `pipeline`, `sequence_parallel`, `model_args`.

    Raises UserError with everything that is wrong.

    >>> import zerofit as zf
    >>> plan = zf.plan("llama-tiny", zf.Cluster("l4", gpus=2), global_batch=8, seq_len=64, tensor_parallel=1)
    >>> best = plan.layouts[0]
    >>> best.layout.world_size, best.layout.global_batch, best.peak_bytes < plan.cluster.device.memory_bytes
    (2, 8, True)
    >>> best.to_run().ranks
    2
    """
    request = PlanningRequest(
        model=model,
        pins=pins,
        profile=Path(profile) if profile else None,
        image=image,
        maximum=maximum,
        minimum=minimum,
        tuned=Path(tuned) if tuned else None,
        top=top,
        nvme_path=nvme_path,
        confirm=confirm,
    )
    clusters = [cluster] if isinstance(cluster, Cluster) else list(cluster or (Cluster.here(),))
    return answer_request(request, clusters, on_event=on_event)


def answer_request(request: PlanningRequest, clusters: Sequence[Cluster], *, on_event: OnEvent | None = None) -> Plan:
    """Return the plan for the best of the clusters, with those for all of them where there are several."""
    start, problems = time.perf_counter(), Problems()
    if corrections := request.corrections:
        for cluster in clusters:
            problems.attempt(partial(refuse_other_device, corrections, cluster.device.kind))
    problems.raise_if_any()
    plans = [_plan_for(cluster, request, Reporter(on_event)) for cluster in clusters]
    plans.sort(key=lambda one: -one.result.layouts[0].samples_per_s if one.result.layouts else 0.0)
    boxes = tuple(plans) if len(plans) > 1 else ()
    best = _confirmed(plans[0], Reporter(on_event))
    return replace(best, boxes=boxes, total_s=round(time.perf_counter() - start, 3))


def _confirmed(plan: Plan, report: Reporter) -> Plan:
    """Return the plan with simulations of the layouts that were asked for, and of the one to be written."""
    request = plan.request
    if request.confirm:
        plan = confirm_layouts(plan, request.confirm, report)
    if request.write and request.profile is None and plan.layouts:
        plan = confirm_written(plan, report)
    return plan


def _plan_for(cluster: Cluster, request: PlanningRequest, report: Reporter) -> Plan:
    question, file = _question(cluster, request, report)
    if request.maximum:
        question, largest_fit = _maximum(question, cluster, request.maximum, report)
        plan = _plan_of(question, cluster, request, file, largest_fit)
        if request.profile is not None:  # without torch
            return plan

        def plan_at(value: int) -> Plan:
            smaller = _with_value(question, largest_fit.what, value, report)
            return _plan_of(smaller, cluster, request, file, largest_fit)

        return settle(plan, largest_fit, plan_at, report)
    answer = None
    if request.minimum:
        smallest = _fewest(question, cluster)
        cluster = smallest or cluster
        answer = FewestDevices(cluster=smallest, looked_up_to=MOST_GPUS)
    return _plan_of(question, cluster, request, file, answer)


def _maximum(
    question: PlanQuestion, cluster: Cluster, what: Maximum, report: Reporter
) -> tuple[PlanQuestion, LargestFit]:
    if what == "seq-len":
        return _longest(question, cluster, report)
    return _deepest(question, cluster, report) if what == "layers" else _widest(question, cluster)


def _with_value(question: PlanQuestion, what: Maximum, value: int, report: Reporter) -> PlanQuestion:
    """Return the question with another sequence length, number of layers or micro batch."""
    if what == "layers":
        return replace(question, profile=with_layers(question.profile, value))
    if what == "micro-batch":
        return replace(question, request=replace(question.request, micro_batch=value))
    assert question.traced
    traced = replace(question.traced, seq_len=value)
    return replace(question, profile=trace(traced, report), traced=traced)


def _plan_of(
    question: PlanQuestion,
    cluster: Cluster,
    request: PlanningRequest,
    file: Path | None,
    answer: LargestFit | FewestDevices | None,
) -> Plan:
    profile, calibration = question.profile, read_calibration(cluster.device.kind)
    forecast = forecast_of(profile, cluster)
    result = search(profile, cluster, question.request, forecast, calibration, question.top, question.correct)
    return Plan(
        result=result,
        request=request,
        profile=profile,
        profile_file=file if request.maximum != "seq-len" else None,  # which is of another length
        answer=answer,
        remedies=() if result.layouts else tuple(_remedies(question, cluster)),
        tuned=request.corrections,
    )


def _question(cluster: Cluster, request: PlanningRequest, report: Reporter) -> tuple[PlanQuestion, Path | None]:
    """Return the question about this cluster, and where its profile lies."""
    stored = read_profile(request.profile) if request.profile else None
    pins, corrections = request.pins, request.corrections
    wanted = PlanRequest(
        precision=_precision(pins.get("precision"), cluster, stored),
        global_batch=pins.get("global_batch"),
        micro_batch=pins.get("micro_batch"),
        accumulation=pins.get("gradient_accumulation_steps"),
        tp=pins.get("tensor_parallel"),
        pp=pins.get("pipeline"),
        sp=pins.get("sequence_parallel"),
        checkpointing=pins.get("activation_checkpointing"),
    )
    correct = corrections.correct if corrections else None
    if stored is not None:
        request.refuse_meaningless(stored)
        return PlanQuestion(profile=stored, request=wanted, top=request.top, correct=correct), request.profile
    assert isinstance(request.model, str)
    degrees = None  # all that are worth it
    if wanted.tp or wanted.sp:  # the asked ones beside the plain model
        degrees = tuple(dict.fromkeys((Degrees(), Degrees(wanted.tp or 1, 1, wanted.sp or 1))))
    traced = ProfileRequest(
        model=request.model,
        precision=wanted.precision,
        device="cpu" if cluster.on_cpu else "cuda",
        seq_len=pins.get("seq_len"),
        image=request.image,
        model_args=pins.get("model_args") or {},
        degrees=degrees,
    )
    profile, file = get_profile(traced, report)
    request.refuse_meaningless(profile)
    traced = replace(traced, seq_len=profile.seq_len)
    return PlanQuestion(profile=profile, request=wanted, traced=traced, top=request.top, correct=correct), file


def forecast_of(profile: Profile, cluster: Cluster) -> Forecast:
    """Return the memory forecast for this kind of device."""
    device = cluster.device.kind
    return Forecaster(profile, "cpu" if cluster.on_cpu else "cuda", blas_workspace_bytes(device)).memory


def _fewest(question: PlanQuestion, cluster: Cluster, full: int | None = None) -> Cluster | None:
    """Return the smallest such cluster where a layout fits, on nodes of `full` devices; None beyond MOST_GPUS."""
    forecast = forecast_of(question.profile, cluster)

    def wants(gpus: int, nodes: int) -> float:
        return pressure(question.profile, replace(cluster, gpus=gpus, nodes=nodes), question.request, forecast)

    found = inverse.fewest(wants, full or cluster.gpus)
    return replace(cluster, gpus=found[0], nodes=found[1]) if found else None


def _precision(asked: str | None, cluster: Cluster, stored: Profile | None) -> str:
    """Return the precision asked for, else the device's usual one, or one that the profile has.

    Usual are bf16, fp16 before Ampere, and fp32 on a CPU. Raises UserError.
    """
    able = cluster.device.tflops
    if asked is None:
        usual = "fp32" if cluster.on_cpu else "bf16" if "bf16" in able else "fp16"
        traced = list(dict.fromkeys(key.split("/")[0] for key in stored.costs)) if stored else []
        asked = usual if usual in traced or not traced else traced[0]
    if asked in able:
        return asked
    message = f"{cluster.device.kind} has no {asked} arithmetic"
    hint = f"take --precision {' or '.join(able)}"
    raise UserError(Problem(kind="precision", message=message, hint=hint, where="--precision"))


def _remedies(question: PlanQuestion, cluster: Cluster) -> list[str]:
    """Return what would make the model fit, where nothing does."""
    found = []
    more = _fewest(question, cluster, max(cluster.gpus, cluster.device.node.gpus))
    if more is not None and more.ranks > cluster.ranks:
        found.append(f"{more.ranks} x {cluster.device.kind} ({more.nodes} node(s) of {more.gpus})")
    elif more is None:
        size = shown_bytes(cluster.device.memory_bytes)
        found.append(f"not even {MOST_GPUS} x {cluster.device.kind} of {size} are enough")
    forecast = forecast_of(question.profile, cluster)
    if cluster.on_cpu:
        return found
    host_bytes = host_needed(question.profile, cluster, question.request, forecast)
    if host_bytes is not None:
        found.append(f"{shown_bytes(host_bytes)} of host memory a node (--host-memory)")
    larger = [d for d in DEVICES.values() if d.memory_bytes > cluster.device.memory_bytes]
    for device in sorted(larger, key=lambda d: d.memory_bytes):
        able = question.request.precision in device.tflops
        same = replace(cluster, kind=device.kind, device_memory=None, network=None, host_memory=cluster.host_bytes)
        if able and pressure(question.profile, same, question.request, forecast) <= 1:
            size = f" with {shown_bytes(device.memory_bytes)}" if device.kind == cluster.device.kind else ""
            found.append(f"{cluster.ranks} x {device.kind}{size}, with the same host memory")
            break
    if not cluster.nvme_bytes:
        disks = replace(cluster, nvme=10**15)
        if pressure(question.profile, disks, question.request, forecast) <= 1:
            found.append("local NVMe disks (--nvme SIZE)")
    return found


def _longest(question: PlanQuestion, cluster: Cluster, report: Reporter) -> tuple[PlanQuestion, LargestFit]:
    traced, request = question.traced, question.request
    if traced is None or question.profile.seq_len is None:
        message = "--max seq-len needs a model that takes tokens, by its name: other lengths are traced anew"
        hint = "give MODEL instead of --profile" if traced is None else "take --max micro-batch"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--max"))
    limit, model = longest_sequence(traced), traced.model
    # where it may be recomputed it is: the longest sequence is found among the layouts that need least
    checkpointing = True if request.checkpointing is None else request.checkpointing
    lean = replace(traced, checkpointings=(checkpointing,))
    single = replace(request, micro_batch=request.micro_batch or 1)

    def wants(seq_len: int) -> float:
        report.status(f"tracing {model} at {seq_len} tokens ...")
        profile = trace(replace(lean, seq_len=seq_len), report)
        return pressure(profile, cluster, single, forecast_of(profile, cluster))

    found, looked = largest(wants, TOKENS, TOKENS, limit or MOST_TOKENS, end_first=limit is not None)
    bounded = found is not None and found + TOKENS > (limit or MOST_TOKENS)
    fit = LargestFit(what="seq-len", value=found, step=TOKENS, looked=looked, bounded=bounded, limit=limit)
    if found is None:
        return question, fit
    traced = replace(traced, seq_len=found)
    return replace(question, profile=trace(traced, report), traced=traced, request=single), fit


def _deepest(question: PlanQuestion, cluster: Cluster, report: Reporter) -> tuple[PlanQuestion, LargestFit]:
    layer = question.profile.layers[repeated_layer(question.profile)]

    def wants(count: int, pipelines: bool = False) -> float:
        report.status(f"forecasting {count} times {layer.name} ...")
        profile, request = with_layers(question.profile, count), replace(question.request, pipelines=pipelines)
        return pressure(profile, cluster, request, forecast_of(profile, cluster))

    # cutting many layers into stages takes seconds, and pipelines seldom hold most: they are asked where others end
    found, looked = largest(wants, 1, 1, MOST_LAYERS)
    border = (found or 0) + 1
    if border <= MOST_LAYERS and wants(border, pipelines=True) <= 1:
        found, more = largest(lambda count: wants(count, pipelines=True), border, 1, MOST_LAYERS)
        looked += more
    bounded, repeated = found == MOST_LAYERS, {"layer": layer.name, "now": layer.count}
    fit = LargestFit(what="layers", value=found, step=1, looked=looked, bounded=bounded, **repeated)
    return (replace(question, profile=with_layers(question.profile, found)) if found else question), fit


def _widest(question: PlanQuestion, cluster: Cluster) -> tuple[PlanQuestion, LargestFit]:
    """Look for any micro batch, without regard to a global batch."""
    free = replace(question.request, global_batch=None)
    forecast = forecast_of(question.profile, cluster)

    def wants(micro: int) -> float:
        return pressure(question.profile, cluster, replace(free, micro_batch=micro), forecast)

    found, looked = largest(wants, 1, 1, MOST_SAMPLES)
    fit = LargestFit(what="micro-batch", value=found, step=1, looked=looked, bounded=found == MOST_SAMPLES)
    return (replace(question, request=replace(free, micro_batch=found)) if found else question), fit
