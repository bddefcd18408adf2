"""Supervision of one start of a run: a server that receives heartbeats of all ranks and sends them commands."""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.spec.files import open_jsonl
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.json_lines import LONGEST, ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import LaunchSpec
from zerofit.watch.messages import Beating, Ended, Hello, InvalidMessage, Message, read_hello, read_message
from zerofit.watch.verdict import BUSY_CPU, FailureVerdict, RankState, judge

POLL_S = 0.1
TRACED = ("hang", "rank-stopped", "host-unreachable", "vanished", "not-started", "rank-ended")
HELLO_S = 10.0  # for a connection to authenticate
HELLO_BYTES = 4096  # of its first line
STRANGERS = 128  # connections that have not authenticated, beside one for each rank
ACCEPTED = 64  # connections taken at a time: each can say its hello before so many others come
REPORTS_S = 2.0  # after the first failure, for other ranks to report theirs
STACKS_S = 12.0
FROZEN_S = 5.0  # between two looks
IN_REACH_S = 4.0  # guards speak once a second
LOSSY_S = 3.0  # a packet that is lost now and then is no news


class Watch:
    """Receives what the guards of one start's ranks report. One thread: everything happens in `poll`."""

    def __init__(self, address: str):
        """Listen on a free port of `address`, by which ranks reach it ("" for all of this machine's)."""
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._unauthenticated: dict[JsonLineSocket, float] = {}
        self._known: dict[JsonLineSocket, int] = {}
        self._stacks: set[int] = set()
        self.states: list[RankState] = []
        self._token, self._timeout_s, self._coming_s = "", 0.0, 0.0
        self._polled = time.monotonic()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def expect(self, spec: LaunchSpec) -> None:
        """Expect these ranks to report from now on."""
        self._token, self._timeout_s, self._coming_s = spec.token, spec.timeout_s, spec.coming_s
        now = time.monotonic()
        self.states = [RankState(rank, host, now) for rank, host in enumerate(spec.hosts)]

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._known, *self._unauthenticated]:
            connection.close()
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
                self._receive(key.fileobj)
        for connection, since in list(self._unauthenticated.items()):
            if time.monotonic() - since > HELLO_S:
                self._forget(connection)
        self._polled = time.monotonic()

    def verdict(self) -> FailureVerdict | None:
        """Return what is wrong by now."""
        return judge(self.states, time.monotonic(), self._timeout_s, self._coming_s)

    def await_failures(self) -> None:
        """Give the other ranks a moment to report why they failed."""
        self._until(lambda: not self._at_work(), REPORTS_S)

    def keep_stacks(self) -> None:
        """Have the stack traces of all ranks that can be reached written to the logs."""
        self.send_all({"do": "stacks"})
        asked = {state.rank for state in self._in_reach() if state.ended is None}
        self._until(lambda: asked <= self._stacks, STACKS_S)

    def stop(self) -> bool:
        """End all ranks; return whether all guards that can be reached have done so."""
        in_reach = {state.rank for state in self._in_reach()}
        self.send_all({"do": "kill"})
        self._until(lambda: not in_reach & self._at_work(), STACKS_S)
        return not in_reach & self._at_work()

    def summary(self) -> str:
        """Return how the ranks are, in one short line; empty while there is nothing to say."""
        here = sum(s.here for s in self.states)
        if here < len(self.states):
            return f"waiting for ranks ({here} of {len(self.states)} are there)"
        now = time.monotonic()
        lossy = [
            s
            for s in self.states
            if s.ended is None and s.beat.get("resending") and s.beat.get("still_s", 0.0) > LOSSY_S
        ]
        if lossy:
            return f"the network loses packets: {lossy[0].name} sends again what is not acknowledged"
        quiet = [s for s in self.states if s.ended is None and _quiet_s(s, now) > self._timeout_s / 4]
        if not quiet:
            return ""
        worst = max(quiet, key=lambda s: _quiet_s(s, now))
        if not worst.beat.get("phase"):
            return f"{worst.name} is starting ({_quiet_s(worst, now):.0f} s)"
        return f"{worst.name} quiet for {_quiet_s(worst, now):.0f} s ({worst.where})"

    def _in_reach(self) -> list[RankState]:
        """Return the ranks whose guard has just reported; the others get commands too, but nobody waits for them."""
        now = time.monotonic()
        return [self.states[rank] for rank in self._known.values() if now - self.states[rank].heard < IN_REACH_S]

    def _at_work(self) -> set[int]:
        """Return the ranks whose guard is connected and has not reported their end."""
        return {rank for rank in self._known.values() if self.states[rank].ended is None}

    def _until(self, done: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self.poll(0.1)

    def send_all(self, command: dict[str, Any]) -> None:
        """Send a command to all guards."""
        for connection in list(self._known):
            with suppress(ConnectionLost):
                connection.send(command)

    def _accept(self) -> None:
        """Take new connections; where too many have not authenticated, those that came first are closed."""
        with suppress(OSError):
            for _ in range(ACCEPTED):
                self.adopt(JsonLineSocket(self._listener.accept()[0], max(self._timeout_s, 1.0)))
        for connection in list(self._unauthenticated)[: -STRANGERS - len(self.states)]:
            self._forget(connection)

    def adopt(self, connection: JsonLineSocket) -> None:
        """Wait for a connection's hello."""
        connection.longest = HELLO_BYTES
        self._unauthenticated[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: Any) -> None:
        try:
            for message in connection.receive():
                if connection in self._unauthenticated:
                    self._authenticate(connection, read_hello(message))
                else:
                    found = read_message(message)
                    self._note(self.states[self._known[connection]], found)
                    if isinstance(found, Beating):
                        connection.send({"heard": True})  # the guard says no more before
        except (ConnectionLost, InvalidMessage):
            if connection in self._known:
                state = self.states[self._known[connection]]
                state.lost = state.ended is None
            self._forget(connection)

    def _authenticate(self, connection: JsonLineSocket, message: Hello) -> None:
        authentic = hmac.compare_digest(message.hello.encode(), self._token.encode())
        if not authentic or message.rank >= len(self.states) or self.states[message.rank].here:
            raise ConnectionLost("not authenticated")
        del self._unauthenticated[connection]
        connection.longest = LONGEST
        self._known[connection] = message.rank
        self.states[message.rank].here, self.states[message.rank].heard = True, time.monotonic()

    def _note(self, state: RankState, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Beating):
            before, seconds = state.beat.get("cpu_s", 0.0), max(now - state.heard, 1e-3)
            state.beat = message.beat.model_dump(exclude_none=True)
            state.busy = (message.beat.cpu_s - before) / seconds > BUSY_CPU
        elif isinstance(message, Ended):
            if message.failure and message.failure.rank != state.rank:
                raise InvalidMessage("another rank's failure")
            state.ended, state.beat = (
                message.ended,
                {**state.beat, **message.last.model_dump(exclude_unset=True, exclude_none=True)},
            )
            state.failure = message.failure and message.failure.model_dump(exclude_unset=True)
        else:
            self._stacks.add(state.rank)
        state.heard = now

    def _forget(self, connection: JsonLineSocket) -> None:
        self._selector.unregister(connection)
        self._known.pop(connection, None)
        self._unauthenticated.pop(connection, None)
        connection.close()


def _quiet_s(state: RankState, now: float) -> float:
    return max(now - state.heard, state.beat.get("silent_s", 0.0))


@dataclass(frozen=True, kw_only=True)
class RanksOutcome:
    """The outcome of one start's ranks."""

    code: int  # of the launcher
    verdict: FailureVerdict | None  # what the watch has seen go wrong
    failures: tuple[dict[str, Any], ...]  # what ranks have reported


def supervise(
    ranks: AbstractContextManager[subprocess.Popen[bytes]], watch: Watch, folder: RunFolder, tick: Callable[[], None]
) -> RanksOutcome:
    """Watch the ranks to their end; `tick` is called about ten times a second.

    On the first thing that goes wrong stack traces are kept and all ranks that can be reached are ended.
    """
    verdict = None
    with ranks as process, ExitStack() as stack:
        stack.callback(watch.stop)  # however the block ends
        while process.poll() is None:
            watch.poll(POLL_S)
            tick()
            verdict = watch.verdict()
            if verdict:
                verdict = _make_an_end(verdict, watch, folder)
                break
        else:
            watch.await_failures()
            verdict = watch.verdict()  # what came with the launcher's own end
        tick()
    failures = tuple(state.failure for state in watch.states if state.failure and state.failure["problems"])
    return RanksOutcome(code=process.returncode, verdict=verdict, failures=failures)


def _make_an_end(verdict: FailureVerdict, watch: Watch, folder: RunFolder) -> FailureVerdict:
    """Keep stack traces where they tell something, end all ranks, note the fault; the verdict with their place."""
    decided = time.monotonic()
    if verdict.problem.kind == "rank-ended":
        watch.await_failures()  # where a rank has lost a peer, the report of the peer may come later
        verdict = watch.verdict() or verdict
    if verdict.problem.kind in TRACED:
        watch.keep_stacks()
    watch.stop()
    fault = {
        "time_s": round(time.time(), 1),
        "kind": verdict.problem.kind,
        "ranks": verdict.ranks,
        "host": verdict.host,
        "message": verdict.problem.message,
        "seen_after_s": verdict.unheard_s,
        "stopped_after_s": round(time.monotonic() - decided, 1),
    }
    kept = None
    with suppress(OSError):  # the disk may be full: that is no reason to hide the verdict
        kept = _kept_stacks(folder)
        with open_jsonl(folder.faults) as file:
            file.write(json.dumps({**fault, "stacks": str(kept.relative_to(folder.path)) if kept else None}) + "\n")
    return replace(verdict, problem=replace(verdict.problem, where=str(kept))) if kept else verdict


def _kept_stacks(folder: RunFolder) -> Path | None:
    """Put the stack traces where the next start does not write over them; their folder, None where there are none."""
    found = [path for path in folder.logs.glob("rank-*.stacks.txt") if path.stat().st_size]
    if not found:
        return None
    number = 1
    while (kept := folder.logs / f"fault-{number}").exists():
        number += 1
    kept.mkdir()
    for path in found:
        path.rename(kept / path.name)
    return kept
