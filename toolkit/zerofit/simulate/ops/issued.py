"""Record the work that a rank issues on streams in one step, and how streams wait.

Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from zerofit.spec.profile import Kernel

# kinds of work besides collectives: kernels, computation on the host, copies between them, DeepSpeed's C++ optimizers
KERNEL, ON_HOST, COPY, STEP, HOST_STEP = "kernel", "on the host", "copy", "optimizer", "optimizer on the host"
HOOKS = "hooks"  # of ZeRO-3


class CommunicatingRanks(NamedTuple):
    """The ranks of a process group."""

    name: str
    size: int
    per_node: int  # on this rank's node


class IssuedWork(NamedTuple):
    """A piece of work on a stream.

    It begins when all earlier work and waits of the stream have ended.
    """

    kind: str  # one of the above, or a collective as c10d names it: "allreduce"
    stream: int  # 0 is the default stream; negative: the stream of a process group's collectives
    phase: str
    module: str  # the running module, or the one whose backward runs; "" outside of the model
    t: int  # allocations and releases so far
    bytes: float = 0.0  # copied, stepped, or of a collective's full tensor
    kernel: Kernel | None = None
    inside: bool = True  # launched by a module or autograd; otherwise by an engine or an optimizer, one at a time
    behind: int | None = None  # another stream whose work so far must be done first
    ranks: CommunicatingRanks | None = None  # of a collective
    count: int = 1  # of HOOKS: parameters
    pinned: bool = True  # of COPY: whether the host's memory is page-locked


class IssuedWait(NamedTuple):
    """A wait of a stream (or of the host) for another stream."""

    stream: int | None  # the stream that waits; None: the host
    on: int | None  # None: all streams
    before: int  # index in the list: it waits for work before this index


# A simulation has no times, so the log has only what decides them: the order of work on each stream, and what each
# stream waits for. `app.simulation.rank_trace` adds the times later, for any device.
class IssuedLog:
    """The issued work and waits, in order."""

    def __init__(self) -> None:
        self.items: list[IssuedWork | IssuedWait] = []
        self._communicators: dict[str, int] = {}

    def send(self, work: IssuedWork, ranks: CommunicatingRanks) -> tuple[int, int]:
        """Record a collective on the stream of its process group.

        Return `on` and `before` of `wait`, to wait for the collective.
        """
        stream = self._communicators.setdefault(ranks.name, -1 - len(self._communicators))
        self.items.append(work._replace(stream=stream, behind=work.stream, ranks=ranks))
        return stream, len(self.items)

    def wait(self, stream: int | None, on: int | None, before: int | None = None) -> None:
        """Record that `stream` (None: the host) waits for work on stream `on`.

        `before`: index in the list; only work before it is waited for. None: all work so far.
        """
        self.items.append(IssuedWait(stream, on, len(self.items) if before is None else before))
