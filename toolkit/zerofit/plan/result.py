"""Define the result of a plan: the best layouts, and why the others do not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofit.features.checkpointing import WORDS
from zerofit.plan.fit import Fit
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.outlook import PAIRS, Outlook, PublishedErrors, Work, outlook_of
from zerofit.plan.rates import Rates
from zerofit.plan.time import StepTime
from zerofit.report.html_table import html_table
from zerofit.spec.cluster import Cluster
from zerofit.spec.files import field_data
from zerofit.spec.profile import Profile
from zerofit.spec.units import shown_bytes

SAME_SPEED = 0.03  # relative uncertainty of a step time, even if it is corrected by measurements


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """One of the best layouts, with its memory and speed."""

    layout: PlannedLayout
    memory: LayoutMemory
    fit: Fit
    time: StepTime
    samples_per_s: float
    tokens_per_s: float | None  # None for images
    mfu: float | None  # None for CPUs
    errors: PublishedErrors | None = None  # of forecasts like this one; None for CPUs and corrected forecasts
    outlook: Outlook | None = None  # for a full training, if requested

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step, rounded like samples per second."""
        return self.layout.global_batch / self.samples_per_s

    def to_dict(self) -> dict[str, object]:
        """Return a row of `layouts`, `misfits` or `close` for `zerofit plan --json`."""
        lacks = {"memory": self.fit.exceeded, "bytes": round(self.fit.lacking_bytes)}
        return {
            **self.layout.to_dict(),
            "layout": str(self.layout),
            "peak_bytes": self.memory.peak_bytes,
            "peak_phase": self.memory.peak_phase,
            "breakdown": self.memory.breakdown,
            "margin_bytes": round(self.fit.margin_bytes),
            "device_total_bytes": self.fit.device_available_bytes,
            "host_bytes": self.memory.host_bytes,
            "nvme_bytes": self.memory.nvme_bytes,
            "step_s": self.step_s,
            "step_s_range": self.errors and [self.errors.low * self.step_s, self.errors.high * self.step_s],
            "errors": self.errors and self.errors._asdict(),
            "time": field_data(self.time, "step_s"),
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "fits": self.fit.exceeded is None,
            "verdict": self.fit.verdict,
            "lacks": lacks if self.fit.exceeded else None,
            **({"outlook": self.outlook.to_dict()} if self.outlook else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Layouts rejected for one reason.

    `layout` is the one that needs the least memory; None if no layout was forecast.
    """

    reason: str  # stable slug
    count: int
    message: str
    hint: str
    layout: PlannedLayout | None = None
    fit: Fit | None = None

    def to_dict(self) -> dict[str, object]:
        """Return a row of `rejections` for `zerofit plan --json`."""
        return {
            **field_data(self, "layout", "fit"),
            "layout": self.layout.to_dict() if self.layout else None,
            "lacks_share": round(self.fit.utilization - 1, 4) if self.fit else None,
        }


@dataclass(frozen=True, kw_only=True)
class FrontierLayout:
    """A layout that no other layout beats in both speed and memory."""

    layout: str
    peak_bytes: int
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The ranked layouts of a model on one cluster, and the rejected ones."""

    model: str
    parameters: int
    seq_len: int | None  # None for images
    precision: str
    cluster: Cluster
    rates: Rates
    layouts: tuple[RankedLayout, ...]  # best first; they differ in more than buckets and overlap unless all are ranked
    rejections: tuple[Rejected, ...]  # most frequent first
    considered: int
    fitting: int
    seconds: float
    padding: str = ""  # what the first layout loses to sizes of the model that are not multiples of 8
    close: tuple[RankedLayout, ...] = ()  # faster than the first layout; their peaks fit, but not with the margin
    frontier: tuple[FrontierLayout, ...] = ()  # fastest first
    misfits: tuple[RankedLayout, ...] = ()  # layouts that need the least memory, if fewer fit than were requested

    @property
    def nearest(self) -> Rejected | None:
        """The rejected layouts that are closest to fitting."""
        return min(
            (r for r in self.rejections if r.fit), key=lambda r: r.fit.utilization if r.fit else 0.0, default=None
        )

    @property
    def plainest(self) -> int | None:
        """The index of the simplest layout about as fast as the first one; None if none fits.

        Among equally simple layouts, the fastest is chosen.
        """
        speeds = [ranked.samples_per_s for ranked in self.layouts]
        # below this ratio, forecasts cannot tell which speed is higher (measured on published pairs of layouts)
        apart = PAIRS.high if self.layouts and self.layouts[0].errors else 1 + SAME_SPEED
        near = [n for n, speed in enumerate(speeds) if speed * apart >= speeds[0]]
        return min(near, key=lambda n: plain(self.layouts[n].layout)[:MACHINERY], default=None)

    def to_dict(self) -> dict[str, object]:
        """Return the plan's part of `zerofit plan --json`."""
        cluster = self.cluster
        return {
            "model": self.model,
            "parameters": self.parameters,
            "seq_len": self.seq_len,
            "precision": self.precision,
            "cluster": {
                "gpu": cluster.device.kind,
                "gpus": cluster.gpus,
                "nodes": cluster.nodes,
                "ranks": cluster.ranks,
                "device_bytes": cluster.device.memory_bytes,
                "host_bytes": cluster.host_bytes,
                "nvme_bytes": cluster.nvme_bytes,
                "assumed": list(cluster.notes),
            },
            "layouts": [ranked.to_dict() for ranked in self.layouts],
            "misfits": [ranked.to_dict() for ranked in self.misfits],
            "close": [ranked.to_dict() for ranked in self.close],
            "frontier": [field_data(row) for row in self.frontier],
            "plainest": self.plainest,
            "padding": self.padding,
            "fitting": self.fitting,
            "considered": self.considered,
            "rejected": {rejected.reason: rejected.count for rejected in self.rejections},
            "rejections": [rejected.to_dict() for rejected in self.rejections],
            "nearest_miss": self.nearest.to_dict() if self.nearest and not self.layouts else None,
            "rates": {name: getattr(self.rates, name) for name in self.rates.sources},
            "rate_sources": self.rates.sources,
            "seconds": round(self.seconds, 4),
        }

    def _repr_html_(self) -> str:
        rows = [
            (
                ranked.layout,
                shown_bytes(ranked.memory.peak_bytes),
                f"{ranked.step_s:.3g} s",
                f"{ranked.tokens_per_s or ranked.samples_per_s:,.3g}",
                "" if ranked.mfu is None else f"{ranked.mfu:.0%}",
            )
            for ranked in self.layouts
        ]
        cluster, speed = self.cluster, "tokens/s" if self.seq_len else "samples/s"
        caption = f"{self.model} in {self.precision} on {cluster.nodes} x {cluster.gpus} x {cluster.label}"
        if not rows and self.nearest:
            caption += f": nothing fits; nearest: {self.nearest.layout}: {self.nearest.message}"
        return html_table(caption, ("layout", "device memory", "step", speed, "MFU"), rows)


def with_outlooks(result: PlanResult, work: Work, profile: Profile) -> PlanResult:
    """Return `result` with an outlook on a full run for each layout."""

    def with_outlook(ranked: RankedLayout) -> RankedLayout:
        of_model = (profile.trained, profile.seq_len)
        return replace(
            ranked, outlook=outlook_of(work, ranked.layout, ranked.step_s, ranked.errors, *of_model, result.cluster)
        )

    lists = {name: tuple(map(with_outlook, getattr(result, name))) for name in ("layouts", "misfits", "close")}
    return replace(result, **lists)


MACHINERY = 4  # entries of `plain`'s key that count machinery; the others are sizes


def plain(layout: PlannedLayout) -> tuple[int, ...]:
    """Return a sort key that puts simpler layouts first, e.g. with less offloading."""
    offloads = (layout.offload_optimizer != "none") + (layout.offload_param != "none")
    degrees = layout.tp * layout.pp * layout.sp * layout.ep * layout.replicas
    sizes = (layout.overlap, layout.bucket, layout.micro_batch)
    return (offloads, degrees, list(WORDS).index(layout.checkpointing), layout.zero_stage, *sizes)
