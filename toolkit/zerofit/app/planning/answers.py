"""Answers of a plan: layouts as runs and as files, the largest value that fits, the fewest devices."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zerofit.app.planning.request import Maximum, PlanningRequest, TunedLayouts
from zerofit.config.ds_json import bundled
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.result import PlanResult, RankedLayout, Rejected
from zerofit.plan.space import stage3_sizes
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.files import field_data, write_json, write_text
from zerofit.spec.model_facts import bucket_elements
from zerofit.spec.profile import Profile
from zerofit.spec.run import Run

NAMES = ("ds_config.json", "run.yaml")
DEPTH = "num_hidden_layers"  # what transformers calls the number of layers, for every model (`attribute_map`)


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

    @property
    def model_args(self) -> dict[str, Any]:
        """The model's, with the number of layers where that was the question."""
        args = dict(self.request.pins.get("model_args", {}))
        if self.request.maximum == "layers" and self.profile.model_type is not None:
            args[DEPTH] = max(layer.count for layer in self.profile.layers)
        return args

    def to_run(self) -> Run:
        """Return the run, to which only the data is to be added (`run.model_copy(update={"data": ...})`)."""
        fields = run_fields(self.layout, self.profile, self.model_args, self.request.image)
        return Run(**fields, ds_config=self.ds_config)

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
    written: tuple[Path, ...] = ()  # files that the command wrote
    confirmed: tuple[Confirmation, ...] = ()  # layouts that were simulated

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

    @property
    def chosen(self) -> int | None:
        """The layout to be written: the plainest of the fastest, or the first that a simulation has found to fit.

        None where nothing fits.
        """
        refused = {one.layout for one in self.confirmed if not one.fits and not one.problem}
        if self.result.plainest not in refused:
            return self.result.plainest  # a forecast of time cannot tell it from the first
        return next((one.layout for one in self.confirmed if one.fits), None)

    def write(self, folder: Path | str) -> tuple[Path, Path]:
        """Write ds_config.json and run.yaml of the best layout, or of a plainer one that is nearly as fast.

        A layout that a simulation has refused is not written (`confirmed`). Raises UserError where nothing fits, files
        would be replaced, or the folder cannot be written to.
        """
        number = self.chosen
        if number is None:
            message = "no layout fits: there is nothing to write"
            raise UserError(Problem(kind="nothing-fits", message=message, hint="; ".join(map(str, self.confirmed))))
        request, layout = self.request, self.result.layouts[number].layout
        args = self.layouts[number].model_args
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
        found["total_s"] = self.total_s
        if self.written:
            found |= {"written": [str(path) for path in self.written], "written_layout": self.chosen}
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


def refuse_existing(folder: Path) -> None:
    """Raise a UserError where a file would be replaced, or the folder is a file."""
    problems = Problems()
    if folder.exists() and not folder.is_dir():
        problems.add("output-exists", f"{folder} is a file", "name a folder", "--write")
    for path in (folder / name for name in NAMES):
        if path.exists():
            problems.add("output-exists", f"{path} exists", "name another folder, or remove it", "--write")
    problems.raise_if_any()


def write_plan(
    folder: Path, layout: PlannedLayout, profile: Profile, model_args: dict[str, Any], image: str | None, nvme_path: str
) -> tuple[Path, Path]:
    """Write both files, and return their paths. Raises UserError."""
    refuse_existing(folder)
    config, run = (folder / name for name in NAMES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(config, ds_config(layout, profile, nvme_path))
        described = {**run_fields(layout, profile, model_args, image), "ds_config": str(config.absolute())}
        write_text(run, yaml.safe_dump(described, sort_keys=False) + data_line(profile, image))
    except OSError as error:
        message = f"cannot write to {folder}: {error.strerror or error}"
        raise UserError(Problem(kind="output-unwritable", message=message, where="--write")) from None
    return config, run


def ds_config(layout: PlannedLayout, profile: Profile, nvme_path: str) -> dict[str, Any]:
    """Return the bundled JSON of the stage with what the plan decided; the run's own sizes stay "auto"."""
    base = "zero3_nvme" if "nvme" in (layout.offload_optimizer, layout.offload_param) else f"zero{layout.zero_stage}"
    config = json.loads(bundled()[base].read_text(encoding="utf-8"))
    zero = config["zero_optimization"]
    if layout.zero_stage:
        zero["overlap_comm"] = layout.overlap
        if layout.bucket != bucket_elements(profile.parameters):
            for key in {"reduce_bucket_size", "allgather_bucket_size"} & set(zero):
                zero[key] = layout.bucket
        if layout.zero_stage == 3 and layout.persistence > stage3_sizes(profile).persistence:
            zero["stage3_prefetch_bucket_size"] = layout.prefetch
            zero["stage3_param_persistence_threshold"] = layout.persistence
    for key, device in (("offload_optimizer", layout.offload_optimizer), ("offload_param", layout.offload_param)):
        if device == "none":
            zero.pop(key, None)
        elif device == "cpu":
            zero[key] = {"device": "cpu", "pin_memory": True}
        else:
            zero[key]["nvme_path"] = nvme_path
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": "auto"}
    if layout.sp > 1:
        config["sequence_parallel_size"] = "auto"
    return config


def data_line(profile: Profile, image: str | None) -> str:
    """Return what the plan cannot know, as a comment to fill in."""
    if profile.task == "image":
        size = f"{image.rpartition(':')[2]} images" if image else "images"
        return f"# data: imagefolder:/path/to/folder   # {size}; without it digits is taken\n"
    return "# data: text:/path/to/file.txt   # without it pysource is taken\n"


def run_fields(
    layout: PlannedLayout, profile: Profile, model_args: dict[str, Any], image: str | None
) -> dict[str, Any]:
    """Return the fields of the run that the plan is for; what it leaves out `zerofit train` decides."""
    path = Path(profile.model)
    return {
        "model": str(path.absolute()) if path.exists() else profile.model,
        **({"model_args": model_args} if model_args else {}),
        **({"seq_len": profile.seq_len} if profile.seq_len else {}),
        **({"image_size": int(image.rpartition("x")[2])} if image else {}),
        "optimizer": "adamw",  # whose states were planned for
        **layout_fields(layout),
    }


def layout_fields(layout: PlannedLayout) -> dict[str, Any]:
    """Return the fields of a run that its layout decides."""
    degrees = {"tensor_parallel": layout.tp, "pipeline": layout.pp, "sequence_parallel": layout.sp}
    return {
        "ranks": layout.world_size,
        "micro_batch": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "precision": layout.precision,
        "activation_checkpointing": layout.checkpointing,
        **{name: degree for name, degree in degrees.items() if degree > 1},
    }
