"""The job of a run, and its run folder. The run's processes communicate through its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import write_json
from zerofit.spec.foreign import Unreadable, read_json, refused, shaped
from zerofit.spec.model_facts import ModelFacts, Precision
from zerofit.spec.run import Run


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    path: Path

    run = property(lambda self: self.path / "run.json")
    profile = property(lambda self: self.path / "profile.json")
    plan = property(lambda self: self.path / "plan.json")
    ds_config = property(lambda self: self.path / "ds_config.json")
    env = property(lambda self: self.path / "env.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    logs = property(lambda self: self.path / "logs")
    events = property(lambda self: self.path / "logs" / "events.jsonl")
    result = property(lambda self: self.path / "result.json")
    stopped = property(lambda self: self.logs / "stopped.json")  # how far a stopped run got
    stop_request = property(lambda self: self.logs / "stop-requested")  # makes the ranks save and stop
    launch_spec = property(lambda self: self.logs / "launch_spec.json")  # for the guard of each rank
    faults = property(lambda self: self.logs / "faults.jsonl")  # failures, and the time to detect and recover
    lock = property(lambda self: self.logs / "run.lock")  # of the command that supervises the ranks
    ranks_lock = property(lambda self: self.logs / "ranks.lock")  # shared by the living ranks
    checkpoints = property(lambda self: self.path / "checkpoints")
    model = property(lambda self: self.path / "model")
    averaged_model = property(lambda self: self.path / "model-ema")  # of --ema
    model_parts = property(lambda self: self.path / ".model-parts")  # of pipeline stages, until rank 0 has read them
    tensorboard = property(lambda self: self.path / "tensorboard")
    traces = property(lambda self: self.path / "traces")  # of profiled steps

    def refuse_other(self, given: str | Path, hint: str, where: str) -> None:
        """Raise UserError if this is not a run's folder. `given`: the folder as the user wrote it."""
        if not self.plan.is_file():
            message = f"{given} is not a zerofit run folder: plan.json is missing"
            raise UserError(Problem(kind="run-folder", message=message, hint=hint, where=where))

    def rank_log(self, rank: int) -> Path:
        """Return the log of all output of one rank."""
        return self.logs / f"rank-{rank}.log"

    def rank_memory(self, rank: int) -> Path:
        """Return the memory snapshot (of torch) that a rank writes when it runs out of memory."""
        return self.logs / f"rank-{rank}.memory.pickle"

    def rank_trace(self, rank: int, step: int) -> Path:
        """Return the file of one rank's torch.profiler trace that begins at `step` (from 1)."""
        return self.traces / f"rank-{rank}-step-{step}.json"

    def rank_stacks(self, rank: int) -> Path:
        """Return the file of one rank's stack traces, written on a failure."""
        return self.logs / f"rank-{rank}.stacks.txt"

    def rank_error(self, rank: int) -> Path:
        """Return the JSON file into which a rank writes the reason of its failure."""
        return self.logs / f"rank-{rank}.error.json"

    def errors(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each failed rank and the content of its error file; {} if the file is damaged."""
        for path in sorted(self.logs.glob("rank-*.error.json")):
            try:
                content = read_json(path)
            except (OSError, Unreadable):  # for example on a full disk
                content = {}
            yield path.name.removeprefix("rank-").removesuffix(".error.json"), content


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees and the ZeRO stage. The product of dp, tp, pp and sp is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1  # number of neighbors among the data x sequence ranks that split the experts
    zero_stage: int = 0

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.dp * self.tp * self.pp * self.sp

    @property
    def combined(self) -> bool:
        """Whether zerofit, not DeepSpeed, creates the process groups and slices the weights."""
        return self.ep > 1 or sum(degree > 1 for degree in (self.tp, self.pp, self.sp)) > 1

    @property
    def by_flag(self) -> dict[str, int]:
        """The parallel degrees above 1, besides data parallelism, by the flag that sets them."""
        degrees = {"--tensor-parallel": self.tp, "--pipeline": self.pp, "--sequence-parallel": self.sp}
        degrees["--expert-parallel"] = self.ep
        return {flag: degree for flag, degree in degrees.items() if degree > 1}

    def as_dict(self) -> dict[str, int]:
        """Return the `layout` object of the command line's JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return layout_words(self.as_dict())


def layout_words(layout: Mapping[str, object]) -> str:
    """Return a layout as "ZeRO-2, dp 4", with the degrees above 1."""
    axes = [f"{axis} {size}" for axis, size in layout.items() if axis != "zero_stage" and size not in (1, None)]
    return ", ".join([f"ZeRO-{layout.get('zero_stage', 0)}", *axes])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch sizes: global = micro x gradient accumulation steps x data parallel degree.

    If ranks have different micro batches (`by_rank`), the sum of these replaces micro x data parallel degree.
    """

    micro: int
    accumulation: int
    dp: int
    by_rank: tuple[int, ...] = ()  # micro batch of each data parallel rank, if they differ
    limit: int = 0  # largest micro batch that a measurement at the start may choose; 0: no measurement

    @property
    def shares(self) -> tuple[int, ...]:
        """The micro batch of each data parallel rank."""
        return self.by_rank or (self.micro,) * self.dp

    @property
    def total(self) -> int:
        """Samples per optimizer step."""
        return self.accumulation * sum(self.shares)

    @property
    def most(self) -> int:
        """The largest possible micro batch of any rank, which must fit the memory."""
        return max(map(self.most_of, range(self.dp)))

    def most_of(self, dp_rank: int) -> int:
        """Return the largest possible micro batch of one rank."""
        return self.limit or self.shares[dp_rank]

    def positions(self, number: int, dp_rank: int) -> range:
        """Return the positions of a rank's samples of micro batch `number` in the global batch."""
        shares = self.shares
        start = number * sum(shares) + sum(shares[:dp_rank])
        return range(start, start + shares[dp_rank])


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoint that a job resumes from."""

    checkpoint: str  # its folder
    step: int  # optimizer steps done
    samples: int  # samples consumed
    same_layout: bool  # whether DeepSpeed can load its files directly
    shares: tuple[int, ...] = ()  # measured micro batch of each data parallel rank, to keep


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """The forecast memory of a rank in bytes, as the maximum over pipeline stages."""

    phases: dict[str, int]  # "build", "init", "forward", "backward", "step" -> peak on the device
    reserved_bytes: int  # reserved on the device by torch's allocator; on CPUs the peak of tensors
    beside_bytes: int  # context and communicators of a GPU; on CPUs the process with its libraries
    margin_bytes: int  # kept free in addition, for scratch and the uncertainty of `beside_bytes`
    host_bytes: int  # host memory without the process; 0 on CPUs
    pinned_bytes: int  # part of host_bytes
    stages: tuple[int, ...] = ()  # host memory of a rank of each pipeline stage, with its process
    first_bytes: int = 0  # host memory of rank 0, which saves the model, with its process
    free_bytes: int | None = None  # free on the device at the time of the forecast; None on CPUs or if unknown
    host_margin_bytes: int = 0  # a rank's share of the host memory kept free for the system
    judged_ranks: int = 0  # the first ranks, whose hosts' free memory was checked; other hosts check their own


@dataclass(frozen=True, kw_only=True)
class FittedLayout:
    """The choice of `--fit`, for all starts in the run folder until a rank runs out of memory."""

    given: dict[str, Any]  # fields of the run that the user gave, with the DeepSpeed JSON as written
    chosen: dict[str, Any]  # fields of the run, with the full DeepSpeed JSON
    why: tuple[str, ...]  # explanation
    reserved_bytes: int  # a rank's forecast, as in `MemoryForecast`
    ran_out: bool = False  # a rank ran out of memory: the next start uses a smaller layout


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The steps that the ranks of `zerofit replay` repeat."""

    step: int  # last step to repeat, from 1
    double: bool = False  # in float64


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of a run: all that its ranks need, stored in the run folder as readable files."""

    run: Run
    layout: Layout
    batch: Batch
    steps: int
    facts: ModelFacts
    ds_config: dict[str, Any]
    start: Start | None = None
    forecast: MemoryForecast | None = None
    fit: FittedLayout | None = None  # None without `--fit`
    step_s: float | None = None  # forecast seconds per step; None without a stored profile
    replay: ReplayRequest | None = None  # None: a normal training

    @property
    def precision(self) -> Precision:
        """The training precision."""
        return self.run.precision or "fp32"

    def samples_after(self, step: int) -> int:
        """Return the samples consumed up to `step`. Earlier starts may have had other batch sizes."""
        done, samples = (self.start.step, self.start.samples) if self.start else (0, 0)
        return samples + (step - done) * self.batch.total

    def to_dict(self) -> dict[str, object]:
        """Return the job as JSON data, without `start`, `fit` and the forecasts."""
        return {
            "run": self.run.model_dump(mode="json"),
            "layout": asdict(self.layout),
            "batch": asdict(self.batch),
            "steps": self.steps,
            "facts": asdict(self.facts),
            "ds_config": self.ds_config,
        }

    @classmethod
    def from_dict(cls, value: object) -> Job:
        """Return the job from a dictionary that `to_dict` made. Raises ValueError otherwise."""
        if isinstance(value, dict) and isinstance(run := value.get("run"), dict):
            # unknown fields are ignored, so checkpoints of other versions can be read
            value = value | {"run": {name: run[name] for name in run if name in Run.model_fields}}
        return shaped(value, _schema())

    def write(self, folder: RunFolder, ds_source: str | dict[str, object]) -> None:
        """Write run.json, profile.json, plan.json and ds_config.json.

        `ds_source`: the DeepSpeed JSON as the user wrote it.
        """
        # `zerofit train run.json` starts the same run in a new folder (`zerofit train FOLDER` resumes). So run.json has
        # the user's own DeepSpeed JSON, and no output folder.
        resolved = self.run.model_copy(
            update={"ds_config": ds_source, "output": None, "steps": self.steps, "epochs": None, "resume": "auto"}
        )
        write_json(folder.run, resolved.model_dump(mode="json"))
        write_json(folder.profile, asdict(self.facts))
        plan = {"layout": asdict(self.layout), "batch": asdict(self.batch), "steps": self.steps, "step_s": self.step_s}
        for name in ("start", "forecast", "fit", "replay"):
            value = getattr(self, name)
            plan[name] = asdict(value) if value else None
        write_json(folder.plan, plan)
        write_json(folder.ds_config, self.ds_config)

    def write_batch(self, folder: RunFolder) -> None:
        """Write the batch into plan.json."""
        write_json(folder.plan, _content(folder.plan) | {"batch": asdict(self.batch)})

    @classmethod
    def read(cls, folder: RunFolder) -> Job:
        """Read the job that `write` wrote into this folder. Raises UserError for other content."""
        plan, run, facts, ds_config = map(_content, (folder.plan, folder.run, folder.profile, folder.ds_config))
        with refused(folder.path, kind="run-folder"):
            return cls.from_dict(plan | {"run": run, "facts": facts, "ds_config": ds_config})


def _content(file: Path) -> dict[str, object]:
    with refused(file, kind="run-folder"):
        return read_json(file)


@cache
def _schema() -> TypeAdapter[Job]:
    return TypeAdapter(Job)
