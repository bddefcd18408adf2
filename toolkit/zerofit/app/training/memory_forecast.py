"""Forecast the memory of a job's ranks, from building the model to the last save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from pydantic import TypeAdapter

from zerofit.app.job.result_cache import result_file
from zerofit.app.simulation.runs import PreparedSimulation
from zerofit.check.dotted import get
from zerofit.features.optimizers import of_json
from zerofit.features.zero import NARROW_MASTERS
from zerofit.models.catalog import find
from zerofit.simulate.forecast.assess import assess, exact_if_doubtful
from zerofit.simulate.forecast.run import SimulatedRank, heaviest_of, simulate_ranks
from zerofit.simulate.record import STEPS, KindPeak, RankPhase, RankRecord, SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.foreign import read_json, shaped
from zerofit.spec.memory_kinds import MASTER, PARAMETERS, STATE
from zerofit.spec.mesh import largest_batch_of_stages
from zerofit.spec.overhead import HOST_PROCESS_BYTES, REPLAYED
from zerofit.spec.run_folder import Job, MemoryForecast

SAVE = "save"  # the phase in which the trained model is written
# fields of a run that do not affect memory; runs that differ only in these fields share one simulation
_INDIFFERENT = {"output", "resume", "seed", "lr", "min_lr", "steps", "epochs", "data", "data_root", "text_field"}
_INDIFFERENT |= {"save_every", "save_async", "keep_last", "keep_every", "eval_every", "eval_samples", "log_every"}
_INDIFFERENT |= {"callbacks", "tensorboard", "wandb", "heartbeat_timeout", "check_loss", "tokenizer", "profile"}
_INDIFFERENT |= {"profile_ranks", "record_memory", "ds_config"}  # ds_config is replaced by the job's filled-in JSON


# The memory of a rank over its life, from few simulated ranks:
#
#   rank 0           build, init, steps of the engine  + the copy for --save-async + saving the model
#   one per stage    the same, with the part of the model that it saves
#
# The engine is simulated. Copies that zerofit makes while it saves are added by formulas, since a simulation writes no
# checkpoint. Records are cached by everything that decides them: job, device, code and versions.


@dataclass(frozen=True, kw_only=True)
class RankForecasts:
    """Forecasts for the ranks whose memory differs: rank 0 and one rank per pipeline stage."""

    cluster: Cluster  # cluster with one device for each rank of the job
    first: SimulatedRank
    stages: tuple[SimulatedRank, ...]

    def of(self, rank: int) -> SimulatedRank:
        """Return the simulated rank that represents the rank number `rank`."""
        # Ranks are numbered stage by stage: the first ranks / stages of them are stage 0. Rank 0 also saves the model.
        return self.stages[rank * len(self.stages) // self.cluster.ranks] if rank else self.first

    @cached_property
    def summary(self) -> MemoryForecast:
        """The forecast as stored in plan.json."""
        ranks = [assess(rank, self.cluster) for rank in (self.first, *self.stages)]
        phases: dict[str, int] = {}
        for phase in (phase for rank in ranks for phase in rank.phases):
            phases[phase.name] = max(phases.get(phase.name, 0), phase.peak_bytes)
        return MemoryForecast(
            phases=phases,
            reserved_bytes=max(rank.reserved_bytes for rank in ranks),
            beside_bytes=max(sum(part.bytes for part in rank.overheads) for rank in ranks),
            # other streams free memory late, a replay misses kernels' scratch, and overheads outside torch vary
            margin_bytes=max(
                rank.reserved_ahead_bytes
                - rank.reserved_bytes
                + round(REPLAYED * rank.reserved_bytes)
                + sum(part.high_bytes - part.bytes for part in rank.overheads)
                for rank in ranks
            ),
            host_bytes=max(sum(rank.host_bytes.values()) for rank in ranks),
            pinned_bytes=max(rank.host_bytes["pinned"] for rank in ranks),
            stages=tuple(self.host_need(rank) for rank in self.stages),
            first_bytes=self.host_need(self.first),
        )

    def host_need(self, rank: SimulatedRank) -> int:
        """Return the peak host memory of a rank, with its process but without shared library pages."""
        if not self.cluster.on_cpu:
            return max(rank.record.host_phases.values()) + HOST_PROCESS_BYTES
        overheads = assess(rank, self.cluster).overheads
        return rank.record.peaks[0].bytes + sum(part.bytes for part in overheads)


def least_bytes(job: Job) -> int:
    """Return a lower bound of the memory of all ranks of a job together, without a simulation.

    It contains weights, fp32 master weights and the optimizer's moments, but no gradients and activations.
    """
    parameters, stage, copies = job.facts.trained_parameters, job.layout.zero_stage, job.layout.dp * job.layout.sp
    narrow = any(feature.on(job.ds_config) for feature in NARROW_MASTERS)
    masters = 0 if narrow or job.precision == "fp32" else 4
    entry = of_json(get(job.ds_config, "optimizer.type"))
    moments = entry.states.least_bytes if entry and not narrow else 0
    # Weights count once at stage 3, else once per data parallel rank. Master weights and moments count once, except
    # for stage 0 in fp32, where each data parallel rank has all moments (`plan.persistent`).
    weights = job.facts.weight_bytes(job.precision) * (1 if stage == 3 else copies)
    return weights + parameters * (masters + moments) * (1 if stage or job.precision != "fp32" else copies)


def forecast_ranks(prepared: PreparedSimulation, free: Cluster, report: Reporter) -> RankForecasts | Problem:
    """Return the memory forecast of a job's ranks, or why the job cannot be simulated."""
    job, cluster = prepared.job, prepared.cluster
    ranks = _simulate_or_recall(
        [prepared.target(rank) for rank in largest_batch_of_stages(job.layout, job.batch)], report
    )
    # Equal layers are extrapolated from a few. If the free memory leaves a doubt about the verdict, all are simulated.
    exactly = partial(_simulate_or_recall, report=report, exact=True)
    ranks = exact_if_doubtful(ranks, free, exactly)
    for problem in ranks:
        if isinstance(problem, Problem):
            return problem
    heaviest = heaviest_of(ranks, exactly)
    simulated = [rank for rank in [ranks[0], *heaviest] if isinstance(rank, SimulatedRank)]
    first, *stages = (
        # the second rank stands for the other ranks of the first stage; each later rank for all ranks of its stage
        _with_save(_with_copy(rank, saves_parameters=n != 1), saved, cluster.on_cpu)
        for n, (rank, saved) in enumerate(zip(simulated, _saved_bytes(job, cluster.on_cpu), strict=True))
    )
    return RankForecasts(cluster=cluster, first=first, stages=tuple(stages))


def _with_copy(rank: SimulatedRank, *, saves_parameters: bool) -> SimulatedRank:
    """Add to a rank the host copy of the data that it saves during training (`--save-async`)."""
    job, record = rank.target.job, rank.record
    if not job.run.save_async or job.run.save_every == "0":
        return rank
    # At stages 0 to 2, only one data parallel rank saves the parameters. At stage 0, this rank also saves everything
    # else. At stage 3 the parameters are saved as master weights (`engine.save_checkpoint`).
    stage, saves_parameters = job.layout.zero_stage, saves_parameters or job.layout.dp == 1
    saved = [STATE, MASTER] if stage or saves_parameters else []
    saved += [PARAMETERS] if stage < 3 and saves_parameters else []
    # The copy exists from the first save on (`train.checkpoint_engine.HostCopies`), so in all steps. With a GPU it is
    # pinned; on a CPU it is in the device's memory.
    copy = sum(record.kept[kind] for kind in saved)
    if rank.target.accelerator != "cpu":
        host = {name: size + (copy if name in STEPS else 0) for name, size in record.host_phases.items()}
        pinned = {**record.host, "pinned": record.host["pinned"] + copy}
        return replace(rank, record=replace(record, host_phases=host, host=pinned))
    phases, peaks = list(record.phases), list(record.peaks)
    for n, phase in enumerate(phases):
        if phase.name in STEPS:
            sizes = {name: getattr(phase, name) + copy for name in ("start_bytes", "peak_bytes", "end_bytes")}
            phases[n] = replace(phase, **sizes)
    for n, peak in enumerate(peaks):
        if peak.phase in STEPS:
            breakdown = {**peak.breakdown, "copy of what is saved": copy}
            peaks[n] = replace(peak, bytes=peak.bytes + copy, breakdown=breakdown)
    peaks.sort(key=lambda peak: -peak.bytes)
    return replace(rank, record=replace(record, phases=phases, peaks=peaks))


def _saved_bytes(job: Job, on_cpu: bool) -> list[int]:
    """Return the bytes that ranks copy to the host to save the model: of rank 0, then by stage."""
    layout, facts, weights = job.layout, job.facts, job.facts.weight_bytes(job.precision)
    # Models of transformers are written while they are gathered. Rank 0 keeps copies of all adapters, or of all weights
    # of another model (`train.run.save_model`).
    streamed = find(job.run.model).family == "transformers"
    if job.run.lora:
        adapters = weights * facts.trained_parameters // facts.parameters
        return [adapters, *[adapters // layout.pp] * layout.pp]
    if layout.pp > 1:  # a stage copies its part before it writes the part
        part = weights // layout.pp * (1 if on_cpu else 2)
        return [part if streamed else max(part, weights), *[part] * layout.pp]
    # `EngineTrainer.weights` gathers partitioned modules one at a time, and copies one tensor at a time from a GPU.
    largest, gathered = weights * facts.largest_parameter // facts.parameters, layout.zero_stage == 3 or layout.tp > 1
    copied = gathered or not on_cpu
    return [(largest if streamed else weights) if copied else 0, largest if gathered else 0]


def _with_save(rank: SimulatedRank, saved_bytes: int, on_cpu: bool) -> SimulatedRank:
    """Return the rank with a phase that saves the model, with `saved_bytes` of copies."""
    record = rank.record
    if not on_cpu:
        host = {**record.host_phases, SAVE: record.host_phases["step"] + saved_bytes}
        return replace(rank, record=replace(record, host_phases=host))
    # On a CPU the copies for a save share the memory of the training, and may set its peak.
    last = record.phases[-1]
    total = last.end_bytes + saved_bytes
    figures = {"start_bytes": last.end_bytes, "peak_bytes": total, "end_bytes": total}
    phase = RankPhase(name=SAVE, step=-1, **figures)
    parts = {"state of training": last.end_bytes, "copies of weights": saved_bytes}
    peak = KindPeak(key=SAVE, phase=SAVE, step=-1, module="", at="", bytes=total, breakdown=parts)
    peaks = sorted([*record.peaks, peak], key=lambda peak: -peak.bytes)
    return replace(rank, record=replace(record, phases=[*record.phases, phase], peaks=peaks))


def _simulate_or_recall(
    targets: Sequence[SimulationTarget], report: Reporter, *, exact: bool = False
) -> list[SimulatedRank | Problem]:
    """Return the rank of each target, from the cache or simulated now.

    `exact`: simulate all of its layers.
    """
    files = [_record_file(target) for target in targets]
    recalled = [_recall(target, file) for target, file in zip(targets, files, strict=True)]
    ranks: list[SimulatedRank | Problem | None] = [
        rank if rank and not (exact and rank.layers) else None for rank in recalled
    ]
    # All missing ranks are simulated in one call, so that they share the process that has imported torch.
    missing = [n for n, rank in enumerate(ranks) if rank is None]
    new: list[SimulatedRank | Problem] = []
    if missing:
        new = simulate_ranks([targets[n] for n in missing], lambda text: report.status(f"memory: {text}"), exact=exact)
    for n, rank in zip(missing, new, strict=True):
        ranks[n] = rank
        if isinstance(rank, SimulatedRank):
            record = _RECORD.dump_python(replace(rank.record, timeline=(), events=None, host_moments={}), mode="json")
            files[n].parent.mkdir(parents=True, exist_ok=True)
            write_json(files[n], {"record": record, "layers": rank.layers, "check_error": rank.check_error})
    return [rank for rank in ranks if rank is not None]


_RECORD = TypeAdapter(RankRecord)


def _recall(target: SimulationTarget, file: Path) -> SimulatedRank | None:
    try:
        stored = read_json(file)
        record, layers = shaped(stored["record"], _RECORD), tuple(stored["layers"])
        return SimulatedRank(target=target, record=record, layers=layers, check_error=stored["check_error"])
    except (OSError, ValueError, KeyError, TypeError):  # never simulated, or written by another version
        return None


def _record_file(target: SimulationTarget) -> Path:
    """Return the file of a target's record, whose name depends on all that affects the record."""
    key = target.as_dict()
    run = {name: value for name, value in key["job"]["run"].items() if name not in _INDIFFERENT}
    job = {**key["job"], "run": run, "steps": None}
    # of the optimizer, only the type affects memory: not its learning rate and the like
    config = {**job["ds_config"], "optimizer": None, "scheduler": None}
    # the name of a user's own model does not identify its code, but the time of its file's last change does
    code = Path(*target.job.run.model.partition(":")[0].split(".")).with_suffix(".py")
    changed_ns = code.stat().st_mtime_ns if target.job.facts.own and code.is_file() else None
    optimizer = get(job["ds_config"], "optimizer.type")
    key |= {"job": {**job, "ds_config": config}, "optimizer": optimizer, "own": changed_ns}
    return result_file("forecasts", key)
