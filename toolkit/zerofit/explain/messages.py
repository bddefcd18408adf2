"""Find the messages about missing memory in a log, and read their figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from zerofit.explain.data import any_of, read_data
from zerofit.explain.log import LogLine
from zerofit.spec.units import shown_bytes

DEVICE, HOST = "device", "host"

_UNITS = {"bytes": 0, "byte": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = r"(-?[\d.]+) ?(bytes|[KMGT]i?B)"  # torch and DeepSpeed mean 1024 by all units
# torch's messages differ by version: 1.x and 2.0 have one pair of parentheses; 2.1 writes sentences ("capacty"), with
# the processes on the device. 2.2 adds expandable segments, 2.5 adds private pools. XPU, HIP and NPU use these words.
_FIGURES = {
    "asked_bytes": rf"(?:[Tt]ried|[Tt]rying) to allocate {_SIZE}",
    "total_bytes": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}|max allowed: {_SIZE}",
    "free_bytes": rf"{_SIZE} free|of which {_SIZE} is free",
    "allocated_bytes": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch|MPS allocated: {_SIZE}",
    "reserved_bytes": rf"{_SIZE} reserved in total by PyTorch",
    "unallocated_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached",
    "limit_bytes": rf"{_SIZE} allowed",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "metal_bytes": rf"other allocations: {_SIZE}",
    "private_bytes": rf"{_SIZE} allocated in private pools",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIGURES.items()}
_TORCH = re.compile(r"(?:CUDA|HIP|XPU|NPU|MLU|MPS backend) out of memory|C10 Out of Memory")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_GPU = re.compile(r"\b(?:GPU|NPU|XPU|MLU|device) (\d+)[ ;]")
_OTHERS_TOO = re.compile(r"STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)(?!_DEVICE_ALLOC)")
MESSAGE_LENGTH = 600  # torch lists each process on the device
MESSAGE_LINES = 12  # number of lines over which a message may be wrapped
KERNEL_LINES = 200  # number of lines of the kernel's report, which has a line for each process


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """The figures of an error message; None for a figure that the message does not have."""

    asked_bytes: int | None = None
    total_bytes: int | None = None  # memory of the device, or the limit of a host's control group
    free_bytes: int | None = None
    allocated_bytes: int | None = None  # by tensors
    reserved_bytes: int | None = None  # by torch's allocator
    limit_bytes: int | None = None  # of set_per_process_memory_fraction
    process_bytes: int | None = None  # used by this process on the device, with its context and libraries
    private_bytes: int | None = None  # in pools of CUDA graphs
    other_bytes: tuple[int, ...] = ()  # other processes on the device

    @property
    def known(self) -> int:
        """The number of known figures."""
        return sum(bool(value) for value in vars(self).values())

    @property
    def unallocated_bytes(self) -> int | None:
        """The bytes that torch has reserved and no tensor uses."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def beside_bytes(self) -> int | None:
        """The bytes on the device outside of torch's allocator: contexts, libraries, processes."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    def __str__(self) -> str:
        parts = {
            "requested": self.asked_bytes,
            "total": self.total_bytes,
            "in tensors": self.allocated_bytes,
            "unused by torch": self.unallocated_bytes,
            "outside of torch": self.beside_bytes,
            "free": self.free_bytes,
        }
        return ", ".join(f"{shown_bytes(size)} {name}" for name, size in parts.items() if size is not None)


@dataclass(frozen=True, kw_only=True)
class ShortageSign:
    """An entry of `messages` in shortages.yaml."""

    kind: str
    place: str  # DEVICE, HOST, "shared memory" or "kernel"
    pattern: re.Pattern[str]
    is_certain: bool = True
    ends_process: bool = False


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """One message about missing memory."""

    sign: ShortageSign
    message: str
    line: int  # in the log, from 1
    rank: str = ""
    gpu: int | None = None
    figures: MemoryFigures = field(default_factory=MemoryFigures)

    @property
    def is_certain(self) -> bool:
        """Whether this message always means a shortage of memory."""
        return self.sign.is_certain and not _OTHERS_TOO.search(self.message)


def ended_by(signal: int) -> str:
    """Return the pattern of a line that reports that `signal` ended a process."""
    codes = rf"(?:{128 + signal}|{256 - signal})\b"  # a shell's exit code, and a negative one as a byte
    return (
        rf"return code = -{signal}\b|\bcode -{signal}\b|exitcode *: -{signal}\b"
        rf"|Signal {signal} \(|[Ss]ignals?\.\w+: {signal}\b"
        rf"|(?i:exit(?:ed)?|non-zero)(?: with)?(?: exit)? ?(?i:code|status)?(?: of)?[\"']?[:=]? *\(?{codes}"
    )


@cache
def signs() -> dict[str, ShortageSign]:
    """Return the entries of `messages` in shortages.yaml by kind, in their order."""
    found = [sign_of(**entry) for entry in read_data("shortages.yaml")["messages"]]
    return {sign.kind: sign for sign in found}


def sign_of(patterns: Sequence[str], signals: Sequence[int] = (), **fields: Any) -> ShortageSign:
    """Return the sign of an entry."""
    return ShortageSign(pattern=any_of([*map(ended_by, signals), *patterns]), **fields)


# Logs have millions of lines, and the patterns are slow. So a line is only read if it has one of these words.
_WORDS = (
    *("out of memory", "Out of Memory", "Out Of Memory", "out-of-memory", "enough memory", "allocate memory"),
    *("shared memory", "memory limit", "low on memory", "memory pressure", ": memory", ": mem", "available memory"),
    *("memory utilization", "mem-fraction", "serve at least", "max seq len", "available RAM", "status_memory_error"),
    *("oom", "OOM", "MEMLIMIT", "OUT_OF_", "ALLOC_FAILED", "_STATUS_", "EXHAUSTED", "Exhausted", "MemoryError"),
    *("bad_alloc", "Unable to allocate", "Failed to CUDA", "cudaHost", "MemoryAllocation", "outside PyTorch's"),
    *("paging file", "/dev/shm", "mmap", "out of resource", "OutOfResources", "many resources", "died", "crashed"),
    *("DataLoader worker", "illed", "137", "247", "-9", "ignal"),
)


def shortages(lines: Sequence[LogLine]) -> list[Shortage]:
    """Return all messages about missing memory, in the log's order."""
    found = list[Shortage]()
    for at, line in enumerate(lines):
        text = line.text
        if not any(word in text for word in _WORDS) or text.lstrip().startswith(("File ", "#")):
            continue
        if sign := next((sign for sign in signs().values() if sign.pattern.search(text)), None):
            found.append(_shortage(sign, lines, at))
    return found


def ranked(found: Sequence[Shortage]) -> list[Shortage]:
    """Return the messages that explain a failure, the most informative first."""
    order = list(signs())
    return sorted(found, key=lambda shortage: (order.index(shortage.sign.kind), -shortage.figures.known, shortage.line))


def _shortage(sign: ShortageSign, lines: Sequence[LogLine], at: int) -> Shortage:
    line = lines[at]
    text = joined_message(lines, at)
    found = Shortage(sign=sign, message=shortened(text), line=line.number, rank=line.rank)
    if sign.kind == "torch":
        gpu = _GPU.search(text)
        return replace(found, gpu=int(gpu[1]) if gpu else None, figures=device_figures(text))
    if sign.place == HOST:
        # the kernel writes the limit of a control group some lines before the process that it kills
        first = max(0, at - KERNEL_LINES) if sign.kind == "kernel-oom" else at
        before = " ".join(line.text for line in lines[first:at])
        return replace(found, figures=_host_figures(text, before))
    if asked := re.search(r"(?:calloc|malloc)(?: async)? (\d+) bytes", text):
        return replace(found, figures=MemoryFigures(asked_bytes=int(asked[1])))
    return found


def shortened(text: str) -> str:
    """Return a message, cut between words if it is too long. "..." marks the cut."""
    return textwrap.shorten(text, MESSAGE_LENGTH, placeholder=" ...")


def joined_message(lines: Sequence[LogLine], at: int) -> str:
    """Return a message on one line. It may be wrapped, with lines of other ranks in between."""
    rank = lines[at].rank
    parts = [lines[at].text.strip()]
    for line in lines[at + 1 : at + MESSAGE_LINES]:
        if line.rank == rank:
            text = line.text.strip().strip("│|").strip()
            if not text or re.match(r"Traceback|File |\[|frame #|Exception raised|During handling|╰", text):
                break
            parts.append(text)
    return re.sub(r"\s+", " ", " ".join(parts))


def device_figures(text: str) -> MemoryFigures:
    """Return the memory figures in the first of torch's messages in `text`."""
    # The joined lines may contain the message of another rank. Figures of two messages must not be mixed.
    starts = [match.start() for match in _TORCH.finditer(text)]
    text = text[: starts[1] if len(starts) > 1 else None]
    found: dict[str, int] = {}  # by field of `MemoryFigures`
    for name, pattern in _PATTERNS.items():
        if match := pattern.search(text):
            number, unit = [group for group in match.groups() if group]
            found[name] = _bytes(number, unit)
    others = [_bytes(number, unit) for _, number, unit in _OTHERS.findall(text)]
    unallocated = found.pop("unallocated_bytes", None)
    metal = found.pop("metal_bytes", None)
    if metal is not None:  # MPS counts its heaps and what else Metal has allocated for this process (MPSAllocator.mm)
        unallocated, used = 0, found.get("allocated_bytes", 0) + metal
        found |= {"process_bytes": used, "free_bytes": max(0, found.get("total_bytes", 0) - used)}
    if unallocated is not None and "allocated_bytes" in found:
        found["reserved_bytes"] = found["allocated_bytes"] + unallocated
    # Under WDDM, MIG or another container's driver, the process's own figure may be 0 or 2^64
    if not found.get("reserved_bytes", 0) <= found.get("process_bytes", -1) <= found.get("total_bytes", 0):
        found.pop("process_bytes", None)
    # In a container, torch does not find its own process number on the device, so this process is among the others
    reserved = found.get("reserved_bytes", 0)
    if "process_bytes" not in found and (own := [size for size in others if size >= 0.99 * reserved]) and reserved:
        found["process_bytes"] = min(own)
        others.remove(min(own))
    return MemoryFigures(**found, other_bytes=tuple(others))


def _host_figures(text: str, before: str) -> MemoryFigures:
    """Return the figures of a message by the kernel, the CPU allocator, numpy or Ray.

    `before`: the text before the message.
    """
    if asked := re.search(r"you tried to allocate (\d+) bytes", text):  # torch's CPU allocator
        return MemoryFigures(asked_bytes=int(asked[1]))
    if asked := re.search(rf"Unable to allocate {_SIZE} for an array", text):  # numpy
        return MemoryFigures(asked_bytes=_bytes(asked[1], asked[2]))
    if ray := re.search(rf"memory used={_SIZE}\) was running was {_SIZE} / {_SIZE}", text):
        own, host, total = (_bytes(ray[at], ray[at + 1]) for at in (1, 3, 5))
        return MemoryFigures(process_bytes=own, total_bytes=total, free_bytes=total - host)
    # the kernel
    # A process's resident memory is the sum of these three. All of them are in kB.
    resident = [int(size) << 10 for size in re.findall(r"\b(?:anon|file|shmem)-rss:(\d+)kB", text)]
    limit = re.search(r"memory: usage \d+kB, limit (\d+)kB", before)
    return MemoryFigures(
        process_bytes=sum(resident) if resident else None, limit_bytes=int(limit[1]) << 10 if limit else None
    )


def _bytes(number: str, unit: str) -> int:
    try:
        return int(float(number) * 1024 ** _UNITS[unit.lower() if unit == "bytes" else unit[0].lower()])
    except (ValueError, OverflowError):  # "1.2.3"
        return 0
