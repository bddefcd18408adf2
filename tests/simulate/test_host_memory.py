"""Host memory as torch takes it, reckoned by hand from CachingHostAllocator.h, and its extension to more layers."""

from __future__ import annotations

from zerofit.simulate.memory.host import extended, highest, host_moments
from zerofit.simulate.memory.ledger import HOST, LOCKED, PINNED, Ledger, Storage
from zerofit.simulate.record import HostMoment


def allocate(ledger: Ledger, size: int, place: str) -> int:
    return ledger.allocated(Storage(size, place, "init", -1, "op", "", None, 0))


def test_pinned_blocks_are_powers_of_two_and_stay():
    ledger = Ledger()
    ledger.begin("init", -1)
    allocate(ledger, 1000, HOST)
    first = allocate(ledger, 3000, PINNED)  # 4096
    ledger.freed(first)
    ledger.begin("step", 0)
    allocate(ledger, 4000, PINNED)  # the same block again
    allocate(ledger, 5000, PINNED)  # 8192
    allocate(ledger, 5000, LOCKED)  # by DeepSpeed, as large as it is
    found = host_moments(ledger)
    assert found["init"].parts == {"pageable": 1000, "pinned": 4096, "pinned_free": 0}
    assert found["step"].parts == {"pageable": 1000, "pinned": 4096 + 8192 + 5000, "pinned_free": 0}
    assert highest(found) == found["step"].parts


def test_a_released_block_is_still_taken():
    ledger = Ledger()
    ledger.begin("init", -1)
    ledger.freed(allocate(ledger, 3000, PINNED))
    ledger.begin("step", 0)
    allocate(ledger, 100_000, PINNED)  # no block of its size is free
    assert highest(host_moments(ledger)) == {"pageable": 0, "pinned": 131_072, "pinned_free": 4096}


def test_sizes_are_extended_before_they_are_rounded():
    """One buffer that grows with the layers, and one for each layer: 4 and 6 layers, extended to 32."""

    def moment(layers: int) -> HostMoment:
        pinned = {"flat.py:1": (100 * layers + 7,), "layer.py:2": (300,) * layers}
        return HostMoment(pageable_bytes=10 * layers, locked_bytes=layers, pinned=pinned, pinned_free_bytes=0)

    def line(a: float, b: float) -> int:
        return round(a + (b - a) * (32 - 4) / (6 - 4))

    found = extended(moment(4), moment(6), line, [])
    assert found == moment(32)
    assert found.pinned_bytes == 4096 + 32 * 512  # of rounded sizes, the line would give 512 + 14 * 512 for the first


def test_sizes_of_sub_groups_are_known_for_all_layers():
    """Groups of 100 elements in fp32, filled by layers of 30: 7 and 9 layers, extended to 11."""

    def moment(sizes: list[int]) -> HostMoment:
        blocks = {"stage3.py:1340": tuple(sorted(sizes)), "stage3.py:795": (sum(sizes) // 2,)}
        return HostMoment(pageable_bytes=0, locked_bytes=0, pinned=blocks, pinned_free_bytes=0)

    parts = [[120, 90], [120, 120, 30], [120, 120, 90]]
    few, more, whole = (moment([4 * part for part in several]) for several in parts)
    assert extended(few, more, lambda a, b: round(b + (b - a)), parts) == whole


def test_requests_that_found_a_released_block_are_no_line():
    """Three sub-groups, of which one took a block that parameters had left: nothing says how many will with all."""

    def moment(*sizes: int) -> HostMoment:
        return HostMoment(pageable_bytes=0, locked_bytes=0, pinned={"stage3.py:1340": sizes}, pinned_free_bytes=0)

    parts = [[120, 90], [120, 120, 30], [120, 120, 90]]
    assert extended(moment(360, 480), moment(480, 480), lambda a, b: b + (b - a), parts) is not None
    assert extended(moment(360, 480), moment(120, 480, 480), lambda a, b: b + (b - a), parts) is not None
    assert (
        extended(
            moment(
                480,
            ),
            moment(120, 480, 480),
            lambda a, b: b + (b - a),
            parts,
        )
        is None
    )
