"""Turn a simulated rank's record into a result: the rank's memory, and whether it fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerofit.models.catalog import source_of
from zerofit.simulate.forecast.result import PeakLocation, RankAllocations, SimulatedRun, SimulatedScript, Simulation
from zerofit.simulate.forecast.run import SimulatedRank
from zerofit.simulate.forecast.verdict import (
    NOT,
    Communicator,
    FitVerdict,
    Overhead,
    judge,
    judge_events,
    overheads,
    unseen_on_cpu,
)
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.record import GroupUse, RankPhase, RankRecord, ScriptFacts, SimulationTarget
from zerofit.simulate.script.command import ScriptTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.mesh import coords_of
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.overhead import HOST_PROCESS_BYTES, HOST_RESERVE
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout
from zerofit.spec.units import counted, shown_bytes

UNSURE = 0.25  # relative uncertainty of extrapolated reserved bytes


@dataclass(frozen=True, kw_only=True)
class SimulatedScriptRank:
    """A simulated rank of a user's script, with its record."""

    target: ScriptTarget
    record: RankRecord
    facts: ScriptFacts

    @property
    def run(self) -> SimulatedScript:
        """The script, and the facts that its simulation found."""
        return SimulatedScript(command=shlex.join(self.target.command.words), facts=self.facts)


def assess(simulated: SimulatedRank | SimulatedScriptRank, cluster: Cluster) -> Simulation:
    """Return how much memory a simulated rank needs, and whether it fits the cluster.

    Stages, knobs and seconds stay empty.
    """
    record = simulated.record
    if isinstance(simulated, SimulatedScriptRank):
        # A script's own tensor and sequence parallelism is not known here: these ranks count as data parallel.
        stages = simulated.facts.pipeline_stages
        layout = Layout(dp=simulated.target.world_size // stages, pp=stages, zero_stage=simulated.facts.zero_stage)
        run, facts, layers, error = simulated.run, simulated.facts, (), 0.0
    else:
        job, layers, error = simulated.target.job, simulated.layers, simulated.check_error
        layout, run, facts = job.layout, _run(simulated.target), job.facts
    peak, beside = record.peaks[0], _beside(simulated, cluster)
    if cluster.on_cpu:  # matrix products copy the largest parameter in fp32
        largest = facts.largest_parameter * ELEMENT_BYTES["fp32"]
        beside += unseen_on_cpu(peak.bytes, largest, bool(facts.experts))
    host = record.host
    verdict, reserved, ahead = _verdict(record, beside, cluster, simulated.target.alloc_conf)
    smi_bytes = reserved + sum(o.bytes for o in beside)
    shared = smi_bytes if cluster.device.unified_memory else 0
    host_node_bytes, host_fits, host_sentence = _host(sum(host.values()) + shared, cluster)
    last = max(phase.step for phase in record.phases)
    return Simulation(
        world_size=layout.world_size,
        rank=simulated.target.rank,
        layout=layout,
        run=run,
        phases=_merged(record.phases),
        peak_bytes=peak.bytes,
        peak_phase=peak.phase,
        peak_step=peak.step,
        peak_at=PeakLocation(module=peak.module, line=peak.at, own=peak.own),
        breakdown=peak.breakdown,
        reserved_bytes=reserved,
        reserved_ahead_bytes=ahead,
        overheads=tuple(beside),
        smi_bytes=smi_bytes,
        device=cluster.device.kind,
        device_total_bytes=cluster.device.memory_bytes,
        host_bytes={"pageable": host["pageable"], "pinned": host["pinned"] + host["pinned_free"]},
        host_kept_bytes=host["pinned_free"],
        host_phases=record.host_phases,
        host_node_bytes=host_node_bytes,
        host_total_bytes=cluster.host_bytes,
        nvme_bytes=record.nvme_bytes,
        comm=tuple(row for row in record.sent if row.step == last),
        flops=sum(row.flops for row in record.flops if row.step == last),
        fits=verdict.fits and host_fits,
        verdict=verdict.word if host_fits else NOT,
        margin_bytes=verdict.margin_bytes,
        because=" ".join([verdict.sentence, host_sentence]).strip(),
        layers_simulated=layers,
        extension_error=error,
        timeline=record.timeline,
        allocations=_allocations(record, simulated.target.alloc_conf, beside, cluster),
    )


def _beside(simulated: SimulatedRank | SimulatedScriptRank, cluster: Cluster) -> list[Overhead]:
    record = simulated.record
    libraries = _libraries(simulated.target.job.run) if isinstance(simulated, SimulatedRank) else ""
    return overheads(cluster.device, _communicators(record.groups), record.convolution_bytes, libraries)


def _allocations(
    record: RankRecord, alloc_conf: str, beside: Sequence[Overhead], cluster: Cluster
) -> RankAllocations | None:
    if record.events is None or record.origins is None:
        return None
    room = None if cluster.on_cpu else cluster.device.memory_bytes - sum(overhead.bytes for overhead in beside)
    return RankAllocations(events=record.events, origins=record.origins, room_bytes=room, alloc_conf=alloc_conf)


def _libraries(run: Run) -> str:
    """Return the key of CPU_PROCESS_BYTES for the libraries of a rank.

    The result is "" if their memory is unknown: with torch.compile, and for a user's own model.
    """
    family = source_of(run).family
    if run.compile or family == "custom":
        return ""
    if run.lora or family == "diffusers":
        return "peft or diffusers"
    return "transformers" if family == "transformers" else "torch"


def _run(target: SimulationTarget) -> SimulatedRun:
    run, batch = target.job.run, target.job.batch
    return SimulatedRun(
        model=run.model,
        precision=run.precision,
        seq_len=run.seq_len,
        activation_checkpointing=run.activation_checkpointing,
        activation_offload=run.activation_offload,
        loss_chunk=run.loss_chunk,
        mlp_chunk=run.mlp_chunk,
        optimizer=run.optimizer,
        ds_config=run.ds_config,
        input=target.inputs,
        micro_batch=batch.most_of(coords_of(target.rank, target.job.layout).dp_rank),
        gradient_accumulation_steps=batch.accumulation,
    )


# An extrapolation is sure unless the verdict depends on what fragmentation adds. So all layers are simulated only if
#
#   allocated peak  <  device's memory  <  (1 + UNSURE) * reserved peak + overheads
#
# Below, the run fits in any case. Above, it does not, since the allocated peak is exact.
def decided(
    ranks: Sequence[SimulatedRank | Problem],
    cluster: Cluster,
    simulate_exactly: Callable[[list[SimulationTarget]], Sequence[SimulatedRank | Problem]],
) -> list[SimulatedRank | Problem]:
    """Return the ranks.

    If the extrapolation leaves open whether a rank fits, all of its layers are simulated.
    """
    results, capacity = list(ranks), cluster.device.memory_bytes
    doubtful: dict[int, SimulationTarget] = {}
    for n, rank in enumerate(ranks):
        if isinstance(rank, SimulatedRank) and rank.layers and not cluster.on_cpu:
            others = sum(overhead.high_bytes for overhead in _beside(rank, cluster))
            high = (1 + UNSURE) * rank.record.reserved_ahead_bytes + others
            if rank.record.peaks[0].bytes < capacity < high:
                doubtful[n] = rank.target
    exact = simulate_exactly([*doubtful.values()]) if doubtful else []
    for n, rank in zip(doubtful, exact, strict=True):
        results[n] = rank
    return results


def _verdict(
    record: RankRecord, beside: list[Overhead], cluster: Cluster, alloc_conf: str
) -> tuple[FitVerdict, int, int]:
    """Return the verdict and two reserved peaks.

    The first peak assumes that the device keeps up with the host. The second peak assumes that the host runs ahead.
    """
    there = cluster.device.memory_bytes
    if cluster.on_cpu:  # no caching allocator
        taken = record.peaks[0].bytes
        return judge(taken, beside, there), taken, taken
    if record.events is None:
        verdict = judge(record.reserved_ahead_bytes, beside, there, likely_bytes=record.reserved_bytes)
        return verdict, record.reserved_bytes, record.reserved_ahead_bytes
    settings = read_alloc_conf(alloc_conf)
    verdict, found = judge_events(record.events, beside, there, settings, record.reserved_bytes)
    return verdict, min(record.reserved_bytes, found.peak_reserved_bytes), found.peak_reserved_bytes


# NCCL connects a rank to its two neighbors in a ring, and to more ranks only where it sends to them directly: to all
# others in an all-to-all, to the next and the previous stage of a pipeline.
def _communicators(groups: list[GroupUse]) -> list[Communicator]:
    found = []
    for group in groups:
        peers = group.ranks - 1 if any(op.startswith("alltoall") for op in group.ops) else 0
        peers = peers or (2 if {"send", "recv"} & set(group.ops) else 0)
        found.append(Communicator(name="+".join(group.ops), ranks=group.ranks, direct_peers=peers))
    return found


def _host(rank_bytes: int, cluster: Cluster) -> tuple[int, bool, str]:
    if cluster.on_cpu:
        return 0, True, ""
    needed = (rank_bytes + HOST_PROCESS_BYTES) * cluster.gpus
    available = round(cluster.host_bytes * (1 - HOST_RESERVE))
    ranks = f"{counted(cluster.gpus, 'rank')} need{'s' if cluster.gpus == 1 else ''}"
    sentence = (
        f"Host memory: {ranks} {shown_bytes(needed)} of a node's {shown_bytes(cluster.host_bytes)}, "
        f"including {shown_bytes(HOST_PROCESS_BYTES)} per process; {HOST_RESERVE:.0%} is reserved for the system."
    )
    return needed, needed <= available, sentence


def _merged(phases: list[RankPhase]) -> tuple[RankPhase, ...]:
    """Merge the phases of a step's micro batches, so that each phase of each step has one row."""
    rows: dict[tuple[str, int], RankPhase] = {}
    for phase in phases:
        first = rows.setdefault((phase.name, phase.step), phase)
        peak_bytes = max(first.peak_bytes, phase.peak_bytes)
        rows[phase.name, phase.step] = replace(first, peak_bytes=peak_bytes, end_bytes=phase.end_bytes)
    return tuple(rows.values())
