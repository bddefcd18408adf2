"""What the host knows of streams, and the events that the caching allocator hears of it."""

from __future__ import annotations

import threading

from zerofit.simulate.memory.allocator import RecordStream, Synchronized, replay
from zerofit.simulate.memory.caching import MIB
from zerofit.simulate.memory.ledger import DEVICE, Ledger, Storage, device_events
from zerofit.simulate.ops.streams import Streams


def allocate(streams: Streams, size: int) -> int:
    stored = Storage(size, DEVICE, "forward", 0, "op", "", None, 0, stream=streams.current.number)
    return streams.ledger.allocated(stored)


def notes(streams: Streams) -> list[Synchronized]:
    return [note for _, note in streams.ledger.notes if isinstance(note, Synchronized)]


def test_memory_belongs_to_the_stream_that_is_current():
    streams = Streams(Ledger())
    side = streams.Stream()
    with streams.using(side):
        allocate(streams, MIB)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(streams.current))
        thread.start()
        thread.join()
    with side:
        allocate(streams, MIB)
    allocate(streams, MIB)
    assert [one.stream for one in streams.ledger.storages] == [side.number, side.number, 0]
    assert elsewhere == [streams.default]  # of its own in each thread


def test_torch_makes_32_streams_of_each_priority_and_returns_them_in_turn():
    """c10/cuda/CUDAStream.cpp: getStreamFromPool and get_idx, which all later streams of a script come from."""
    streams = Streams(Ledger())
    made = [streams.Stream() for _ in range(40)]
    numbers = [stream.number for stream in made]
    assert len({0, *numbers}) == 33 and numbers[32:] == numbers[:8]
    urgent = {streams.Stream(priority=-1).number for _ in range(40)}
    assert len(urgent) == 32 and not urgent & {0, *numbers}
    made[0].wait_stream(made[1])
    assert made[32].waited == {made[1].number: 0}  # the same stream
    for stream in made:
        with stream:
            streams.ledger.freed(allocate(streams, 30 * MIB))
    assert replay(device_events(streams.ledger)).peak_reserved_bytes == 32 * 30 * MIB


def test_what_a_stream_has_waited_for_is_known_with_it():
    streams = Streams(Ledger())
    side, other = streams.Stream(), streams.Stream()
    allocate(streams, MIB)
    other.wait_stream(side)
    allocate(streams, MIB)
    streams.default.wait_stream(other)
    allocate(streams, MIB)
    streams.default.synchronize()
    # the side stream up to the first wait, the other up to the second, the default one up to now
    assert {note.stream: note.before for note in notes(streams)} == {side.number: 1, other.number: 2, 0: 3}


def test_an_event_is_a_place_in_a_stream():
    streams = Streams(Ledger())
    event = streams.Event()
    event.record(streams.default)
    allocate(streams, MIB)
    event.synchronize()
    event.synchronize()  # nothing new
    assert notes(streams) == []  # there was nothing before it
    event.record()
    assert not event.query()  # the host is ahead
    allocate(streams, MIB)
    assert not event.query()
    assert event.query()  # nothing was issued in between: it waits
    assert notes(streams) == [Synchronized(stream=0, before=1)]


def test_a_wait_frees_what_was_released_before_it():
    streams = Streams(Ledger())
    side, ledger = streams.Stream(), streams.ledger
    with side:
        first = allocate(streams, 30 * MIB)
        ledger.note(RecordStream(storage=first, stream=0))
    ledger.freed(first)
    streams.synchronize()
    with side:
        allocate(streams, 30 * MIB)
    assert replay(device_events(ledger)).peak_reserved_bytes == 30 * MIB
    ledger.notes = [note for note in ledger.notes if not isinstance(note[1], Synchronized)]
    assert replay(device_events(ledger)).peak_reserved_bytes == 60 * MIB
    assert replay(device_events(ledger), host_ahead=False).peak_reserved_bytes == 30 * MIB
