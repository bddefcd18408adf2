"""What a plan answers: layouts as runs, the largest value that fits, the fewest devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.app.planning.corrections import TunedLayouts
from zerofit.app.planning.files import ds_config, run_fields, write_plan
from zerofit.app.planning.request import Maximum, PlanningRequest
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.result import PlanResult, RankedLayout, Rejected
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.plain_data import field_data
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run


@dataclass(frozen=True, kw_only=True)
class LargestFit:
    """The largest value of one size with which a layout fits."""

    what: Maximum
    value: int | None  # None: not even the smallest fits
    step: int  # in which values were tried
    looked: int  # values that were tried
    bounded: bool  # no larger value was tried
    limit: int | None = None  # of the model
    layer: str | None = None  # that is repeated
    now: int | None = None  # how often the model repeats it

    def to_dict(self) -> dict[str, Any]:
        """Return what `asked` is in `zerofit plan --json`."""
        found = {"max": self.what, **field_data(self, "what", "bounded", "limit", "layer", "now")}
        if self.what == "seq-len":
            found["limit"] = self.limit
        if self.what == "layers":
            found |= {"layer": self.layer, "now": self.now}
        return {**found, "next_fits": None if self.bounded else False}

    def __str__(self) -> str:
        if self.value is None:
            return f"no {self.what} fits"
        words = f"largest {self.what}: {self.value}"
        if self.layer is not None:
            words += f" (the model has {self.now} of {self.layer})"
        if not self.bounded:
            return f"{words}; {self.value + self.step} does not fit"
        return f"{words}, the most that the model takes" if self.limit else f"{words}, and no more was looked at"


@dataclass(frozen=True, kw_only=True)
class FewestDevices:
    """The smallest cluster on which a layout fits."""

    cluster: Cluster | None  # None: there is none
    looked_up_to: int  # devices

    def to_dict(self) -> dict[str, Any]:
        """Return what `asked` is in `zerofit plan --json`."""
        found = {"min": "gpus", "value": None, "looked_up_to": self.looked_up_to}
        if self.cluster:
            found |= {"value": self.cluster.ranks, "gpus": self.cluster.gpus, "nodes": self.cluster.nodes}
        return found

    def __str__(self) -> str:
        if self.cluster is None:
            return f"not even {self.looked_up_to} devices are enough"
        return f"fewest devices: {self.cluster.ranks} ({self.cluster.nodes} node(s) of {self.cluster.gpus})"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One of the best layouts: its forecast, and the run that it stands for."""

    ranked: RankedLayout
    profile: Profile = field(repr=False)
    request: PlanningRequest = field(repr=False)

    @property
    def layout(self) -> PlannedLayout:
        """Degrees, stage, batches and offloading."""
        return self.ranked.layout

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.ranked.step_s

    @property
    def peak_bytes(self) -> int:
        """Device memory of the rank that needs most."""
        return self.ranked.memory.peak_bytes

    @property
    def samples_per_s(self) -> float:
        """Samples a second, of all ranks together."""
        return self.ranked.samples_per_s

    @property
    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON; what a run decides (batch sizes, precision, lr) is "auto"."""
        return ds_config(self.layout, self.profile, self.request.nvme_path)

    def to_run(self) -> Run:
        """Return the run, to which only the data is to be added (`run.model_copy(update={"data": ...})`)."""
        args = dict(self.request.pins.get("model_args", {}))
        return Run(**run_fields(self.layout, self.profile, args, self.request.image), ds_config=self.ds_config)

    def to_dict(self) -> dict[str, Any]:
        """Return a row of `layouts` in `zerofit plan --json`."""
        return self.ranked.to_dict()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layouts of a model that fit a cluster, best first, and why the others do not."""

    result: PlanResult
    request: PlanningRequest = field(repr=False)
    profile: Profile = field(repr=False)
    profile_file: Path | None  # where the profile is kept; `profile=` takes it
    answer: LargestFit | FewestDevices | None = None  # to `maximum` or `minimum`
    remedies: tuple[str, ...] = ()  # what would make the model fit, where nothing does
    tuned: TunedLayouts | None = field(default=None, repr=False)
    boxes: tuple[Plan, ...] = field(default=(), repr=False)  # of several clusters, the fastest first
    total_s: float = 0.0

    @property
    def layouts(self) -> tuple[PlannedRun, ...]:
        """The best layouts."""
        return tuple(PlannedRun(ranked=one, profile=self.profile, request=self.request) for one in self.result.layouts)

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """Why other layouts do not fit, the most frequent reason first."""
        return self.result.rejections

    @property
    def considered(self) -> int:
        """Layouts that were looked at."""
        return self.result.considered

    @property
    def cluster(self) -> Cluster:
        """What the plan is for; the smallest one where that was the question."""
        return self.result.cluster

    def write(self, folder: Path | str) -> tuple[Path, Path]:
        """Write ds_config.json and run.yaml of the best layout, or of a plainer one that is nearly as fast.

        Raises UserError where nothing fits, files would be replaced, or the folder cannot be written to.
        """
        number = self.result.plainest  # a forecast of time cannot tell it from the first
        if number is None:
            raise UserError(Problem(kind="nothing-fits", message="no layout fits: there is nothing to write"))
        request, layout = self.request, self.result.layouts[number].layout
        args = dict(request.pins.get("model_args", {}))
        return write_plan(Path(folder), layout, self.profile, args, request.image, request.nvme_path)

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit plan --json` prints."""
        found = self.result.to_dict()
        found["top"] = self.request.top
        found["tuned"] = self.tuned.to_dict() if self.tuned else None
        found["profile"] = str(self.profile_file) if self.profile_file else None
        if self.answer:
            found["asked"] = self.answer.to_dict()
        if not self.result.layouts:
            found["remedies"] = list(self.remedies)
        if self.boxes:
            found["boxes"] = [_box(one) for one in self.boxes]
        return {**found, "total_s": self.total_s}

    def _repr_html_(self) -> str:
        return self.result._repr_html_()


def _box(plan: Plan) -> dict[str, Any]:
    cluster, layouts = plan.cluster, plan.result.layouts
    return {
        "gpu": cluster.device.kind,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "layout": layouts[0].to_dict() if layouts else None,
        "remedies": list(plan.remedies),
    }
