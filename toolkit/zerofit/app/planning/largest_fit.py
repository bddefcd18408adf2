"""Find the largest value that fits, the fewest devices that suffice, and other remedies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from zerofit.app.planning.profiles import ProfileRequest, longest_sequence, trace
from zerofit.app.planning.request import Maximum
from zerofit.app.planning.search_setup import SearchSetup, forecast_of
from zerofit.plan import inverse
from zerofit.plan.degrees import Degrees
from zerofit.plan.inverse import MOST_GPUS, largest, repeated_layer, with_layers
from zerofit.plan.search import host_needed, pressure
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import DEVICES
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import field_data
from zerofit.spec.profile import Savings, offered
from zerofit.spec.units import shown_bytes

MOST_TOKENS = 2**24  # per sequence
MOST_LAYERS = 4096
MOST_SAMPLES = 2**16  # per micro batch
TOKENS = 256  # distance between tried sequence lengths


class LongerSequence(NamedTuple):
    """The longest sequence that fits by forecast, and the options that make it fit."""

    savings: Savings
    value: int  # tokens

    def __str__(self) -> str:
        return f"{self.value} with {self.savings.flags}"


@dataclass(frozen=True, kw_only=True)
class LargestFit:
    """The largest sequence length, micro batch or number of layers with which a layout fits."""

    what: Maximum
    value: int | None  # None: not even the smallest fits
    step: int  # distance between tried values
    looked: int  # number of tried values
    bounded: bool  # no larger value was tried
    limit: int | None = None  # the model's limit
    layer: str | None = None  # the kind of layer whose number is searched
    now: int | None = None  # the number of these layers that the model has now
    longer: tuple[LongerSequence, ...] = ()  # longest sequences; each entry adds one option to the entry before

    def to_dict(self) -> dict[str, object]:
        """Return the value of `asked` in `zerofit plan --json`."""
        data = {"max": self.what, **field_data(self, "what", "bounded", "limit", "layer", "now", "longer")}
        if self.what == "seq-len":
            data["limit"] = self.limit
            data["longer"] = [{"value": sequence.value, **sequence.savings.fields} for sequence in self.longer]
        if self.what == "layers":
            data |= {"layer": self.layer, "now": self.now}
        return {**data, "next_fits": None if self.bounded else False}

    def __str__(self) -> str:
        if self.longer:
            return f"{self._sentence}. By forecast: {'; '.join(map(str, self.longer))}"
        return self._sentence

    @property
    def _sentence(self) -> str:
        if self.value is None:
            return f"no {self.what} fits"
        words = f"largest {self.what}: {self.value}"
        if self.layer is not None:
            words += f" (the model has {self.now} layers of the kind {self.layer})"
        if not self.bounded:
            return f"{words}; {self.value + self.step} does not fit"
        return f"{words}, the model's limit" if self.limit else f"{words}; larger values were not tried"


@dataclass(frozen=True, kw_only=True)
class FewestDevices:
    """The smallest cluster on which a layout fits."""

    cluster: Cluster | None  # None: none fits
    looked_up_to: int  # devices

    def to_dict(self) -> dict[str, object]:
        """Return the value of `asked` in `zerofit plan --json`."""
        data: dict[str, object] = {"min": "gpus", "value": None, "looked_up_to": self.looked_up_to}
        if self.cluster:
            data |= {"value": self.cluster.ranks, "gpus": self.cluster.gpus, "nodes": self.cluster.nodes}
        return data

    def __str__(self) -> str:
        if self.cluster is None:
            return f"even {self.looked_up_to} devices are not enough"
        return f"fewest devices: {self.cluster.ranks} ({self.cluster.gpus} per node)"


# All searches here use the pressure of a value: needed / available bytes of the scarcest memory, in the layout for
# which this share is smallest. A value fits if its pressure is at most 1.
def maximum_of(setup: SearchSetup, cluster: Cluster, what: Maximum, report: Reporter) -> tuple[SearchSetup, LargestFit]:
    """Return the setup with the largest `what` that fits, and the result of the search.

    `what`: the sequence length, micro batch or number of layers.
    """
    if what == "seq-len":
        return _longest_sequence(setup, cluster, report)
    return _most_layers(setup, cluster, report) if what == "layers" else _largest_micro_batch(setup, cluster)


def with_value(setup: SearchSetup, what: Maximum, value: int, report: Reporter) -> SearchSetup:
    """Return the setup with `value` as its sequence length, number of layers or micro batch."""
    if what == "layers":
        return replace(setup, profile=with_layers(setup.profile, value))
    if what == "micro-batch":
        return replace(setup, request=replace(setup.request, micro_batch=value))
    assert setup.traced
    traced = replace(setup.traced, seq_len=value)
    return replace(setup, profile=trace(traced, report), traced=traced)


def fewest(setup: SearchSetup, cluster: Cluster, full: int | None = None) -> Cluster | None:
    """Return the smallest cluster on which a layout fits; None if MOST_GPUS devices are too few.

    `full`: number of devices in a full node. If the cluster has several nodes, all of them are full.
    """
    forecast = forecast_of(setup.profile, cluster)

    def pressure_on(gpus: int, nodes: int) -> float:
        return pressure(setup.profile, replace(cluster, gpus=gpus, nodes=nodes), setup.request, forecast)

    smallest = inverse.fewest(pressure_on, full or cluster.gpus)
    return replace(cluster, gpus=smallest[0], nodes=smallest[1]) if smallest else None


# A remedy changes only one thing: more devices, more host memory, a device with more memory, or disks. Each remedy is
# tried with the layout that needs the least of the scarcest memory.
def remedies_of(setup: SearchSetup, cluster: Cluster) -> list[str]:
    """Return changes that would make the model fit, for a plan in which no layout fits."""
    remedies = []
    smallest = fewest(setup, cluster, max(cluster.gpus, cluster.device.node.gpus))
    if smallest is not None and smallest.ranks > cluster.ranks:
        remedies.append(f"{smallest.ranks} x {cluster.device.kind} ({smallest.gpus} per node)")
    elif smallest is None:
        size = shown_bytes(cluster.device.memory_bytes)
        remedies.append(f"even {MOST_GPUS} x {cluster.device.kind} of {size} are not enough")
    forecast = forecast_of(setup.profile, cluster)
    if cluster.on_cpu:
        return remedies
    host_bytes = host_needed(setup.profile, cluster, setup.request, forecast)
    if host_bytes is not None and not cluster.device.unified_memory:
        remedies.append(f"{shown_bytes(host_bytes)} of host memory per node (--host-memory)")
    # Only the smallest device that suffices is named. Host memory stays the same, so that only one thing changes.
    larger = [d for d in DEVICES.values() if d.memory_bytes > cluster.device.memory_bytes]
    for device in sorted(larger, key=lambda d: d.memory_bytes):
        has_precision = setup.request.precision in device.tflops
        same = replace(cluster, kind=device.kind, device_memory=None, network=None, host_memory=cluster.host_bytes)
        if has_precision and pressure(setup.profile, same, setup.request, forecast) <= 1:
            size = f" with {shown_bytes(device.memory_bytes)}" if device.kind == cluster.device.kind else ""
            remedies.append(f"{cluster.ranks} x {device.kind}{size}, with the same host memory")
            break
    if not cluster.nvme_bytes:
        # A petabyte stands for any disk: the question is only whether disks help at all.
        with_disks = replace(cluster, nvme=10**15)
        if pressure(setup.profile, with_disks, setup.request, forecast) <= 1:
            remedies.append("local NVMe disks (--nvme SIZE)")
    return remedies


def _longest_sequence(setup: SearchSetup, cluster: Cluster, report: Reporter) -> tuple[SearchSetup, LargestFit]:
    # Memory grows with the length, so the longest sequence that fits is found by bisection.
    traced, request = setup.traced, setup.request
    if traced is None or setup.profile.seq_len is None:
        message = "--max seq-len needs the name of a text model: a stored profile has only one sequence length"
        hint = "use MODEL instead of --profile" if traced is None else "use --max micro-batch"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--max"))
    limit, model = longest_sequence(traced), traced.model
    # Each tried length is a trace, which takes seconds. So trace only what the longest sequence can need: activation
    # checkpointing unless it is forbidden, a micro batch of 1, and degrees that divide the cluster's ranks.
    checkpointing = True if request.checkpointing is None else request.checkpointing
    degrees = [
        Degrees(**{name: int(degree) for name, degree in (part.split("=") for part in key.split("/")[2:])})
        for key in setup.profile.costs
    ]
    degrees = [d for d in degrees if cluster.ranks % d.product == 0 and cluster.ranks % d.ep == 0]
    lean = replace(traced, checkpointings=(checkpointing,), degrees=tuple(dict.fromkeys((Degrees(), *degrees))))
    single = replace(request, micro_batch=request.micro_batch or 1)

    def pressure_at(seq_len: int) -> float:
        report.status(f"tracing {model} at {seq_len} tokens ...")
        profile = trace(replace(lean, seq_len=seq_len), report)
        return pressure(profile, cluster, single, forecast_of(profile, cluster))

    most = limit or MOST_TOKENS
    longest, looked = largest(pressure_at, TOKENS, TOKENS, most, end_first=limit is not None)
    bounded = longest is not None and longest + TOKENS > most
    leanest = replace(setup, traced=lean, request=single)
    longer = () if bounded else tuple(_longer_with_savings(leanest, cluster, longest, most, report))
    figures = {"step": TOKENS, "looked": looked, "bounded": bounded, "limit": limit}
    fit = LargestFit(what="seq-len", value=longest, longer=longer, **figures)
    if longest is None:
        return setup, fit
    traced = replace(traced, seq_len=longest)
    return replace(setup, profile=trace(traced, report), traced=traced, request=single), fit


# All combinations of the options would be too many traces. So the options are added one by one: the next option is
# the one that needs the least memory at twice the length that fits so far.
def _longer_with_savings(
    setup: SearchSetup, cluster: Cluster, longest: int | None, most: int, report: Reporter
) -> Iterator[LongerSequence]:
    """Yield ever longer sequences, each with one more option that saves memory."""
    traced, profile = setup.traced, setup.profile
    assert traced
    choices = offered(profile.task, profile.model_type).fields
    if cluster.on_cpu or not all(traced.checkpointings):  # the host is the device, or there is nothing to offload
        choices.pop("activation_offload")

    def pressure_at(seq_len: int, request: ProfileRequest) -> float:
        report.status(f"tracing {request.model} at {seq_len} tokens with {request.savings.flags} ...")
        profile = trace(replace(request, seq_len=seq_len), report)
        return pressure(profile, cluster, setup.request, forecast_of(profile, cluster))

    length = longest or 0
    while length + TOKENS <= most:
        choices = {name: value for name, value in choices.items() if not getattr(traced.savings, name)}
        if not choices:
            return
        candidates = [replace(traced, savings=traced.savings._replace(**{name: choices[name]})) for name in choices]
        probed = min(max(2 * length, TOKENS), most)
        pressures = [pressure_at(probed, request) for request in candidates]
        traced = candidates[pressures.index(min(pressures))]
        longer, _ = largest(partial(pressure_at, request=traced), max(length, TOKENS), TOKENS, most)
        if longer is None or longer <= length:
            return
        length = longer
        yield LongerSequence(traced.savings, length)


def _most_layers(setup: SearchSetup, cluster: Cluster, report: Reporter) -> tuple[SearchSetup, LargestFit]:
    layer = setup.profile.layers[repeated_layer(setup.profile)]
    if layer.count == 1:
        message = f"--max layers repeats a layer, but no kind of layer occurs more than once in {setup.profile.model}"
        hint = "use --max micro-batch, or the same model with more layers (--model-args)"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--max"))

    def pressure_at(count: int, pipelines: bool = False) -> float:
        report.status(f"forecasting {count} times {layer.name} ...")
        profile, request = with_layers(setup.profile, count), replace(setup.request, pipelines=pipelines)
        return pressure(profile, cluster, request, forecast_of(profile, cluster))

    # Cutting many layers into stages is slow, and pipelines seldom allow the largest value, so they are tried last.
    count, looked = largest(pressure_at, 1, 1, MOST_LAYERS)
    border = (count or 0) + 1
    if border <= MOST_LAYERS and pressure_at(border, pipelines=True) <= 1:
        count, looked_again = largest(partial(pressure_at, pipelines=True), border, 1, MOST_LAYERS)
        looked += looked_again
    bounded, repeated = count == MOST_LAYERS, {"layer": layer.name, "now": layer.count}
    fit = LargestFit(what="layers", value=count, step=1, looked=looked, bounded=bounded, **repeated)
    return (replace(setup, profile=with_layers(setup.profile, count)) if count else setup), fit


def _largest_micro_batch(setup: SearchSetup, cluster: Cluster) -> tuple[SearchSetup, LargestFit]:
    """Search for the largest micro batch, ignoring the global batch."""
    free = replace(setup.request, global_batch=None)
    forecast = forecast_of(setup.profile, cluster)

    def pressure_at(micro_batch: int) -> float:
        return pressure(setup.profile, cluster, replace(free, micro_batch=micro_batch), forecast)

    size, looked = largest(pressure_at, 1, 1, MOST_SAMPLES)
    fit = LargestFit(what="micro-batch", value=size, step=1, looked=looked, bounded=size == MOST_SAMPLES)
    return (replace(setup, request=replace(free, micro_batch=size)) if size else setup), fit
