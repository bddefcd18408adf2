"""From what a simulated rank allocates to the result: what it needs of the cluster, and whether that is there."""

from __future__ import annotations

from dataclasses import replace

from zerofit.simulate.record import GroupUse, RankPhase, SimulationTarget
from zerofit.simulate.result import PeakLocation, SimulatedRun, Simulation
from zerofit.simulate.run import SimulatedRank
from zerofit.simulate.verdict import NOT, Communicator, FitVerdict, Overhead, judge, judge_events, overheads
from zerofit.spec.cluster import Cluster
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.overhead import HOST_PROCESS_BYTES, HOST_RESERVE
from zerofit.spec.units import shown_bytes

UNSURE = 0.25  # of an extrapolation's reserved bytes


def assess(simulated: SimulatedRank, cluster: Cluster) -> Simulation:
    """Return what a simulated rank needs and whether the cluster has it; without stages, knobs and seconds."""
    record, target = simulated.record, simulated.target
    peak = record.peaks[0]
    beside = overheads(cluster.device, _communicators(record.groups), _largest_bytes(target))
    verdict, reserved = _verdict(simulated, beside, cluster)
    host_node_bytes, host_fits, host_sentence = _host(record.host, cluster)
    last = max(phase.step for phase in record.phases)
    return Simulation(
        world_size=target.job.layout.world_size,
        rank=target.rank,
        layout=target.job.layout,
        run=_run(target),
        phases=_merged(record.phases),
        peak_bytes=peak.bytes,
        peak_phase=peak.phase,
        peak_step=peak.step,
        peak_at=PeakLocation(module=peak.module, line=peak.at),
        breakdown=peak.breakdown,
        reserved_bytes=reserved,
        overheads=tuple(beside),
        smi_bytes=reserved + sum(o.bytes for o in beside),
        device=cluster.device.kind,
        device_total_bytes=cluster.device.memory_bytes,
        host_bytes=record.host,
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
        layers_simulated=simulated.layers,
        extension_error=simulated.check_error,
        timeline=record.timeline,
    )


def _largest_bytes(target: SimulationTarget) -> int:
    """Return the bytes of the largest parameter as matrix products take it."""
    return target.job.facts.largest_parameter * ELEMENT_BYTES["fp32"]


def _run(target: SimulationTarget) -> SimulatedRun:
    run, batch = target.job.run, target.job.batch
    return SimulatedRun(
        model=run.model,
        precision=run.precision,
        seq_len=run.seq_len,
        activation_checkpointing=bool(run.activation_checkpointing),
        loss_chunk=run.loss_chunk,
        optimizer=run.optimizer,
        ds_config=run.ds_config,
        input=target.inputs,
        micro_batch=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
    )


def is_inconclusive(simulated: SimulatedRank, cluster: Cluster) -> bool:
    """Return whether an extrapolation leaves open if the rank fits: reserved bytes are not linear in the layers."""
    if not simulated.layers or cluster.on_cpu:
        return False
    record, there = simulated.record, cluster.device.memory_bytes
    beside = sum(o.high_bytes for o in overheads(cluster.device, _communicators(record.groups)))
    return record.peaks[0].bytes < there < (1 + UNSURE) * record.reserved_bytes + beside


def _verdict(simulated: SimulatedRank, beside: list[Overhead], cluster: Cluster) -> tuple[FitVerdict, int]:
    """Return the verdict on the device, and the reserved peak that it rests on."""
    record, there = simulated.record, cluster.device.memory_bytes
    if cluster.on_cpu:  # no caching allocator: what is released is gone
        taken = record.peaks[0].bytes
        return judge(taken, beside, there), taken
    if record.events is not None:
        verdict, found = judge_events(record.events, beside, there)
        return verdict, found.peak_reserved_bytes
    return judge(record.reserved_bytes, beside, there), record.reserved_bytes


def _communicators(groups: list[GroupUse]) -> list[Communicator]:
    found = []
    for group in groups:
        peers = group.ranks - 1 if any(op.startswith("alltoall") for op in group.ops) else 0
        peers = peers or (2 if {"send", "recv"} & set(group.ops) else 0)
        found.append(Communicator(name="+".join(group.ops), ranks=group.ranks, direct_peers=peers))
    return found


def _host(host: dict[str, int], cluster: Cluster) -> tuple[int, bool, str]:
    """Return the bytes of host memory that a node's ranks take, whether they are there, and a sentence on it."""
    if cluster.on_cpu:
        return 0, True, ""
    needed = (sum(host.values()) + HOST_PROCESS_BYTES) * cluster.gpus
    available = round(cluster.host_bytes * (1 - HOST_RESERVE))
    ranks = "1 rank takes" if cluster.gpus == 1 else f"the {cluster.gpus} ranks of a node take"
    sentence = (
        f"Host memory: {ranks} {shown_bytes(needed)} with their processes ({shown_bytes(HOST_PROCESS_BYTES)} each), "
        f"of {shown_bytes(cluster.host_bytes)} less {HOST_RESERVE:.0%}."
    )
    return needed, needed <= available, sentence


def _merged(phases: list[RankPhase]) -> tuple[RankPhase, ...]:
    """Merge the phases of a step's micro batches: one row for each phase of each step."""
    rows: dict[tuple[str, int], RankPhase] = {}
    for phase in phases:
        first = rows.setdefault((phase.name, phase.step), phase)
        peak_bytes = max(first.peak_bytes, phase.peak_bytes)
        rows[phase.name, phase.step] = replace(first, peak_bytes=peak_bytes, end_bytes=phase.end_bytes)
    return tuple(rows.values())
