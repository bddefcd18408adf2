"""Choose everything that a run with `--fit` leaves open, and record the choice.

Formulas forecast all options, and simulations decide which of them fit.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from zerofit.app.clusters.hosts import filled
from zerofit.app.fitting.options import CHOSEN, Given, LayoutOption, chosen_fields, given_fields, options_of
from zerofit.app.job.resolve import ResolvedJob, resolve_job
from zerofit.app.planning.job_forecast import cluster_of
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.checkpoint.compatible import obstacles
from zerofit.checkpoint.store import Store
from zerofit.config.batch import shown
from zerofit.launch.host import this_machine
from zerofit.launch.hostfile import Host
from zerofit.plan.fit import check_fit, explain
from zerofit.plan.result import plain
from zerofit.simulate.forecast.result import FITS, WITHIN, Simulation, severity
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import DOES_NOT_FIT, DoesNotFit, Problem, RunFailed, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.foreign import Unreadable, read_json, shaped
from zerofit.spec.model_facts import Machine
from zerofit.spec.overhead import REPLAYED
from zerofit.spec.run import AUTO, Run, RunRequest
from zerofit.spec.run_folder import Batch, FittedLayout, RunFolder
from zerofit.spec.units import shown_bytes

MOST = 6  # options to simulate
# The simplest option this close to the fastest is chosen, since forecasts of time are not more precise. In
# benchmarks/fit.py the choice reaches 97 % of the best throughput that fits with 0, and 98 % with 0.1.
ALIKE = 0.1

Simulate = Callable[[LayoutOption], Sequence[Simulation]]  # raises Refused
PLACE = "--fit"
KEPT = {"ranks", "precision", "micro_batch_by_rank", "ema", *CHOSEN}  # the fields that a choice may have
LEANER = 0.9  # after a rank ran out of memory, layouts above this share of its forecast are not chosen
HINT = "leave out layout options, use shorter sequences or fewer --ranks; `zerofit plan` lists devices that fit; "


class Refused(Exception):
    """Raised for an option that zerofit or DeepSpeed does not support for this run."""


def needed_bytes(simulation: Simulation) -> float:
    """Return the device memory that a rank needs to fit with certainty, in bytes."""
    return _torch_bytes(simulation) + sum(overhead.high_bytes for overhead in simulation.overheads)


def _torch_bytes(simulation: Simulation) -> float:
    """Return the bytes that torch reserves, with the margin of a replay."""
    return (1 + REPLAYED) * simulation.reserved_ahead_bytes


# Plan's forecasts are fast and close; a simulation of the engine is exact and takes seconds. So plan orders the options
# and the engine decides:
#
#     1. Take the simplest option within 10 % of the fastest that should fit, and simulate it.
#     2. The ratio of simulated to forecast memory corrects the forecasts of the other options.
#     3. If another option is better now, simulate it. Stop after six simulations, or when the best option is simulated.
@dataclass
class FitSearch:
    """A search for the fastest options that fit the free memory of each node."""

    options: Sequence[LayoutOption]
    free: Cluster
    simulate: Simulate
    most_bytes: float = math.inf  # limit of reserved bytes per rank; a layout that reserved more ran out of memory
    seen: dict[LayoutOption, Simulation | None] = field(default_factory=dict)  # None: cannot be simulated
    _refused: set[tuple] = field(default_factory=set)
    _last: tuple[LayoutOption, Simulation] | None = None  # the last simulated option, which corrects plan's forecasts

    def run(self) -> LayoutOption | None:
        """Return the chosen option; None if no option fits or is close to the limit.

        An option that is close to the limit is chosen only if no option fits.
        """
        # Each simulation corrects the forecasts, so another option may be preferred after it.
        while (option := self._preferred(self.options)) not in self.seen:
            if option is None or len(self.seen) == MOST:
                break
            self._look(option)
        option = self._preferred(list(self.seen))
        # Corrected forecasts have errors, too. So the leanest option is simulated even if it should not fit.
        if option is None and (leanest := self.leanest) and leanest not in self.seen:
            self._look(leanest)
        return option or self._preferred(list(self.seen)) or self._preferred(list(self.seen), {FITS, WITHIN})

    @property
    def leanest(self) -> LayoutOption | None:
        """The option that leaves its fullest memory (device, host or disk) most free, by forecast."""
        remaining = [option for option in self.options if _kind(option) not in self._refused]
        return min(
            remaining, key=lambda option: check_fit(option.memory, option.layout, self.free).utilization, default=None
        )

    def faster_than(self, option: LayoutOption) -> list[LayoutOption]:
        """Return the options that are faster than `option` but do not fit, fastest first."""
        remaining = [faster for faster in self.options if faster.samples_per_s > option.samples_per_s]
        return [faster for faster in remaining if not self._fits(faster)]

    def _preferred(
        self, options: Sequence[LayoutOption], verdicts: Set[str] = frozenset({FITS})
    ) -> LayoutOption | None:
        """Return the simplest of the fitting options that are nearly as fast as the fastest."""
        fitting = [option for option in options if self._fits(option, verdicts)]
        least = (1 - ALIKE) * max((option.samples_per_s for option in fitting), default=0.0)
        near = [option for option in fitting if option.samples_per_s >= least]

        def complexity(option: LayoutOption) -> tuple[float, ...]:
            # Simple means: no offload first, then small degrees besides data parallelism, then no recomputation, then a
            # low stage. Among equally simple options the fastest counts.
            offloads, degrees, checkpointing, stage, overlap, *_ = plain(option.layout)
            savings = len(option.savings.fields)
            return (offloads, degrees, checkpointing, stage, savings, overlap, -option.samples_per_s)

        return min(near, key=complexity, default=None)

    def _fits(self, option: LayoutOption, verdicts: Set[str] = frozenset({FITS})) -> bool:
        """Return whether the option fits, by simulation or by plan's corrected forecast."""
        worst = self.seen.get(option)
        if worst:
            return worst.verdict in verdicts and worst.reserved_bytes <= self.most_bytes
        if option not in self.seen and _kind(option) in self._refused:
            return False
        peak_bytes, fit = option.memory.peak_bytes, check_fit(option.memory, option.layout, self.free)
        if self._last is None:
            return fit.exceeded is None and peak_bytes <= self.most_bytes
        # The last simulation corrects plan's forecast: its ratio to plan's scales torch's memory and host memory. The
        # memory outside torch does not depend on the option, so the simulated bytes are added.
        simulated_option, simulation = self._last
        planned = check_fit(simulated_option.memory, simulated_option.layout, self.free)
        ratio = _torch_bytes(simulation) / simulated_option.memory.peak_bytes
        host_ratio = simulation.host_node_bytes / planned.host_bytes if planned.host_bytes else 1.0
        device_bytes = ratio * peak_bytes + needed_bytes(simulation) - _torch_bytes(simulation)
        corrected = replace(fit, device_bytes=device_bytes, host_bytes=host_ratio * fit.host_bytes)
        return corrected.exceeded is None and ratio * peak_bytes <= self.most_bytes

    def _look(self, option: LayoutOption) -> None:
        try:
            simulations = self.simulate(option)
        except Refused:
            self._refused.add(_kind(option))
            return
        worst = self.seen[option] = max(simulations, key=severity) if simulations else None
        if worst:
            self._last = (option, worst)


def _kind(option: LayoutOption) -> tuple:
    """Return what decides whether an option is refused."""
    # DeepSpeed and zerofit refuse combinations of features, never sizes. So options that differ only in batch sizes,
    # buckets or overlap are all refused or all accepted.
    layout = option.layout
    degrees = (layout.tp, layout.pp, layout.sp, layout.ep)
    return layout.zero_stage, layout.offload, degrees, layout.checkpointing, option.savings


HINT += "--anyway starts the smallest layout anyway"
OUT_OF_MEMORY = "out-of-memory"


# The order of a start with `--fit`: an earlier choice for the folder, else all layouts by forecast (`options`), of
# which a few are simulated (`choose`). The run is resolved with the chosen fields, as if the user had given them.
def fitted(
    request: RunRequest,
    folder: RunFolder,
    *,
    report: Reporter,
    gate: MemoryGate,
    machine: Machine | None = None,
    hosts: Sequence[Host] = (),
    anyway: bool = False,
) -> tuple[RunRequest, FittedLayout | None]:
    """Return the request with every open value chosen, and the choice.

    Without `--fit` the request is unchanged. For a run on this machine, `machine` is None and `hosts` is empty.
    `anyway`: if no layout fits, use the smallest. Raises UserError and ModelError, and DoesNotFit if no layout fits.
    """
    # An earlier choice is reused. If a rank ran out of memory with it, the layout is chosen again among smaller ones.
    former = read_choice(folder)
    places = [Path(request.places[name].rpartition(":")[0]).absolute() for name in CHOSEN if name in request.places]
    # without a flag for the layout, each of its fields comes from the run folder
    is_resume = bool(places) and all(place == folder.run for place in places)
    if former and not request.run.fit and is_resume:
        if not former.ran_out:
            return request, former
        # from the options that the user gave then
        free = {name: Run.model_fields[name].default for name in ("ranks", *CHOSEN)} | former.given
        run = request.run.model_copy(update={**free, "fit": True})
        places = {name: place for name, place in request.places.items() if name not in free or name in former.given}
        request = RunRequest(run=run, places=places)
    if not request.run.fit:
        return request, None
    if request.run.pipeline == AUTO:  # treated as not given
        places = {name: place for name, place in request.places.items() if name != "pipeline"}
        request = replace(request, run=request.run.model_copy(update={"pipeline": 1}), places=places)
    if request.run.micro_batch_by_rank:
        message = f"{request.place('micro_batch_by_rank')} with --fit: --fit gives every rank the same micro batch"
        hint = "remove --fit (`zerofit plan --micro-batch-by-rank 4,2` shows what fits), or use equal micro batches"
        raise UserError(Problem(kind="conflict", message=message, hint=hint, where="--fit"))
    given = given_fields(request)
    devices = (machine or this_machine()).devices
    # this machine may have fewer devices than the one that chose
    enough_ranks = former and ("ranks" in former.given or former.chosen["ranks"] <= devices)
    if former and former.given == given and not former.ran_out and enough_ranks:
        report.note(f"using the layout chosen earlier for {folder.path}: {former.why[0]}")
        return _settled(request, former.chosen), former
    return _Fit(request, folder, report, gate, machine, hosts, given, former).run(anyway)


def read_choice(folder: RunFolder) -> FittedLayout | None:
    """Return this run folder's choice; None if it is missing or damaged, or sets other fields."""
    try:
        stored = read_json(folder.plan).get("fit")
        choice = shaped(stored, TypeAdapter(FittedLayout)) if stored else None
        if choice:
            for fields in (choice.given, choice.chosen):
                Run(**fields)  # validated, since a forged plan.json could name callbacks
            if {*choice.given, *choice.chosen} - KEPT or not {"ranks", "global_batch"} <= choice.chosen.keys():
                return None
        return choice
    except (OSError, Unreadable, UserError):
        return None


@contextmanager
def leaner_next(folder: RunFolder, again: str) -> Iterator[None]:
    """If a rank runs out of memory within the block, record this in the run folder.

    The next start then chooses a smaller layout. `again`: the command that resumes a run folder.
    """
    try:
        yield
    except RunFailed as failure:
        choice = read_choice(folder)
        if choice is None or failure.problem.kind != OUT_OF_MEMORY:
            raise
        plan = read_json(folder.plan)  # readable, since `read_choice` has read it
        write_json(folder.plan, {**plan, "fit": asdict(replace(choice, ran_out=True))})
        hint = f"`{again} {shlex.quote(str(folder.path))}` resumes from the newest checkpoint with a smaller layout"
        raise RunFailed(replace(failure.problem, hint=hint)) from None


def _settled(request: RunRequest, chosen: Mapping[str, object]) -> RunRequest:
    run = request.run.model_copy(update={**chosen, "fit": False})
    return RunRequest(run=run, places={**dict.fromkeys(chosen, PLACE), **request.places})


@dataclass
class _Fit:
    request: RunRequest
    folder: RunFolder
    report: Reporter
    gate: MemoryGate
    machine: Machine | None
    hosts: Sequence[Host]
    given: Given
    former: FittedLayout | None  # the earlier choice for this folder, which cannot be reused

    def run(self, anyway: bool) -> tuple[RunRequest, FittedLayout]:
        resolved = self._resolved(self._with_former_batch())
        ranks = resolved.job.layout.world_size
        cluster = cluster_of(ranks, filled(self.hosts, ranks) if self.hosts else ())
        profile, options = options_of(resolved, self.given, cluster, self.report)
        optimizer = resolved.job.run.optimizer

        def chosen(option: LayoutOption) -> dict[str, object]:
            return chosen_fields(option, profile, self.given, optimizer)

        free = self.gate.free_on(cluster, self.folder.path)

        def simulate(option: LayoutOption) -> Sequence[Simulation]:
            return self._simulations(option, _settled(self.request, chosen(option)), free)

        most = LEANER * self.former.reserved_bytes if self.former and self.former.ran_out else math.inf
        search = FitSearch(options, free, simulate, most_bytes=most)
        option = search.run()
        if option is None:  # try the options that cost speed but make long sequences fit
            _, lean = options_of(resolved, self.given, cluster, self.report, lean=True)
            search = FitSearch(lean, free, simulate, most_bytes=most) if lean else search
            option = search.run() or (search.leanest if anyway else None)
        if option is None:
            raise DoesNotFit(_nothing_fits(self.request.run.model, search))
        chosen_by = "zerofit chose every setting"
        if self.given:
            names = ", ".join(self.request.place(name) for name in self.given)
            chosen_by = f"given: {names}; zerofit chose the rest"
        why = (*_reasons(option, search), f"{chosen_by}; a resume uses the same layout (recorded in the run folder)")
        self.report.note(*why)
        worst, fields = search.seen.get(option), chosen(option)
        reserved = worst.reserved_bytes if worst else option.memory.peak_bytes
        fit = FittedLayout(given=self.given, chosen=fields, why=why, reserved_bytes=reserved)
        return _settled(self.request, fields), fit

    def _with_former_batch(self) -> RunRequest:
        """Return the request with the former choice's global batch, unless the user gave one."""
        run = self.request.run
        sizes = ("micro_batch", "gradient_accumulation_steps")
        if self.former is None or "global_batch" in self.given or all(name in self.given for name in sizes):
            return self.request
        run = run.model_copy(update={"global_batch": self.former.chosen["global_batch"]})
        return RunRequest(run=run, places={**self.request.places, "global_batch": PLACE})

    def _resolved(self, request: RunRequest) -> ResolvedJob:
        """Resolve a run silently. Its notes and warnings are reported later, for the completed run."""
        kinds = ("status", "task")
        report = Reporter(lambda event: self.report.on_event(event) if event.kind in kinds else None)
        return resolve_job(request.updated(fit=False), machine=self.machine, report=report)

    def _simulations(self, option: LayoutOption, request: RunRequest, free: Cluster) -> Sequence[Simulation]:
        """Simulate an option. Raises Refused if the run or its newest checkpoint refuses it."""
        self.report.status(f"fit: simulating {option}")
        try:
            resolved = self._resolved(request)
        except UserError as error:
            raise Refused(str(error)) from None
        saved = [entry.manifest for entry in Store(self.folder.checkpoints).entries() if entry.manifest]
        if saved and obstacles(saved[-1].job, resolved.job):
            raise Refused("the checkpoint does not support it")
        return self.gate.simulations(request, resolved, free)


def _reasons(option: LayoutOption, search: FitSearch) -> list[str]:
    layout, worst = option.layout, search.seen.get(option)
    batch = shown(Batch(micro=layout.micro_batch, accumulation=layout.accumulation, dp=layout.dp))
    speed = f"{option.step_s:.3g} s per step, {option.samples_per_s:,.3g} samples/s"
    best = f"chosen from {len(search.options):,} layouts: the simplest within {ALIKE:.0%} of the fastest that fits"
    sizes = f"; buckets of {layout.bucket:,} elements" + ", overlapped" * layout.overlap if layout.zero_stage else ""
    lines = [f"--fit chooses {option}: {batch}{sizes}", f"{best} (forecast {speed})"]
    free = f"per rank, {shown_bytes(search.free.device.memory_bytes)} free"
    if worst:
        lines.append(
            f"simulated: {worst.verdict}, needs {shown_bytes(needed_bytes(worst))} {free}; peak in {worst.peak_phase}"
        )
    else:
        lines.append(f"cannot be simulated; plan forecasts {shown_bytes(option.memory.peak_bytes)} {free}")
    faster = search.faster_than(option)
    if not faster:
        return [*lines, "memory did not rule out any faster layout"]
    fastest = faster[0]
    simulated = search.seen.get(fastest)
    needed = (
        needed_bytes(simulated) if simulated else check_fit(fastest.memory, fastest.layout, search.free).device_bytes
    )
    why = f"{len(faster):,} faster layouts do not fit; the fastest, {fastest}, needs {shown_bytes(needed)} per rank"
    if search.most_bytes < math.inf:
        why += f" (a layout that reserves {shown_bytes(search.most_bytes / LEANER)} ran out of memory)"
    return [*lines, why]


def _nothing_fits(model: str, search: FitSearch) -> Problem:
    leanest, count = search.leanest, f"{len(search.options):,} layouts"
    if leanest is None:
        return Problem(kind=DOES_NOT_FIT, message=f"none of {count} of {model} supports the given options", hint=HINT)
    worst = search.seen.get(leanest)
    if search.most_bytes < math.inf:
        reserved = search.most_bytes / LEANER  # by the layout that ran out of memory
        needed = worst.reserved_bytes if worst else leanest.memory.peak_bytes
        because = (
            f"a rank that reserves {shown_bytes(reserved)} ran out of memory; this layout needs {shown_bytes(needed)}"
        )
    else:
        fit = check_fit(leanest.memory, leanest.layout, search.free)
        because = worst.because if worst else explain(leanest.memory, fit)
    message = f"none of {count} of {model} fits; the smallest is {leanest}: {because}"
    return Problem(kind=DOES_NOT_FIT, message=message, hint=HINT)
