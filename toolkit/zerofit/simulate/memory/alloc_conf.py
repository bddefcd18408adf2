"""Read the options of torch's caching allocator (PYTORCH_CUDA_ALLOC_CONF)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from zerofit.spec.errors import Problems
from zerofit.spec.overhead import LARGE_SEGMENT_BYTES

MIB = 2**20
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes are multiples of it
INTERVALS = 16  # of roundup_power2_divisions: from 1 MiB on, each twice the previous one
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # environment variables, the newer name first
# options that do not change how much device memory is reserved. The threshold needs a memory fraction of the process
# (`set_fraction` in c10/cuda/CUDACachingAllocator.cpp), which neither DeepSpeed nor zerofit sets
NO_EFFECT = ("garbage_collection_threshold", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
NO_EFFECT += ("release_lock_on_cudamalloc", "release_lock_on_hipmalloc")
NO_EFFECT += ("pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register")
NO_EFFECT += ("pinned_num_register_threads", "pinned_free_catch_all", "pinned_reserve_segment_size_mb")
NO_EFFECT += ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
NOT_SIMULATED = {  # option -> hint
    "large_segment_size_mb": "leave it out of the simulation",
    "per_process_memory_fraction": "leave it out, and set --device-memory to this fraction",
}


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How the caching allocator allocates and splits segments. The defaults are torch's."""

    expandable_segments: bool = False
    max_split_bytes: float = inf  # blocks from this size on are not split, and serve only requests of about their size
    rounding_bytes: int = LARGE_SEGMENT_BYTES  # a larger request gets such a block if it is less than this larger
    divisions: tuple[int, ...] = (0,) * INTERVALS  # steps per power of two to which sizes are rounded; 0 or 1: none

    # A request is rounded up to 512 bytes, or with `roundup_power2_divisions` to a part of the power of two below it:
    #
    #   unit = 2^floor(log2(size)) / divisions        e.g. 100 MiB with 8 divisions: unit 8 MiB, block 104 MiB
    def rounded_bytes(self, size_bytes: int) -> int:
        """Return the size of the block for a request of `size_bytes` (round_size)."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        power = size_bytes.bit_length() - 1
        parts = self.divisions[min(max(0, power - 20), INTERVALS - 1)]
        unit = MIN_BLOCK_BYTES
        if parts > 1 and size_bytes > MIN_BLOCK_BYTES * parts:  # roundup_power2_next_division
            unit = 1 << power >> (parts.bit_length() - 1)
        return -(-size_bytes // unit) * unit


def read_alloc_conf(text: str) -> AllocatorSettings:
    """Read the text of PYTORCH_CUDA_ALLOC_CONF. Raises UserError with all problems.

    >>> settings = read_alloc_conf("expandable_segments:True,roundup_power2_divisions:[64:8,>:4]")
    >>> settings.expandable_segments, settings.rounded_bytes(100 * MIB) == 104 * MIB
    (True, True)
    """
    problems, found, where = Problems(), {}, "--alloc-conf"
    for option in _options(text):
        name, _, value = option.partition(":")
        reader = _READERS.get(name)
        if name in NOT_SIMULATED:
            problems.add("alloc-conf", f"{name} is not simulated", NOT_SIMULATED[name], where)
        elif reader is None and name not in NO_EFFECT:
            message = f"unknown option {name or option!r} of torch's allocator"
            problems.add("alloc-conf", message, f"known: {', '.join((*_READERS, *NO_EFFECT))}", where)
        if reader is None:
            continue
        try:
            found |= reader(value)
        except ValueError as error:
            problems.add("alloc-conf", f"{name}: {error}", "use the syntax of PYTORCH_CUDA_ALLOC_CONF", where)
    problems.raise_if_any()
    return AllocatorSettings(**found)


def alloc_conf_of(environment: Mapping[str, str]) -> str:
    """Return the allocator's options in environment variables; "" if there are none."""
    return next((environment[name] for name in VARIABLES if environment.get(name)), "")


def _options(text: str) -> list[str]:
    found, depth = [""], 0
    for letter in text.replace(" ", ""):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [option for option in found if option]


def _expandable(value: str) -> dict[str, object]:
    if value not in ("True", "False"):
        raise ValueError(f"must be True or False, not {value!r}")
    return {"expandable_segments": value == "True"}


def _backend(value: str) -> dict[str, object]:
    if value != "native":
        raise ValueError(f"only native is simulated, not {value!r}")
    return {}


def _mebibytes(field: str, value: str) -> dict[str, object]:
    if not value.isdecimal() or int(value) * MIB < LARGE_SEGMENT_BYTES:
        raise ValueError(f"must be a number of MiB, {LARGE_SEGMENT_BYTES // MIB} or more, not {value!r}")
    return {field: int(value) * MIB}


# [64:8,256:4,>:2] in the table of intervals. Each starts at a power of two of MiB:
#
#   from MiB     1 ... 64   128   256   512 ... 32768
#   divisions    8 ...  8     0     4     2 ...     2      the first entry holds for smaller sizes, too
def _divisions(value: str) -> dict[str, object]:
    """Read one number for all sizes, or [MIB:N,...,>:N] (parseRoundUpPower2Divisions)."""
    if not value.startswith("["):
        return {"divisions": (_power(value, least=1),) * INTERVALS}
    table, last = [0] * INTERVALS, 0
    for number, entry in enumerate(filter(None, value.strip("[]").split(","))):
        size, _, parts = entry.partition(":")
        count = _power(parts, least=0)
        if size == ">":
            table[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        last = min(_power(size, least=1).bit_length() - 1, INTERVALS - 1)
        begin = 0 if number == 0 else last
        table[begin : last + 1] = [count] * (last + 1 - begin)
    return {"divisions": tuple(table)}


def _power(value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least or int(value) & (int(value) - 1):
        raise ValueError(f"sizes and divisions must be powers of two, not {value!r}")
    return int(value)


_READERS = {
    "expandable_segments": _expandable,
    "max_split_size_mb": partial(_mebibytes, "max_split_bytes"),
    "max_non_split_rounding_mb": partial(_mebibytes, "rounding_bytes"),
    "roundup_power2_divisions": _divisions,
    "backend": _backend,
}
