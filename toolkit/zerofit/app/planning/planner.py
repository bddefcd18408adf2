"""`zerofit.plan`: which layouts of a model fit a cluster, and how fast they are, before any GPU is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from zerofit.app.planning import questions
from zerofit.app.planning.answers import FewestDevices, LargestFit, Plan
from zerofit.app.planning.corrections import refuse_other_device
from zerofit.app.planning.profiles import ProfileRequest, get_profile, read_profile
from zerofit.app.planning.questions import PlanQuestion, precision_of, traced_degrees
from zerofit.app.planning.request import LayoutPins, Maximum, Minimum, PlanningRequest
from zerofit.plan.inverse import MOST_GPUS
from zerofit.plan.space import PlanRequest
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problems
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.run import Run


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
        on_event: hears what is being done.
        **pins: what is fixed of the layouts: `global_batch`, `micro_batch`, `gradient_accumulation_steps`, `seq_len`,
            `precision`, `activation_checkpointing`, `tensor_parallel`, `pipeline`, `sequence_parallel`, `model_args`.

    Raises:
        UserError: with everything that is wrong.

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
    return replace(plans[0], boxes=boxes, total_s=round(time.perf_counter() - start, 3))


def _plan_for(cluster: Cluster, request: PlanningRequest, report: Reporter) -> Plan:
    question, file = _question(cluster, request, report)
    answer: LargestFit | FewestDevices | None = None
    if request.maximum:
        question, answer = questions.maximum(question, cluster, request.maximum, report)
    elif request.minimum:
        smallest = questions.fewest(question, cluster)
        cluster = smallest or cluster
        answer = FewestDevices(cluster=smallest, looked_up_to=MOST_GPUS)
    result = questions.best(question, cluster)
    return Plan(
        result=result,
        request=request,
        profile=question.profile,
        profile_file=file if request.maximum != "seq-len" else None,  # which is of another length
        answer=answer,
        remedies=() if result.layouts else tuple(questions.remedies(question, cluster)),
        tuned=request.corrections,
    )


def _question(cluster: Cluster, request: PlanningRequest, report: Reporter) -> tuple[PlanQuestion, Path | None]:
    """Return the question about this cluster, and where its profile lies."""
    stored = read_profile(request.profile) if request.profile else None
    pins, corrections = request.pins, request.corrections
    wanted = PlanRequest(
        precision=precision_of(pins.get("precision"), cluster, stored),
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
    traced = ProfileRequest(
        model=request.model,
        precision=wanted.precision,
        device="cpu" if cluster.on_cpu else "cuda",
        seq_len=pins.get("seq_len"),
        image=request.image,
        model_args=pins.get("model_args") or {},
        degrees=traced_degrees(wanted),
    )
    profile, file = get_profile(traced, report)
    request.refuse_meaningless(profile)
    traced = replace(traced, seq_len=profile.seq_len)
    return PlanQuestion(profile=profile, request=wanted, traced=traced, top=request.top, correct=correct), file
