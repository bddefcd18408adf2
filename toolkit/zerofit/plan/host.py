"""What offloading keeps in host memory and on NVMe at stage 3, and how page-locked memory is rounded.

Places are of DeepSpeed 0.19.8, below deepspeed/runtime/. Sizes are those of zerofit's bundled JSONs: what they leave
out has DeepSpeed's default. Swap buffers are rounded as torch rounds, as `zerofit simulate` counts them; DeepSpeed's
own allocator (ops/csrc/pin_memory) takes them page by page, so they are an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import Parameter, StageTimeline
from zerofit.spec.overhead import pinned_bytes

SUB_GROUP_ELEMENTS = 1_000_000_000  # zero_optimization.sub_group_size, its default (zero/config.py)
SWAP_BUFFERS = 4  # offload_optimizer.buffer_count, its default (zero/offload_config.py)
PARAMETER_BUFFERS = 5  # offload_param.buffer_count, its default
PARAMETERS_IN_CPU = 1_000_000_000  # offload_param.max_in_cpu, its default: elements
LEAST_SWAPPED_BYTES = 2**20  # swap_tensor/utils.py, MIN_AIO_BYTES
ALIGNED_BYTES = 1024  # swap_tensor/utils.py, AIO_ALIGNED_BYTES

Part = Callable[[Parameter], int]  # elements of a parameter that a rank has


class SubGroup(NamedTuple):
    """Parameters that stage 3 steps at once."""

    part: int  # elements of this rank
    numels: tuple[int, ...]  # of the whole parameters


class OffloadedMemory(NamedTuple):
    """Bytes that stay from step to step, and those of the moment when host memory is highest."""

    host: dict[str, int]
    nvme: int = 0
    momentary: int = 0


def pinned(device: str) -> Callable[[int], int]:
    """What a page-locked buffer takes of the host; where the device is the CPU nothing is locked."""
    return int if device == "cpu" else pinned_bytes


def sub_groups(line: StageTimeline, part: Part) -> list[SubGroup]:
    """zero/stage3.py, _create_fp16_sub_groups."""
    found = []
    for group in filter(None, line.members):
        waiting: list[Parameter] = []
        whole = sum(map(part, group)) <= SUB_GROUP_ELEMENTS
        size = 0
        for parameter in group:
            waiting.append(parameter)
            size += part(parameter)
            if parameter is group[-1] or (size >= SUB_GROUP_ELEMENTS and not whole):
                found.append(SubGroup(size, tuple(p.numel for p in waiting)))
                waiting, size = [], 0
    return found


def optimizer_offloaded(
    line: StageTimeline, layout: PlannedLayout, part: Part, element: int, device: str
) -> OffloadedMemory:
    """States, masters and gradients; sub-groups below a MiB stay on the host (optimizer_utils.py)."""
    locked, groups = pinned(device), sub_groups(line, part)
    disk = layout.offload_optimizer == "nvme"
    swapped = [g.part for g in groups if disk and 4 * g.part >= LEAST_SWAPPED_BYTES]
    kept = [g.part for g in groups if not disk or 4 * g.part < LEAST_SWAPPED_BYTES]
    whole = sum(g.part for g in groups)
    host = {
        "master weights": 4 * sum(kept),
        "optimizer state": 8 * sum(kept),
        # of the micro batch (zero/stage3.py:791), and the optimizer's own (:1338)
        "gradients": locked(element * whole) + sum(locked(4 * size) for size in kept),
    }
    if not swapped:
        return OffloadedMemory(host)
    host["swap buffers"] = SWAP_BUFFERS * locked(4 * _aligned(max(swapped), 4))  # swap_tensor/utils.py:180
    # moments are made in ordinary memory at the first step; gradients before they are locked (:791)
    return OffloadedMemory(host, 16 * sum(swapped), max(8 * max(swapped), element * whole if device != "cpu" else 0))


def parameters_offloaded(
    line: StageTimeline, layout: PlannedLayout, part: Part, element: int, device: str, tied: int = 0
) -> OffloadedMemory:
    """A flat buffer a group (zero/stage3.py:884); on disk what is beyond PARAMETERS_IN_CPU, with buffers to read into.

    `tied`: elements of a matrix that another one replaces once it has been written.
    """
    locked = pinned(device)
    totals = [sum(map(part, group)) for group in filter(None, line.members)]
    if layout.offload_param == "cpu":
        return OffloadedMemory({"parameters": sum(locked(element * size) for size in totals)})
    flat, room = [], PARAMETERS_IN_CPU
    for size in totals:
        flat.append(min(size, max(0, room)))
        room -= size
    largest = max((p.numel * (layout.tp if p.split else 1) for layer in line.layers for p in layer), default=0)
    buffers = locked(element * PARAMETER_BUFFERS * _aligned(largest, element))
    groups = sub_groups(line, part)
    if sum(flat) < sum(totals):  # for the largest sub-group's parameters, and in full (:1015)
        most = max(groups, key=lambda g: g.part)
        buffers += locked(element * sum(_aligned(numel, element) for numel in most.numels))
    written = [part(p) for group in line.members for p in group] + [part(Parameter(tied, 0, 0))]
    files = sum(element * _aligned(n, element) for n in written if element * n >= LEAST_SWAPPED_BYTES)
    kept = sum(locked(element * size) for size in flat if size)
    return OffloadedMemory({"parameters": kept, "swap buffers": buffers}, files)


def _aligned(numel: int, element: int) -> int:
    """Elements, up to a whole block of a file."""
    block = ALIGNED_BYTES // element
    return -(-numel // block) * block
