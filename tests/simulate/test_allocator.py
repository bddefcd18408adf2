"""The caching allocator's rules, each by a case reckoned by hand from c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofit.simulate.memory.alloc_conf import MIB, AllocatorSettings, alloc_conf_of, read_alloc_conf
from zerofit.simulate.memory.allocator import EmptyCache, RecordStream, Synchronized, replay
from zerofit.simulate.memory.caching import CachingAllocator, ExpandableAllocator, segment_bytes
from zerofit.spec.errors import UserError
from zerofit.spec.overhead import pinned_bytes

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def after(events, allocator=None):
    """Return the allocator after a replay of all events."""
    allocator = allocator or CachingAllocator()
    assert replay(events, allocator=allocator, settings=allocator.settings).out_of_memory is None
    return allocator


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded up first, and then large enough for its own segment
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (25 * MIB, 25 * MIB, 26 * MIB),
    ],
)
def test_sizes(asked, block, segment):
    rounded = AllocatorSettings().rounded_bytes(asked)
    assert (rounded, segment_bytes(rounded)) == (block, segment)
    assert replay([(0, asked)]).peak_reserved_bytes == segment


def test_nothing_takes_nothing():
    found = replay([(0, 0), (0, 0)])
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (0, 0)


def test_a_large_block_keeps_up_to_one_mib_too_much():
    # 20 MiB segment: 19 MiB leave exactly kSmallSize, which is not split off; 512 bytes less leave more than that
    held = replay([(0, 5 * MIB), (1, 14 * MIB)])  # 5 of 20 MiB, then 15 MiB of rest for 14: stays whole
    assert (held.peak_allocated_bytes, held.peak_reserved_bytes) == (20 * MIB, 20 * MIB)
    split = replay([(0, 5 * MIB), (1, 14 * MIB - 512)])
    assert split.peak_allocated_bytes == 19 * MIB - 512


def test_a_small_block_is_split_to_the_last_512_bytes():
    found = replay([(0, MIB), (1, MIB - 512), (2, 512)])
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (2 * MIB, 2 * MIB)
    assert replay([(0, MIB), (1, MIB - 512), (2, 1024)]).peak_reserved_bytes == 4 * MIB


def test_a_freed_block_is_used_again():
    assert replay([(0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB)]).peak_reserved_bytes == 30 * MIB
    assert replay([(0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB + 1)]).peak_reserved_bytes == 62 * MIB


def test_small_and_large_do_not_share():
    assert replay([(0, 20 * MIB), (0, -20 * MIB), (1, MIB)]).peak_reserved_bytes == 22 * MIB


def test_free_neighbours_merge():
    fill = [(0, 8 * MIB), (1, 6 * MIB), (2, 6 * MIB)]  # one segment of 20 MiB
    apart = replay([*fill, (0, -8 * MIB), (2, -6 * MIB), (3, 9 * MIB)])
    assert apart.peak_reserved_bytes == 40 * MIB
    merged = replay([*fill, (0, -8 * MIB), (1, -6 * MIB), (3, 14 * MIB)])
    assert merged.peak_reserved_bytes == 20 * MIB
    all_three = replay([*fill, (0, -8 * MIB), (2, -6 * MIB), (1, -6 * MIB), (3, 20 * MIB)])
    assert all_three.peak_reserved_bytes == 20 * MIB


def test_segments_do_not_merge():
    found = replay([(0, 10 * MIB), (1, 10 * MIB), (0, -10 * MIB), (1, -10 * MIB), (2, 20 * MIB)])
    assert found.peak_reserved_bytes == 40 * MIB


def test_the_smallest_block_that_fits_is_taken():
    held = [(0, 40 * MIB), (1, 30 * MIB), (0, -40 * MIB), (1, -30 * MIB)]
    # 30 MiB go to the block of 30, so that 40 MiB still fit
    assert replay([*held, (2, 30 * MIB), (3, 40 * MIB)]).peak_reserved_bytes == 70 * MIB
    # 35 MiB take 40 and leave 5
    assert replay([*held, (2, 35 * MIB), (3, 5 * MIB), (4, 30 * MIB)]).peak_reserved_bytes == 70 * MIB


def test_streams_have_pools_of_their_own():
    assert replay([(0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB, 7)]).peak_reserved_bytes == 60 * MIB
    assert replay([(0, 30 * MIB, 7), (0, -30 * MIB, 7), (1, 30 * MIB, 7)]).peak_reserved_bytes == 30 * MIB


def test_what_another_stream_uses_comes_back_when_it_is_done():
    """recordStream, free, process_events: the block waits for the other stream's work up to its release."""
    used = [(0, 30 * MIB), RecordStream(storage=0, stream=7), (0, -30 * MIB)]
    again = (1, 30 * MIB)
    assert replay([*used, again]).peak_reserved_bytes == 60 * MIB
    assert replay([*used, Synchronized(stream=7, before=3), again]).peak_reserved_bytes == 30 * MIB
    assert replay([*used, Synchronized(stream=None, before=3), again]).peak_reserved_bytes == 30 * MIB
    # waiting for what the stream had to do before the release is not enough, nor is another stream's
    assert replay([*used, Synchronized(stream=7, before=2), again]).peak_reserved_bytes == 60 * MIB
    assert replay([*used, Synchronized(stream=0, before=3), again]).peak_reserved_bytes == 60 * MIB
    # its own stream needs no event
    own = [(0, 30 * MIB), RecordStream(storage=0, stream=0), (0, -30 * MIB)]
    assert replay([*own, again]).peak_reserved_bytes == 30 * MIB


def test_all_streams_must_be_done():
    events = [(0, 30 * MIB), RecordStream(storage=0, stream=1), RecordStream(storage=0, stream=2), (0, -30 * MIB)]
    one, other = Synchronized(stream=1, before=4), Synchronized(stream=2, before=4)
    assert replay([*events, one, (1, 30 * MIB)]).peak_reserved_bytes == 60 * MIB
    assert replay([*events, one, other, (1, 30 * MIB)]).peak_reserved_bytes == 30 * MIB


def test_what_waits_is_not_allocated_and_not_merged():
    # 8 + 12 of one segment: while the 8 wait, the 12 cannot become 20
    events = [(0, 8 * MIB), (1, 12 * MIB), RecordStream(storage=0, stream=1), (0, -8 * MIB), (1, -12 * MIB)]
    assert after(events).allocated_bytes == 0
    assert replay([*events, (2, 20 * MIB)]).peak_reserved_bytes == 40 * MIB
    assert replay([*events, Synchronized(stream=1, before=4), (2, 20 * MIB)]).peak_reserved_bytes == 20 * MIB


def test_a_full_device_waits_for_its_streams():
    events = [(0, 60 * MIB), RecordStream(storage=0, stream=1), (0, -60 * MIB), (1, 70 * MIB)]
    found = after(events, CachingAllocator(100 * MIB))  # synchronize_and_free_events before release_cached_blocks
    assert (found.flushes, found.reserved_bytes) == (1, 70 * MIB)


def test_blocks_of_max_split_size_are_not_cut():
    """max_split_size_mb:100 - get_free_block, should_split, release_available_cached_blocks."""
    limited = read_alloc_conf("max_split_size_mb:100")
    held = [(0, 120 * MIB), (0, -120 * MIB)]
    assert replay([*held, (1, 60 * MIB)]).peak_reserved_bytes == 120 * MIB
    assert replay([*held, (1, 60 * MIB)], settings=limited).peak_reserved_bytes == 180 * MIB  # too small a request
    # a request of about its size takes it whole, from 20 MiB less on it does not
    assert replay([*held, (1, 101 * MIB)], settings=limited).peak_allocated_bytes == 120 * MIB
    assert replay([*held, (1, 100 * MIB)], settings=limited).peak_reserved_bytes == 220 * MIB
    rounded = read_alloc_conf("max_split_size_mb:100,max_non_split_rounding_mb:21")
    assert replay([*held, (1, 100 * MIB)], settings=rounded).peak_reserved_bytes == 120 * MIB
    # also in an expandable segment, unless the block is the last one in use
    expandable = read_alloc_conf("max_split_size_mb:100,expandable_segments:True")
    inner = [(0, 120 * MIB), (1, 20 * MIB), (0, -120 * MIB), (2, 60 * MIB)]
    assert replay(inner, settings=EXPANDABLE).peak_reserved_bytes == 140 * MIB
    assert replay(inner, settings=expandable).peak_reserved_bytes == 200 * MIB
    assert replay([*held, (1, 60 * MIB)], settings=expandable).peak_reserved_bytes == 120 * MIB
    # on a full device such blocks are given back first, and no more of them than are needed
    full = [(0, 120 * MIB), (1, 110 * MIB), (0, -120 * MIB), (1, -110 * MIB), (2, 60 * MIB)]
    found = after(full, CachingAllocator(240 * MIB, limited))
    assert (found.flushes, found.reserved_bytes) == (0, 120 * MIB + 60 * MIB)


@pytest.mark.versions(of="torch")
@pytest.mark.parametrize(
    "divisions",
    ["4", "1", "[64:8,256:4,1024:2,>:1]", "[256:1,512:2,1024:4,>:8]", "[>:8]", "[1:2,2:4,4:8]", "[65536:4]"],
)
def test_divisions_are_read_as_torch_reads_them(divisions):
    torch = pytest.importorskip("torch")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    asked = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    asked.restype, asked.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    ours = read_alloc_conf(f"roundup_power2_divisions:{divisions}")
    try:
        torch._C._accelerator_setAllocatorSettings(f"roundup_power2_divisions:{divisions}")
        for power in range(10, 40):
            assert ours.divisions[min(max(0, power - 20), 15)] == asked((1 << power) + 1), power
    finally:
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[>:0,1:0]")


@pytest.mark.parametrize(
    ("asked", "taken"),  # docs/source/notes/cuda.rst: with 4 divisions, 1200 is rounded to 1280
    [
        (1200 * MIB, 1280 * MIB),
        (1024 * MIB, 1024 * MIB),
        (1281 * MIB, 1536 * MIB),
        (2048, 2048),
        (2049, 2560),
        (600, 1024),
    ],
)
def test_sizes_are_rounded_to_divisions(asked, taken):
    assert read_alloc_conf("roundup_power2_divisions:4").rounded_bytes(asked) == taken


def test_options_are_those_of_torch():
    found = read_alloc_conf("garbage_collection_threshold:0.8, expandable_segments:True,backend:native")
    assert found == EXPANDABLE
    assert read_alloc_conf("") == AllocatorSettings()
    assert alloc_conf_of({"PYTORCH_CUDA_ALLOC_CONF": "a"}) == "a"
    with pytest.raises(UserError) as raised:
        read_alloc_conf("expandable:True,max_split_size_mb:19,roundup_power2_divisions:3,expandable_segments:1")
    assert len(raised.value.problems) == 4


@pytest.mark.versions(of="torch")
def test_torch_accepts_the_same_options():
    options = ["expandable_segments:true", "max_split_size_mb:19", "max_split_size_mb:20", "roundup_power2_divisions:0"]
    options += ["max_non_split_rounding_mb:19", "max_non_split_rounding_mb:20", "roundup_power2_divisions:[1:0]"]
    options += ["new:True", "throw_on_cudamalloc_oom:True", "graph_capture_record_stream_reuse:True"]
    options += [f"pinned_{name}_mb:64" for name in ("max_cached_size", "max_round_threshold", "reserve_segment_size")]
    options += ["pinned_free_catch_all:True"]
    read = "for option in sys.argv[1:]:\n with suppress(ValueError):\n  read(option)\n  print(option)"
    program = (
        f"import sys, torch; from contextlib import suppress; read = torch._C._accelerator_setAllocatorSettings\n{read}"
    )
    words = [sys.executable, "-c", program, *options]
    accepted = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    for option in options:
        with nullcontext() if option in accepted else pytest.raises(UserError):
            read_alloc_conf(option)


@pytest.mark.parametrize("option", ["backend:cudaMallocAsync", "per_process_memory_fraction:0.5"])
def test_options_that_are_not_simulated_are_refused(option):
    with pytest.raises(UserError, match="simulated"):
        read_alloc_conf(option)


def test_resizing_holds_both_for_a_moment():
    found = after([(0, 30 * MIB), (0, 10 * MIB), (0, -40 * MIB)])
    assert found.peak_allocated_bytes == found.peak_reserved_bytes == 70 * MIB
    assert found.allocated_bytes == 0


def test_empty_cache_gives_back_whole_segments_only():
    events = [(0, 30 * MIB), (1, 5 * MIB), (2, 6 * MIB), (0, -30 * MIB), (2, -6 * MIB)]
    assert after(events).reserved_bytes == 50 * MIB
    found = after([*events, EmptyCache()])
    assert (found.reserved_bytes, found.allocated_bytes) == (20 * MIB, 5 * MIB)


def test_a_full_device_gives_back_its_cache_first():
    found = replay([(0, 60 * MIB), (0, -60 * MIB), (1, 70 * MIB)], device_bytes=100 * MIB)
    assert (found.flushes, found.out_of_memory) == (1, None)
    assert found.peak_reserved_bytes == 70 * MIB


def test_out_of_memory():
    events = [(0, 30 * MIB), (1, 5 * MIB), (2, 5 * MIB), (2, -5 * MIB), (3, 50 * MIB + 1), (4, MIB)]
    found = replay(events, device_bytes=100 * MIB)
    failed = found.out_of_memory
    assert failed is not None
    assert (failed.event, failed.asked_bytes) == (4, 52 * MIB)
    assert (failed.allocated_bytes, failed.reserved_bytes) == (35 * MIB, 50 * MIB)
    assert found.flushes == 1
    assert found.peak_reserved_bytes == 50 * MIB
    assert replay(events, device_bytes=102 * MIB).out_of_memory is not None  # 102 + 2 MiB for the small one
    assert replay(events, device_bytes=104 * MIB).out_of_memory is None


def test_expandable_grows_by_pages():
    events = [(0, 5 * MIB), (1, 14 * MIB)]
    assert replay(events, settings=EXPANDABLE).peak_reserved_bytes == 20 * MIB
    found = replay([*events, (2, 30 * MIB)], settings=EXPANDABLE)
    # the free MiB at the end of the first page is the beginning of the next block: 29 MiB more in two pages
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (49 * MIB, 60 * MIB)


def test_expandable_segments_join_what_the_default_cannot():
    events = [(0, 40 * MIB), (1, 40 * MIB), (0, -40 * MIB), (1, -40 * MIB), (2, 80 * MIB)]
    assert replay(events, settings=EXPANDABLE).peak_reserved_bytes == 80 * MIB
    assert replay(events).peak_reserved_bytes == 160 * MIB


def test_expandable_keeps_the_end_of_the_segment_for_growing():
    # [25][15] [2][18 free]; with 0 released 17 MiB go to its 25 though 18 fit tighter, so that 38 need one page only
    events = [(0, 25 * MIB), (1, 15 * MIB), (2, 2 * MIB), (0, -25 * MIB), (3, 17 * MIB), (4, 38 * MIB)]
    assert replay(events, settings=EXPANDABLE).peak_reserved_bytes == 80 * MIB


def test_expandable_small_pages():
    events = [(0, MIB), (1, MIB)]
    assert replay(events, settings=EXPANDABLE).peak_reserved_bytes == 2 * MIB
    assert replay([*events, (2, 512)], settings=EXPANDABLE).peak_reserved_bytes == 4 * MIB


def test_expandable_gives_back_single_pages():
    # pages of 20 MiB: 0 covers the first three, 1 the fourth and half of the fifth; freed, 0 returns its three
    events = [(0, 60 * MIB), (1, 30 * MIB), (0, -60 * MIB), EmptyCache()]
    assert after(events, ExpandableAllocator()).reserved_bytes == 40 * MIB
    # 10 MiB are free at the end of the fifth page: 70 MiB begin there
    assert after([*events, (2, 70 * MIB)], ExpandableAllocator()).reserved_bytes == 100 * MIB
    gone = [(0, 60 * MIB), (0, -60 * MIB), EmptyCache(), (1, MIB)]
    assert after(gone, ExpandableAllocator()).reserved_bytes == 2 * MIB


def test_expandable_out_of_memory():
    found = replay(
        [(0, 60 * MIB), (0, -60 * MIB), (1, 5 * MIB, 3), (2, 90 * MIB)], device_bytes=100 * MIB, settings=EXPANDABLE
    )
    assert found.flushes == 1
    assert found.out_of_memory is not None and found.out_of_memory.asked_bytes == 90 * MIB


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), (2**30 + 1, 2**31)]
)
def test_pinned(asked, taken):
    assert pinned_bytes(asked) == taken


sizes = st.one_of(st.integers(0, 4 * MIB), st.integers(0, 64 * MIB), st.sampled_from([512, MIB, 10 * MIB]))
steps = st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 40), st.integers(0, 1)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps, kind=st.sampled_from([CachingAllocator, ExpandableAllocator]), limit=st.sampled_from([None, 256 * MIB])
)
def test_blocks_never_overlap_and_all_comes_back(steps, kind, limit):
    allocator = kind(limit)
    live: list[int] = []
    for number, (size, free, which, stream) in enumerate(steps):
        if free and live:
            allocator.release(live.pop(which % len(live)))
        elif allocator.allocate(number, size, stream):
            live.append(number)
        assert allocator.reserved_bytes >= allocator.allocated_bytes == sum(b.size for b in allocator.live.values())
        assert limit is None or allocator.reserved_bytes <= limit
        places = sorted((b.address, b.size) for b in allocator.live.values())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
    for number in live:
        allocator.release(number)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def random_events(count: int, seed: int) -> list[tuple[int, int]]:
    chance, live, events = random.Random(seed), {}, []
    for number in range(count):
        if live and chance.random() < 0.48:
            storage = chance.choice(list(live))
            events.append((storage, -live.pop(storage)))
        else:
            live[number] = int(2 ** chance.uniform(4, 26))
            events.append((number, live[number]))
    return events


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_as_torch_does(seed, expandable):
    import torch

    torch.empty(1, device="cuda")
    set_options = torch._C._accelerator_setAllocatorSettings
    set_options(f"expandable_segments:{expandable}")
    torch.cuda.empty_cache()
    base, base_allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    events, held = random_events(2000, seed), {}
    for storage, change in events:
        if change > 0:
            held[storage] = torch.empty(change, dtype=torch.uint8, device="cuda")
        else:
            del held[storage]
    ours = replay(events, settings=AllocatorSettings(expandable_segments=expandable))
    assert torch.cuda.max_memory_allocated() - base_allocated == pytest.approx(ours.peak_allocated_bytes, rel=0.01)
    assert torch.cuda.max_memory_reserved() - base == pytest.approx(ours.peak_reserved_bytes, rel=0.03)
    held.clear()
    torch.cuda.empty_cache()
    set_options("expandable_segments:False")
