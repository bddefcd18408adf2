"""Replay a simulated rank's host memory by phase: pageable memory, and page-locked memory.

See ATen/core/CachingHostAllocator.h: torch rounds a request to a power of two. A released block is kept for the
next request of the same size. Nothing is returned to the system. DeepSpeed locks its buffers for NVMe itself, page
by page (csrc/aio/py_lib/deepspeed_pin_tensor.cpp).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from zerofit.simulate.memory.ledger import DEVICE, HOST, LOCKED, Ledger, place_in_code
from zerofit.simulate.record import HostMoment
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.overhead import pinned_bytes

Line = Callable[[float, float], int]


# torch never returns page-locked memory to the system. So its total is the largest number of blocks of each
# size that were in use at once, and "free" blocks are part of the process's memory:
#
#   bytes = sum over powers of two of (power * the most blocks of this size that were in use at once)
class _PinnedBlocks:
    def __init__(self) -> None:
        self.made: defaultdict[str, list[int]] = defaultdict(list)
        self.free: Counter[int] = Counter()  # rounded size -> blocks
        self.made_bytes = self.free_bytes = 0

    def allocate(self, size: int, line: str) -> None:
        rounded = pinned_bytes(size)
        if self.free[rounded]:
            self.free[rounded] -= 1
            self.free_bytes -= rounded
        else:
            self.made[line].append(size)
            self.made_bytes += rounded

    def release(self, size: int) -> None:
        self.free[pinned_bytes(size)] += 1
        self.free_bytes += pinned_bytes(size)


def host_moments(ledger: Ledger) -> dict[str, HostMoment]:
    """Return for each phase its moment with the most host memory, over all steps."""
    found: dict[str, HostMoment] = {}
    live, blocks = Counter[str](), _PinnedBlocks()
    starts = {mark.event: mark.name for mark in ledger.marks}
    phase, most = "", -1

    def look() -> None:
        nonlocal most
        total = live.total() + blocks.made_bytes
        if phase and total > most:
            most = total
            pinned = {line: tuple(sorted(sizes)) for line, sizes in blocks.made.items()}
            kinds = {"pageable_bytes": live[HOST], "locked_bytes": live[LOCKED]}
            found[phase] = HostMoment(**kinds, pinned=pinned, pinned_free_bytes=blocks.free_bytes)

    for number, (index, change) in enumerate(ledger.events):
        storage = ledger.storages[index]
        if number in starts:
            phase = starts[number]
            most = found[phase].total_bytes if phase in found else -1
            look()
        if storage.place == DEVICE or not change:
            continue
        if storage.place in (HOST, LOCKED):
            live[storage.place] += change
        elif change > 0:
            blocks.allocate(change, place_in_code(storage))
        else:
            blocks.release(-change)
        look()
    return found


def highest(moments: dict[str, HostMoment]) -> dict[str, int]:
    """Return the bytes by kind at the moment with the most host memory, over all phases."""
    nothing = HostMoment(pageable_bytes=0, locked_bytes=0, pinned={}, pinned_free_bytes=0)
    return max(moments.values(), key=lambda moment: moment.total_bytes, default=nothing).parts


# Rounding makes page-locked bytes a staircase over the layers, so a line through two totals would miss the full
# model's steps. The line is drawn through the requested sizes instead, and the full model's sizes are rounded.
#
#   requests of one line of code   few: 3 blocks of 40 MB    more: 5 of 40 MB    ->  full: 33 of 40 MB  (count grows)
#                                  few: 1 block of 40 MB     more: 1 of 60 MB    ->  full: 1 of 340 MB  (size grows)
def extended(few: HostMoment, more: HostMoment, line: Line, sub_groups: Sequence[list[int]]) -> HostMoment | None:
    """Return the full model's moment with the most host memory.

    `few` and `more` are from models of fewer layers. Requested sizes are extrapolated linearly, then rounded. There are
    three cases for a line of code:

    - It allocates one block per sub-group of stage 3. Then the sizes come from `sub_groups`.
      `sub_groups` lists the elements of each sub-group for `few`, for `more` and for the full model.
    - It allocates equally many blocks in `few` and in `more`. Then the sizes of the blocks grow.
    - The sizes are the same in `few` and in `more`. Then the number of blocks grows.

    In other cases the result is None, e.g. if some requests reused a released block.
    """

    def sizes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
        for element in ELEMENT_BYTES.values():
            asked = [tuple(sorted(element * part for part in parts)) for parts in sub_groups]
            if asked and asked[:2] == [a, b]:
                return asked[2]
        if len(a) == len(b):
            grown = [max(0, line(x, y)) for x, y in zip(a, b, strict=True)]
            return tuple(sorted(filter(None, grown)))
        counts = Counter(a), Counter(b)
        if counts[0].keys() != counts[1].keys():
            return None
        return tuple(sorted(size for size in counts[0] for _ in range(line(counts[0][size], counts[1][size]))))

    pinned = dict[str, tuple[int, ...]]()
    for place in dict.fromkeys([*few.pinned, *more.pinned]):
        found = sizes(few.pinned.get(place, ()), more.pinned.get(place, ()))
        if found is None:
            return None
        pinned[place] = found
    return HostMoment(
        pageable_bytes=max(0, line(few.pageable_bytes, more.pageable_bytes)),
        locked_bytes=max(0, line(few.locked_bytes, more.locked_bytes)),
        pinned=pinned,
        pinned_free_bytes=max(0, line(few.pinned_free_bytes, more.pinned_free_bytes)),
    )
