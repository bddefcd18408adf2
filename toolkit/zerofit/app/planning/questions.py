"""The questions of a plan: the best layouts, the largest value that fits, the fewest devices, what would help."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofit.app.planning.answers import LargestFit
from zerofit.app.planning.profiles import ProfileRequest, longest_sequence, trace
from zerofit.app.planning.request import Maximum
from zerofit.plan import inverse
from zerofit.plan.degrees import Degrees
from zerofit.plan.inverse import MOST_GPUS, largest, repeated_layer, with_layers
from zerofit.plan.memory import Forecaster
from zerofit.plan.reasons import Forecast
from zerofit.plan.result import PlanResult
from zerofit.plan.search import Correct, host_needed, pressure, search
from zerofit.plan.space import PlanRequest
from zerofit.spec.calibration import read_calibration
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import DEVICES
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.profile import Profile
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


def best(question: PlanQuestion, cluster: Cluster) -> PlanResult:
    """Return the best layouts on one cluster."""
    calibration = read_calibration(cluster.device.kind)
    forecast = forecast_of(question.profile, cluster)
    return search(question.profile, cluster, question.request, forecast, calibration, question.top, question.correct)


def forecast_of(profile: Profile, cluster: Cluster) -> Forecast:
    """Return the memory forecast for this kind of device."""
    return Forecaster(profile, "cpu" if cluster.on_cpu else "cuda").memory


def maximum(
    question: PlanQuestion, cluster: Cluster, what: Maximum, report: Reporter
) -> tuple[PlanQuestion, LargestFit]:
    """Return the question at the largest value that fits, and that value. Raises UserError."""
    if what == "seq-len":
        return _longest(question, cluster, report)
    if what == "layers":
        return _deepest(question, cluster, report)
    return _widest(question, cluster)


def fewest(question: PlanQuestion, cluster: Cluster, full: int | None = None) -> Cluster | None:
    """Return the smallest such cluster where a layout fits, on nodes of `full` devices; None beyond MOST_GPUS."""
    forecast = forecast_of(question.profile, cluster)

    def wants(gpus: int, nodes: int) -> float:
        return pressure(question.profile, replace(cluster, gpus=gpus, nodes=nodes), question.request, forecast)

    found = inverse.fewest(wants, full or cluster.gpus)
    return replace(cluster, gpus=found[0], nodes=found[1]) if found else None


def precision_of(asked: str | None, cluster: Cluster, stored: Profile | None = None) -> str:
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


def remedies(question: PlanQuestion, cluster: Cluster) -> list[str]:
    """Return what would make the model fit, where nothing does."""
    found = []
    more = fewest(question, cluster, max(cluster.gpus, cluster.device.node.gpus))
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
    fit = LargestFit(
        what="layers",
        value=found,
        step=1,
        looked=looked,
        bounded=found == MOST_LAYERS,
        layer=layer.name,
        now=layer.count,
    )
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


def traced_degrees(request: PlanRequest) -> tuple[Degrees, ...] | None:
    """Return the degrees to trace: the asked ones beside the plain model, or None for all that are worth it."""
    if not (request.tp or request.sp):
        return None
    return tuple(dict.fromkeys((Degrees(), Degrees(request.tp or 1, 1, request.sp or 1))))
