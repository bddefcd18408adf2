"""Compare the memory that a job's ranks need with their hosts' free memory before a start."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zerofit.app.job.resolve import ResolvedJob
from zerofit.app.simulation.runs import KnobSimulations, PreparedSimulation
from zerofit.app.training.free_memory import Facts, HostMemory, memory_here, memory_of_hosts
from zerofit.app.training.memory_forecast import RankForecasts, forecast_ranks, least_bytes
from zerofit.check.dotted import get
from zerofit.checkpoint.store import expected_bytes
from zerofit.launch.hostfile import Host
from zerofit.simulate.endings import MAY_FIT, optional
from zerofit.simulate.forecast.assess import assess
from zerofit.simulate.forecast.processes import end_server
from zerofit.simulate.forecast.result import FITS, NOT, ORDER, WITHIN, Simulation, severity
from zerofit.simulate.memory.alloc_conf import alloc_conf_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import by_name
from zerofit.spec.errors import DOES_NOT_FIT, DoesNotFit, Problem, UserError
from zerofit.spec.events import Event, Reporter
from zerofit.spec.local_machine import gpu_memory
from zerofit.spec.overhead import CPU_LIBRARY_BYTES, HOST_PROCESS_BYTES, HOST_RESERVE
from zerofit.spec.reservations import needed_by, release, reservations_locked, reserve
from zerofit.spec.run import RunRequest
from zerofit.spec.run_folder import Job, MemoryForecast
from zerofit.spec.units import counted, shown_bytes

ANYWAY = "--anyway starts it anyway"
OFFLOADS = ("offload_optimizer", "offload_param")
CHANGES = 3  # named in a refusal
NO_CHANGE = "no single change makes this run fit: see `zerofit plan`"
ANY = 1 << 62  # bytes; no limit
UNKNOWN = "cannot forecast the memory of this run"


@dataclass(frozen=True, kw_only=True)
class HostVerdict:
    """Whether the memory of one host is enough for its ranks."""

    host: HostMemory
    word: str  # FITS, WITHIN or NOT
    message: str  # memory needed, in which phase, and free memory
    rank: int  # the rank that needs most


# Before a run starts, its ranks' forecast is compared with the free memory of every host:
#
#   1. Parameters and optimizer state alone need more than all hosts have     refused in milliseconds (`least_bytes`)
#   2. The engine is simulated for each rank that differs (`memory_forecast`) seconds, or a cached record
#   3. For each host: needs of its ranks <= free memory - reservations of other runs
#          GPU:  what torch reserves + context, for each device; tensors + pinned memory + processes, for the host
#          CPU:  the host's memory is divided among its ranks in proportion to their needs
#   4. The memory is reserved, under a lock, so a run that starts at the same time does not count on it (`reservations`)
#
# A refusal names the changes that would fit. Each of them is simulated, so a suggestion is never a guess.


class MemoryGate:
    """Refuse a run that does not fit, else reserve its memory until the gate is closed."""

    def __init__(
        self,
        report: Reporter,
        *,
        anyway: bool = False,
        hosts: Sequence[Host] | None = None,
        facts: Mapping[str, Facts] | None = None,
    ):
        """`hosts`: in the order of their ranks; this machine if None. `facts`: hosts' reports.

        If `hosts` is given and `facts` is None, only the first host, this machine, is checked. If `facts` is empty,
        no host is checked. `anyway`: warn instead of refusing.
        """
        self._report, self._anyway, self._hosts, self._facts = report, anyway, hosts, facts
        self._run: Path | None = None

    def __call__(self, request: RunRequest, resolved: ResolvedJob, output: Path) -> MemoryForecast | None:
        """Return the memory that a rank of this job will need; None, with a note, if it is unknown.

        An earlier forecast of the same job is reused. `output`: the run folder.

        Raises DoesNotFit if a host has too little free memory, or if a disk of this machine has too little free space.
        """
        # The check has three stages, from cheap to exact: a lower bound by a formula, a simulation, and the free
        # memory. A run that cannot fit is refused by the first stage within milliseconds.
        job, cluster = resolved.job, self._cluster(resolved)
        hosts = self._host_memory(job.layout.world_size, output) if cluster else []
        state_verdict = self._state_verdict(resolved, hosts) if cluster and not self._anyway else None
        if cluster and state_verdict:
            problem = self._memory_problem(request, resolved, cluster, state_verdict)
            self._refuse([problem, disk_problem(job, output, None)])
        forecasts = self._forecast(request, resolved, cluster, _with_free(cluster, hosts)) if cluster else None
        end_server()  # the import of torch uses memory that the ranks need
        problems: list[Problem | None] = [disk_problem(job, output, forecasts)]
        if forecasts is None:
            self._refuse(problems)
            return None
        # The simulation takes seconds, in which another run may have started. So the free memory is read again, and
        # under the lock no other run can reserve it between this reading and our reservation.
        with reservations_locked():
            hosts = self._host_memory(job.layout.world_size, output)
            verdicts = [judge(forecasts, host) for host in hosts]
            worst = max(verdicts, key=lambda verdict: ORDER.index(verdict.word), default=None)
            if worst is None or worst.word != NOT or self._anyway:
                self._reserve(output, forecasts, job)
        if worst and worst.word == NOT:
            problems.insert(0, self._memory_problem(request, resolved, forecasts.cluster, worst))
        elif worst and worst.word == WITHIN:
            self._report.warning(f"close to the limit: {worst.message}")
        self._refuse(problems)
        return replace(
            forecasts.summary,
            free_bytes=min((host.gpu_bytes for host in hosts if host.gpu_bytes is not None), default=None),
            host_margin_bytes=min(
                (round(HOST_RESERVE * host.host_bytes / len(host.ranks)) for host in hosts), default=0
            ),
            judged_ranks=job.layout.world_size if self._anyway else sum(len(host.ranks) for host in hosts),
        )

    def free_on(self, cluster: Cluster, output: Path) -> Cluster:
        """Return the cluster with the free memory of the host that has the least memory per rank."""
        hosts = self._host_memory(cluster.ranks, output) or [memory_here(range(cluster.gpus), output)]
        return _with_free(cluster, hosts)

    def simulations(self, request: RunRequest, resolved: ResolvedJob, free: Cluster) -> list[Simulation]:
        """Return simulations of the ranks that differ, with verdicts for the memory of `free`.

        [] if the job cannot be simulated.
        """
        cluster = self._cluster(resolved)
        forecasts = self._forecast(request, resolved, cluster, free) if cluster else None
        return [assess(rank, free) for rank in (forecasts.first, *forecasts.stages)] if forecasts else []

    def close(self) -> None:
        """Release the memory that this process has reserved."""
        if self._run:
            release(self._run)

    def _state_verdict(self, resolved: ResolvedJob, hosts: Sequence[HostMemory]) -> HostVerdict | None:
        """Return a refusal if not even parameters and optimizer state fit. This needs no simulation."""
        job = resolved.job
        ranks, needed = job.layout.world_size, least_bytes(job)
        free = _usable_bytes(job, hosts, on_cpu=resolved.machine.accelerator == "cpu")
        # An unchecked host may have any amount of free memory, so the total proves nothing.
        some_unknown = sum(len(host.ranks) for host in hosts) < ranks
        if some_unknown or needed <= free:
            return None
        message = (
            f"{job.run.model} needs at least {shown_bytes(needed)} for the parameters and optimizer state of "
            f"{counted(ranks, 'rank')}; {shown_bytes(free)} are free "
            f"{hosts[0].place + hosts[0].reserved_note() if len(hosts) == 1 else f'on {len(hosts)} hosts'}."
        )
        return HostVerdict(host=hosts[0], word=NOT, message=message, rank=0)

    def _forecast(
        self, request: RunRequest, resolved: ResolvedJob, cluster: Cluster, free: Cluster
    ) -> RankForecasts | None:
        if resolved.job.facts.task == "gan" or resolved.inputs is None:
            return None
        forecasts = forecast_ranks(prepared_for(request, resolved, cluster), free, self._report)
        if isinstance(forecasts, Problem):
            self._report.note(f"{UNKNOWN}: {forecasts.message}")
            return None
        return forecasts

    def _cluster(self, resolved: ResolvedJob) -> Cluster | None:
        """Return a cluster with one device per rank, of the kind of the hosts' devices.

        None, with a note, if zerofit does not know the device.
        """
        ranks = resolved.job.layout.world_size
        if resolved.machine.accelerator == "cpu":
            return Cluster("cpu", gpus=ranks)
        gpus = [gpu for facts in (self._facts or {}).values() for gpu in facts["gpus"]]
        device = by_name(gpus[0]["name"], gpus[0]["total_bytes"]) if gpus else None
        try:
            return Cluster(device.kind, gpus=ranks) if device else replace(Cluster.here(), gpus=ranks)
        except UserError as error:  # a GPU that is not in the catalog
            self._report.note(f"{UNKNOWN}: {error}")
            return None

    def _host_memory(self, ranks: int, output: Path) -> list[HostMemory]:
        if self._hosts is None:
            return [memory_here(range(ranks), output)]
        if self._facts is None:
            return [memory_here(range(min(ranks, self._hosts[0].slots)), output)]
        # A job may use fewer ranks than the hosts have slots: the last hosts then run fewer ranks, or none.
        checked = self._hosts if self._facts else ()
        hosts = [host for host in memory_of_hosts(checked, self._facts) if host.ranks.start < ranks]
        return [replace(host, ranks=range(host.ranks.start, min(ranks, host.ranks.stop))) for host in hosts]

    def _reserve(self, output: Path, forecasts: RankForecasts, job: Job) -> None:
        """Reserve memory on this machine. On other hosts, the guards of the ranks reserve it."""
        if self._hosts is not None:
            return
        self._run, ranks, summary = output, job.layout.world_size, forecasts.summary
        gpus = [] if forecasts.cluster.on_cpu else gpu_memory(ranks)
        needs = needed_by(range(ranks), ranks, asdict(summary))
        reserve(output, sum(needs), {gpu.uuid: summary.reserved_bytes + summary.beside_bytes for gpu in gpus})

    def _memory_problem(
        self, request: RunRequest, resolved: ResolvedJob, cluster: Cluster, worst: HostVerdict
    ) -> Problem:
        """Return the refusal, with the changes that would fit according to a simulation of each."""
        if self._anyway:
            return Problem(kind=DOES_NOT_FIT, message=worst.message, where=worst.host.name)
        ranks, host = resolved.job.layout.world_size, worst.host
        # Changes are simulated as if all hosts had the free memory of the worst host.
        nodes = -(-ranks // len(host.ranks))
        free = replace(cluster, gpus=len(host.ranks), nodes=nodes, host_memory=max(1, host.host_bytes))
        if not cluster.on_cpu and host.gpu_bytes is not None:
            free = replace(free, device_memory=max(1, host.gpu_bytes))
        self._report.warning(f"{worst.message} Nothing was started; searching for changes that would fit")

        def is_worth(job: Job) -> bool:
            return least_bytes(job) <= _usable_bytes(job, [host] * nodes, on_cpu=cluster.on_cpu)

        prepared = prepared_for(request, resolved, free)
        knobs = KnobSimulations(prepared=prepared, rank=worst.rank, is_worth=is_worth, times=False)
        hint = f"{self._changes(knobs)}; {ANYWAY}"
        return Problem(kind=DOES_NOT_FIT, message=worst.message, hint=hint, where=host.name)

    def _changes(self, knobs: KnobSimulations) -> str:
        """Return the changes that would fit, and notes on changes that could not be tried."""
        failures: list[str] = []

        def on_event(event: Event) -> None:
            if event.kind == "note":
                failures.append(event.text)
            else:
                self._report.status(event.text)

        # `optional` turns an error into a note, so that it does not hide the refusal
        rows = optional(lambda: knobs(on_event), (), MAY_FIT, Reporter(on_event))
        fitting = sorted((row for row in rows if row.fits), key=lambda row: -row.reserved_bytes)[:CHANGES]
        changes = "; ".join(f"{row.change} ({shown_bytes(row.reserved_bytes)})" for row in fitting)
        nothing = "see `zerofit plan` for what would fit" if failures else NO_CHANGE
        return "; ".join([f"these would fit: {changes}" if fitting else nothing, *failures])

    def _refuse(self, problems: Sequence[Problem | None]) -> None:
        refused = [problem for problem in problems if problem]
        if refused and not self._anyway:
            self.close()
            raise DoesNotFit(*refused)
        for problem in refused:
            self._report.warning(f"{problem.message}; started anyway")


def _with_free(cluster: Cluster, hosts: Sequence[HostMemory]) -> Cluster:
    """Return the cluster with the memory of the host that has the least per rank."""
    if not hosts:
        return cluster
    # All ranks run the same layout, so the host with the least memory per rank decides.
    least = min(hosts, key=lambda host: host.host_bytes // len(host.ranks))
    device = min((host.gpu_bytes for host in hosts if host.gpu_bytes is not None), default=None)
    if cluster.on_cpu:
        device = (least.host_bytes - CPU_LIBRARY_BYTES) // len(least.ranks)
    device_memory = None if device is None else max(1, device)
    return replace(cluster, host_memory=max(1, least.host_bytes), device_memory=device_memory)


def _usable_bytes(job: Job, hosts: Sequence[HostMemory], *, on_cpu: bool) -> int:
    """Return how much of the hosts' memory a job's layout can use; ANY if it offloads to disk."""
    offloads = {get(job.ds_config, f"zero_optimization.{part}.device") for part in OFFLOADS}
    gpus = [len(host.ranks) * host.gpu_bytes for host in hosts if host.gpu_bytes is not None]
    # With a disk to offload to, memory is no limit. Without the free memory of all GPUs, no limit is known.
    if "nvme" in offloads or (not on_cpu and len(gpus) < len(hosts)):
        return ANY
    host_bytes = sum(host.host_bytes for host in hosts) if on_cpu or "cpu" in offloads else 0
    return host_bytes + (0 if on_cpu else sum(gpus))


def prepared_for(request: RunRequest, resolved: ResolvedJob, cluster: Cluster) -> PreparedSimulation:
    """Prepare a resolved run for simulation on the devices of `cluster`."""
    request = request.updated(data=resolved.job.run.data, ranks=resolved.job.layout.world_size)
    alloc_conf = alloc_conf_of(os.environ)  # the ranks inherit it
    return PreparedSimulation(request=request, cluster=cluster, resolved=resolved, alloc_conf=alloc_conf)


def judge(forecasts: RankForecasts, host: HostMemory) -> HostVerdict:
    """Return the verdict for the ranks of one host: its devices and, with GPUs, its memory."""
    # On a CPU the device's memory is the host's, so the first verdict covers both.
    verdicts = [_device_verdict(forecasts, host)]
    if not forecasts.cluster.on_cpu:
        verdicts.append(_host_verdict(forecasts, host))
    return max(verdicts, key=lambda verdict: ORDER.index(verdict.word))


def _device_verdict(forecasts: RankForecasts, host: HostMemory) -> HostVerdict:
    """Return the verdict on the devices of one host."""
    simulated = {id(rank): rank for rank in map(forecasts.of, host.ranks)}.values()  # several ranks share a GPU
    cluster, shares = replace(forecasts.cluster, gpus=len(host.ranks), host_memory=ANY), dict[int, int]()
    if forecasts.cluster.on_cpu:
        # On a CPU, ranks share the host's memory. Each may use a share in proportion to its need.
        total = sum(forecasts.host_need(forecasts.of(rank)) for rank in host.ranks)
        free = max(0, host.host_bytes - CPU_LIBRARY_BYTES)
        shares = {id(rank): max(1, free * forecasts.host_need(rank) // total) for rank in simulated}
    elif host.gpu_bytes is not None:
        shares = {id(rank): max(1, host.gpu_bytes) for rank in simulated}
    assessed = [assess(rank, replace(cluster, device_memory=shares.get(id(rank)))) for rank in simulated]
    worst = max(assessed, key=severity)
    place = host.place if len(host.ranks) == 1 else f"for each of {len(host.ranks)} ranks {host.place}"
    place += host.reserved_note(on_gpus=not forecasts.cluster.on_cpu)
    kind, size = max(worst.breakdown.items(), key=lambda pair: pair[1])
    total = worst.reserved_bytes + sum(part.bytes for part in worst.overheads)
    phase = worst.peak_phase if worst.peak_step < 0 else f"{worst.peak_phase} of step {worst.peak_step + 1}"
    message = (
        f"{worst.run.model} needs {shown_bytes(total)} per rank in {phase} ({shown_bytes(size)} are {kind}); "
        f"{shown_bytes(worst.device_total_bytes)} are free {place}. {worst.because}"
    )
    return HostVerdict(host=host, word=worst.verdict, message=message, rank=worst.rank)


def _host_verdict(forecasts: RankForecasts, host: HostMemory) -> HostVerdict:
    """Return the verdict on a GPU host's memory, in the phase in which its ranks need the most."""
    records, phases = [forecasts.of(rank).record for rank in host.ranks], Counter[str]()
    for record in records:  # ranks go through the phases together, so the sum per phase counts
        phases.update(record.host_phases)
    phase, tensors = max(phases.items(), key=lambda pair: pair[1])
    processes = HOST_PROCESS_BYTES * len(records)
    if forecasts.cluster.device.unified_memory:
        tensors += (forecasts.summary.reserved_bytes + forecasts.summary.beside_bytes) * len(records)
    needed, pinned = tensors + processes, sum(record.host["pinned"] for record in records)
    word = NOT if needed > host.host_bytes else FITS
    if word == FITS and needed > host.host_bytes * (1 - HOST_RESERVE):
        word = WITHIN
    model, count = forecasts.first.target.job.run.model, len(records)
    message = (
        f"{model} needs {shown_bytes(needed)} of host memory in {phase}; {shown_bytes(host.host_bytes)} are free "
        f"{host.place}{host.reserved_note()}. {count} {'rank needs' if count == 1 else 'ranks need'} "
        f"{shown_bytes(tensors)} for tensors (at most {shown_bytes(pinned)} pinned) and {shown_bytes(processes)} "
        f"for processes."
    )
    return HostVerdict(host=host, word=word, message=message, rank=forecasts.of(host.ranks[0]).target.rank)


def disk_problem(job: Job, output: Path, forecasts: RankForecasts | None) -> Problem | None:
    """Return a problem if a disk is too small for the model and a checkpoint, or for offloading."""
    saved = 0 if job.run.save_every == "0" else expected_bytes(job)
    # Every run keeps at least one checkpoint, if it saves any, and writes the model at its end.
    needs = [(output, saved + job.facts.weight_bytes(job.precision))]
    offloaded = sum(forecasts.of(rank).record.nvme_bytes for rank in range(job.layout.world_size)) if forecasts else 0
    for part in OFFLOADS:
        path = get(job.ds_config, f"zero_optimization.{part}.nvme_path")
        if offloaded and path:
            needs.append((Path(path), offloaded))
            break
    for path, needed in needs:
        folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(folder).free
        if free < needed:
            what = "offloading to disk" if path != output else "the model with a checkpoint" if saved else "the model"
            message = f"{what} needs {shown_bytes(needed)}, and {folder} has {shown_bytes(free)} free"
            hint = f"delete files, or use another disk; {ANYWAY}"
            return Problem(kind=DOES_NOT_FIT, message=message, hint=hint, where=str(path))
    return None
