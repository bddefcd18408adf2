"""The memory gate: what the ranks of a job need, held against what is free on this machine, before any rank starts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zerofit.app.planning.profiles import code_digest
from zerofit.app.resolve import ResolvedJob
from zerofit.app.simulation import PreparedSimulation, first_ranks
from zerofit.check.dotted import get
from zerofit.simulate.assess import assess
from zerofit.simulate.processes import end_server
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.simulate.result import Simulation
from zerofit.simulate.run import SimulatedRank
from zerofit.simulate.run import simulate as simulate_ranks
from zerofit.simulate.verdict import FITS, NOT
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import DoesNotFit, Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root, write_json
from zerofit.spec.local_machine import free_gpu_bytes, free_host_bytes, versions
from zerofit.spec.overhead import HOST_RESERVE, REPLAYED
from zerofit.spec.run import RunRequest
from zerofit.spec.run_folder import Job, MemoryForecast
from zerofit.spec.units import shown_bytes

ANYWAY = "--anyway starts it all the same"
CHANGES = 3  # that a refusal names
# fields of a run on which memory does not depend, so that one simulation serves runs that differ in them
_INDIFFERENT = {"output", "resume", "seed", "lr", "min_lr", "steps", "epochs", "data", "data_root", "text_field"}
_INDIFFERENT |= {"save_every", "save_async", "keep_last", "keep_every", "eval_every", "eval_samples", "log_every"}
_INDIFFERENT |= {"callbacks", "tensorboard", "wandb", "heartbeat_timeout", "tokenizer"}


def check_room(
    asked: RunRequest, resolved: ResolvedJob, output: Path, *, report: Reporter, anyway: bool = False
) -> MemoryForecast | None:
    """Return the memory that a rank of this job will need; None where it cannot be known, which is said.

    A job that was simulated before is answered from what was kept, in a fraction of a second. `output`: the run
    folder. `anyway`: warn where the job would be refused.

    Raises DoesNotFit where memory or disk that is free on this machine is not enough.
    """
    job = resolved.job
    simulations = _simulations(asked, resolved, report)
    problems = [_disk_problem(job, output, simulations)]
    if simulations:
        worst = max(simulations, key=lambda one: (one.verdict == NOT, one.verdict != FITS, one.reserved_bytes))
        if worst.verdict == NOT:
            problems.append(_memory_problem(asked, resolved, worst, report, anyway))
        elif worst.verdict != FITS:
            report.warning(f"{_needs(worst)}: within the margin of the forecast. {worst.because}")
    for problem in filter(None, problems):
        if not anyway:
            raise DoesNotFit(problem)
        report.warning(f"{problem.message}; started all the same")
    return _forecast(simulations) if simulations else None


def _simulations(asked: RunRequest, resolved: ResolvedJob, report: Reporter) -> list[Simulation]:
    """Return one rank of each pipeline stage, assessed against what is free; none where the job cannot be simulated."""
    job, unknown = resolved.job, "the memory of this run is not forecast"
    if job.facts.task == "gan" or resolved.inputs is None:
        return []
    try:
        whole = replace(Cluster.here(), gpus=job.layout.world_size)
        free = replace(whole, host_memory=free_host_bytes(), device_memory=free_gpu_bytes(whole.gpus))
    except UserError as error:  # a GPU that is not in the catalogue
        report.note(f"{unknown}: {error}")
        return []
    prepared = _prepared(asked, resolved, whole)
    ranks = _simulate_or_recall([prepared.target(rank) for rank in first_ranks(job)], report)
    for problem in ranks:
        if isinstance(problem, Problem):
            report.note(f"{unknown}: {problem.message}")
            return []
    return [assess(rank, free) for rank in ranks if isinstance(rank, SimulatedRank)]


def _prepared(asked: RunRequest, resolved: ResolvedJob, cluster: Cluster) -> PreparedSimulation:
    asked = replace(asked, run=asked.run.model_copy(update={"data": resolved.job.run.data}))
    found: dict[str, Any] = {"job": resolved.job, "inputs": resolved.inputs, "ds_source": resolved.ds_source}
    return PreparedSimulation(asked=asked, cluster=cluster, image=None, **found)


def _simulate_or_recall(targets: Sequence[SimulationTarget], report: Reporter) -> list[SimulatedRank | Problem]:
    """Return each target's rank, from the cache or simulated now and kept."""
    files = [_file(target) for target in targets]
    found: list[SimulatedRank | Problem | None] = [
        _recall(target, file) for target, file in zip(targets, files, strict=True)
    ]
    missing = [n for n, one in enumerate(found) if one is None]
    new = simulate_ranks([targets[n] for n in missing], lambda text: report.status(f"memory: {text}"))
    end_server()  # its memory is the ranks'
    for n, one in zip(missing, new, strict=True):
        found[n] = one
        if isinstance(one, SimulatedRank):
            record = _RECORD.dump_python(replace(one.record, timeline=(), events=None), mode="json")
            files[n].parent.mkdir(parents=True, exist_ok=True)
            write_json(files[n], {"record": record, "layers": one.layers, "check_error": one.check_error})
    return [one for one in found if one is not None]


_RECORD = TypeAdapter(RankRecord)


def _recall(target: SimulationTarget, file: Path) -> SimulatedRank | None:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        record, layers = _RECORD.validate_python(kept["record"]), tuple(kept["layers"])
        return SimulatedRank(target=target, record=record, layers=layers, check_error=kept["check_error"])
    except (OSError, ValueError, KeyError, TypeError):  # never simulated, or kept by another version
        return None


def _file(target: SimulationTarget) -> Path:
    """Return where a target's record is kept: by everything that it depends on, the code that made it included."""
    plain = target.as_dict()
    run = {name: value for name, value in plain["job"]["run"].items() if name not in _INDIFFERENT}
    job = {**plain["job"], "run": run, "steps": None}
    config = {**job["ds_config"], "optimizer": None, "scheduler": None}
    optimizer = get(job["ds_config"], "optimizer.type")
    plain |= {"job": {**job, "ds_config": config}, "optimizer": optimizer, "own": _own_code(target.job)}
    key = json.dumps([plain, versions(), code_digest(__name__)], sort_keys=True, default=str)
    return cache_root() / "forecasts" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _own_code(job: Job) -> int | None:
    """Return when the user's own model was last changed, since its name says nothing of its code."""
    path = Path(*job.run.model.partition(":")[0].split(".")).with_suffix(".py")
    return path.stat().st_mtime_ns if job.facts.own and path.is_file() else None


def _needs(worst: Simulation) -> str:
    """Return what a rank needs, in which phase, and most of what."""
    kind, size = max(worst.breakdown.items(), key=lambda pair: pair[1])
    total = worst.reserved_bytes + sum(one.bytes for one in worst.overheads)
    phase = worst.peak_phase if worst.peak_step < 0 else f"{worst.peak_phase} of step {worst.peak_step + 1}"
    return f"{worst.run.model} needs {shown_bytes(total)} a rank in {phase}, {shown_bytes(size)} of it {kind}"


def _memory_problem(
    asked: RunRequest, resolved: ResolvedJob, worst: Simulation, report: Reporter, anyway: bool
) -> Problem:
    """Return the refusal, with the nearest changes that would fit, each simulated."""
    ranks = resolved.job.layout.world_size
    here = "on this machine" if ranks == 1 else f"for each of {ranks} ranks on this machine"
    message = f"{_needs(worst)}; {shown_bytes(worst.device_total_bytes)} are free {here}. {worst.because}"
    if anyway:
        return Problem(kind="does-not-fit", message=message)
    whole = replace(Cluster.here(), gpus=ranks)
    free = replace(whole, host_memory=free_host_bytes(), device_memory=free_gpu_bytes(ranks))
    rows = _prepared(asked, resolved, free).knobs(worst.rank)(lambda event: report.status(event.text))
    fitting = sorted((row for row in rows if row.fits), key=lambda row: -row.reserved_bytes)[:CHANGES]
    changes = "; ".join(f"{row.change} ({shown_bytes(row.reserved_bytes)})" for row in fitting)
    hint = f"these would fit: {changes}" if fitting else "no single change of this run would fit: see `zerofit plan`"
    return Problem(kind="does-not-fit", message=message, hint=f"{hint}; {ANYWAY}")


def _disk_problem(job: Job, output: Path, simulations: Sequence[Simulation]) -> Problem | None:
    """Return what the disks lack: for one checkpoint, or for what offloading writes."""
    wanted = [(output, 0 if job.run.save_every == "0" else job.facts.checkpoint_bytes(job.precision))]
    swapped = sum(one.nvme_bytes for one in simulations) * job.layout.world_size // max(1, len(simulations))
    for part in ("offload_optimizer", "offload_param"):
        path = get(job.ds_config, f"zero_optimization.{part}.nvme_path")
        if swapped and path:
            wanted.append((Path(path), swapped))
            break
    for path, needed in wanted:
        there = next(place for place in (path, *path.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(there).free
        if free < needed:
            what = "a checkpoint" if path == output else "offloading to disk"
            message = f"{what} takes {shown_bytes(needed)}, and {there} has {shown_bytes(free)} free"
            hint = f"make room, or name another disk; {ANYWAY}"
            return Problem(kind="does-not-fit", message=message, hint=hint, where=str(path))
    return None


def _forecast(simulations: Sequence[Simulation]) -> MemoryForecast:
    """Return the most that any stage needs in each phase."""
    phases: dict[str, int] = {}
    for one in simulations:
        for phase in one.phases:
            phases[phase.name] = max(phases.get(phase.name, 0), phase.peak_bytes)
    return MemoryForecast(
        phases=phases,
        reserved_bytes=max(one.reserved_bytes for one in simulations),
        beside_bytes=max(sum(part.bytes for part in one.overheads) for one in simulations),
        margin_bytes=max(map(_margin, simulations)),
        free_bytes=min(one.device_total_bytes for one in simulations),
        host_bytes=max(sum(one.host_bytes.values()) for one in simulations),
        pinned_bytes=max(one.host_bytes["pinned"] for one in simulations),
        host_margin_bytes=round(HOST_RESERVE * simulations[0].host_total_bytes / simulations[0].world_size),
    )


def _margin(one: Simulation) -> int:
    """Return what the verdict keeps free beside the reserved peak and the middle of what lies beside it."""
    return round(REPLAYED * one.reserved_bytes) + sum(part.high_bytes - part.bytes for part in one.overheads)
