"""What lies on device and host between two steps: parameters, master weights, optimizer states, standing buffers.

Places are of DeepSpeed 0.19.8, below deepspeed/runtime/. Bytes of Adam: two float32 states an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from zerofit.plan.host import OffloadedMemory, optimizer_offloaded, parameters_offloaded, pinned
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import Parameter, StageTimeline
from zerofit.spec.precision import ELEMENT_BYTES

STATES_BYTES, MASTER_BYTES = 8, 4  # an element, whatever the precision


class PersistentMemory(NamedTuple):
    """Bytes by kind that stay from step to step."""

    device: dict[str, int]
    host: dict[str, int]
    nvme: int = 0
    momentary: int = 0  # bytes that the host holds beside them at one moment


def shards(layout: PlannedLayout) -> int:
    """Ranks that ZeRO partitions over: data and sequence parallel ones (engine.py, seq_data_parallel_group)."""
    return layout.dp * layout.sp


def partitions(line: StageTimeline, ranks: int) -> tuple[int, ...]:
    """Elements of one rank's flat partition of each group; padded to 2 x ranks (zero/stage_1_and_2.py:390, :525)."""
    return tuple(-(-sum(group) // (2 * ranks)) * 2 for group in line.groups if group)


class ParameterSharers(NamedTuple):
    """Ranks that stage 3 spreads a parameter over.

    transformers' zero.Init spreads over all ranks, and one that tensor parallelism then splits over data parallel ones
    (engine.py, _resolve_zero3_param_placement).
    """

    whole: int  # of parameters that every tensor parallel rank has whole
    split: int  # of those that they have parts of

    def of(self, parameter: Parameter) -> int:
        """Of this parameter."""
        return self.split if parameter.split else self.whole


def sharers(layout: PlannedLayout) -> ParameterSharers:
    """At stage 3."""
    return ParameterSharers(shards(layout) * layout.tp, shards(layout))


def shards_of_parameters(line: StageTimeline, layout: PlannedLayout) -> tuple[int, ...]:
    """Elements of one rank's parts of each group at stage 3: each parameter is spread by itself, rounded up."""
    return _shards_of_parameters(line, sharers(layout))


@lru_cache(maxsize=1024)
def _shards_of_parameters(line: StageTimeline, spread: ParameterSharers) -> tuple[int, ...]:
    return tuple(sum(-(-p.numel // spread.of(p)) for p in group) for group in line.members if group)


def kept_whole(line: StageTimeline, layout: PlannedLayout) -> int:
    """Elements that stage 3 never gives back once gathered: persistent ones (partitioned_param_coordinator.py:644)."""
    # the only rank's part is the parameter itself (partition_parameters.py, NoGatherHandle)
    return _persistent(line, layout.persistence, *(ranks > 1 for ranks in sharers(layout)))


@lru_cache(maxsize=1024)
def _persistent(line: StageTimeline, threshold: int, whole: bool, split: bool) -> int:
    spread = (p.numel for layer in line.layers for p in layer if (split if p.split else whole))
    return sum(numel for numel in spread if numel <= threshold)


@lru_cache(maxsize=1024)
def overlap_in_partition(line: StageTimeline, ranks: int) -> int:
    """Elements of all parameters that reach into a rank's partitions, on the rank where they are most.

    Stages 1 and 2 keep whole gradients of parameters that lie in the partition in part (stage_1_and_2.py:2187).
    """
    return _overlap(line, ranks, int)


@lru_cache(maxsize=1024)
def _locked_overlap(line: StageTimeline, ranks: int, element: int, device: str) -> int:
    """Bytes of page-locked copies of their gradients, each by itself."""
    locked = pinned(device)
    return _overlap(line, ranks, lambda numel: locked(element * numel))


def _overlap(line: StageTimeline, ranks: int, weigh: Callable[[int], int]) -> int:
    totals = [0] * ranks
    sizes = partitions(line, ranks)
    for group, size in zip((g for g in line.groups if g), sizes, strict=True):
        for rank, weight in _reaching_in(group, size, weigh):
            totals[rank] += weight
    return max(totals)


def _reaching_in(numels: Sequence[int], size: int, weigh: Callable[[int], int]) -> list[tuple[int, int]]:
    found: dict[int, int] = {}
    start = 0
    for numel in numels:
        for rank in range(start // size, (start + numel - 1) // size + 1):
            found[rank] = found.get(rank, 0) + weigh(numel)
        start += numel
    return list(found.items())


def standing(line: StageTimeline, layout: PlannedLayout, device: str, tied: int = 0) -> PersistentMemory:
    """What stays of a rank's layers, by the ZeRO stage; `tied`: elements of a matrix that is another one's."""
    element = ELEMENT_BYTES[layout.precision]
    if layout.zero_stage == 3:
        found = _partitioned(line, layout, element, device, tied)
    elif layout.zero_stage:
        found = _partitioned_states(line, layout, element, device)
    else:
        found = _unpartitioned(line, layout, element)
    return found._replace(device={"buffers of the model": line.buffers_bytes, **found.device})


def in_bf16_optimizer(layout: PlannedLayout) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer: without ZeRO under a pipeline (engine.py:2316)."""
    return layout.zero_stage == 0 and layout.pp > 1 and layout.precision == "bf16"


def reduction_bytes(layout: PlannedLayout) -> int:
    """An element in which gradients cross the ranks: float32 under sequence parallelism (engine.py:2182)."""
    return 4 if layout.sp > 1 else ELEMENT_BYTES[layout.precision]


def _unpartitioned(line: StageTimeline, layout: PlannedLayout, element: int) -> PersistentMemory:
    """Stage 0: fp32 steps the parameters themselves; else masters (fp16/unfused_optimizer.py:78)."""
    if in_bf16_optimizer(layout):  # masters in parts, gradients flat and for good (bf16_optimizer.py:178, :191)
        found = _partitioned_states(line, replace(layout, offload_optimizer="none"), element, "cuda")
        gradients = element * sum(partitions(line, shards(layout))) * shards(layout)
        return found._replace(device=found.device | {"gradients": gradients})
    whole = line.parameters
    master = MASTER_BYTES * whole if element == 2 else 0
    states = STATES_BYTES * whole
    return PersistentMemory({"parameters": element * whole, "master weights": master, "optimizer state": states}, {})


def _partitioned_states(line: StageTimeline, layout: PlannedLayout, element: int, device: str) -> PersistentMemory:
    """Stages 1 and 2: a flat buffer a group (stage_1_and_2.py:520), this rank's part in float32 (:560)."""
    ranks = shards(layout)
    sizes = partitions(line, ranks)
    part = sum(sizes)
    parameters = {"parameters": element * part * ranks}
    if layout.offload_optimizer == "none":
        states = {"master weights": MASTER_BYTES * part, "optimizer state": STATES_BYTES * part}
        return PersistentMemory(parameters | states, {})
    locked = pinned(device)
    masters = sum(locked(MASTER_BYTES * size) for size in sizes)
    host = {  # "nvme" is the CPU here (:220)
        "master weights": masters,
        "optimizer state": STATES_BYTES * part,
        "gradients": masters,  # of the same sizes (:941)
        # :573, :652
        "communication buckets": sum(locked(element * size) for size in sizes) + locked(element * line.largest),
    }
    if layout.accumulation > 1 and layout.zero_stage == 2:  # :1825; stage 1 reduces once a step
        host["gradients"] += _locked_overlap(line, ranks, element, device)
    return PersistentMemory(parameters | {"communication buckets": element * line.largest}, host)  # :658


def _partitioned(line: StageTimeline, layout: PlannedLayout, element: int, device: str, tied: int) -> PersistentMemory:
    """Stage 3: parts of parameters (zero/stage3.py:972), masters (:1172), gradients in the model's dtype (:791)."""
    part, of_one = sum(shards_of_parameters(line, layout)), partial(_part_of, sharers(layout))
    here = {
        "communication buckets": reduction_bytes(layout) * layout.bucket,  # :782, held for good
        "gathered parameters": element * kept_whole(line, layout),
    }
    away = OffloadedMemory({})
    if layout.offload_param == "none":
        here["parameters"] = element * part
    else:
        away = parameters_offloaded(line, layout, of_one, element, device, tied)
    if layout.offload_optimizer == "none":
        states = {"master weights": MASTER_BYTES * part, "optimizer state": STATES_BYTES * part}
        return PersistentMemory(here | states | {"gradients": element * part}, away.host, away.nvme)
    steps = optimizer_offloaded(line, layout, of_one, element, device)
    host = {kind: away.host.get(kind, 0) + steps.host.get(kind, 0) for kind in {**away.host, **steps.host}}
    return PersistentMemory(here, host, away.nvme + steps.nvme, steps.momentary)


def _part_of(spread: ParameterSharers, parameter: Parameter) -> int:
    return -(-parameter.numel // spread.of(parameter))
