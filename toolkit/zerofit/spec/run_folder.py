"""The job of a run and its run folder, where each hand-over between processes lies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zerofit.spec.files import write_json
from zerofit.spec.foreign import read_json, refused, shaped
from zerofit.spec.model_facts import ModelFacts, Precision
from zerofit.spec.run import Run


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder; nothing is read or written here."""

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
    stopped = property(lambda self: self.logs / "stopped.json")  # where a run that was asked to stop has come to
    stop_request = property(lambda self: self.logs / "stop-requested")  # asks the ranks to save and stop
    launch_spec = property(lambda self: self.logs / "launch_spec.json")  # for the guard of each rank
    faults = property(lambda self: self.logs / "faults.jsonl")  # what went wrong, and how long it took to see and mend
    lock = property(lambda self: self.logs / "run.lock")  # held by the command that watches over the ranks
    ranks_lock = property(lambda self: self.logs / "ranks.lock")  # shared by the ranks that are alive
    checkpoints = property(lambda self: self.path / "checkpoints")
    model = property(lambda self: self.path / "model")
    averaged_model = property(lambda self: self.path / "model-ema")  # of --ema
    model_parts = property(lambda self: self.path / ".model-parts")  # of pipeline stages, until rank 0 has them
    tensorboard = property(lambda self: self.path / "tensorboard")
    traces = property(lambda self: self.path / "traces")  # of profiled steps

    def rank_log(self, rank: int) -> Path:
        """Return the log of everything that one rank and the libraries in it print."""
        return self.logs / f"rank-{rank}.log"

    def rank_trace(self, rank: int, step: int) -> Path:
        """Return the file of torch.profiler's trace of steps in a row of one rank, from `step` (1-based) on."""
        return self.traces / f"rank-{rank}-step-{step}.json"

    def rank_stacks(self, rank: int) -> Path:
        """Return the file of one rank's stack traces, taken when something had gone wrong."""
        return self.logs / f"rank-{rank}.stacks.txt"

    def rank_error(self, rank: int) -> Path:
        """Return the file that says why one rank stopped, as JSON; written by the rank itself."""
        return self.logs / f"rank-{rank}.error.json"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees and the ZeRO stage; their product is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1  # of the data x sequence ranks, so many neighbours hold a mixture's experts together
    zero_stage: int = 0

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.sp

    @property
    def combined(self) -> bool:
        """Whether zerofit makes groups and slices: experts, or more than one of tensor, pipeline and sequence."""
        return self.ep > 1 or sum(degree > 1 for degree in (self.tp, self.pp, self.sp)) > 1

    def as_dict(self) -> dict[str, int]:
        """Return the `layout` object of the command line's JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch identity: global = micro x gradient accumulation steps x data parallel degree.

    Ranks may take micro batches of their own (`by_rank`); the global batch then has the sum of these.
    """

    micro: int
    accumulation: int
    dp: int
    by_rank: tuple[int, ...] = ()  # of each data parallel rank, where they are not all `micro`
    limit: int = 0  # the most that a rank may take by a measurement at the start; 0: nothing is measured

    @property
    def shares(self) -> tuple[int, ...]:
        """The micro batch of each data parallel rank."""
        return self.by_rank or (self.micro,) * self.dp

    @property
    def total(self) -> int:
        """Samples in one optimizer step."""
        return self.accumulation * sum(self.shares)

    @property
    def most(self) -> int:
        """The largest micro batch that a rank may be given: what memory must be there for."""
        return max(map(self.most_of, range(self.dp)))

    def most_of(self, dp_rank: int) -> int:
        """Return the largest micro batch that one rank may be given."""
        return self.limit or self.shares[dp_rank]

    def positions(self, number: int, dp_rank: int) -> range:
        """Return the places of a rank's samples in one of a step's micro batches, from 0 in the global batch."""
        shares = self.shares
        start = number * sum(shares) + sum(shares[:dp_rank])
        return range(start, start + shares[dp_rank])


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoint from which a job goes on."""

    checkpoint: str  # its folder
    step: int  # optimizer steps done
    samples: int  # samples consumed
    same_layout: bool  # whether DeepSpeed can take its files up as they are
    shares: tuple[int, ...] = ()  # the micro batch of each data parallel rank by its measurement, to be kept


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """What a rank is forecast to take, in bytes: the most of any pipeline stage."""

    phases: dict[str, int]  # "build", "init", "forward", "backward", "step" -> most alive on the device
    reserved_bytes: int  # of the device, by torch's allocator; on CPUs the most alive
    beside_bytes: int  # context and communicators of a GPU; on CPUs the process with its libraries
    margin_bytes: int  # that the verdict keeps free beside both: for scratch, and for what is not known of `beside`
    host_bytes: int  # of the host, beside the process; 0 on CPUs, where device and host are one
    pinned_bytes: int  # of them
    stages: tuple[int, ...] = ()  # host memory of a rank of each pipeline stage, its process included
    first_bytes: int = 0  # host memory of rank 0, which saves the model, its process included
    free_bytes: int | None = None  # of the device, when it was forecast; None on CPUs and where it is not known
    host_margin_bytes: int = 0  # a rank's share of what the verdict leaves of the host to the system
    judged_ranks: int = (
        0  # the first so many are on hosts that were asked what is free; other hosts look for themselves
    )


@dataclass(frozen=True, kw_only=True)
class FittedLayout:
    """What `--fit` has chosen; it holds for the run folder until a rank runs out of memory with it."""

    given: dict[str, Any]  # fields of the run that were not free, the DeepSpeed JSON as it was written
    chosen: dict[str, Any]  # fields of the run, the whole DeepSpeed JSON included
    why: tuple[str, ...]  # in words
    reserved_bytes: int  # a rank's forecast: of the device, as in `MemoryForecast`
    ran_out: bool = False  # a rank ran out of memory all the same: the next start takes a leaner one


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of a run, all that its ranks need to know; kept in the run folder as files that a person can open."""

    run: Run
    layout: Layout
    batch: Batch
    steps: int
    facts: ModelFacts
    ds_config: dict[str, Any]
    start: Start | None = None
    forecast: MemoryForecast | None = None  # None where memory was not forecast
    fit: FittedLayout | None = None  # None where the layout was not chosen by `--fit`
    step_s: float | None = None  # forecast of a step's seconds; None where no kept profile tells it

    @property
    def precision(self) -> Precision:
        """The number format that it trains in."""
        return self.run.precision or "fp32"

    def samples_after(self, step: int) -> int:
        """Return samples consumed by the whole training up to this step, whatever batch size it began with."""
        done, samples = (self.start.step, self.start.samples) if self.start else (0, 0)
        return samples + (step - done) * self.batch.total

    def to_dict(self) -> dict[str, Any]:
        """Return all but `start`, `fit` and the forecasts as JSON."""
        return {
            "run": self.run.model_dump(mode="json"),
            "layout": asdict(self.layout),
            "batch": asdict(self.batch),
            "steps": self.steps,
            "facts": asdict(self.facts),
            "ds_config": self.ds_config,
        }

    @classmethod
    def from_dict(cls, value: Any) -> Job:
        """Return the job that `to_dict` described. Raises ValueError for anything else.

        Fields of the run that this version does not know are left out, so that older checkpoints can be read.
        """
        run = value.get("run") if isinstance(value, dict) else None
        if isinstance(run, dict):
            value = value | {"run": {name: run[name] for name in run if name in Run.model_fields}}
        return shaped(value, _schema())

    def write(self, folder: RunFolder, ds_source: str | dict[str, Any]) -> None:
        """Write run.json, profile.json, plan.json and ds_config.json.

        run.json can be given to `zerofit train` again: it carries the DeepSpeed JSON as the user wrote it, and no
        output folder, so that the same run gets a new one. (The folder itself, given to `zerofit train`, goes on.)
        """
        resolved = self.run.model_copy(
            update={"ds_config": ds_source, "output": None, "steps": self.steps, "epochs": None, "resume": "auto"}
        )
        write_json(folder.run, resolved.model_dump(mode="json"))
        write_json(folder.profile, asdict(self.facts))
        plan = {"layout": asdict(self.layout), "batch": asdict(self.batch), "steps": self.steps, "step_s": self.step_s}
        for name in ("start", "forecast", "fit"):
            value = getattr(self, name)
            plan[name] = asdict(value) if value else None
        write_json(folder.plan, plan)
        write_json(folder.ds_config, self.ds_config)

    def write_batch(self, folder: RunFolder) -> None:
        """Write into plan.json how its ranks share out the batch."""
        write_json(folder.plan, _content(folder.plan) | {"batch": asdict(self.batch)})

    @classmethod
    def read(cls, folder: RunFolder) -> Job:
        """Read the job that `write` left in this folder. Raises UserError where it is not what `write` has written."""
        plan, run, facts, ds_config = map(_content, (folder.plan, folder.run, folder.profile, folder.ds_config))
        with refused(folder.path, kind="run-folder"):
            return cls.from_dict(plan | {"run": run, "facts": facts, "ds_config": ds_config})


def _content(file: Path) -> dict[str, Any]:
    with refused(file, kind="run-folder"):
        return read_json(file)


@cache
def _schema() -> TypeAdapter[Job]:
    return TypeAdapter(Job)
