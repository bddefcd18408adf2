"""`zerofit.simulate`: the memory that a run's ranks need on any hardware.

The run is checked as for training, without data.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zerofit.app.job.hub_models import with_shape
from zerofit.app.job.requests import as_request
from zerofit.app.job.resolve import InputSource, ResolvedJob, cluster_machine, ds_name, resolve_job
from zerofit.app.planning.job_forecast import traced_step_s
from zerofit.app.planning.output_files import TRACE_FLAG, write_trace
from zerofit.app.simulation.rank_trace import trace_of_simulation
from zerofit.models.inputs import Inputs
from zerofit.simulate.endings import MAY_FIT, note_failed, optional
from zerofit.simulate.forecast.assess import assess, exact_if_doubtful
from zerofit.simulate.forecast.knobs import Knob, knobs
from zerofit.simulate.forecast.result import KnobResult, Simulation, first_that_fits, in_order, severity, stage_peaks
from zerofit.simulate.forecast.run import SimulatedRank, heaviest_of, simulate_ranks
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import refuse_target
from zerofit.spec.mesh import largest_batch_of_stages
from zerofit.spec.model_facts import Task, is_text
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Job
from zerofit.spec.stages import stages_of
from zerofit.spec.units import counted

# How a run is simulated. The ranks of a pipeline stage differ only in their partitions, so few of them are enough:
#
#   1. `prepare_simulation` turns the request into a job, as before a run starts, for the described cluster.
#   2. A rank of each stage runs the engine on fake tensors. For a large model it runs few layers and extrapolates.
#   3. `exact_if_doubtful` runs a rank again with all layers if the extrapolation leaves its verdict open.
#   4. At ZeRO 1 and 2, `engine.partitions` names in each stage the rank whose partition needs most memory
#      (`record.heavier_rank`). `heaviest_of` runs it.
#   5. The stage with the worst verdict is the result. Changes that would need less memory are simulated on demand.


@dataclass(frozen=True, kw_only=True)
class PreparedSimulation:
    """A checked run that is ready to be simulated on a cluster."""

    request: RunRequest
    cluster: Cluster
    image: str | None = None
    resolved: ResolvedJob
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of its processes

    @property
    def job(self) -> Job:
        """The job whose ranks are simulated."""
        return self.resolved.job

    @property
    def inputs(self) -> Inputs:
        """The model's inputs, without which no step can be simulated."""
        assert self.resolved.inputs is not None
        return self.resolved.inputs

    def target(self, rank: int) -> SimulationTarget:
        """Return what to simulate for a rank."""
        return SimulationTarget(
            job=self.job,
            inputs=self.inputs,
            rank=rank,
            accelerator=self.cluster.accelerator,
            device_bytes=self.cluster.device.memory_bytes,
            workspace_bytes=blas_workspace_bytes(self.cluster.device),
            alloc_conf=self.alloc_conf,
        )

    def changed(self, knob: Knob) -> PreparedSimulation | None:
        """Return the run with one change; None if zerofit or DeepSpeed would refuse the changed run."""
        places = {**self.request.places, **{field: field for field in knob.fields}}
        config = {} if knob.config == self.resolved.ds_source else {"ds_config": knob.config}
        run = self.request.run.model_copy(update={**knob.fields, **config})
        try:
            request = RunRequest(run=run, places=places)
            return prepare_simulation(request, self.cluster, image=self.image, alloc_conf=self.alloc_conf)
        except UserError:
            return None


@dataclass(frozen=True)
class _ChangedRun:
    prepared: PreparedSimulation
    changes: tuple[str, ...] = ()
    config: str | None = None  # the bundled DeepSpeed JSON, if one of the changes is another JSON

    @property
    def change(self) -> str:
        return (" " if all(change.startswith("--") for change in self.changes) else " + ").join(self.changes)

    def offered(self) -> list[Knob]:
        """Return changes that would need less memory than this run; some may be refused."""
        run = self.prepared
        return knobs(run.job, run.resolved.ds_source, ds_name(run.request.run))

    def after(self, wanted: Knob) -> _ChangedRun | None:
        """Return the run with one more change; None if it is no longer offered or is refused.

        A micro batch can be halved until it is 1.
        """
        for knob in self.offered():
            if knob.change == wanted.change or (knob.halves and wanted.halves):
                prepared = self.prepared.changed(knob)
                option = knob.change.split()[0]  # a later value of the same option replaces the earlier one
                earlier = [change for change in self.changes if change.split()[0] != option]
                config = knob.config if isinstance(knob.config, str) else self.config
                return _ChangedRun(prepared, (*earlier, knob.change), config) if prepared else None
        return None


@dataclass(frozen=True, kw_only=True)
class KnobSimulations:
    """Changes that would need less memory than the run.

    Calling this object simulates each change.
    """

    prepared: PreparedSimulation
    rank: int  # simulated in each changed run
    heaviest: bool = True  # simulate instead the heaviest of the ranks that differ only in their partitions
    exact: bool = False
    is_worth: Callable[[Job], bool] = lambda job: True  # returns whether to simulate the job of a change
    times: bool = True  # returns the forecast slowdown of each change; may trace the model

    def __call__(self, on_event: OnEvent | None = None) -> tuple[KnobResult, ...]:
        """Return the result of each change, least memory first.

        If no change fits, add the shortest combination of changes.
        """
        report, start = Reporter(on_event), _ChangedRun(self.prepared)
        offered = [(knob, run) for knob in start.offered() if (run := start.after(knob))]
        changed = [run for _, run in offered if self.is_worth(run.prepared.job)]
        tried = self._simulated(changed, report)
        rows = [row for row in tried if row]
        if not any(row.fits for row in rows):
            speed = {row.change: row.slowdown for row in rows if row.slowdown is not None}
            # Changes are combined from the one that costs least speed on. A change without a forecast comes last.
            cheapest = sorted((knob for knob, _ in offered), key=lambda knob: speed.get(knob.change, math.inf))
            rows += self._combined([knob for knob in cheapest if knob.combines], report)
        return in_order(rows)

    def _combined(self, order: Sequence[Knob], report: Reporter) -> list[KnobResult]:
        """Add up these changes in order, and return the shortest combination that fits.

        If no combination fits, return the combination that needs the least memory. Offloading and small micro
        batches cost the most speed, so each of them is left out if the run fits without it.
        """
        misfits: list[KnobResult] = []
        for offloads, halves in itertools.product((False, True), repeat=2):
            chain = [_ChangedRun(self.prepared)]
            once = [knob for knob in order if (offloads or not knob.offloads) and (halves or not knob.halves)]
            halving = next((knob for knob in once if knob.halves), None)
            for knob in once:
                if changed := chain[-1].after(knob):
                    chain.append(changed)
            while halving and (changed := chain[-1].after(halving)):
                chain.append(changed)
            chain = chain[2:]  # more than one change
            tried = any(chain and row.change == chain[-1].change for row in misfits)
            if not chain or tried or not self.is_worth(chain[-1].prepared.job):
                continue
            best = self._simulated(chain[-1:], report)[0]
            if best and best.fits:
                return [first_that_fits(chain, best, partial(self._simulated, report=report))]
            misfits += [best] if best else []
        return sorted(misfits, key=lambda row: row.peak_bytes)[:1]

    def _simulated(self, changed: Sequence[_ChangedRun], report: Reporter) -> list[KnobResult | None]:
        cluster = self.prepared.cluster

        def simulate_more(targets: Sequence[SimulationTarget], *, exact: bool = True) -> list[SimulatedRank | Problem]:
            return simulate_ranks(targets, lambda text: report.status(f"{MAY_FIT}: {text}"), exact=exact)

        targets = [run.prepared.target(self.rank) for run in changed]
        simulated = exact_if_doubtful(simulate_more(targets, exact=self.exact), cluster, simulate_more)
        if self.heaviest:
            simulated = heaviest_of(simulated, simulate_more)
        note_failed(simulated, MAY_FIT, report)
        slowdowns: dict[int, float] = {}
        if self.times:
            runs = [run.prepared for run in changed]
            slowdowns = optional(lambda: self._slowdowns(runs, report), {}, "step times", report)
        return [
            replace(KnobResult.of(assess(rank, cluster), run.change, run.config), slowdown=slowdowns.get(number))
            if isinstance(rank, SimulatedRank)
            else None
            for number, (run, rank) in enumerate(zip(changed, simulated, strict=True))
        ]

    def _slowdowns(self, changed: Sequence[PreparedSimulation], report: Reporter) -> dict[int, float]:
        """Return the slowdown of a step for each change that formulas forecast, by its number.

        A changed sequence length is left out, since it changes the work of a step.
        """
        progress = Reporter(lambda event: report.status(f"{MAY_FIT}: {event.text}"))

        def step_s(run: PreparedSimulation) -> float | None:
            return traced_step_s(run.job, run.inputs, run.cluster, progress)

        before, seq_len = step_s(self.prepared), self.prepared.job.run.seq_len
        if not before:
            return {}
        after = {number: step_s(run) for number, run in enumerate(changed) if run.job.run.seq_len == seq_len}
        return {number: seconds / before - 1 for number, seconds in after.items() if seconds}


def simulate(
    run: Run | RunRequest | str | Path,
    cluster: Cluster | None = None,
    *,
    rank: int | None = None,
    image: str | None = None,
    exact: bool = False,
    alloc_conf: str = "",
    trace: str | Path | None = None,
    snapshot: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> Simulation:
    """Run the real DeepSpeed engine as one rank of a run on fake tensors, without a GPU.

    Args:
        run: the training (a run, a run file or a model's name); its `ds_config` is the DeepSpeed JSON.
        cluster: the hardware; this machine if None.
        rank: the rank to simulate. By default the heaviest rank of each pipeline stage is simulated, and the heaviest
            of these is returned.
        image: "image:3x224x224", the inputs of an image model if the run names no data.
        exact: simulate every layer of a large model instead of extrapolating from few (`Simulation.plot` needs it).
        alloc_conf: options of torch's allocator, in the format of PYTORCH_CUDA_ALLOC_CONF.
        trace: file for a Chrome trace of a step of the returned rank; implies `exact`.
        snapshot: file for the rank's allocations in torch's format for memory snapshots; implies `exact`.
        on_event: gets progress.

    Raises UserError with all problems of the run, or with the place where the model cannot be simulated.

    >>> import zerofit as zf
    >>> run = zf.Run(model="llama-tiny", ds_config="zero2", micro_batch=2, seq_len=16, precision="bf16")
    >>> simulation = zf.simulate(run, zf.Cluster("l4", gpus=2))
    >>> simulation.fits, simulation.peak_bytes == sum(simulation.breakdown.values())
    (True, True)
    >>> [phase.name for phase in simulation.phases if phase.step == 1]
    ['forward', 'backward', 'step']
    """
    start, report = time.perf_counter(), Reporter(on_event)
    request = with_shape(as_request(run), report)
    if cluster is None:
        cluster = Cluster.here() if request.run.ranks is None else replace(Cluster.here(), gpus=request.run.ranks)
    prepared = prepare_simulation(request, cluster, image=image, alloc_conf=alloc_conf, report=report)
    if stages := stages_of(prepared.job):
        report.stages(stages)
    refuse_target(trace, TRACE_FLAG)
    refuse_target(snapshot, "--snapshot")
    # One rank of each stage is simulated, from a few layers. Near the limit, all layers are simulated (see above).
    exact = exact or trace is not None or snapshot is not None  # an extrapolated rank has no timeline of memory
    targets = [replace(prepared.target(n), stacks=snapshot is not None) for n in _ranks(prepared.job, rank)]
    exactly = partial(simulate_ranks, show=report.status, exact=True)
    simulated = exact_if_doubtful(simulate_ranks(targets, report.status, exact=exact), cluster, exactly)
    if rank is None:
        simulated = heaviest_of(simulated, exactly)
    failed = [problem for problem in simulated if isinstance(problem, Problem)]
    if failed:
        raise UserError(*dict.fromkeys(failed))  # stages may fail in the same way
    assessed = [assess(done, cluster) for done in simulated if isinstance(done, SimulatedRank)]
    worst = max(assessed, key=severity)
    if trace is not None:
        write_trace(Path(trace), trace_of_simulation(worst, prepared.job, prepared.inputs, cluster, report))
    if snapshot is not None:
        worst = worst.write_snapshot(Path(snapshot))
    return replace(
        worst,
        stages=stage_peaks(assessed),
        seconds=round(time.perf_counter() - start, 1),
        trace=Path(trace) if trace is not None else None,
        simulate_knobs=KnobSimulations(prepared=prepared, rank=worst.rank, heaviest=rank is None, exact=exact),
    )


def prepare_simulation(
    request: RunRequest,
    cluster: Cluster,
    *,
    image: str | None = None,
    alloc_conf: str = "",
    report: Reporter | None = None,
) -> PreparedSimulation:
    """Check everything about a run that needs no data. Raises UserError with all problems."""
    problems = Problems()
    problems.attempt(lambda: read_alloc_conf(alloc_conf))
    resolved = resolve_job(
        _on_all(request, cluster, problems),
        machine=cluster_machine(cluster),
        inputs=InputSource(kind="assumed", image=image),
        report=report,
        problems=problems,
        check_task=partial(_check_task, request),
    )
    return PreparedSimulation(request=request, cluster=cluster, image=image, resolved=resolved, alloc_conf=alloc_conf)


def _check_task(request: RunRequest, task: Task, problems: Problems) -> None:
    if task == "gan":
        message = f"{request.run.model} trains two engines, which `zerofit simulate` does not support"
        problems.add("model-task", message, "use another model", "MODEL")
    if request.run.pipeline != 1 and request.run.pipeline_balance == "time":
        message = "`--pipeline-balance time` measures the layers, but a simulation computes nothing"
        problems.add("layout", message, "use --pipeline-balance parameters", "--pipeline-balance")
    if not is_text(task) and task != "gan":
        samples = "rows of a table" if task == "table" else "images"
        reasons = {
            "seq_len": f"{samples} have no tokens",
            "loss_chunk": f"{samples} have too few logits to compute them in chunks",
        }
        for field, reason in reasons.items():
            if field in request.places and getattr(request.run, field):
                problems.add("conflict", f"{request.place(field)}: {reason}", "remove it", request.place(field))


def _on_all(request: RunRequest, cluster: Cluster, problems: Problems) -> RunRequest:
    ranks = request.run.ranks
    if ranks and ranks > cluster.ranks:
        message = f"{counted(ranks, 'rank')}, but {counted(cluster.ranks, 'device')} ({cluster.nodes} x {cluster.gpus})"
        problems.add("ranks", message, "raise --gpus or --nodes, or remove --ranks", request.place("ranks"))
    return RunRequest(run=request.run.model_copy(update={"ranks": ranks or cluster.ranks}), places=request.places)


def _ranks(job: Job, rank: int | None) -> list[int]:
    """Return the ranks to simulate: the given rank, else the heaviest of each pipeline stage.

    Raises UserError.
    """
    ranks = job.layout.world_size
    if rank is None:
        return largest_batch_of_stages(job.layout, job.batch)
    if not 0 <= rank < ranks:
        message, hint = f"no rank {rank}: the run has {counted(ranks, 'rank')}", f"use 0 to {ranks - 1}"
        raise UserError(Problem(kind="bad-value", message=message, hint=hint, where="--rank"))
    return [rank]
