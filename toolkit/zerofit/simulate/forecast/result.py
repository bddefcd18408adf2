"""Define the result of a simulation, and compare it with an earlier simulation's `--json`.

Imports no torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from zerofit.features.checkpointing import Checkpointing
from zerofit.models.inputs import Inputs
from zerofit.report.html_table import html_table
from zerofit.simulate.endings import MAY_FIT, optional
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.memory.allocator import Event as AllocatorEvent
from zerofit.simulate.memory.snapshot import AllocationOrigin, snapshot_of
from zerofit.simulate.record import CollectiveCalls, MemoryPoint, RankPhase, ScriptFacts
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import field_data, plain_data
from zerofit.spec.foreign import Unreadable, parse_json, refused
from zerofit.spec.overhead import RESERVED_MORE, RESERVED_MORE_RANKS
from zerofit.spec.run_folder import Layout
from zerofit.spec.units import shown_bytes

T = TypeVar("T")
ALIKE = 0.02  # of a step's time, below the error of its forecast
HINT = "write one with: zerofit simulate ... --json > base.json"
SAME = ("device", "world_size", "rank")  # must be equal for a comparison
FITS, WITHIN, NOT = ORDER = ("fits", "close to the limit", "does not fit")


@dataclass(frozen=True)
class Overhead:
    """Memory that is not simulated, as a range from published figures."""

    name: str
    low_bytes: int
    high_bytes: int  # the verdict uses this one
    source: str

    @property
    def bytes(self) -> int:
        """The middle of the range."""
        return (self.low_bytes + self.high_bytes) // 2


@dataclass(frozen=True, kw_only=True)
class PeakLocation:
    """The code that allocates at the peak."""

    module: str  # the model's module, "" outside of it
    line: str  # file:line, the path starting at its package
    own: str  # the user's innermost line, "file:line"; "" if none was running


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The settings of the simulated run that decide its memory."""

    model: str
    precision: str | None
    seq_len: int | None
    activation_checkpointing: Checkpointing
    activation_offload: bool
    loss_chunk: int | None
    mlp_chunk: int | None
    optimizer: str | None
    ds_config: dict[str, object] | str | None
    input: Inputs
    micro_batch: int
    gradient_accumulation_steps: int


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The memory of the same script under an assumption that makes its tensors larger."""

    peak_bytes: int
    peak_phase: str
    reserved_bytes: int
    fits: bool
    because: str

    @classmethod
    def of(cls, found: Simulation, **more: Any) -> Self:
        """Return the worst case with the figures of the simulation `found`.

        `more`: fields of a subclass, e.g. `tokens`.
        """
        names = ("peak_bytes", "peak_phase", "reserved_bytes", "fits", "because")
        return cls(**{name: getattr(found, name) for name in names}, **more)


@dataclass(frozen=True, kw_only=True)
class LongestBatch(WorstCase):
    """The script's memory if every batch has the largest samples that the script allows."""

    tokens: int  # 0 if batches have no tokens
    shape: tuple[int, ...]  # of the largest input of the model

    @property
    def name(self) -> str:
        """The length of the batch in tokens, or the shape of its images or audio."""
        return f"{self.tokens} tokens" if self.tokens else f"largest {' x '.join(map(str, self.shape))}"


@dataclass(frozen=True, kw_only=True)
class SimulatedScript:
    """A user's script, with the facts that its simulation found."""

    command: str  # as typed
    facts: ScriptFacts
    longest: LongestBatch | None = None  # if requested
    worst_routing: WorstCase | None = None  # all tokens choose the same experts; None if no shape depends on a router

    @property
    def model(self) -> str:
        """The simulation's name: the script's file."""
        return self.facts.name

    @property
    def is_upper_bound(self) -> bool:
        """Whether the figures are an upper bound.

        They are, for example, if a mask has unknown values or a region is compiled. They are not if they lack memory.
        """
        return any(note.bound for note in self.facts.notes) and not self.lacks_memory

    @property
    def lacks_memory(self) -> bool:
        """Whether the figures lack memory, e.g. the workspace of a library."""
        return any(note.missing for note in self.facts.notes)

    def to_dict(self) -> dict[str, object]:
        """Return the script's part of `zerofit simulate --json`."""
        cases = {"longest": self.longest, "worst_routing": self.worst_routing}
        worse = {name: field_data(case) for name, case in cases.items() if case}
        return {"command": self.command, **field_data(self.facts), "is_upper_bound": self.is_upper_bound, **worse}


@dataclass(frozen=True, kw_only=True)
class StagePeak:
    """The rank that was simulated for one pipeline stage."""

    rank: int
    peak_bytes: int
    peak_phase: str
    reserved_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class KnobResult:
    """The figures of one change to the run, from a simulation with this change."""

    change: str  # as a flag or a key of the DeepSpeed JSON
    peak_bytes: int
    reserved_bytes: int
    outside_bytes: int  # device memory outside of reserved_bytes; a change may start more communicators
    host_node_bytes: int
    fits: bool
    config: str | None = None  # the bundled DeepSpeed JSON of the change
    file: dict[str, object] | None = None  # content of its file for Accelerate, or of the Trainer's fsdp_config
    cost_rank: int = 0  # position among the changes by lost speed, 0 for the least
    slowdown: float | None = None  # forecast: how much longer a step takes, as a share; None: unknown

    @classmethod
    def of(cls, found: Simulation, change: str, config: str | None) -> KnobResult:
        """Return the row for `change`, with the figures of its simulation `found`."""
        names = ("peak_bytes", "reserved_bytes", "host_node_bytes", "fits")
        figures = {name: getattr(found, name) for name in names}
        figures["outside_bytes"] = sum(overhead.bytes for overhead in found.overheads)
        return cls(change=change, config=config, **figures)


# A simulation takes seconds to minutes, and a chain can have ten changes. Since each change includes the one before it,
# memory falls along the chain, and log2(10) simulations find the first that fits.
def first_that_fits(
    chain: Sequence[T], best: KnobResult, simulate: Callable[[Sequence[T]], list[KnobResult | None]]
) -> KnobResult:
    """Return the result of the first change that fits, by bisection.

    Each change in `chain` includes the change before it. `best`: the result of the last change, which fits.
    """
    fewest, most = 0, len(chain) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        row = simulate([chain[middle]])[0]
        # a change that could not be simulated (None) counts as one that does not fit
        if row and row.fits:
            best, most = row, middle
        else:
            fewest = middle + 1
    return best


def in_order(rows: Sequence[KnobResult]) -> tuple[KnobResult, ...]:
    """Return the changes, those with the least memory first. Set their `cost_rank` by slowdown.

    Changes of equal speed are numbered in the given order. Changes of unknown speed get the last numbers.
    """

    def cost(row: KnobResult) -> float:
        if row.slowdown is None:
            return float("inf")
        return 0.0 if abs(row.slowdown) < ALIKE else row.slowdown

    ranked = [replace(row, cost_rank=number) for number, row in enumerate(sorted(rows, key=cost))]
    return tuple(sorted(ranked, key=lambda row: row.peak_bytes))


@dataclass(frozen=True, kw_only=True)
class RankAllocations:
    """All allocations of a rank and where they come from, for a memory snapshot."""

    events: Sequence[AllocatorEvent]
    origins: Sequence[AllocationOrigin]
    room_bytes: int | None  # of the device for torch's allocator; None: no limit
    alloc_conf: str


SimulateKnobs = Callable[[OnEvent | None], tuple[KnobResult, ...]]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How much memory one rank needs, and whether it fits.

    Bytes are for one rank, except `host_node_bytes`.
    """

    world_size: int
    rank: int
    layout: Layout
    run: SimulatedRun | SimulatedScript
    phases: tuple[RankPhase, ...]  # one for each phase of a step, its micro batches merged
    peak_bytes: int  # allocated
    peak_phase: str
    peak_step: int
    peak_at: PeakLocation
    breakdown: dict[str, int]  # kind -> bytes; sums to peak_bytes
    reserved_bytes: int  # peak of torch's caching allocator if the device keeps up with the host
    reserved_ahead_bytes: int  # the reserved peak if the host runs ahead: memory used by other streams is freed later
    overheads: tuple[Overhead, ...]  # device memory outside of reserved_bytes
    smi_bytes: int  # as nvidia-smi shows it
    device: str  # its name in the catalog
    device_total_bytes: int
    host_bytes: dict[str, int]  # "pageable" and "pinned"
    host_kept_bytes: int  # of the pinned bytes, those that torch caches for the next request
    host_phases: dict[str, int]  # phase -> peak of host memory; for GPUs only
    host_node_bytes: int  # of all ranks of a node, their processes included
    host_total_bytes: int
    nvme_bytes: int
    comm: tuple[CollectiveCalls, ...]  # of the last simulated step
    flops: int  # of the last simulated step
    fits: bool
    verdict: str  # "fits", "close to the limit" or "does not fit"
    margin_bytes: int  # negative: this much is missing
    because: str
    layers_simulated: tuple[int, ...]  # () for the full model; the first checks the extrapolation
    extension_error: float  # relative error of the extrapolation at the first
    stages: tuple[StagePeak, ...] = ()  # of a pipeline
    tried: tuple[KnobResult, ...] = ()  # the changes, after they were simulated
    seconds: float = 0.0
    picture: Path | None = None  # the picture that was drawn
    trace: Path | None = None  # the trace of a step that was written
    snapshot: Path | None = None  # the memory snapshot that was written
    against: BaselineComparison | None = None  # comparison with an earlier simulation
    timeline: tuple[MemoryPoint, ...] = field(default=(), repr=False)  # () if layers were extrapolated
    with_timeline: bool = field(default=False, repr=False)  # whether `to_dict` includes the (long) timeline
    allocations: RankAllocations | None = field(default=None, repr=False, compare=False)  # for `write_snapshot`
    simulate_knobs: SimulateKnobs | None = field(default=None, repr=False, compare=False)

    # The lower end is what torch reserves if the device keeps up with the host, with each overhead at its lower end.
    # The upper end has the larger of two figures: the reserve if the host runs ahead, and the likely reserve with the
    # excess that published runs had (RESERVED_MORE, more with several ranks).
    @property
    def smi_range_bytes(self) -> tuple[int, int]:
        """A range for `smi_bytes`. It contained the measurement in 8 of 10 published runs.

        On a CPU it is the range for the process.
        """
        low, high = (sum(getattr(o, f"{end}_bytes") for o in self.overheads) for end in ("low", "high"))
        more = 0.0 if self.device == "cpu" else RESERVED_MORE if self.world_size == 1 else RESERVED_MORE_RANKS
        most = max(self.reserved_ahead_bytes, int(self.reserved_bytes * (1 + more)))
        return self.reserved_bytes + low, most + high

    def knobs(self, on_event: OnEvent | None = None) -> tuple[KnobResult, ...]:
        """Return changes that may help, those with the least memory first.

        The first call simulates them. A note reports changes that could not be simulated.
        """
        look = self.simulate_knobs
        if look and not self.tried:
            found = optional(lambda: look(on_event), (), MAY_FIT, Reporter(on_event))
            object.__setattr__(self, "tried", found)  # frozen for callers; this only stores what was asked for
        return self.tried

    def to_dict(self) -> dict[str, object]:
        """Return the output of `zerofit simulate --json`.

        "knobs" has the changes that were simulated.
        """
        left_out = ["tried", "with_timeline", "allocations", "simulate_knobs"]
        left_out += [] if self.with_timeline else ["timeline"]
        left_out += [name for name in ("stages", "picture", "trace", "snapshot", "against") if not getattr(self, name)]
        more = {"smi_range_bytes": list(self.smi_range_bytes), "knobs": plain_data(self.tried)}
        return {**field_data(self, *left_out), **more}

    def plot(self, path: str | Path) -> None:
        """Draw the device memory over the run, by kind.

        Raises UserError if `path` cannot be written as a picture, or if the layers were extrapolated.
        """
        from zerofit.report.memory_plot import MemoryTimeline, draw

        if not self.timeline:
            message = "this simulation is extrapolated from a few layers, so it has no timeline to draw"
            raise UserError(Problem(kind="no-timeline", message=message, hint="simulate with exact=True"))
        timeline = MemoryTimeline(
            points=[vars(point) for point in self.timeline],
            title=f"{self.run.model}, rank {self.rank} of {self.world_size}",
            peak_at=" ".join(filter(None, (self.peak_at.module, self.peak_at.line))),
            device=self.device,
            device_total_bytes=self.device_total_bytes,
        )
        draw(timeline, Path(path))

    def write_snapshot(self, path: Path) -> Simulation:
        """Write the allocations as torch.cuda.memory._dump_snapshot() does.

        Return the simulation with `path` as its snapshot. Raises UserError if `path` cannot be written.
        """
        taken = self.allocations
        assert taken is not None
        settings = read_alloc_conf(taken.alloc_conf)
        content = snapshot_of(taken.events, taken.origins, device_bytes=taken.room_bytes, settings=settings)
        with refused(path, kind="unwritable", where="--snapshot", doing="write"):
            path.write_bytes(pickle.dumps(content, protocol=4))  # which all viewers read
        return replace(self, snapshot=path)

    def _repr_html_(self) -> str:
        rows = [(kind, shown_bytes(size), f"{size / self.peak_bytes:.1%}") for kind, size in self.breakdown.items()]
        rows += [("peak", shown_bytes(self.peak_bytes), self.peak_phase)]
        rows += [("reserved", shown_bytes(self.reserved_bytes), f"of {shown_bytes(self.device_total_bytes)}")]
        caption = f"{self.run.model}, rank {self.rank} of {self.world_size} on {self.device}: {self.verdict}"
        return html_table(caption, ("memory", "bytes", ""), rows)


def severity(simulation: Simulation) -> tuple[int, int]:
    """Return a sort key: the verdict, then the reserved bytes.

    It is largest for the worst of several ranks.
    """
    return ORDER.index(simulation.verdict), simulation.reserved_bytes


def stage_peaks(stages: Sequence[Simulation]) -> tuple[StagePeak, ...]:
    """Return the peak of each pipeline stage; empty without a pipeline."""
    names = ("rank", "peak_bytes", "peak_phase", "reserved_bytes", "fits")
    peaks = tuple(StagePeak(**{name: getattr(stage, name) for name in names}) for stage in stages)
    return peaks if len(peaks) > 1 else ()


@dataclass(frozen=True, kw_only=True)
class BaselineComparison:
    """The difference between the peaks of a simulation and an earlier one."""

    baseline: str  # the file
    base_bytes: int
    added_bytes: int  # negative: saved
    allowed: float  # relative to base_bytes
    no_longer_fits: bool
    exceeded: bool  # whether the change adds more than allowed, or the run no longer fits
    because: str

    @property
    def added(self) -> float:
        """The added bytes, relative to the baseline."""
        return self.added_bytes / self.base_bytes


def read_baseline(path: Path) -> dict[str, object]:
    """Read the output of an earlier `zerofit simulate --json`.

    It is the last line of the file. Raises UserError.
    """
    with refused(path, kind="baseline", hint=HINT, where="--baseline"):
        # a log of a CI job may have other output above it
        lines = path.read_bytes().strip().splitlines() or [b""]
        found = parse_json(lines[-1])
        if not isinstance(found, dict) or not {*SAME, "peak_bytes", "fits"} <= found.keys():
            raise Unreadable("it contains no simulation")
        if not isinstance(found["peak_bytes"], int) or found["peak_bytes"] <= 0:
            raise Unreadable(f"peak_bytes must be a positive number of bytes, not {found['peak_bytes']!r:.40}")
        return found


def compare_with(base: dict[str, object], now: Simulation, path: Path, allowed: float) -> BaselineComparison:
    """Compare a simulation with an earlier one.

    Raises UserError if rank, world size or device differ.
    """
    problems = Problems()
    for name in SAME:
        if base[name] != getattr(now, name):
            message = f"{path} has {name.replace('_', ' ')} {base[name]}, but this simulation has {getattr(now, name)}"
            problems.add("baseline", message, "simulate both with the same setting", "--baseline")
    problems.raise_if_any()
    base_bytes = base["peak_bytes"]
    assert isinstance(base_bytes, int)  # `read_baseline` refuses others
    added, lost = now.peak_bytes - base_bytes, bool(base["fits"]) and not now.fits
    return BaselineComparison(
        baseline=str(path),
        base_bytes=base_bytes,
        added_bytes=added,
        allowed=allowed,
        no_longer_fits=lost,
        exceeded=lost or added > allowed * base_bytes,
        because=_sentence(now, added, base_bytes, lost),
    )


def _sentence(now: Simulation, added: int, before: int, lost: bool) -> str:
    if added == 0 and not lost:
        return f"the peak is unchanged, {shown_bytes(before)}"
    change = f"{'adds' if added >= 0 else 'saves'} {shown_bytes(abs(added))} ({added / before:+.2%})"
    where = f" at {now.peak_at.own or now.peak_at.line} in {now.peak_phase}" if added > 0 else ""
    end = f", and no longer fits on {now.device}" if lost else ""
    return f"this change {change}{where}{end}: the peak was {shown_bytes(before)}, now {shown_bytes(now.peak_bytes)}"
