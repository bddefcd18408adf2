"""What a rank issues in one optimizer step, in its order: work on streams, and who waits for whom. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerofit.spec.profile import Kernel

# kinds of work beside collectives: kernels, what the host computes, copies between both, DeepSpeed's C++ optimizers
KERNEL, ON_HOST, COPY, STEP, HOST_STEP = "kernel", "on the host", "copy", "optimizer", "optimizer on the host"
HOOKS = "hooks"  # of ZeRO-3


class CommunicatingRanks(NamedTuple):
    """The ranks of a process group."""

    name: str
    size: int
    per_node: int  # of this rank's node


class IssuedWork(NamedTuple):
    """Work that begins when its stream has done what was issued to it before, and what it has waited for."""

    kind: str  # one of the above, or a collective as c10d calls it: "allreduce"
    stream: int  # from 0, the default one; negative: of a process group's collectives
    phase: str
    module: str  # that runs, or whose backward it is; "" outside of the model
    t: int  # allocations and releases so far
    bytes: float = 0.0  # copied, stepped, or of a collective's whole tensor
    kernel: Kernel | None = None
    inside: bool = True  # a module or autograd launches it; else an engine or an optimizer, one by one
    behind: int | None = None  # another stream, whose work so far comes before
    ranks: CommunicatingRanks | None = None  # of a collective
    count: int = 1  # of HOOKS: parameters
    pinned: bool = True  # of COPY: whether the host's memory is page-locked


class IssuedWait(NamedTuple):
    """A stream, or the host, waits for another stream."""

    stream: int | None  # that waits; None: the host
    on: int | None  # None: all streams
    before: int  # for what was issued before this place in the list


class IssuedLog:
    """A list of work and waits, as they come."""

    def __init__(self) -> None:
        self.items: list[IssuedWork | IssuedWait] = []
        self._communicators: dict[str, int] = {}
        self._awaited: dict[int, tuple[object, int, int]] = {}  # id of a handle -> itself, its stream, its place

    def send(self, work: IssuedWork, ranks: CommunicatingRanks, handles: Sequence[object]) -> None:
        """Note a collective, on the stream of its group; `handles`: by which it is waited for."""
        stream = self._communicators.setdefault(ranks.name, -1 - len(self._communicators))
        self.items.append(work._replace(stream=stream, behind=work.stream, ranks=ranks))
        for handle in handles:  # kept, so that no other has its id
            self._awaited[id(handle)] = handle, stream, len(self.items)

    def wait_for(self, handle: object, stream: int) -> None:
        """Note that a stream waits for a collective."""
        if id(handle) in self._awaited:
            _, on, before = self._awaited[id(handle)]
            self.wait(stream, on, before)

    def wait(self, stream: int | None, on: int | None, before: int | None = None) -> None:
        """Note a wait, of the host where `stream` is None; `before` is now where it is None."""
        self.items.append(IssuedWait(stream, on, len(self.items) if before is None else before))
