"""Estimate duration, uncertainty, GPU hours and cost of a full run with a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zerofit.plan.goodput import Goodput, Reliability, goodput_of
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.files import field_data
from zerofit.spec.model_facts import is_text

LONG = 16_384  # tokens per sample


class PublishedErrors(NamedTuple):
    """The interval of the middle 80 % of the ratios measured / forecast in one class of figures."""

    what: str
    figures: int
    low: float
    high: float
    narrower: str = "--measured"  # the measurement that narrows the interval most


# benchmarks/results/time-accuracy.json, "classes". Each forecast is fitted without the figure's own source. Each
# interval contains 80 % of the figures of a source that was left out of it. A layout belongs to the first class that
# matches.
CLASSES = {
    "image": PublishedErrors("image models", 29, 0.83, 1.26, "zerofit calibrate"),
    "offload": PublishedErrors("an offloaded optimizer", 10, 0.89, 1.19, "zerofit calibrate"),
    "pipeline": PublishedErrors("pipelines", 10, 0.81, 1.35),
    "tensor": PublishedErrors("tensor parallelism", 20, 0.76, 1.2),
    "long": PublishedErrors("sequences of 16K and more", 20, 0.92, 1.15, "zerofit calibrate"),
    "fsdp2": PublishedErrors("FSDP", 97, 0.9, 1.09),
    "nodes": PublishedErrors("DeepSpeed on several nodes", 31, 0.9, 1.18),
    "text": PublishedErrors("DeepSpeed on one node", 32, 0.65, 1.63, "zerofit calibrate"),
}
# Published step times of torchtitan's Llama 2 and 3 (2024 and 2025: 3 on A100, 4 on H100) were 0.98 to 1.28 times the
# forecasts. These releases had norms of several kernels and a loss in one piece; there are no figures of newer ones.
TITAN = PublishedErrors("torchtitan", 7, 0.98, 1.28)
# "pairs_interval": for a layout's step time, if another layout of the same model and machine was measured
PAIRS = PublishedErrors("two layouts of one model on one machine", 78, 0.89, 1.13)
AS_MEASURED = PublishedErrors("measured", 1, 1.0, 1.0)


def class_of(layout: PlannedLayout, task: str, seq_len: int | None, nodes: int) -> str:
    """Return the key in CLASSES for a layout on GPUs."""
    fitting = {
        "image": not is_text(task),
        "offload": layout.offload != "none",
        "pipeline": layout.pp > 1,
        "tensor": layout.tp > 1,
        "long": (seq_len or 0) >= LONG,
        "fsdp2": layout.by_layer,
        "nodes": nodes > 1,
    }
    return next((name for name, fits in fitting.items() if fits), "text")


def errors_of(layout: PlannedLayout, task: str, seq_len: int | None, nodes: int) -> PublishedErrors:
    """Return the forecast errors on published figures in the same class as the layout."""
    if layout.engine == "torchtitan":
        return TITAN
    return CLASSES[class_of(layout, task, seq_len, nodes)]


class Price(NamedTuple):
    """The price of one device per hour, with its source."""

    per_gpu_hour: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much to train, what devices cost, and how often they fail."""

    samples: float | None = None  # per epoch
    tokens: float | None = None  # per epoch, instead of samples
    epochs: float = 1.0
    prices: Mapping[str, float] = field(default_factory=dict)  # per GPU hour, by name of device or instance; "": any
    reliability: Reliability = field(default_factory=Reliability)

    def samples_of(self, seq_len: int | None) -> float | None:
        """Return the number of samples in all epochs.

        The result is None if it is unknown, or if `tokens` is set for a model without tokens.
        """
        if self.tokens is not None:
            return self.epochs * self.tokens / seq_len if seq_len else None
        return None if self.samples is None else self.epochs * self.samples

    def price(self, cluster: Cluster) -> Price | None:
        """Return the user's price, else the node's list price; None if both are unknown."""
        requested = cluster.kind if isinstance(cluster.kind, str) else cluster.device.kind
        for name in (requested, cluster.device.kind, ""):
            if name in self.prices:
                return Price(self.prices[name], "--price")
        listed = cluster.device.node.price
        if listed is None:
            return None
        words = f"list price of {cluster.device.node.name} on {listed.date} ({listed.source})"
        return Price(listed.usd / cluster.device.node.gpus, words)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The duration and cost of a full run with one layout, including saves and failures."""

    steps: int | None  # None: the length is unknown
    train_h: float | None  # of steps alone
    hours: float | None  # with saves and failures; None if failures are so frequent that no step is ever saved
    hours_range: tuple[float, float] | None  # from the step time's interval
    gpu_hours: float | None  # of training devices, without spare nodes
    price: Price | None
    cost: float | None
    goodput: Goodput

    def to_dict(self) -> dict[str, object]:
        """Return the field `outlook` of a layout for `zerofit plan --json`."""
        return {**field_data(self, "price"), "price": self.price and self.price._asdict()}


def outlook_of(
    work: Work,
    layout: PlannedLayout,
    step_s: float,
    errors: PublishedErrors | None,
    trained: int,
    seq_len: int | None,
    cluster: Cluster,
) -> Outlook:
    """Return the duration and the cost of the work. The number of steps is rounded up.

    `trained`: number of parameters that a checkpoint has. Frozen ones are not saved.
    """
    useful = goodput_of(work.reliability.failures(trained, layout, cluster))
    samples, price = work.samples_of(seq_len), work.price(cluster)
    if samples is None:
        nothing = dict.fromkeys(("steps", "train_h", "hours", "hours_range", "gpu_hours", "cost"))
        return Outlook(**nothing, price=price, goodput=useful)
    steps = max(1, math.ceil(samples / layout.global_batch))
    train_h = steps * step_s / 3600
    hours = train_h / useful.share if useful.share else None
    gpu_hours = hours and hours * cluster.ranks
    return Outlook(
        steps=steps,
        train_h=train_h,
        hours=hours,
        hours_range=(errors.low * hours, errors.high * hours) if errors and hours else None,
        gpu_hours=gpu_hours,
        price=price,
        cost=price and gpu_hours and gpu_hours * price.per_gpu_hour,
        goodput=useful,
    )
