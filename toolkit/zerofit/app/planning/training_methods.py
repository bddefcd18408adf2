"""Compare methods of fine-tuning: which fit a cluster, how fast, and to which length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from zerofit.app.planning.largest_fit import LargestFit, maximum_of
from zerofit.app.planning.plan import Plan, PlannedRun
from zerofit.app.planning.planner import plan_for
from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.search_setup import setup_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.partial_training import PART_FIELDS, Method

USUAL_RANK = 8  # rank of adapters without --lora; peft's default
USUAL_BITS = "nf4"  # for "qlora"


@dataclass(frozen=True, kw_only=True)
class MethodFit:
    """A way to train a model on a cluster."""

    method: Method
    plan: Plan  # at the requested sequence length
    longest: LargestFit | None  # by forecast; None for images

    @property
    def best(self) -> PlannedRun | None:
        """The fastest layout; None if nothing fits."""
        return next(iter(self.plan.layouts), None)

    def to_dict(self) -> dict[str, object]:
        """Return a row of `methods` in `zerofit plan --json`."""
        profile = self.plan.profile
        return {
            "method": self.method,
            "trained": profile.trained,
            "parameters": profile.parameters,
            "layout": self.best.to_dict() if self.best else None,
            "longest": self.longest.to_dict() if self.longest else None,
            "remedies": list(self.plan.remedies),
        }


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """Ways to train one model on one cluster."""

    cluster: Cluster
    rows: tuple[MethodFit, ...]

    @property
    def layouts(self) -> list[PlannedRun]:
        """The best layout of each method that fits."""
        return [row.best for row in self.rows if row.best]

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit plan --methods --json` prints."""
        first = self.rows[0].plan
        return {
            "model": first.profile.model,
            "gpu": self.cluster.device.kind,
            "ranks": self.cluster.ranks,
            "seq_len": first.profile.seq_len,
            "methods": [row.to_dict() for row in self.rows],
        }


def compare_methods(
    request: PlanningRequest, methods: Sequence[Method], cluster: Cluster, *, on_event: OnEvent | None = None
) -> MethodComparison:
    """Return the plan of each method, and the longest sequence that fits by forecast with each."""
    report = Reporter(on_event)
    report.note(*request.notes)
    ordered = [method for method in get_args(Method) if method in methods]
    rows = tuple(_fit_of_method(method, request, cluster, report) for method in ordered)
    return MethodComparison(cluster=cluster, rows=rows)


def _fit_of_method(method: Method, request: PlanningRequest, cluster: Cluster, report: Reporter) -> MethodFit:
    # Each method keeps the user's options that it has: "full" none, "lora" those of adapters, "qlora" all.
    part = {} if method == "full" else {"lora": USUAL_RANK, **request.part}
    if method == "qlora":
        part = {"quantize": USUAL_BITS, **part}
    elif method == "lora":
        part = {name: value for name, value in part.items() if name not in ("quantize", "double_quant")}
    rest = {name: value for name, value in request.pins.items() if name not in PART_FIELDS}
    with_method = replace(request, pins={**rest, **part})
    plan = plan_for(cluster, with_method, report)
    longest = None
    if plan.profile.seq_len is not None:
        setup, _ = setup_of(cluster, with_method, report)
        longest = maximum_of(setup, cluster, "seq-len", report)[1]
    return MethodFit(method=method, plan=plan, longest=longest)
