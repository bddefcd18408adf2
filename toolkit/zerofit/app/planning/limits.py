"""The largest value that fits, the fewest devices that suffice, and what would make a model fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from zerofit.app.planning.answers import LargestFit, LongerSequence
from zerofit.app.planning.profiles import ProfileRequest, longest_sequence, trace
from zerofit.app.planning.question import PlanQuestion, forecast_of
from zerofit.app.planning.request import Maximum
from zerofit.plan import inverse
from zerofit.plan.degrees import Degrees
from zerofit.plan.inverse import MOST_GPUS, largest, repeated_layer, with_layers
from zerofit.plan.search import host_needed, pressure
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import DEVICES
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.profile import Profile, Savings, offered
from zerofit.spec.units import shown_bytes

MOST_TOKENS = 2**24  # per sequence
MOST_LAYERS = 4096
MOST_SAMPLES = 2**16  # per micro batch
TOKENS = 256  # distance between tried sequence lengths


def maximum_of(
    question: PlanQuestion, cluster: Cluster, what: Maximum, report: Reporter
) -> tuple[PlanQuestion, LargestFit]:
    """Return the question for the largest sequence, micro batch or number of layers that fits, and that value."""
    if what == "seq-len":
        return _longest(question, cluster, report)
    return _deepest(question, cluster, report) if what == "layers" else _widest(question, cluster)


def with_value(question: PlanQuestion, what: Maximum, value: int, report: Reporter) -> PlanQuestion:
    """Return the question with another sequence length, number of layers or micro batch."""
    if what == "layers":
        return replace(question, profile=with_layers(question.profile, value))
    if what == "micro-batch":
        return replace(question, request=replace(question.request, micro_batch=value))
    assert question.traced
    traced = replace(question.traced, seq_len=value)
    return replace(question, profile=trace(traced, report), traced=traced)


def fewest(question: PlanQuestion, cluster: Cluster, full: int | None = None) -> Cluster | None:
    """Return the smallest cluster that fits a layout, with nodes of `full` devices; None beyond MOST_GPUS."""
    forecast = forecast_of(question.profile, cluster)

    def wants(gpus: int, nodes: int) -> float:
        return pressure(question.profile, replace(cluster, gpus=gpus, nodes=nodes), question.request, forecast)

    found = inverse.fewest(wants, full or cluster.gpus)
    return replace(cluster, gpus=found[0], nodes=found[1]) if found else None


def remedies_of(question: PlanQuestion, cluster: Cluster) -> list[str]:
    """Return changes that would make the model fit, if no layout fits."""
    found = []
    more = fewest(question, cluster, max(cluster.gpus, cluster.device.node.gpus))
    if more is not None and more.ranks > cluster.ranks:
        found.append(f"{more.ranks} x {cluster.device.kind} ({more.nodes} node(s) of {more.gpus})")
    elif more is None:
        size = shown_bytes(cluster.device.memory_bytes)
        found.append(f"not even {MOST_GPUS} x {cluster.device.kind} of {size} suffice")
    forecast = forecast_of(question.profile, cluster)
    if cluster.on_cpu:
        return found
    host_bytes = host_needed(question.profile, cluster, question.request, forecast)
    if host_bytes is not None:
        found.append(f"{shown_bytes(host_bytes)} of host memory per node (--host-memory)")
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
        message = "--max seq-len needs a text model by name, because other lengths have to be traced"
        hint = "use MODEL instead of --profile" if traced is None else "use --max micro-batch"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--max"))
    limit, model = longest_sequence(traced), traced.model
    # recompute unless forbidden, because the longest sequence is among the layouts with least memory
    checkpointing = True if request.checkpointing is None else request.checkpointing
    lean = replace(traced, checkpointings=(checkpointing,), degrees=_degrees_on(cluster, question.profile))
    single = replace(request, micro_batch=request.micro_batch or 1)

    def wants(seq_len: int) -> float:
        report.status(f"tracing {model} at {seq_len} tokens ...")
        profile = trace(replace(lean, seq_len=seq_len), report)
        return pressure(profile, cluster, single, forecast_of(profile, cluster))

    most = limit or MOST_TOKENS
    found, looked = largest(wants, TOKENS, TOKENS, most, end_first=limit is not None)
    bounded = found is not None and found + TOKENS > most
    leanest = replace(question, traced=lean, request=single)
    longer = () if bounded else tuple(_longer(leanest, cluster, found, most, report))
    figures = {"step": TOKENS, "looked": looked, "bounded": bounded, "limit": limit}
    fit = LargestFit(what="seq-len", value=found, longer=longer, **figures)
    if found is None:
        return question, fit
    traced = replace(traced, seq_len=found)
    return replace(question, profile=trace(traced, report), traced=traced, request=single), fit


def _degrees_on(cluster: Cluster, profile: Profile) -> tuple[Degrees, ...]:
    """Return the degrees of a profile that are possible on a cluster."""
    found = [Degrees(**{n: int(d) for n, d in (p.split("=") for p in key.split("/")[2:])}) for key in profile.costs]
    fitting = [one for one in found if cluster.ranks % one.product == 0 and cluster.ranks % one.ep == 0]
    return tuple(dict.fromkeys((Degrees(), *fitting)))


def _longer(
    question: PlanQuestion, cluster: Cluster, found: int | None, most: int, report: Reporter
) -> Iterator[LongerSequence]:
    """Yield longer and longer sequences.

    Each adds one option: the one that needs least memory at twice the length of the sequence before.
    """
    traced, known = question.traced, question.profile
    assert traced
    choices = offered(known.task, known.model_type).fields
    if cluster.on_cpu or not all(traced.checkpointings):  # the host is the device, or nothing to offload
        choices.pop("activation_offload")
    length = found or 0
    while length + TOKENS <= most and (choices := _others(choices, traced.savings)):
        tries = [replace(traced, savings=traced.savings._replace(**{name: choices[name]})) for name in choices]

        def wants(seq_len: int, one: ProfileRequest) -> float:
            report.status(f"tracing {one.model} at {seq_len} tokens with {one.savings.flags} ...")
            profile = trace(replace(one, seq_len=seq_len), report)
            return pressure(profile, cluster, question.request, forecast_of(profile, cluster))

        there = min(max(2 * length, TOKENS), most)
        pressures = [wants(there, one) for one in tries]
        traced = tries[pressures.index(min(pressures))]
        longer, _ = largest(partial(wants, one=traced), max(length, TOKENS), TOKENS, most)
        if longer is None or longer <= length:
            return
        length = longer
        yield LongerSequence(traced.savings, length)


def _others(choices: dict[str, Any], savings: Savings) -> dict[str, Any]:
    return {name: value for name, value in choices.items() if not getattr(savings, name)}


def _deepest(question: PlanQuestion, cluster: Cluster, report: Reporter) -> tuple[PlanQuestion, LargestFit]:
    layer = question.profile.layers[repeated_layer(question.profile)]
    if layer.count == 1:
        message = f"--max layers repeats a layer, but {question.profile.model} has no kind of layer with more than two"
        hint = "use --max micro-batch, or the same model with more layers (--model-args)"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--max"))

    def wants(count: int, pipelines: bool = False) -> float:
        report.status(f"forecasting {count} times {layer.name} ...")
        profile, request = with_layers(question.profile, count), replace(question.request, pipelines=pipelines)
        return pressure(profile, cluster, request, forecast_of(profile, cluster))

    # cutting many layers into stages is slow and pipelines seldom fit most, so they are tried last
    found, looked = largest(wants, 1, 1, MOST_LAYERS)
    border = (found or 0) + 1
    if border <= MOST_LAYERS and wants(border, pipelines=True) <= 1:
        found, more = largest(lambda count: wants(count, pipelines=True), border, 1, MOST_LAYERS)
        looked += more
    bounded, repeated = found == MOST_LAYERS, {"layer": layer.name, "now": layer.count}
    fit = LargestFit(what="layers", value=found, step=1, looked=looked, bounded=bounded, **repeated)
    return (replace(question, profile=with_layers(question.profile, found)) if found else question), fit


def _widest(question: PlanQuestion, cluster: Cluster) -> tuple[PlanQuestion, LargestFit]:
    """Search for the largest micro batch, ignoring the global batch."""
    free = replace(question.request, global_batch=None)
    forecast = forecast_of(question.profile, cluster)

    def wants(micro: int) -> float:
        return pressure(question.profile, cluster, replace(free, micro_batch=micro), forecast)

    found, looked = largest(wants, 1, 1, MOST_SAMPLES)
    fit = LargestFit(what="micro-batch", value=found, step=1, looked=looked, bounded=found == MOST_SAMPLES)
    return (replace(question, request=replace(free, micro_batch=found)) if found else question), fit
