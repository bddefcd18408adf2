"""Answers of a plan: layouts as runs and as files, the largest value that fits, the fewest devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zerofit.app.planning.files import data_line, ds_config, merged, run_fields, write_plan
from zerofit.app.planning.from_trace import TraceCalibration
from zerofit.app.planning.measured import MeasuredScaling
from zerofit.app.planning.pins import savings_of
from zerofit.app.planning.request import Maximum, PlanningRequest, TunedLayouts
from zerofit.app.planning.traces import trace_of_layout, write_trace
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.outlook import Outlook
from zerofit.plan.result import PlanResult, RankedLayout, Rejected
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import field_data
from zerofit.spec.profile import Profile, Savings
from zerofit.spec.run import Run

DEPTH = "num_hidden_layers"  # what transformers calls the number of layers, for every model (`attribute_map`)


class LongerSequence(NamedTuple):
    """The longest sequence, by forecast, with more than was asked for that holds fewer activations."""

    savings: Savings
    value: int  # tokens

    def __str__(self) -> str:
        return f"{self.value} with {self.savings.flags}"


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
    longer: tuple[LongerSequence, ...] = ()  # each with one thing more than the one before; the rest gives nothing

    def to_dict(self) -> dict[str, Any]:
        """Return what `asked` is in `zerofit plan --json`."""
        found = {"max": self.what, **field_data(self, "what", "bounded", "limit", "layer", "now", "longer")}
        if self.what == "seq-len":
            found["limit"] = self.limit
            found["longer"] = [{"value": one.value, **one.savings.fields} for one in self.longer]
        if self.what == "layers":
            found |= {"layer": self.layer, "now": self.now}
        return {**found, "next_fits": None if self.bounded else False}

    def __str__(self) -> str:
        if self.longer:
            return f"{self._found}. By forecast: {'; '.join(map(str, self.longer))}"
        return self._found

    @property
    def _found(self) -> str:
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
class Confirmation:
    """What a simulation of the engine says of a planned layout."""

    layout: int  # its place among the layouts
    fits: bool
    verdict: str = ""
    peak_bytes: int = 0
    reserved_bytes: int = 0
    needed_bytes: int = 0  # of the device, with everything beside torch at its upper end
    available_bytes: int = 0
    because: str = ""
    problem: str | None = None  # why it cannot be simulated

    def __str__(self) -> str:
        if self.problem:
            return f"layout {self.layout + 1} cannot be simulated, and stands by its forecast alone: {self.problem}"
        return f"layout {self.layout + 1}, simulated: {self.verdict}. {self.because}"


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
    def outlook(self) -> Outlook | None:
        """How long the whole training takes, what it costs, when to save it; None where that was not asked."""
        return self.ranked.outlook

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
        planned = ds_config(self.layout, self.profile, self.request.nvme_path)
        return planned if self.request.measured else merged(planned, self.request.ds_config)

    @property
    def model_args(self) -> dict[str, Any]:
        """The model's, with the number of layers where that was the question."""
        args = dict(self.request.pins.get("model_args", {}))
        if self.request.maximum == "layers" and self.profile.model_type is not None:
            args[DEPTH] = max(layer.count for layer in self.profile.layers)
        return args

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the run but its DeepSpeed JSON and its data."""
        fields = run_fields(self.layout, self.profile, self.model_args, self.request.image) | self.request.part
        return {**fields, **savings_of(self.request.pins, self.request.ds_config).fields}

    def to_run(self) -> Run:
        """Return the run, to which only the data is to be added (`run.model_copy(update={"data": ...})`)."""
        return Run(**self.fields, ds_config=self.ds_config)

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
    scaling: MeasuredScaling | None = field(default=None, repr=False)  # of step times, by one that was measured
    by_trace: TraceCalibration | None = field(default=None, repr=False)  # of the device's rates
    boxes: tuple[Plan, ...] = field(default=(), repr=False)  # of several clusters, the fastest first
    total_s: float = 0.0
    written: tuple[Path, ...] = ()  # files that the command wrote
    traced: Path | None = None  # the timeline of a step that it wrote
    confirmed: tuple[Confirmation, ...] = ()  # layouts that were simulated

    @property
    def layouts(self) -> tuple[PlannedRun, ...]:
        """The best layouts."""
        return tuple(PlannedRun(ranked=one, profile=self.profile, request=self.request) for one in self.result.layouts)

    @property
    def misfits(self) -> tuple[PlannedRun, ...]:
        """Layouts that do not fit, those that lack least first, where fewer fit than were wanted."""
        return tuple(PlannedRun(ranked=one, profile=self.profile, request=self.request) for one in self.result.misfits)

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

    @property
    def chosen(self) -> int | None:
        """The layout to be written: the plainest of the fastest, or the first that a simulation has found to fit.

        None where nothing fits.
        """
        refused = {one.layout for one in self.confirmed if not one.fits and not one.problem}
        if self.result.plainest not in refused:
            return self.result.plainest  # a forecast of time cannot tell it from the first
        return next((one.layout for one in self.confirmed if one.fits), None)

    @property
    def shown(self) -> int:
        """The place of the layout whose step is traced: the one to be written, else the first."""
        return self.chosen or 0

    def write(self, folder: Path | str) -> tuple[Path, Path]:
        """Write ds_config.json and run.yaml of the best layout, or of a plainer one that is nearly as fast.

        A layout that a simulation has refused is not written (`confirmed`). Raises UserError where nothing fits, files
        would be replaced, or the folder cannot be written to.
        """
        number = self.chosen
        if number is None:
            message = "no layout fits: there is nothing to write"
            raise UserError(Problem(kind="nothing-fits", message=message, hint="; ".join(map(str, self.confirmed))))
        planned = self.layouts[number]
        return write_plan(Path(folder), planned.fields, planned.ds_config, data_line(self.profile, self.request.image))

    def trace(self, path: Path | str) -> Path:
        """Write the timeline of a step of the layout that `write` takes, else of the first, in the Chrome trace format.

        One rank of each pipeline stage. Raises UserError where there is no layout, or the file cannot be written.
        """
        planned = self.layouts[self.shown] if self.layouts else next(iter(self.misfits), None)
        if planned is None:
            message, hint = "no layout has a step time: there is nothing to trace", "ask for one that DeepSpeed takes"
            raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where="--trace"))
        one = planned.ranked
        trace = trace_of_layout(self.profile, self.cluster, self.result.rates, one.layout, one.step_s)
        write_trace(Path(path), trace)
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit plan --json` prints."""
        found = self.result.to_dict()
        found["top"] = self.request.top
        if self.request.work:
            found["assumed"] = self.request.work.reliability.sources
        found["tuned"] = self.tuned.to_dict() if self.tuned else None
        found["measured"] = self.scaling.to_dict() if self.scaling else None
        found["from_trace"] = self.by_trace.to_dict() if self.by_trace else None
        found["profile"] = str(self.profile_file) if self.profile_file else None
        if self.answer:
            found["asked"] = self.answer.to_dict()
        if not self.result.layouts:
            found["remedies"] = list(self.remedies)
        if self.boxes:
            found["boxes"] = [_box(one) for one in self.boxes]
        found["total_s"] = self.total_s
        if self.written:
            found |= {"written": [str(path) for path in self.written], "written_layout": self.chosen}
        if self.traced:
            found["trace"] = str(self.traced)
        if self.confirmed:
            found["confirmed"] = [field_data(one) for one in self.confirmed]
        return found

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
