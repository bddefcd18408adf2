"""The command's ear: hears the guards of all ranks, and gives them orders."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from contextlib import suppress
from typing import Any

from zerofit.watch.json_lines import ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import LaunchSpec
from zerofit.watch.verdict import BUSY_CPU, FailureVerdict, RankState, judge

HELLO_S = 10.0  # for a connection to say who it is
REPORTS_S = 2.0  # after the first failure, for other ranks to report theirs
STACKS_S = 12.0
FROZEN_S = 5.0  # between two looks
IN_REACH_S = 4.0  # guards speak once a second
LOSSY_S = 3.0  # a packet that is lost now and then is no news


class Watch:
    """Hears the guards of one start's ranks. One thread: everything happens in `poll`."""

    def __init__(self, address: str):
        """Listen on a free port of `address` ("" for all of this machine's)."""
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[JsonLineSocket, float] = {}
        self._known: dict[JsonLineSocket, int] = {}
        self._stacks: set[int] = set()
        self.states: list[RankState] = []
        self._token, self._timeout_s, self._coming_s = "", 0.0, 0.0
        self._polled = time.monotonic()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def expect(self, orders: LaunchSpec) -> None:
        """From now on these ranks are expected to report."""
        self._token, self._timeout_s, self._coming_s = orders.token, orders.timeout_s, orders.coming_s
        now = time.monotonic()
        self.states = [RankState(rank, host, now) for rank, host in enumerate(orders.hosts)]

    def close(self) -> None:
        """Hear no more."""
        for wire in [*self._known, *self._strangers]:
            wire.close()
        self._selector.close()
        self._listener.close()

    def poll(self, seconds: float) -> None:
        """Take what has come, waiting for something at most so long."""
        gap = time.monotonic() - self._polled
        if gap > FROZEN_S:  # this command was stopped (Ctrl-Z): nobody could be heard
            for state in self.states:
                state.heard += gap
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._hear(key.fileobj)
        for wire, since in list(self._strangers.items()):
            if time.monotonic() - since > HELLO_S:
                self._forget(wire)
        self._polled = time.monotonic()

    def verdict(self) -> FailureVerdict | None:
        """What is wrong by now."""
        return judge(self.states, time.monotonic(), self._timeout_s, self._coming_s)

    def await_failures(self) -> None:
        """Give the other ranks a moment to report why they failed."""
        self._until(lambda: not self._known, REPORTS_S)

    def keep_stacks(self) -> None:
        """Have the stack traces of all ranks that can be reached written to the logs."""
        self._order({"do": "stacks"})
        asked = {state.rank for state in self._in_reach() if state.ended is None}
        self._until(lambda: asked <= self._stacks, STACKS_S)

    def stop(self) -> bool:
        """Order an end; whether all guards that can be reached have made one."""
        in_reach = {state.rank for state in self._in_reach()}
        self._order({"do": "kill"})
        self._until(lambda: not in_reach & set(self._known.values()), STACKS_S)
        return not in_reach & set(self._known.values())

    def summary(self) -> str:
        """How the ranks are, in one short line; empty while there is nothing to say."""
        here = sum(s.here for s in self.states)
        if here < len(self.states):
            return f"waiting for ranks ({here} of {len(self.states)} are there)"
        now = time.monotonic()
        lossy = [s for s in self.states if s.ended is None and s.beat.get("resending") and s.beat["still_s"] > LOSSY_S]
        if lossy:
            return f"the network loses packets: {lossy[0].name} sends again what is not acknowledged"
        quiet = [s for s in self.states if s.ended is None and _quiet_s(s, now) > self._timeout_s / 4]
        if not quiet:
            return ""
        worst = max(quiet, key=lambda s: _quiet_s(s, now))
        return f"{worst.name} quiet for {_quiet_s(worst, now):.0f} s ({worst.where})"

    def _in_reach(self) -> list[RankState]:
        """Ranks whose guard has been heard just now; the others get orders too, but nobody waits for them."""
        now = time.monotonic()
        return [self.states[rank] for rank in self._known.values() if now - self.states[rank].heard < IN_REACH_S]

    def _until(self, done: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self.poll(0.1)

    def _order(self, order: dict[str, Any]) -> None:
        for wire in list(self._known):
            with suppress(ConnectionLost):
                wire.send(order)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            wire = JsonLineSocket(connection, max(self._timeout_s, 1.0))
            self._strangers[wire] = time.monotonic()
            self._selector.register(wire, selectors.EVENT_READ)

    def _hear(self, wire: Any) -> None:
        try:
            for message in wire.receive():
                if wire in self._strangers:
                    self._greet(wire, message)
                else:
                    self._note(self.states[self._known[wire]], message)
                    if "beat" in message:
                        wire.send({"heard": True})  # the guard says no more before
        except ConnectionLost:
            if wire in self._known:
                state = self.states[self._known[wire]]
                state.lost = state.ended is None
            self._forget(wire)

    def _greet(self, wire: JsonLineSocket, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        known = isinstance(rank, int) and 0 <= rank < len(self.states) and not self.states[rank].here
        if not known or not hmac.compare_digest(str(message.get("hello")).encode(), self._token.encode()):
            raise ConnectionLost("a stranger")
        assert isinstance(rank, int)
        del self._strangers[wire]
        self._known[wire] = rank
        self.states[rank].here, self.states[rank].heard = True, time.monotonic()

    def _note(self, state: RankState, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if "beat" in message:
            before, seconds = state.beat.get("cpu_s", 0.0), max(now - state.heard, 1e-3)
            state.beat = message["beat"]
            state.busy = (state.beat["cpu_s"] - before) / seconds > BUSY_CPU
        if "ended" in message:
            state.ended, state.beat = message["ended"], {**state.beat, **message.get("last", {})}
            state.failure = message.get("failure")
        if "stacks" in message:
            self._stacks.add(state.rank)
        state.heard = now

    def _forget(self, wire: JsonLineSocket) -> None:
        self._selector.unregister(wire)
        self._known.pop(wire, None)
        self._strangers.pop(wire, None)
        wire.close()


def _quiet_s(state: RankState, now: float) -> float:
    return max(now - state.heard, state.beat.get("silent_s", 0.0))
