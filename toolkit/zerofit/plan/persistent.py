"""Compute persistent memory: the bytes on device, host and NVMe between two steps.

References are to DeepSpeed 0.19.8, below deepspeed/runtime/. Sizes for offloading come from zerofit's bundled
JSONs, otherwise from DeepSpeed's defaults. Swap buffers are rounded up as in torch and in `zerofit simulate`. This
gives an upper bound, because DeepSpeed's own allocator (ops/csrc/pin_memory) allocates them page by page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from operator import mul
from typing import NamedTuple

from zerofit.features.optimizers.adamw import ADAMW
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.optimizer_states import host_state_bytes, states_of, whole_states
from zerofit.plan.timeline import Parameter, StageTimeline
from zerofit.spec.overhead import pinned_bytes
from zerofit.spec.partitions import partition_overlaps

MASTER_BYTES = 4  # per element of the master weights, for any precision
SUB_GROUP_ELEMENTS = 1_000_000_000  # default of zero_optimization.sub_group_size (zero/config.py)
SWAP_BUFFERS = 4  # default of offload_optimizer.buffer_count (zero/offload_config.py)
PARAMETER_BUFFERS = 5  # default of offload_param.buffer_count
PARAMETERS_IN_CPU = 1_000_000_000  # default of offload_param.max_in_cpu: elements
LEAST_SWAPPED_BYTES = 2**20  # swap_tensor/utils.py, MIN_AIO_BYTES
ALIGNED_BYTES = 1024  # swap_tensor/utils.py, AIO_ALIGNED_BYTES
Shard = Callable[[Parameter], int]  # returns a rank's elements of a parameter


class PersistentMemory(NamedTuple):
    """Memory that is in use from step to step, in bytes per kind."""

    device: dict[str, int]
    host: dict[str, int]
    nvme: int = 0
    momentary: int = 0  # extra bytes when host memory is at its peak


# Bytes for each element in 16 bits that a rank keeps between steps, with Adam and n ranks to divide by:
#
#     stage    parameters   master weights   moments   gradients              buckets
#     0        2            4                8         (in backward only)
#     1, 2     2            4/n              8/n       (in backward only)
#     3        2/n          4/n              8/n       2/n                    of fixed size
#
# In 32 bits there are no master weights at stage 0: the optimizer steps the parameters themselves.
# Offloading moves columns to the host or to disk, and adds page-locked buffers. Page-locked blocks are
# rounded up, so the number of tensors matters besides their sizes.
def persistent_memory(line: StageTimeline, layout: PlannedLayout, device: str, tied: int = 0) -> PersistentMemory:
    """Return the memory that a rank keeps between steps. `tied`: elements of a tied matrix."""
    if layout.zero_stage == 3:
        memory = _partitioned(line, layout, device, tied)
    elif layout.zero_stage:
        memory = _partitioned_states(line, layout, device)
    else:
        memory = _unpartitioned(line, layout, device)
    buffers = {"buffers of the model": line.buffers_bytes - line.quantized_bytes}
    if line.quantized_bytes:
        buffers["quantised weights"] = _undivided_quantized(line, layout)
    memory = memory._replace(device={**buffers, **memory.device})
    if not layout.ema:
        return memory
    # float32 averages of the weights that a rank's optimizer updates (train/averaging.py), where its states are. The
    # states of Adam show how many weights these are, since Adam has two numbers per weight. Averaged copies of buffers
    # are not counted: they have only a few numbers per channel.
    with_adam = persistent_memory(line, replace(layout, ema=None, optimizer=ADAMW.name), device, tied)
    place = "device" if layout.offload_optimizer == "none" else "host"
    elements = getattr(with_adam, place).get("optimizer state", 0) // ADAMW.states.element_bytes(on_host=True)
    return memory._replace(**{place: {**getattr(memory, place), "averaged weights": MASTER_BYTES * elements}})


def partitions(line: StageTimeline, ranks: int) -> tuple[int, ...]:
    """Return the elements of one rank's flat partition, for each parameter group.

    Groups are padded to a multiple of 2 x ranks (stage_1_and_2.py:390, :525).
    """
    sizes = zip(filter(None, line.groups), partition_ranks(line, ranks), strict=True)
    return tuple(-(-sum(group) // (2 * sharing)) * 2 for group, sharing in sizes)


def partition_ranks(line: StageTimeline, ranks: int) -> tuple[int, ...]:
    """Return for each group the number of ranks that divide it. Fewer ranks share an expert."""
    return tuple(ranks // line.ep if group[0].expert else ranks for group in line.members if group)


def padded_groups(line: StageTimeline, ranks: int) -> tuple[int, ...]:
    """Return the elements of each group with padding, summed over all ranks."""
    return tuple(map(mul, partitions(line, ranks), partition_ranks(line, ranks)))


class ParameterSharers(NamedTuple):
    """The number of ranks that divide a parameter at stage 3.

    transformers' zero.Init divides a parameter among all ranks. If tensor parallelism then splits it, the data parallel
    ranks divide it (engine.py, _resolve_zero3_param_placement). If zerofit splits the model, the data parallel ranks
    divide all parameters.
    """

    whole: int  # of parameters that every tensor parallel rank has in full
    split: int  # of parameters that tensor parallelism splits
    expert: int  # of experts: ranks with the same experts

    def of(self, parameter: Parameter) -> int:
        """Return the number of ranks that divide a parameter."""
        return self.expert if parameter.expert else self.split if parameter.split else self.whole

    def shard(self, parameter: Parameter) -> int:
        """Return the number of a parameter's elements on one rank."""
        return -(-parameter.numel // self.of(parameter))


def sharers(layout: PlannedLayout) -> ParameterSharers:
    """Return how many ranks divide each kind of parameter at stage 3."""
    ranks = layout.zero_ranks
    return ParameterSharers(ranks * (1 if layout.combined else layout.tp), ranks, ranks // layout.ep)


@lru_cache(maxsize=1024)
def parameter_shards(line: StageTimeline, spread: ParameterSharers) -> tuple[int, ...]:
    """Return for each group one rank's elements at stage 3. Each parameter is rounded up alone."""
    return tuple(sum(map(spread.shard, group)) for group in line.members if group)


@lru_cache(maxsize=1024)
def overlap_in_partition(line: StageTimeline, ranks: int) -> int:
    """Return the elements of the parameters that overlap one rank's partitions.

    Parameters count in full. The rank is the one with the most elements.

    Stages 1 and 2 keep full gradients of parameters that are only partly in the partition (stage_1_and_2.py:2187).
    """
    return max(overlaps(line, ranks, int))


@lru_cache(maxsize=1024)
def largest_overlap(line: StageTimeline, ranks: int) -> dict[Parameter, int]:
    """Return for each parameter the largest number of elements of a rank that stores a part of it.

    A rank's elements are those of all parameters that overlap the rank's partitions. Each of these parameters counts in
    full.
    """
    totals, largest = overlaps(line, ranks, int), dict[Parameter, int]()
    for rank, parameter, _ in _overlapping(line, ranks):
        largest[parameter] = max(largest.get(parameter, 0), totals[rank])
    return largest


@lru_cache(maxsize=1024)
def _locked_overlap(line: StageTimeline, ranks: int, element: int, device: str) -> int:
    """Return the bytes of page-locked copies of all full gradients that overlap a partition.

    The result is for the rank with the most bytes. Each copy is allocated separately.
    """
    locked = _locking(device)
    return max(overlaps(line, ranks, lambda numel: locked(element * numel)))


@lru_cache(maxsize=1024)
def overlaps_and_pieces(line: StageTimeline, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return two numbers of elements for each rank.

    The first is the summed size of all parameters that overlap the rank's partitions. The second is the size of the
    largest tensor that the rank copies for the gradient norm. A rank is left out if both values of another rank are
    at least as large.
    """
    pieces = [0] * ranks
    for rank, parameter, piece in _overlapping(line, ranks):
        pieces[rank] = max(pieces[rank], 0 if parameter.copied else piece)  # ds_pipe_replicated (:2680)
    pairs: list[tuple[int, int]] = []
    for overlap, piece in sorted(zip(overlaps(line, ranks, int), pieces, strict=True), reverse=True):
        if not pairs or piece > pairs[-1][1]:
            pairs.append((overlap, piece))
    return tuple(pairs)


def overlaps(line: StageTimeline, ranks: int, weigh: Callable[[int], int]) -> list[int]:
    """Return for each rank the sum of `weigh(elements)` over the parameters in its partitions.

    A parameter counts in full, even if only a part of it is in the partition.
    """
    totals = [0] * ranks
    for rank, parameter, _ in _overlapping(line, ranks):
        totals[rank] += weigh(parameter.numel)
    return totals


@lru_cache(maxsize=1024)
def _overlapping(line: StageTimeline, ranks: int) -> tuple[tuple[int, Parameter, int], ...]:
    """Return each overlap as (rank, parameter, number of elements in the rank's partition)."""
    groups = zip(filter(None, line.members), partitions(line, ranks), partition_ranks(line, ranks), strict=True)
    return tuple(
        (rank, group[index], piece)
        for group, size, sharing in groups
        for rank, index, piece in partition_overlaps([p.numel for p in group], size, ranks // sharing)
    )


def in_bf16_optimizer(layout: PlannedLayout) -> bool:
    """Return whether DeepSpeed uses its BF16_Optimizer: in a bf16 pipeline without ZeRO."""
    return layout.zero_stage == 0 and layout.pp > 1 and layout.precision == "bf16"  # engine.py:2316


def reduction_bytes(layout: PlannedLayout) -> int:
    """Return the bytes per element of reduced gradients.

    With DeepSpeed's sequence parallelism gradients are reduced in float32 (engine.py:2182).
    """
    return 4 if layout.sp > 1 and not layout.combined else layout.element_bytes


def _locking(device: str) -> Callable[[int], int]:
    """Return a function that turns a buffer's size into the host memory that it needs, in bytes.

    For a GPU, buffers are page-locked, and their sizes are rounded up.
    """
    return int if device == "cpu" else pinned_bytes


def _unpartitioned(line: StageTimeline, layout: PlannedLayout, device: str) -> PersistentMemory:
    """Return the memory of stage 0."""
    element = layout.element_bytes
    if in_bf16_optimizer(layout):  # divided masters, and permanent flat gradients (bf16_optimizer.py:178, :191)
        memory = _partitioned_states(line, replace(layout, offload_optimizer="none"), device)
        gradients = element * sum(padded_groups(line, layout.zero_ranks))
        return memory._replace(device=memory.device | {"gradients": gradients})
    # 16-bit precisions need master weights (fp16/unfused_optimizer.py:78)
    master = MASTER_BYTES * line.parameters if element == 2 else 0
    states = whole_states(line, layout, device)
    on_device = {"parameters": element * line.elements, "master weights": master, "optimizer state": states.device}
    return PersistentMemory(on_device, _paged(states.host))


def _paged(size: int) -> dict[str, int]:
    """Return the memory of paged states, which the driver moves between host and device."""
    return {"optimizer state": size} if size else {}


def _partitioned_states(line: StageTimeline, layout: PlannedLayout, device: str) -> PersistentMemory:
    """Return the memory of stages 1 and 2."""
    # the full weights are in flat groups (stage_1_and_2.py:520), this rank's part is also in float32 (:560)
    element, ranks = layout.element_bytes, layout.zero_ranks
    sizes = partitions(line, ranks)
    part = sum(sizes)
    parameters = {"parameters": element * (sum(padded_groups(line, ranks)) + line.elements - line.parameters)}
    if layout.offload_optimizer == "none":
        states = states_of(layout, sizes, device)
        kept = {"master weights": MASTER_BYTES * part, "optimizer state": states.device}
        return PersistentMemory(parameters | kept, _paged(states.host))
    locked = _locking(device)
    masters = sum(locked(MASTER_BYTES * size) for size in sizes)
    host = {
        "master weights": masters,
        "optimizer state": host_state_bytes(layout) * part,
        "gradients": masters,  # of equal size (:941)
        # :573, :652
        "communication buckets": sum(locked(element * size) for size in sizes) + locked(element * line.largest),
    }
    if layout.accumulation > 1 and layout.zero_stage == 2:  # :1825; stage 1 reduces once per step
        host["gradients"] += _locked_overlap(line, ranks, element, device)
    return PersistentMemory(parameters | {"communication buckets": element * line.largest}, host)  # :658


def _partitioned(line: StageTimeline, layout: PlannedLayout, device: str, tied: int) -> PersistentMemory:
    """Return the memory of stage 3."""
    # a rank's parts of parameters (zero/stage3.py:972), master weights (:1172) and gradients (:791)
    element, spread = layout.element_bytes, sharers(layout)
    part = sum(parameter_shards(line, spread))
    frozen = sum(map(spread.shard, line.frozen))
    # never released once gathered (partitioned_param_coordinator.py:644); a single rank's part is the parameter itself
    # (partition_parameters.py, NoGatherHandle)
    gathered = kept_gathered(line, layout).bytes
    on_device = {
        "communication buckets": reduction_bytes(layout) * layout.bucket,  # :782, permanent
        "gathered parameters": gathered,
    }
    offloaded = PersistentMemory({}, {})
    if layout.offload_param == "none":
        on_device["parameters"] = element * (part + frozen) + _divided_quantized(line, layout)
    else:
        offloaded = parameters_offloaded(line, layout, spread.shard, element, device, tied)
    if layout.offload_optimizer == "none":
        states = states_of(layout, [group.part for group in sub_groups(line, spread.shard)], device)
        on_device |= {
            "master weights": MASTER_BYTES * part,
            "optimizer state": states.device,
            "gradients": element * part,
        }
        return offloaded._replace(device=on_device, host=add_kinds(offloaded.host, _paged(states.host)))
    optimizer = optimizer_offloaded(line, layout, spread.shard, element, device)
    host = add_kinds(offloaded.host, optimizer.host)
    return PersistentMemory(on_device, host, offloaded.nvme + optimizer.nvme, optimizer.momentary)


class KeptGathered(NamedTuple):
    """Small parameters that stage 3 keeps gathered (stage3_param_persistence_threshold)."""

    count: int
    bytes: int


def kept_gathered(line: StageTimeline, layout: PlannedLayout) -> KeptGathered:
    """Return the parameters that a rank never releases."""
    return _small_parameters(line, layout.persistence, sharers(layout), layout.element_bytes)


@lru_cache(maxsize=1024)
def _small_parameters(line: StageTimeline, threshold: int, spread: ParameterSharers, element: int) -> KeptGathered:
    every = (p for layer in (*line.layers, *line.packed) for p in layer)
    sizes = [p.bytes(element) for p in every if p.numel <= threshold and spread.of(p) > 1]
    return KeptGathered(len(sizes), sum(sizes))


def add_kinds(sizes: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return for each kind the sum of its bytes in `sizes` and `other`."""
    return {kind: sizes.get(kind, 0) + other.get(kind, 0) for kind in {**sizes, **other}}


def quantized_at_start(line: StageTimeline, layout: PlannedLayout) -> int:
    """Return the bytes of quantized weights and scales on a rank's device at the start."""
    on_device = layout.zero_stage == 3 and layout.offload_param == "none"
    return _undivided_quantized(line, layout) + (_divided_quantized(line, layout) if on_device else 0)


def _undivided_quantized(line: StageTimeline, layout: PlannedLayout) -> int:
    """Return the bytes of quantized weights and scales that each rank has in full."""
    # stage 3 divides all but the scales
    divided = sum(p.numel for p in chain(*line.packed)) if layout.zero_stage == 3 else 0
    return line.quantized_bytes - divided


def _divided_quantized(line: StageTimeline, layout: PlannedLayout) -> int:
    return sum(map(sharers(layout).shard, chain(*line.packed)))


class SubGroup(NamedTuple):
    """The parameters that ZeRO-3's optimizer updates together."""

    part: int  # elements of this rank
    numels: tuple[int, ...]  # elements of the full parameters


def sub_groups(line: StageTimeline, shard: Shard) -> list[SubGroup]:
    """Divide parameters into sub-groups like _create_fp16_sub_groups in zero/stage3.py."""
    divided = []
    for group in filter(None, line.members):
        waiting: list[Parameter] = []
        fits = sum(map(shard, group)) <= SUB_GROUP_ELEMENTS
        size = 0
        for parameter in group:
            waiting.append(parameter)
            size += shard(parameter)
            if parameter is group[-1] or (size >= SUB_GROUP_ELEMENTS and not fits):
                divided.append(SubGroup(size, tuple(p.numel for p in waiting)))
                waiting, size = [], 0
    return divided


def optimizer_offloaded(
    line: StageTimeline, layout: PlannedLayout, shard: Shard, element: int, device: str
) -> PersistentMemory:
    """Return the host and NVMe memory of states, master weights and gradients."""
    locked, sizes = _locking(device), [group.part for group in sub_groups(line, shard)]
    disk, moments = layout.offload_optimizer == "nvme", host_state_bytes(layout)
    # sub-groups below 1 MiB stay on the host (optimizer_utils.py)
    swapped = [size for size in sizes if disk and 4 * size >= LEAST_SWAPPED_BYTES]
    kept = [size for size in sizes if not disk or 4 * size < LEAST_SWAPPED_BYTES]
    host = {
        "master weights": 4 * sum(kept),
        "optimizer state": moments * sum(kept),
        # of the micro batch (zero/stage3.py:791), and the optimizer's own (:1338)
        "gradients": locked(element * sum(sizes)) + sum(locked(4 * size) for size in kept),
    }
    if not swapped:
        return PersistentMemory({}, host)
    host["swap buffers"] = SWAP_BUFFERS * locked(4 * _aligned(max(swapped), 4))  # swap_tensor/utils.py:180
    # moments are allocated pageable in the first step, gradients before they are locked (:791)
    momentary = max(moments * max(swapped), element * sum(sizes) if device != "cpu" else 0)
    return PersistentMemory({}, host, (2 * MASTER_BYTES + moments) * sum(swapped), momentary)


def parameters_offloaded(
    line: StageTimeline, layout: PlannedLayout, shard: Shard, element: int, device: str, tied: int = 0
) -> PersistentMemory:
    """Return the memory of offloaded parameters: a flat buffer per group (zero/stage3.py:884).

    With NVMe, elements beyond PARAMETERS_IN_CPU are on disk, and host memory also has read buffers. `tied`: elements of
    a tied matrix. Before two layers share the matrix, the second layer's copy is written to disk, too.
    """
    locked = _locking(device)
    totals = [sum(map(shard, group)) for group in filter(None, line.members)]
    if layout.offload_param == "cpu":  # frozen parameters stay separate (partition_parameters.py:1604)
        alone = [p._replace(numel=shard(p)) for p in (*line.frozen, *chain(*line.packed))]
        sizes = [element * total for total in totals] + [p.bytes(element) for p in alone]
        return PersistentMemory({}, {"parameters": sum(map(locked, sizes))})
    flat, left = [], PARAMETERS_IN_CPU
    for size in totals:
        flat.append(min(size, max(0, left)))
        left -= size
    largest = max((p.numel * (layout.tp if p.split else 1) for layer in line.layers for p in layer), default=0)
    buffers = locked(element * PARAMETER_BUFFERS * _aligned(largest, element))
    if sum(flat) < sum(totals):  # a buffer for all full parameters of the largest sub-group (:1015)
        most = max(sub_groups(line, shard), key=lambda g: g.part)
        buffers += locked(element * sum(_aligned(numel, element) for numel in most.numels))
    every = [p for group in (*line.members, line.frozen) for p in group]
    written = [shard(p) for p in every] + [shard(Parameter(tied, 0, 0))]
    files = sum(element * _aligned(n, element) for n in written if element * n >= LEAST_SWAPPED_BYTES)
    kept = sum(locked(element * size) for size in flat if size)
    return PersistentMemory({}, {"parameters": kept, "swap buffers": buffers}, files)


def _aligned(numel: int, element: int) -> int:
    block = ALIGNED_BYTES // element
    return -(-numel // block) * block
