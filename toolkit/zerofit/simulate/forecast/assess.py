"""Turn a simulated rank's record into a result: the rank's memory, and whether it fits.

Figures of memory outside of torch and their sources are in `spec.overhead`. cuDNN's convolution workspaces are
allocated by torch (aten/src/ATen/native/cudnn/Conv_v8.cpp). Their size depends on the algorithm that cuDNN chooses, so
it is given as a range.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerofit.models.catalog import source_of
from zerofit.simulate.forecast.result import (
    FITS,
    NOT,
    WITHIN,
    Overhead,
    PeakLocation,
    RankAllocations,
    SimulatedRun,
    SimulatedScript,
    Simulation,
)
from zerofit.simulate.forecast.run import SimulatedRank
from zerofit.simulate.memory.alloc_conf import AllocatorSettings, read_alloc_conf
from zerofit.simulate.memory.allocator import Event, Reserved, replay
from zerofit.simulate.record import GroupUse, RankPhase, RankRecord, ScriptFacts, SimulationTarget
from zerofit.simulate.script.command import ScriptTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import Device
from zerofit.spec.errors import Problem
from zerofit.spec.mesh import coords_of
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.overhead import (
    CPU_EXPERTS_BYTES,
    CPU_HEAP,
    CPU_PACKED,
    CPU_PROCESS_BYTES,
    CPU_PROCESS_HIGH_BYTES,
    CPU_PROCESS_LOW_BYTES,
    CUDNN_COPIES,
    CUDNN_SOURCE,
    CUDNN_WORKSPACES,
    HOST_PROCESS_BYTES,
    HOST_RESERVE,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_CONNECTION_BYTES,
    NCCL_NVLINK_BYTES,
    NCCL_NVLINK_CHANNELS,
    NCCL_PCIE_BYTES,
    NCCL_PCIE_CHANNELS,
    REPLAYED,
    context_figure,
)
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout
from zerofit.spec.units import counted, shown_bytes

UNSURE = 0.25  # relative uncertainty of extrapolated reserved bytes
_PRIVATE = "private memory of ranks besides tensors (spec/overhead.py)"


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
    verdict, reserved, ahead = _judge_record(record, beside, cluster, simulated.target.alloc_conf)
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


def _allocations(
    record: RankRecord, alloc_conf: str, beside: Sequence[Overhead], cluster: Cluster
) -> RankAllocations | None:
    if record.events is None or record.origins is None:
        return None
    room = None if cluster.on_cpu else cluster.device.memory_bytes - sum(overhead.bytes for overhead in beside)
    return RankAllocations(events=record.events, origins=record.origins, room_bytes=room, alloc_conf=alloc_conf)


def _run(target: SimulationTarget) -> SimulatedRun:
    run, batch = target.job.run, target.job.batch
    names = ("model", "precision", "seq_len", "loss_chunk", "mlp_chunk", "optimizer", "ds_config")
    names += ("activation_checkpointing", "activation_offload")
    return SimulatedRun(
        **{name: getattr(run, name) for name in names},
        input=target.inputs,
        micro_batch=batch.most_of(coords_of(target.rank, target.job.layout).dp_rank),
        gradient_accumulation_steps=batch.accumulation,
    )


def _merged(phases: list[RankPhase]) -> tuple[RankPhase, ...]:
    """Merge the phases of a step's micro batches, so that each phase of each step has one row."""
    rows: dict[tuple[str, int], RankPhase] = {}
    for phase in phases:
        first = rows.setdefault((phase.name, phase.step), phase)
        peak_bytes = max(first.peak_bytes, phase.peak_bytes)
        rows[phase.name, phase.step] = replace(first, peak_bytes=peak_bytes, end_bytes=phase.end_bytes)
    return tuple(rows.values())


def _beside(simulated: SimulatedRank | SimulatedScriptRank, cluster: Cluster) -> list[Overhead]:
    record = simulated.record
    libraries = _libraries(simulated.target.job.run) if isinstance(simulated, SimulatedRank) else ""
    return overheads(cluster.device, record.groups, record.convolution_bytes, libraries)


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


def overheads(
    device: Device, groups: Sequence[GroupUse], convolution_bytes: int = 0, libraries: str = ""
) -> list[Overhead]:
    """Return the memory that a rank needs besides torch's reserved memory.

    `groups`: the rank's process groups. `convolution_bytes`: bytes of input, weights and output of the rank's
    largest convolution. `libraries`: a key of CPU_PROCESS_BYTES, for the libraries that a rank on a CPU imports; ""
    if unknown.
    """
    if device.kind == "cpu":
        low, high = CPU_PROCESS_BYTES.get(libraries, (CPU_PROCESS_LOW_BYTES, CPU_PROCESS_HIGH_BYTES))
        return [Overhead("process", low, high, _PRIVATE)]
    figure = context_figure(device)
    context = Overhead("context and kernels", figure.low_bytes, figure.high_bytes, figure.source)
    workspaces = Overhead(CUDNN_WORKSPACES, 0, CUDNN_COPIES * convolution_bytes, CUDNN_SOURCE)
    buffers = (_buffers(device, group) for group in groups if group.ranks > 1)
    return [context, *([workspaces] if convolution_bytes else []), *buffers]


def unseen_on_cpu(peak_bytes: int, largest_bytes: int, experts: bool) -> list[Overhead]:
    """Return the memory that libraries allocate on a CPU besides torch's tensors.

    `largest_bytes`: bytes of the model's largest parameter. `experts`: whether the model is a mixture of experts.
    """
    found = {
        "gaps in the C library's heap": round(CPU_HEAP * peak_bytes),
        "copies of matrices in MKL and oneDNN": CPU_PACKED * largest_bytes,
        "oneDNN's kernels for the shapes of experts": CPU_EXPERTS_BYTES if experts else 0,
    }
    return [Overhead(name, 0, most, _PRIVATE) for name, most in found.items() if most]


# NCCL connects a rank to its two neighbors in a ring, and to more ranks only if it sends to them directly: to all
# others in an all-to-all, to the next and the previous stage of a pipeline.
def _buffers(device: Device, group: GroupUse) -> Overhead:
    """Return the buffers of one process group's communicator."""
    over_pcie = "PCIe" in device.link_name
    fewest, most = NCCL_PCIE_CHANNELS if over_pcie else NCCL_NVLINK_CHANNELS
    low = fewest * NCCL_CONNECTION_BYTES
    high = NCCL_PCIE_BYTES if over_pcie else NCCL_NVLINK_BYTES
    peers = group.ranks - 1 if any(op.startswith("alltoall") for op in group.ops) else 0
    peers = peers or (2 if {"send", "recv"} & set(group.ops) else 0)
    peers = min(peers, device.node.gpus - 1)  # other nodes share one buffer (nccl#1450)
    if peers > 0:
        low += peers * NCCL_PCIE_CHANNELS[0] * NCCL_CONNECTION_BYTES
        # measured on 8 GPUs, that is 7 peers; nccl#986: linear
        high += peers * most * NCCL_CONNECTION_BYTES if over_pcie else NCCL_ALL_TO_ALL_BYTES * peers // 7
    source = "NCCL init.cc and p2p.cc (12 MiB a connection), NVIDIA/nccl#1685, #986"
    if device.architecture.startswith("cdna"):
        source += "; RCCL is assumed to be the same"
    return Overhead(f"NCCL buffers of the {'+'.join(group.ops)} group ({group.ranks} ranks)", low, high, source)


def _judge_record(
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


@dataclass(frozen=True, kw_only=True)
class FitVerdict:
    """A verdict (FITS, WITHIN or NOT), with the reason."""

    word: str
    margin_bytes: int  # free bytes with every overhead at its upper end; negative: this much is missing
    sentence: str

    @property
    def fits(self) -> bool:
        """Whether the run fits even in the worst case. A run with WITHIN may run out of memory."""
        return self.word == FITS


# What has to fit on a device:
#
#   | reserved peak | overheads: low .. high | kernels and fragmentation that are not simulated (kept free) |
#
# "fits" means that the run fits with the upper end of each overhead. "does not fit" means that it does not fit with the
# lower ends.
def judge(
    peak_reserved_bytes: int,
    beside: Sequence[Overhead],
    device_bytes: int,
    likely_bytes: int | None = None,
) -> FitVerdict:
    """Compare the reserved peak and the overheads with the device's memory.

    FITS: the run fits even with every overhead at its upper end. NOT: it does not fit even with every overhead at
    its lower end. The share REPLAYED of the peak stays free for memory that is not simulated. `likely_bytes` is the
    reserved peak if the device keeps up with the host. The reason mentions it.
    """
    kept = round(REPLAYED * peak_reserved_bytes)
    left = device_bytes - peak_reserved_bytes
    if left - sum(o.high_bytes for o in beside) >= kept:
        word = FITS
    else:
        word = NOT if left < sum(o.low_bytes for o in beside) else WITHIN
    return _verdict(word, (likely_bytes, peak_reserved_bytes), beside, device_bytes, kept)


# A reserved peak above the device's memory is no error yet: torch first returns cached segments. So the events are
# replayed with limited memory, first what is left in the worst case, then in the best case:
#
#   FITS     room = (device - upper ends) / (1 + REPLAYED)      the share REPLAYED stays free for what is not simulated
#   WITHIN   room = device - lower ends
#   NOT      an allocation fails even there
def judge_events(
    events: Sequence[Event],
    beside: Sequence[Overhead],
    device_bytes: int,
    settings: AllocatorSettings | None = None,
    likely_bytes: int | None = None,
) -> tuple[FitVerdict, Reserved]:
    """Return the verdict on a sequence of allocations, and the replay that decided it.

    The replay is the one that fits. Without one, it is the replay without a limit.
    """
    found = replay(events, settings=settings)
    verdict = judge(found.peak_reserved_bytes, beside, device_bytes, likely_bytes=likely_bytes)
    if verdict.fits or device_bytes <= 0:
        return verdict, found
    low, high = sum(o.low_bytes for o in beside), sum(o.high_bytes for o in beside)
    for word, room in ((FITS, int((device_bytes - high) / (1 + REPLAYED))), (WITHIN, device_bytes - low)):
        tight = replay(events, device_bytes=room, settings=settings)
        if tight.out_of_memory is None:
            kept = round(REPLAYED * tight.peak_reserved_bytes)
            flushes = (
                f" It fits only because the allocator frees cached memory (flushes: {tight.flushes}), which stops the"
                " device each time; PYTORCH_ALLOC_CONF=expandable_segments:True reduces fragmentation."
            )
            more = flushes if tight.flushes else ""
            return _verdict(word, (likely_bytes, tight.peak_reserved_bytes), beside, device_bytes, kept, more), tight
    more = f" The first allocation that fails needs {shown_bytes(tight.out_of_memory.asked_bytes)}."
    return _verdict(NOT, (likely_bytes, found.peak_reserved_bytes), beside, device_bytes, 0, more), found


def _verdict(
    word: str,
    reserves: tuple[int | None, int],
    beside: Sequence[Overhead],
    device_bytes: int,
    kept: int,
    more: str = "",
) -> FitVerdict:
    likely, reserved = reserves
    low, high = sum(o.low_bytes for o in beside), sum(o.high_bytes for o in beside)
    left = device_bytes - reserved - high
    more_memory = shown_bytes(high) if low == high else f"{shown_bytes(low)} to {shown_bytes(high)}"
    outside = f"{', '.join(o.name for o in beside)} need another {more_memory}" if beside else ""
    end = {
        FITS: f"{shown_bytes(left)} remain free; kernels and fragmentation may use {shown_bytes(kept)} of it.",
        WITHIN: f"It may run out of memory: kernels and fragmentation may need {shown_bytes(kept)} more.",
        NOT: f"At least {shown_bytes(reserved + low - device_bytes)} are missing.",
    }[word]
    sizes = " to ".join(dict.fromkeys(shown_bytes(size) for size in (min(likely or reserved, reserved), reserved)))
    torch = f"torch reserves {sizes} of the device's {shown_bytes(device_bytes)}"
    sentence = f"{'; '.join(filter(None, (torch, outside)))}. {end}{more}"
    return FitVerdict(word=word, margin_bytes=left, sentence=sentence)


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


# An extrapolation is sure unless the verdict depends on what fragmentation adds. So all layers are simulated only if
#
#   allocated peak  <  device's memory  <  (1 + UNSURE) * reserved peak + overheads
#
# Below, the run fits in any case. Above, it does not, since the allocated peak is exact.
def exact_if_doubtful(
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
