"""Explain a memory snapshot: memory in use by kind and line, fragments, growth by step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from zerofit.explain.advice import CHANGES, RECORD
from zerofit.explain.causes import USUAL_FRAGMENTS
from zerofit.explain.messages import DEVICE, MemoryFigures
from zerofit.explain.result import UNKNOWN, Change, Explanation, Line
from zerofit.explain.snapshot import AliveBlock, Frames, MemorySnapshot, read_snapshot
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
        changes=() if unknown else tuple(Change(change=text) for text in CHANGES.get(cause, ())),
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
