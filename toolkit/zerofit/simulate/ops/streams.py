"""Simulate a device's streams and events, and the work that the host has waited for."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle

from zerofit.simulate.memory.allocator import Synchronized
from zerofit.simulate.memory.ledger import Ledger
from zerofit.simulate.ops.issued import IssuedLog

POOL, PRIORITIES = 32, 4  # kStreamsPerPool, max_compile_time_stream_priorities (c10/cuda/CUDAStream.cpp, .h)


# Why streams matter for memory: a block that another stream has used may be reused only after the host has waited
# for that stream. If the host runs far ahead of the device, many blocks wait to be reused.
#
#   host     issue issue issue ........ item() -> all work before it is complete; waiting blocks are freed
#   device         work work work work |
#
# Each stream has free blocks of its own, which no other stream can use, even after the last Python object of the stream
# is gone. torch makes POOL streams of each priority, and returns them in turn: request POOL + 1 gets the first again.
class Streams:
    """The streams of one device, by number.

    Each thread starts with the first, the default stream.
    """

    def __init__(self, ledger: Ledger):
        streams, self.ledger = self, ledger
        self.issued: IssuedLog | None = None  # the log of issued work, if any
        self.known: dict[int, int] = {}  # stream's number -> the host has waited for its work before this moment
        # stream's number -> other stream's number -> its work before this moment is awaited
        self.waited: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._here = threading.local()
        pools: defaultdict[int, cycle[int]] = defaultdict(partial(cycle, range(1, POOL + 1)))

        class Stream(SimulatedStream):
            def __init__(self, device: object = None, priority: int = 0, *, stream_id: int = -1, **_: object):
                pool = min(max(0, -priority), PRIORITIES - 1)  # lower numbers are higher priorities
                super().__init__(streams, POOL * pool + next(pools[pool]) if stream_id < 0 else stream_id)

        class DeviceEvent(SimulatedEvent):
            def __init__(self, *_: object, **__: object):
                super().__init__(streams)

        self.Stream, self.Event = Stream, DeviceEvent
        self.default = Stream(stream_id=0)

    @property
    def current(self) -> SimulatedStream:
        """The stream that this thread issues work to."""
        return getattr(self._here, "stream", self.default)

    @current.setter
    def current(self, stream: object) -> None:
        self._here.stream = stream

    @contextmanager
    def using(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Within this context, make `stream` current. None keeps the current stream."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *_: object, **__: object) -> None:
        """Make the host wait for all work on the device."""
        self.ledger.note(Synchronized(stream=None, before=self.now))
        self.known = dict.fromkeys(self.waited, self.now)
        if self.issued is not None:
            self.issued.wait(None, None)

    def wait_for(self, done: dict[int, int]) -> None:
        """Make the host wait for streams. `done`: stream's number -> moment that it must reach."""
        for number, moment in done.items():
            if self.known.get(number, 0) < moment:
                self.known[number] = moment
                self.ledger.note(Synchronized(stream=number, before=moment))

    @property
    def now(self) -> int:
        """The current moment: the number of allocations and releases so far."""
        return len(self.ledger.events)

    @property
    def place(self) -> int:
        """The current place: the number of entries in the log of issued work."""
        return 0 if self.issued is None else len(self.issued.items)


# The host runs ahead of the device. The host waits for a stream if it calls `synchronize()`, reads a value (`item()`),
# or copies between host and device without `non_blocking`. Then the stream's work is complete, and so is the work on
# other streams that this stream has waited for. Before the host waits, `query()` returns False. If `query()` is called
# again without new work, the host is in a waiting loop. So this call waits and returns True.
class SimulatedEvent:
    """A point in a stream, with the work that is done when the stream reaches it."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self.done: dict[int, int] = {}  # stream's number -> its work before this moment is done
        self._place = 0, 0  # stream's number, and the number of works issued before
        self._asked_at = -1

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Move this event to the end of the stream's work so far."""
        stream = stream or self._streams.current
        self.done = {**stream.waited, stream.number: self._streams.now}
        self._place = stream.number, self._streams.place

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Make a stream wait for this event."""
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        self._streams.wait_for(self.done)
        self.waits(None)

    def waits(self, stream: int | None) -> None:
        """Record in the log of issued work that `stream` (None: the host) waits for this event."""
        if self._streams.issued is not None:
            self._streams.issued.wait(stream, *self._place)

    def query(self) -> bool:
        """Return whether the host waited for this event.

        If no work came since the last query, synchronize first.
        """
        if self._asked_at == self._streams.now:
            self.synchronize()
        self._asked_at = self._streams.now
        return all(self._streams.known.get(number, 0) >= moment for number, moment in self.done.items())

    def elapsed_time(self, *_: object) -> float:
        """Return 1 millisecond, since libraries divide by the result.

        No time passes in a simulation.
        """
        return 1.0


class SimulatedStream:
    """A stream of the simulated device.

    It computes nothing, but tensors are allocated and used on it.
    """

    device_index = 0
    device_type = 1  # c10::DeviceType::CUDA

    def __init__(self, streams: Streams, number: int):
        self._streams, self.number = streams, number
        self.waited = streams.waited[number]
        self.stream_id = self.cuda_stream = number
        self._end = SimulatedEvent(streams)  # used by `query`

    def wait_event(self, event: SimulatedEvent) -> None:
        """Make this stream wait for an event of another stream."""
        for number, moment in event.done.items():
            self.waited[number] = max(moment, self.waited.get(number, 0))
        event.waits(self.number)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Make this stream wait for all work on another stream."""
        self.wait_event(other.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Return an event at the end of the work so far."""
        event = event or SimulatedEvent(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for all work on this stream."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return whether the host has waited for all work on this stream.

        If no work came since the last query, make the host wait first.
        """
        self.record_event(self._end)
        return self._end.query()

    def is_capturing(self) -> bool:
        """Return False: no CUDA graph is being captured."""
        return False

    def __enter__(self) -> SimulatedStream:
        self._before = self._streams.current
        self._streams.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.current = self._before
