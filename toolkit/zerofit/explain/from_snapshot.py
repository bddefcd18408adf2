"""Explain a memory snapshot: memory in use by kind and line, fragments, growth by step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.explain.advice import RECORD, changes_for
from zerofit.explain.causes import USUAL_FRAGMENTS
from zerofit.explain.messages import DEVICE, MemoryFigures
from zerofit.explain.result import UNKNOWN, Change, Explanation, Line
from zerofit.explain.tracebacks import (
    EVALUATION,
    GENERATION,
    KEPT_LOGITS,
    LOADING,
    SAVING,
    CodeFrame,
    caller_of_torch,
    gathers,
    own_frame,
    phase_of,
)
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_pickle import read_pickle
from zerofit.spec.memory_kinds import (
    ACTIVATIONS,
    ALLOCATED_BY,
    GATHERED,
    GRADIENTS,
    KIND_FILE,
    LOGITS,
    MASTER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    is_loss,
)
from zerofit.spec.units import shown_bytes

Frames = Sequence[Mapping[str, object]]  # innermost first: "filename", "name", "line"
ALIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
SWING = 0.3  # share of the range of allocated bytes between a step's highest and lowest moment
ENOUGH = "did-not-run-out"
COPIES, FRAGMENTS, UNRECORDED, OTHER = "copies of parameters", "fragments", "unrecorded", "other"
LINES = 5
LEAKED_STEPS = 3  # number of steps that must each have left a block of the same line
LEAK_SHARE = 0.01  # share of the allocated bytes
MOST_LOGITS, MOST_STATE = 0.25, 0.6  # shares of the allocated bytes from which logits or states are named as the cause
_STATES = (PARAMETERS, GRADIENTS, MASTER, STATE)
_OPTIMIZER_STATE = ("_init_group", "init_state", "get_state_buffer", "_init_state", "initialize_optimizer_states")
_LOADING = ("from_pretrained", "_apply", "load_state_dict", "reset_parameters", "_load_state_dict_into_meta_model")
_IN_PHASE = {
    KEPT_LOGITS: "evaluation-keeps-logits",
    EVALUATION: "evaluation",
    GENERATION: "generation",
    LOADING: "weights",
    SAVING: "saving",
}


@dataclass(frozen=True, slots=True)
class AliveBlock:
    """An allocation that is alive at a moment."""

    bytes: int
    frames: Frames
    event: int  # index of the event in the trace that allocated it; -1 if the trace has no such event


@dataclass(frozen=True, slots=True)
class AllocatorCall:
    """One event of the trace."""

    action: str
    address: int
    bytes: int
    frames: Frames
    free_bytes: int  # free memory of the device; only for "oom"


@dataclass(frozen=True)
class MemorySnapshot:
    """One device's memory."""

    blocks: dict[int, AliveBlock]  # by address, at the end
    trace: tuple[AllocatorCall, ...]
    reserved_bytes: int  # at the end
    private_bytes: int  # bytes of segments in private pools
    alloc_conf: dict[str, object]  # the allocator's settings; {} before torch 2.1

    @cached_property
    def moment(self) -> int:
        """The event to explain: the last out-of-memory event, or else the peak."""
        failed = [number for number, event in enumerate(self.trace) if event.action == "oom"]
        if failed:
            return failed[-1]
        curve = self.allocated
        return max(range(len(curve)), key=curve.__getitem__, default=-1)

    @property
    def ran_out(self) -> AllocatorCall | None:
        """The out-of-memory event at `moment`."""
        event = self.trace[self.moment] if self.trace else None
        return event if event and event.action == "oom" else None

    @cached_property
    def allocated(self) -> list[int]:
        """Allocated bytes after each event."""
        live, found = 0, list[int]()
        for event in self.trace:
            live += event.bytes * _SIGN.get(event.action, 0)
            found.append(live)
        # allocated before the trace began
        before = sum(block.bytes for block in self.blocks.values()) - live
        return [before + size for size in found]

    @property
    def reserved_at_moment(self) -> int:
        """Reserved bytes at `moment`."""
        later = self.trace[self.moment + 1 :]  # of these segments, the bytes at the end have too many or lack some
        return self.reserved_bytes - sum(event.bytes * _SEGMENT_SIGN.get(event.action, 0) for event in later)

    def alive(self) -> list[AliveBlock]:
        """Return the blocks that were alive at `moment`, also those that were freed later."""
        if not self.trace:
            return list(self.blocks.values())
        live: dict[int, AliveBlock] = {}
        seen: set[int] = set()  # addresses that the trace allocates up to the moment
        for number, event in enumerate(self.trace[: self.moment + 1]):
            if event.action == "alloc":
                live[event.address] = AliveBlock(event.bytes, event.frames, number)
            elif event.action == "free_completed":
                live.pop(event.address, None)
            else:
                continue
            seen.add(event.address)
        # blocks from before the trace: still there at the end, or first freed after the moment
        found = list(live.values())
        for event in self.trace[self.moment + 1 :]:
            if event.action == "free_completed" and event.address not in seen:
                found.append(AliveBlock(event.bytes, (), -1))
            if event.action in ("free_completed", "alloc"):
                seen.add(event.address)
        return found + [block for address, block in self.blocks.items() if address not in seen]

    @cached_property
    def steps(self) -> list[int]:
        """The events up to `moment` at which allocated memory was at a low point between two steps."""
        # a low point counts if memory falls to it and rises from it by `SWING` of the curve's range
        curve = self.allocated[: self.moment + 1]
        if not curve:
            return []
        swing = SWING * (max(curve) - min(curve))
        found, high, low, at, falling = list[int](), curve[0], curve[0], 0, False
        for number, size in enumerate(curve):
            if falling:
                if size < low:
                    low, at = size, number
                elif size > low + swing:
                    found.append(at)
                    high, falling = size, False
            elif size > high:
                high = size
            elif size < high - swing:
                low, at, falling = size, number, True
        return found


_SIGN = {"alloc": 1, "free_completed": -1}
_SEGMENT_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read a snapshot: the device that ran out of memory, or else the fullest device.

    Raises OSError or Unreadable.
    """
    content = read_pickle(path)
    try:
        devices = _devices(content)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"it is not a memory snapshot: {type(error).__name__} {error}") from None
    if not devices:
        raise Unreadable("it records the memory of no device")
    return max(devices, key=lambda device: (device.ran_out is not None, device.reserved_bytes))


def _devices(content: object) -> list[MemorySnapshot]:
    if isinstance(content, list):  # torch.cuda.memory_snapshot(), and torch before 2.0
        content = {"segments": content}
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise Unreadable("it is not a memory snapshot: it has no segments")
    traces = content.get("device_traces") or []
    settings = content.get("allocator_settings")
    numbers = {int(segment.get("device", 0)) for segment in content["segments"]}
    numbers |= {number for number, events in enumerate(traces) if events}
    found = []
    for number in sorted(numbers):
        segments = [segment for segment in content["segments"] if int(segment.get("device", 0)) == number]
        trace = tuple(map(_event, traces[number] if 0 <= number < len(traces) else ()))
        allocated = {event.address: n for n, event in enumerate(trace) if event.action == "alloc"}
        private = (segment for segment in segments if any(segment.get("segment_pool_id", ())))
        found.append(
            MemorySnapshot(
                blocks=_blocks_in_use(allocated, segments),
                trace=trace,
                reserved_bytes=sum(int(segment["total_size"]) for segment in segments),
                private_bytes=sum(int(segment["total_size"]) for segment in private),
                alloc_conf=settings if isinstance(settings, dict) else {},
            )
        )
    return found


def _event(event: dict[str, Any]) -> AllocatorCall:
    address = event.get("addr", event.get("address", -1))
    free = event.get("device_free", 0) or 0
    return AllocatorCall(str(event["action"]), int(address), int(event.get("size", 0)), _frames(event), int(free))


def _blocks_in_use(allocated: dict[int, int], segments: Sequence[dict[str, Any]]) -> dict[int, AliveBlock]:
    """Return the blocks in use by address. `allocated`: the event that allocated an address."""
    found: dict[int, AliveBlock] = {}
    for segment in segments:
        address = int(segment.get("address") or 0)
        for block in segment["blocks"]:
            # in older formats, addresses follow from the sizes of earlier blocks
            address = int(block.get("address", address))
            if block["state"] in ALIVE:
                history = block.get("history") or [{}]  # torch 2.0 and before
                frames = _frames(block) or _frames(history[0])
                size = int(block.get("requested_size") or history[0].get("real_size") or block["size"])
                found[address] = AliveBlock(size, frames, allocated.get(address, -1))
            address += int(block["size"])
    return found


def _frames(event: dict[str, object]) -> Frames:
    frames = event.get("frames")
    return frames if isinstance(frames, list | tuple) else ()


def explain_snapshot(path: Path) -> Explanation:
    """Return why memory ran out, or what fills it at its peak. Raises OSError or Unreadable."""
    # A snapshot has what is alive at the end, and the last events. The moment to explain may lie before the end. So
    # `alive` goes back from the end through the events.
    snapshot = read_snapshot(path)
    alive = snapshot.alive()
    kinds, lines = _by_kind_and_line(alive)
    allocated = sum(kinds.values())
    fragments = max(0, snapshot.reserved_at_moment - allocated)
    failed = snapshot.ran_out
    frames = _calls(failed.frames) if failed else []
    own, caller, phase = own_frame(frames), caller_of_torch(frames), phase_of(frames)
    cause, summary, evidence = _cause(snapshot, alive, kinds, frames)
    moment = "when memory ran out" if failed else "at the peak"
    unknown = cause == UNKNOWN
    return Explanation(
        source="snapshot",
        cause=cause,
        place=DEVICE,
        summary=summary,
        evidence=(
            *evidence,
            f"{len(alive):,} blocks were alive {moment}, in a trace of {len(snapshot.trace):,} events",
        ),
        at=own.place if own else "",
        function=own.name if own else "",
        asked_by=caller.place if caller and caller is not own else "",
        phase=phase,
        steps=len(snapshot.steps) if failed else 0,
        figures=MemoryFigures(
            asked_bytes=failed.bytes if failed else None,
            free_bytes=failed.free_bytes if failed else None,
            allocated_bytes=allocated,
            reserved_bytes=allocated + fragments,
            private_bytes=snapshot.private_bytes or None,
        ),
        alive=dict(sorted({**kinds, FRAGMENTS: fragments}.items(), key=lambda entry: -entry[1])),
        lines=lines,
        changes=() if unknown else tuple(Change(change=text) for text in changes_for(cause)),
        run_next=RECORD if unknown else "",
    )


def _cause(
    snapshot: MemorySnapshot, alive: Sequence[AliveBlock], kinds: Counter[str], frames: Sequence[CodeFrame]
) -> tuple[str, str, tuple[str, ...]]:
    """Return the cause, a sentence and the evidence. `frames`: the call that failed."""
    # The first that applies is the answer. Fragments and leaks come before the phase, and the phase before the kind of
    # memory that fills the GPU: a leak of activations is a leak.
    allocated = sum(kinds.values())
    reserved, failed = snapshot.reserved_at_moment, snapshot.ran_out
    # with the unused memory in one piece, the allocation would have fitted
    if failed and reserved - allocated >= max(failed.bytes - failed.free_bytes, USUAL_FRAGMENTS * reserved):
        pieces = f"{shown_bytes(reserved - allocated)} are unused, in pieces below {shown_bytes(failed.bytes)}"
        return "fragmentation", f"Of {shown_bytes(reserved)} reserved by torch, {pieces}.", ()
    if leak := _leak(snapshot, alive, allocated):
        line, blocks, steps = leak
        size = shown_bytes(sum(block.bytes for block in blocks))
        shown = f"{len(blocks):,} blocks that {line} allocated in {steps} steps were never freed, {size}"
        return "leak", "Each step allocates memory that is never freed.", (shown,)
    if not failed:
        name, size = kinds.most_common(1)[0] if kinds else ("nothing", 0)
        summary = f"At the peak {shown_bytes(allocated)} were in use, most for {name} ({shown_bytes(size)})."
        return ENOUGH, summary, _shares(kinds)
    if kinds[UNRECORDED] > 0.5 * allocated:
        summary = "The snapshot has no stacks for most blocks: recording began too late, or was off."
        return UNKNOWN, summary, ()
    if name := _IN_PHASE.get(phase_of(frames), ""):
        return name, f"Memory ran out in {phase_of(frames)}.", _shares(kinds)
    if kinds[COPIES] > MOST_LOGITS * allocated:
        summary = "A copy of the model's weights (deepcopy: EMA or a reference) is on the GPU."
        return "second-copy", summary, _shares(kinds)
    if kinds[LOGITS] > MOST_LOGITS * allocated:
        return "logits", "Logits and loss fill much of the GPU.", _shares(kinds)
    if frames and gathers(frames) and kinds[GATHERED] > MOST_LOGITS * allocated:
        return "gathered-parameters", "ZeRO-3's gathered parameters fill much of the GPU.", _shares(kinds)
    if sum(kinds[kind] for kind in _STATES) > MOST_STATE * allocated:
        return "states", "Parameters, gradients and optimizer states fill most of the GPU.", _shares(kinds)
    if kinds[ACTIVATIONS] + kinds[TEMPORARIES] + kinds[LOGITS] > 0.4 * allocated:
        return "activations", "A micro batch's activations fill much of the GPU.", _shares(kinds)
    return UNKNOWN, "No kind of memory stands out.", _shares(kinds)


def _shares(kinds: Counter[str]) -> tuple[str, ...]:
    total = max(1, sum(kinds.values()))
    named = ", ".join(f"{kind} {size / total:.0%}" for kind, size in kinds.most_common(3))
    return (f"{named} of the allocated memory",)


def _leak(
    snapshot: MemorySnapshot, alive: Sequence[AliveBlock], allocated: int
) -> tuple[str, list[AliveBlock], int] | None:
    """Find a line of code whose blocks from many steps are all alive.

    Return the line, its blocks and the number of steps.
    """
    steps = snapshot.steps
    # A leak keeps a block of one size at each step. A line may also keep other blocks, such as a growing cache.
    groups: defaultdict[tuple[str, int], list[AliveBlock]] = defaultdict(list)  # by line of code and size
    for block in alive:
        if block.event >= 0 and block.frames:
            caller = caller_of_torch(_calls(block.frames))
            groups[caller.place if caller else "", block.bytes].append(block)
    found = []
    for (line, _), blocks in groups.items():
        numbers = {sum(block.event > step for step in steps) for block in blocks}  # of the steps that allocated them
        size = sum(block.bytes for block in blocks)
        if len(numbers - {0}) >= LEAKED_STEPS and size > LEAK_SHARE * allocated:
            found.append((size, line, blocks, len(numbers)))
    if not found:
        return None
    _, line, blocks, count = max(found, key=lambda entry: entry[0])
    return line, blocks, count


def _by_kind_and_line(alive: Sequence[AliveBlock]) -> tuple[Counter[str], tuple[Line, ...]]:
    recorded = any(block.frames for block in alive)
    kinds: Counter[str] = Counter()
    lines: dict[tuple[str, str, str], list[int]] = {}
    for block in alive:
        kind = kind_of(block.frames, recorded and block.event >= 0)
        kinds[kind] += block.bytes
        if caller := caller_of_torch(_calls(block.frames)):
            entry = lines.setdefault((caller.place, caller.name, kind), [0, 0])
            entry[0] += block.bytes
            entry[1] += 1
    largest = sorted(lines.items(), key=lambda item: -item[1][0])[:LINES]
    return kinds, tuple(
        Line(place=place, function=name, kind=kind, bytes=size, blocks=count)
        for (place, name, kind), (size, count) in largest
    )


# The stack shows who allocated a block. On a GPU, backward runs in a separate thread without Python frames; the blocks
# that it leaves are gradients. DeepSpeed's functions are those of `zerofit simulate`.
def kind_of(frames: Frames, recorded: bool) -> str:
    """Return a block's kind by its stack, innermost call first.

    `recorded`: whether other blocks have stacks.
    """
    calls = [(call.file.replace("\\", "/"), call.name) for call in _stack(frames)]
    python = [(file, name) for file, name in calls if file.endswith(".py") or file.startswith("<")]
    names = {name for _, name in calls}
    # `zerofit simulate` writes snapshots, too. Their first frame names the kind that the simulation has recorded.
    if calls and calls[0][0] == KIND_FILE:
        return calls[0][1]
    if not python:
        in_backward = any("autograd::" in name for name in names)
        return GRADIENTS if in_backward or (recorded and not calls) else UNRECORDED
    if names & {"deepcopy", "__deepcopy__"}:
        return COPIES
    if names & set(_OPTIMIZER_STATE):
        return STATE
    for file, name in python:
        for ending, functions in ALLOCATED_BY.items():
            if file.endswith(ending) and name in functions:
                return functions[name]
        if is_loss(file) or "cross_entropy" in name or name == "log_softmax":
            return LOGITS
    # States were recognized above, so what else an optimizer's step allocates is temporary.
    if any("/optim/" in file for file, _ in python):
        return TEMPORARIES
    if names & {"backward", "_engine_run_backward"}:
        return ACTIVATIONS if "forward" in names else GRADIENTS
    if names & set(_LOADING) or any(name == "__init__" and "/nn/modules/" in file for file, name in python):
        return PARAMETERS
    return ACTIVATIONS if names & {"forward", "_call_impl"} else OTHER


def _calls(frames: Frames) -> list[CodeFrame]:
    """Return the Python calls of a stack, or else all its calls, outermost call first."""
    calls = [call for call in _stack(frames)[::-1] if call.file != KIND_FILE]
    return [call for call in calls if call.file.endswith(".py") or call.file.startswith("<ipython")] or calls


def _stack(frames: Frames) -> list[CodeFrame]:
    found = []
    for frame in frames:
        if isinstance(frame, dict):
            line = frame.get("line")
            number = line if isinstance(line, int) else 0
            found.append(CodeFrame(str(frame.get("filename", "")), number, str(frame.get("name", ""))))
    return found
