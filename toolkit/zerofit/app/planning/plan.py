"""A plan: the layouts that fit, as runs and files, and why other layouts do not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zerofit.app.planning.corrections import MeasuredScaling, TraceCalibration, TunedLayouts
from zerofit.app.planning.largest_fit import FewestDevices, LargestFit
from zerofit.app.planning.layout_pins import savings_of, without_pinned
from zerofit.app.planning.output_files import (
    data_line,
    ds_config,
    merged,
    run_fields,
    trace_of_layout,
    write_accelerate,
    write_plan,
    write_torchtitan,
    write_trace,
)
from zerofit.app.planning.request import PlanningRequest
from zerofit.plan.result import PlanResult, RankedLayout, Rejected
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import field_data
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run
from zerofit.spec.units import shown_bytes

DEPTH = "num_hidden_layers"  # transformers' name for the number of layers in every model (`attribute_map`)


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The result of simulating a planned layout."""

    layout: int  # index among the layouts
    fits: bool
    verdict: str = ""
    peak_bytes: int = 0
    reserved_bytes: int = 0
    needed_bytes: int = 0  # on the device, with the upper estimates for memory outside torch
    available_bytes: int = 0
    because: str = ""
    problem: str | None = None  # the reason why the layout cannot be simulated

    def __str__(self) -> str:
        return self.described(details=True)

    def described(self, details: bool) -> str:
        """Return the verdict in one line. With `details`, add what the memory is used for."""
        layout = f"layout {self.layout + 1}"
        if self.problem:
            return f"{layout} cannot be simulated, so only plan's forecast is known: {self.problem}"
        needed, available = shown_bytes(self.needed_bytes), shown_bytes(self.available_bytes)
        because = f". {self.because}" if details else ""
        return f"{layout} {self.verdict}: needs {needed} of {available}{because}"


@dataclass(frozen=True, kw_only=True)
class PlannedRun(RankedLayout):
    """One of the best layouts: its forecast and the run for it."""

    profile: Profile = field(repr=False)
    request: PlanningRequest = field(repr=False)

    @classmethod
    def of(cls, ranked: RankedLayout, profile: Profile, request: PlanningRequest) -> PlannedRun:
        """Return the run for a layout of a plan."""
        forecast = {of.name: getattr(ranked, of.name) for of in fields(ranked)}
        return cls(**forecast, profile=profile, request=request)

    @property
    def peak_bytes(self) -> int:
        """Device memory of the rank that needs the most memory."""
        return self.memory.peak_bytes

    @property
    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON; values that the run decides (batch sizes, precision, lr) are "auto"."""
        planned = ds_config(self.layout, self.profile, self.request.nvme_path)
        # with `measured`, the user's JSON describes the measured layout, and the search was free of it
        own = {} if self.request.measured else without_pinned(self.request.pins, self.request.ds_config)
        return merged(planned, own)

    @property
    def model_args(self) -> dict[str, Any]:
        """The model's arguments; they include the number of layers if the plan searched for it."""
        args = dict(self.request.pins.get("model_args", {}))
        if self.request.maximum == "layers" and self.profile.model_type is not None:
            args[DEPTH] = max(layer.count for layer in self.profile.layers)
        return args

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the run except its DeepSpeed JSON and data."""
        fields = run_fields(self.layout, self.profile, self.model_args, self.request.image) | self.request.part
        pins = self.request.pins
        fields |= {"compile": True} if pins.get("compile") else {}
        decay = pins.get("weight_decay")
        fields |= {} if decay is None else {"weight_decay": decay}
        return {**fields, **savings_of(pins, self.request.ds_config).fields}

    def to_run(self) -> Run:
        """Return the run without data. Raises UserError for layouts of FSDP2 and torchtitan.

        `run.model_copy(update={"data": ...})` adds data.
        """
        if self.layout.by_layer:
            message = "zerofit trains only with DeepSpeed; for FSDP2, zerofit can simulate your training script"
            commands = {
                "fsdp2": "accelerate launch --config_file FOLDER/accelerate.yaml SCRIPT",
                "torchtitan": "torchrun ..., the command in FOLDER/torchtitan.sh",
            }
            hint = f"zerofit simulate -- {commands[self.layout.engine]}"
            raise UserError(Problem(kind="engine", message=message, hint=hint))
        return Run(**self.fields, ds_config=self.ds_config)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layouts of a model that fit a cluster, best first, and why others do not fit."""

    result: PlanResult
    request: PlanningRequest = field(repr=False)
    profile: Profile = field(repr=False)
    profile_file: Path | None  # stored profile, usable as `profile=`
    answer: LargestFit | FewestDevices | None = None  # answer to `maximum` or `minimum`
    remedies: tuple[str, ...] = ()  # changes that would make the model fit, if nothing fits
    tuned: TunedLayouts | None = field(default=None, repr=False)
    scaling: MeasuredScaling | None = field(default=None, repr=False)  # factor for all step times
    by_trace: TraceCalibration | None = field(default=None, repr=False)  # calibration of the device's rates
    boxes: tuple[Plan, ...] = field(default=(), repr=False)  # plans for several clusters, fastest first
    total_s: float = 0.0
    written: tuple[Path, ...] = ()  # files that the command wrote
    traced: Path | None = None  # file with the timeline of a step
    confirmed: tuple[Confirmation, ...] = ()  # simulated layouts

    @property
    def layouts(self) -> tuple[PlannedRun, ...]:
        """The best layouts."""
        return tuple(PlannedRun.of(row, self.profile, self.request) for row in self.result.layouts)

    @property
    def misfits(self) -> tuple[PlannedRun, ...]:
        """Layouts that do not fit, the nearest to fitting first; () if enough layouts fit."""
        return tuple(PlannedRun.of(row, self.profile, self.request) for row in self.result.misfits)

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """Reasons why other layouts do not fit, most frequent first."""
        return self.result.rejections

    @property
    def considered(self) -> int:
        """Number of layouts examined."""
        return self.result.considered

    @property
    def cluster(self) -> Cluster:
        """The planned cluster or, if the plan searched for the fewest devices, the found cluster."""
        return self.result.cluster

    @property
    def chosen(self) -> int | None:
        """Index of the layout to write; None if nothing fits."""
        refused = {
            confirmation.layout for confirmation in self.confirmed if not confirmation.fits and not confirmation.problem
        }
        # The plainest layout's forecast time equals that of the fastest within the error of forecasts.
        if self.result.plainest not in refused:
            return self.result.plainest
        return next((look.layout for look in self.confirmed if look.layout not in refused), None)

    @property
    def shown(self) -> int:
        """Index of the layout to trace: the layout to write, else the first layout."""
        return self.chosen or 0

    def write(self, folder: Path | str) -> tuple[Path, ...]:
        """Write ds_config.json and run.yaml of the layout `chosen`, and return the files.

        For a layout of FSDP2, write accelerate.yaml. For a layout of torchtitan, write torchtitan.sh, which starts the
        training. Raises UserError if nothing fits, a file exists, or the folder is not writable.
        """
        # `chosen` is not always the first layout: it is the simplest one that simulations have not ruled out.
        number = self.chosen
        if number is None:
            message = "no layout fits, so there is nothing to write"
            raise UserError(Problem(kind="nothing-fits", message=message, hint="; ".join(map(str, self.confirmed))))
        planned = self.layouts[number]
        if planned.layout.engine == "torchtitan":
            return write_torchtitan(Path(folder), planned.layout, self.profile, self.cluster)
        if planned.layout.by_layer:
            return write_accelerate(Path(folder), planned.layout, self.cluster)
        return write_plan(Path(folder), planned.fields, planned.ds_config, data_line(self.profile, self.request.image))

    def trace(self, path: Path | str) -> Path:
        """Write a Chrome trace of one step in the layout that `write` writes, and return the file.

        If no layout fits, trace the first layout that does not fit. The trace has one rank of each pipeline stage.
        Raises UserError if there is no layout, or if the file is not writable.
        """
        planned = self.layouts[self.shown] if self.layouts else next(iter(self.misfits), None)
        if planned is None:
            message, hint = "there is no layout to trace", "ask for a layout that DeepSpeed supports"
            raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where="--trace"))
        # scaled to the plan's step time, which measurements may have corrected
        trace = trace_of_layout(self.profile, self.cluster, self.result.rates, planned.layout, planned.step_s)
        write_trace(Path(path), trace)
        return Path(path)

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit plan --json` prints."""
        data = self.result.to_dict()
        data["top"] = self.request.top
        if self.request.work:
            data["assumed"] = self.request.work.reliability.sources
        data["tuned"] = self.tuned.to_dict() if self.tuned else None
        data["measured"] = self.scaling.to_dict() if self.scaling else None
        data["from_trace"] = self.by_trace.to_dict() if self.by_trace else None
        data["profile"] = str(self.profile_file) if self.profile_file else None
        if self.answer:
            data["asked"] = self.answer.to_dict()
        if not self.result.layouts:
            data["remedies"] = list(self.remedies)
        if self.boxes:
            data["boxes"] = [_row_of_box(plan) for plan in self.boxes]
        data["total_s"] = self.total_s
        if self.written:
            data |= {"written": [str(path) for path in self.written], "written_layout": self.chosen}
        if self.traced:
            data["trace"] = str(self.traced)
        if self.confirmed:
            data["confirmed"] = [field_data(confirmation) for confirmation in self.confirmed]
        return data

    def _repr_html_(self) -> str:
        return self.result._repr_html_()


def _row_of_box(plan: Plan) -> dict[str, object]:
    cluster, layouts = plan.cluster, plan.result.layouts
    return {
        "gpu": cluster.device.kind,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "layout": layouts[0].to_dict() if layouts else None,
        "remedies": list(plan.remedies),
    }
