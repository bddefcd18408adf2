"""Estimate the duration, the GPU hours and the cost of a full run with a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zerofit.plan.goodput import Goodput, Reliability, goodput_of
from zerofit.plan.interval import PublishedErrors
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.files import field_data


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
