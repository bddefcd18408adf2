"""The memory gate: compares the memory that a job's ranks need with the free memory of their hosts, before a start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.app.forecasts import RankForecasts, forecast, least_bytes
from zerofit.app.resolve import ResolvedJob
from zerofit.app.room import Facts, HostRoom, room_here, rooms_of
from zerofit.app.simulation import KnobSimulations, PreparedSimulation
from zerofit.check.dotted import get
from zerofit.launch.hostfile import Host
from zerofit.simulate.endings import optional
from zerofit.simulate.forecast.assess import assess
from zerofit.simulate.forecast.processes import end_server
from zerofit.simulate.forecast.result import Simulation, severity
from zerofit.simulate.forecast.verdict import FITS, NOT, ORDER, WITHIN
from zerofit.simulate.memory.alloc_conf import alloc_conf_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import by_name
from zerofit.spec.errors import DOES_NOT_FIT, DoesNotFit, Problem, UserError
from zerofit.spec.events import Event, Reporter
from zerofit.spec.local_machine import gpu_memory
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, HOST_PROCESS_BYTES, HOST_RESERVE
from zerofit.spec.reservations import needed_by, one_at_a_time, release, reserve
from zerofit.spec.run import RunRequest
from zerofit.spec.run_folder import Job, MemoryForecast
from zerofit.spec.units import shown_bytes

ANYWAY = "--anyway starts it anyway"
OFFLOADS = ("offload_optimizer", "offload_param")
CHANGES = 3  # named in a refusal
NO_CHANGE = "no single change makes this run fit: see `zerofit plan`"
ANY = 1 << 62  # bytes; no limit
UNKNOWN = "cannot forecast the memory of this run"


@dataclass(frozen=True, kw_only=True)
class RoomVerdict:
    """Verdict on one host's memory for its ranks."""

    room: HostRoom
    word: str  # FITS, WITHIN or NOT
    message: str  # memory needed, in which phase, and free memory
    rank: int  # the rank that needs most


class MemoryGate:
    """Gate of one run: refuses a run that does not fit, and reserves memory for one that starts, until it is closed."""

    def __init__(
        self,
        report: Reporter,
        *,
        anyway: bool = False,
        hosts: Sequence[Host] | None = None,
        facts: Mapping[str, Facts] | None = None,
    ):
        """Use hosts in the order of their ranks (None: this machine) and the facts gathered from each.

        Without `facts` only the first host, this machine, is known; with an empty mapping none is. `anyway`: warn
        instead of refusing.
        """
        self._report, self._anyway, self._hosts, self._facts = report, anyway, hosts, facts
        self._run: Path | None = None

    def __call__(self, asked: RunRequest, resolved: ResolvedJob, output: Path) -> MemoryForecast | None:
        """Return the memory that a rank of this job will need; None, with a note, if it cannot be forecast.

        A forecast of the same job is reused if there is one. `output`: the run folder.

        Raises DoesNotFit if a host has too little free memory, or this machine too little free disk.
        """
        job, cluster = resolved.job, self._cluster(resolved)
        before = self._rooms(job.layout.world_size, output) if cluster else []
        too_much = self._too_much(resolved, before) if cluster and not self._anyway else None
        if cluster and too_much:
            problem = self._memory_problem(asked, resolved, cluster, too_much)
            self._refuse([problem, disk_problem(job, output, None)])
        found = self._forecast(asked, resolved, cluster, _free(cluster, before)) if cluster else None
        end_server()  # its memory is the ranks'
        problems: list[Problem | None] = [disk_problem(job, output, found)]
        if found is None:
            self._refuse(problems)
            return None
        with one_at_a_time():
            rooms = self._rooms(job.layout.world_size, output)
            verdicts = [judge(found, room) for room in rooms]
            worst = max(verdicts, key=lambda one: ORDER.index(one.word), default=None)
            if worst is None or worst.word != NOT or self._anyway:
                self._reserve(output, found, job)
        if worst and worst.word == NOT:
            problems.insert(0, self._memory_problem(asked, resolved, found.cluster, worst))
        elif worst and worst.word == WITHIN:
            self._report.warning(f"close to the limit: {worst.message}")
        self._refuse(problems)
        return replace(
            found.summary,
            free_bytes=min((room.gpu_bytes for room in rooms if room.gpu_bytes is not None), default=None),
            host_margin_bytes=min(
                (round(HOST_RESERVE * room.host_bytes / len(room.ranks)) for room in rooms), default=0
            ),
            judged_ranks=job.layout.world_size if self._anyway else sum(len(room.ranks) for room in rooms),
        )

    def free_on(self, cluster: Cluster, output: Path) -> Cluster:
        """Return the cluster with the free memory of the host that has the least per rank."""
        return _free(cluster, self._rooms(cluster.ranks, output) or [room_here(range(cluster.gpus), output)])

    def simulations(self, asked: RunRequest, resolved: ResolvedJob, free: Cluster) -> list[Simulation]:
        """Return simulations of the ranks that differ, judged by this memory; [] if the job cannot be simulated."""
        cluster = self._cluster(resolved)
        found = self._forecast(asked, resolved, cluster, free) if cluster else None
        return [assess(rank, free) for rank in (found.first, *found.stages)] if found else []

    def close(self) -> None:
        """Release what this process has reserved."""
        if self._run:
            release(self._run)

    def _too_much(self, resolved: ResolvedJob, rooms: Sequence[HostRoom]) -> RoomVerdict | None:
        """Return a refusal if not even parameters and optimizer state fit, which needs no simulation."""
        job = resolved.job
        ranks, needed = job.layout.world_size, least_bytes(job)
        there = _room_for(job, rooms, on_cpu=resolved.machine.accelerator == "cpu")
        if sum(len(room.ranks) for room in rooms) < ranks or needed <= there:
            return None
        message = (
            f"{job.run.model} needs at least {shown_bytes(needed)} for the parameters and optimizer state of {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'}; {shown_bytes(there)} are free "
            f"{rooms[0].place + rooms[0].beside_reserved() if len(rooms) == 1 else f'on {len(rooms)} hosts'}."
        )
        return RoomVerdict(room=rooms[0], word=NOT, message=message, rank=0)

    def _forecast(
        self, asked: RunRequest, resolved: ResolvedJob, cluster: Cluster, free: Cluster
    ) -> RankForecasts | None:
        if resolved.job.facts.task == "gan" or resolved.inputs is None:
            return None
        found = forecast(simulated(asked, resolved, cluster), free, self._report)
        if isinstance(found, Problem):
            self._report.note(f"{UNKNOWN}: {found.message}")
            return None
        return found

    def _cluster(self, resolved: ResolvedJob) -> Cluster | None:
        """Return a cluster with a device per rank, of the hosts' kind; None, with a note, if it is unknown."""
        ranks = resolved.job.layout.world_size
        if resolved.machine.accelerator == "cpu":
            return Cluster("cpu", gpus=ranks)
        gpus = [gpu for facts in (self._facts or {}).values() for gpu in facts["gpus"]]
        device = by_name(gpus[0]["name"], gpus[0]["total_bytes"]) if gpus else None
        try:
            return Cluster(device.kind, gpus=ranks) if device else replace(Cluster.here(), gpus=ranks)
        except UserError as error:  # a GPU that is not in the catalogue
            self._report.note(f"{UNKNOWN}: {error}")
            return None

    def _rooms(self, ranks: int, output: Path) -> list[HostRoom]:
        """Return the memory of every known host with some of the ranks."""
        if self._hosts is None:
            return [room_here(range(ranks), output)]
        if self._facts is None:
            return [room_here(range(min(ranks, self._hosts[0].slots)), output)]
        asked = [host for host in self._hosts if self._facts]
        rooms = [room for room in rooms_of(asked, self._facts) if room.ranks.start < ranks]
        return [replace(room, ranks=range(room.ranks.start, min(ranks, room.ranks.stop))) for room in rooms]

    def _reserve(self, output: Path, found: RankForecasts, job: Job) -> None:
        """Reserve memory on this machine; on other hosts the ranks' guards do it."""
        if self._hosts is not None:
            return
        self._run, ranks = output, job.layout.world_size
        each = found.summary.reserved_bytes + found.summary.beside_bytes
        gpus = [] if found.cluster.on_cpu else gpu_memory(ranks)
        needs = needed_by(range(ranks), ranks, asdict(found.summary))
        reserve(output, sum(needs), {gpu.uuid: each for gpu in gpus})

    def _memory_problem(
        self, asked: RunRequest, resolved: ResolvedJob, cluster: Cluster, worst: RoomVerdict
    ) -> Problem:
        """Return the refusal, with the nearest changes that would fit, each simulated."""
        if self._anyway:
            return Problem(kind=DOES_NOT_FIT, message=worst.message, where=worst.room.name)
        ranks, room = resolved.job.layout.world_size, worst.room
        nodes = -(-ranks // len(room.ranks))
        free = replace(cluster, gpus=len(room.ranks), nodes=nodes, host_memory=max(1, room.host_bytes))
        if not cluster.on_cpu and room.gpu_bytes is not None:
            free = replace(free, device_memory=max(1, room.gpu_bytes))
        self._report.warning(f"{worst.message} Nothing was started; searching for changes that would fit")

        def is_worth(job: Job) -> bool:
            return least_bytes(job) <= _room_for(job, [room] * nodes, on_cpu=cluster.on_cpu)

        look = replace(simulated(asked, resolved, free).knobs(worst.rank), is_worth=is_worth, times=False)
        return Problem(
            kind=DOES_NOT_FIT, message=worst.message, hint=f"{self._changes(look)}; {ANYWAY}", where=room.name
        )

    def _changes(self, look: KnobSimulations) -> str:
        """Return the changes that would fit, and notes on what could not be tried; no error here hides the refusal."""
        left_out: list[str] = []

        def hear(event: Event) -> None:
            if event.kind == "note":
                left_out.append(event.text)
            else:
                self._report.status(event.text)

        rows = optional(lambda: look(hear), (), "knobs", Reporter(hear))
        fitting = sorted((row for row in rows if row.fits), key=lambda row: -row.reserved_bytes)[:CHANGES]
        changes = "; ".join(f"{row.change} ({shown_bytes(row.reserved_bytes)})" for row in fitting)
        nothing = "see `zerofit plan` for what would fit" if left_out else NO_CHANGE
        return "; ".join([f"these would fit: {changes}" if fitting else nothing, *left_out])

    def _refuse(self, problems: Sequence[Problem | None]) -> None:
        found = [problem for problem in problems if problem]
        if found and not self._anyway:
            self.close()
            raise DoesNotFit(*found)
        for problem in found:
            self._report.warning(f"{problem.message}; started anyway")


def _free(cluster: Cluster, rooms: Sequence[HostRoom]) -> Cluster:
    """Return nodes with the memory of the host that has least per rank; unchanged if no host is known."""
    if not rooms:
        return cluster
    least = min(rooms, key=lambda room: room.host_bytes // len(room.ranks))
    device = min((room.gpu_bytes for room in rooms if room.gpu_bytes is not None), default=None)
    if cluster.on_cpu:
        device = (least.host_bytes - CPU_LIBRARY_BYTES) // len(least.ranks)
    device_memory = None if device is None else max(1, device)
    return replace(cluster, host_memory=max(1, least.host_bytes), device_memory=device_memory)


def _room_for(job: Job, rooms: Sequence[HostRoom], *, on_cpu: bool) -> int:
    """Return the memory of some hosts that a job's layout can use; no limit if it offloads to disk."""
    places = {get(job.ds_config, f"zero_optimization.{part}.device") for part in OFFLOADS}
    gpus = [len(room.ranks) * room.gpu_bytes for room in rooms if room.gpu_bytes is not None]
    if "nvme" in places or (not on_cpu and len(gpus) < len(rooms)):
        return ANY
    host = sum(room.host_bytes for room in rooms) if on_cpu or "cpu" in places else 0
    return host + (0 if on_cpu else sum(gpus))


def simulated(asked: RunRequest, resolved: ResolvedJob, cluster: Cluster) -> PreparedSimulation:
    """Return a resolved run prepared for simulation on these devices."""
    fields = {"data": resolved.job.run.data, "ranks": resolved.job.layout.world_size}
    asked = replace(asked, run=asked.run.model_copy(update=fields))
    found: dict[str, Any] = {"job": resolved.job, "inputs": resolved.inputs, "ds_source": resolved.ds_source}
    conf = alloc_conf_of(os.environ)  # the ranks inherit it
    return PreparedSimulation(asked=asked, cluster=cluster, image=None, alloc_conf=conf, **found)


def judge(found: RankForecasts, room: HostRoom) -> RoomVerdict:
    """Return the verdict for the ranks of one host: their devices and, with GPUs, the host's memory."""
    verdicts = [_device_verdict(found, room)]
    if not found.cluster.on_cpu:
        verdicts.append(_host_verdict(found, room))
    return max(verdicts, key=lambda one: ORDER.index(one.word))


def _device_verdict(found: RankForecasts, room: HostRoom) -> RoomVerdict:
    """Return the verdict on the devices; on a CPU ranks share the host's memory in proportion to their needs."""
    representing = {id(rank): rank for rank in map(found.of, room.ranks)}.values()
    cluster, shares = replace(found.cluster, gpus=len(room.ranks), host_memory=ANY), dict[int, int]()
    if found.cluster.on_cpu:
        total = sum(found.host_need(found.of(rank)) for rank in room.ranks)
        free = max(0, room.host_bytes - CPU_LIBRARY_BYTES)
        shares = {id(rank): max(1, free * found.host_need(rank) // total) for rank in representing}
    elif room.gpu_bytes is not None:
        shares = {id(rank): max(1, room.gpu_bytes) for rank in representing}
    assessed = [assess(rank, replace(cluster, device_memory=shares.get(id(rank)))) for rank in representing]
    worst = max(assessed, key=severity)
    here = room.place if len(room.ranks) == 1 else f"for each of {len(room.ranks)} ranks {room.place}"
    here += room.beside_reserved(on_gpus=not found.cluster.on_cpu)
    there = f"{shown_bytes(worst.device_total_bytes)} are free {here}"
    message = f"{_needs(worst)}; {there}. {worst.because}"
    return RoomVerdict(room=room, word=worst.verdict, message=message, rank=worst.rank)


def _needs(worst: Simulation) -> str:
    """Return the memory that a rank needs, its phase, and the largest part of it."""
    kind, size = max(worst.breakdown.items(), key=lambda pair: pair[1])
    total = worst.reserved_bytes + sum(one.bytes for one in worst.overheads)
    phase = worst.peak_phase if worst.peak_step < 0 else f"{worst.peak_phase} of step {worst.peak_step + 1}"
    return f"{worst.run.model} needs {shown_bytes(total)} per rank in {phase} ({shown_bytes(size)} are {kind})"


def _host_verdict(found: RankForecasts, room: HostRoom) -> RoomVerdict:
    """Return the verdict on the memory of a host with GPUs, in the phase in which its ranks need most."""
    ranks, phases = [found.of(rank).record for rank in room.ranks], dict[str, int]()
    for record in ranks:
        for name, size in record.host_phases.items():
            phases[name] = phases.get(name, 0) + size
    phase, tensors = max(phases.items(), key=lambda pair: pair[1])
    processes = HOST_PROCESS_BYTES * len(ranks)
    needed, pinned = tensors + processes, sum(record.host["pinned"] for record in ranks)
    word = NOT if needed > room.host_bytes else FITS
    if word == FITS and needed > room.host_bytes * (1 - HOST_RESERVE):
        word = WITHIN
    model, count = found.first.target.job.run.model, len(ranks)
    message = (
        f"{model} needs {shown_bytes(needed)} of host memory for {count} {'rank' if count == 1 else 'ranks'} in "
        f"{phase}: {shown_bytes(tensors)} of tensors, with at most {shown_bytes(pinned)} pinned, and "
        f"{shown_bytes(processes)} of processes; {shown_bytes(room.host_bytes)} are free {room.place}"
        f"{room.beside_reserved()}."
    )
    return RoomVerdict(room=room, word=word, message=message, rank=found.of(room.ranks[0]).target.rank)


def disk_problem(job: Job, output: Path, found: RankForecasts | None) -> Problem | None:
    """Return a problem if a disk has too little space for the model and a checkpoint, or for offloading."""
    saved = 0 if job.run.save_every == "0" else job.facts.checkpoint_bytes(job.precision)
    wanted = [(output, saved + job.facts.weight_bytes(job.precision))]
    swapped = sum(found.of(rank).record.nvme_bytes for rank in range(job.layout.world_size)) if found else 0
    for part in OFFLOADS:
        path = get(job.ds_config, f"zero_optimization.{part}.nvme_path")
        if swapped and path:
            wanted.append((Path(path), swapped))
            break
    for path, needed in wanted:
        there = next(place for place in (path, *path.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(there).free
        if free < needed:
            what = "offloading to disk" if path != output else "the model with a checkpoint" if saved else "the model"
            message = f"{what} needs {shown_bytes(needed)}, and {there} has {shown_bytes(free)} free"
            hint = f"free space, or use another disk; {ANYWAY}"
            return Problem(kind=DOES_NOT_FIT, message=message, hint=hint, where=str(path))
    return None
