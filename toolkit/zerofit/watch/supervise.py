"""Supervise one start of a run: receive the ranks' heartbeats, and end ranks on a failure.

Messages from the ranks' guards are validated before use.
"""

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
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from zerofit.spec.files import open_jsonl
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.json_lines import LONGEST, ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import LaunchSpec
from zerofit.watch.verdict import BUSY_CPU, FailureVerdict, RankState, judge

# Anybody on the network can connect to the command's port. So types are strict (true is not a rank, "5" is not a
# number), numbers have limits, and unknown keys close the connection.
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
POLL_S = 0.1
TRACED = ("hang", "rank-stopped", "host-unreachable", "vanished", "not-started", "rank-ended")
HELLO_S = 10.0  # for a connection to authenticate
HELLO_BYTES = 4096  # limit of its first line
STRANGERS = 128  # limit of unauthenticated connections, plus one per rank
ACCEPTED = 64  # connections accepted at a time, so each can authenticate before many others arrive
REPORTS_S = 2.0  # time for other ranks to report after the first failure
STACKS_S = 12.0
FROZEN_S = 5.0  # time between polls that shows this command was stopped
IN_REACH_S = 4.0  # guards report once a second
LOSSY_S = 3.0  # ignore occasional lost packets


class _Exact(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Hello(_Exact):
    """The first message of a connection: the key of the start, and the guard's rank."""

    hello: str
    rank: Count


class RankBeat(_Exact):
    """A heartbeat of a rank (`zerofit.train.heartbeat`)."""

    step: Count = 0
    phase: str = ""
    training: bool = False
    warm: bool = False
    collective: str | None = None
    at: str = ""
    resending: bool = False
    still_s: Seconds | None = None  # None: before the rank's first heartbeat
    longest_still_s: Seconds = 0.0


class Beat(RankBeat):
    """A rank's heartbeat with its guard's facts about the process."""

    silent_s: Seconds = 0.0
    state: str = ""
    cpu_s: Seconds = 0.0


class RankProblem(_Exact):
    """A `spec.errors.Problem`."""

    kind: str
    message: str
    hint: str = ""
    where: str = ""


class RankFailure(_Exact):
    """A rank's own report of its failure (`zerofit.worker`)."""

    rank: Count
    host: str | None = None
    time_s: Seconds = 0.0
    problems: list[RankProblem]


class Beating(_Exact):
    """Heartbeat message, sent once a second."""

    beat: Beat


class Ended(_Exact):
    """The end of the rank's process."""

    ended: Annotated[int, Field(ge=-255, le=255)]  # exit code; negative: the signal
    last: RankBeat = RankBeat()
    failure: RankFailure | None = None


class Stacks(_Exact):
    """The answer to a request for stack traces: the method that wrote them, or what failed."""

    stacks: str


Message = Beating | Ended | Stacks  # all messages but the first
MESSAGE = TypeAdapter[Message](Message)


# One connection for each rank's guard, with lines of JSON; the guard opens it:
#
#   guard                                        command (this class)
#     hello: secret, rank                  ──►   unknown connections are closed after HELLO_S
#     beat: step, phase, silence, CPU time ──►   once a second
#                                          ◄──   heard: the guard sends the next beat only then, so unread beats
#                                                do not pile up while this command is stopped (Ctrl-Z)
#                                          ◄──   do: stacks | kill
#     ended: exit code, last beat, failure ──►   after a failure the guard waits for "kill", or the launcher
#                                                would kill the other ranks before they report
class Watch:
    """Receives the reports of one start's guards. Single-threaded: everything happens in `poll`."""

    def __init__(self, address: str):
        """Listen on a free port of `address`; "" means all addresses of this machine."""
        # All guards connect at once. The kernel drops connections beyond the backlog, and they try again only after a
        # second.
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._unauthenticated: dict[JsonLineSocket, float] = {}
        self._guards: dict[JsonLineSocket, int] = {}
        self._stacks: set[int] = set()
        self.states: list[RankState] = []
        self._token, self._timeout_s, self._coming_s = "", 0.0, 0.0
        self._polled = time.monotonic()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._listener.getsockname()[1]

    def expect(self, spec: LaunchSpec) -> None:
        """Expect reports from the ranks of `spec` from now on."""
        self._token, self._timeout_s, self._coming_s = spec.token, spec.timeout_s, spec.coming_s
        self._polled = time.monotonic()
        self.states = [RankState(rank, host, self._polled) for rank, host in enumerate(spec.hosts)]

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._guards, *self._unauthenticated]:
            connection.close()
        self._selector.close()
        self._listener.close()

    def poll(self, seconds: float) -> None:
        """Process the messages that have arrived; wait at most `seconds` for the first."""
        gap = time.monotonic() - self._polled
        if gap > FROZEN_S:  # this command was stopped (Ctrl-Z) and could receive nothing
            for state in self.states:
                state.heard += gap
        for key, _ in self._selector.select(seconds):
            connection = key.fileobj
            if not isinstance(connection, JsonLineSocket):  # the listener
                self._accept()
            elif connection in self._guards or connection in self._unauthenticated:  # `_accept` may have closed it
                self._receive(connection)
        for connection, since in list(self._unauthenticated.items()):
            if time.monotonic() - since > HELLO_S:
                self._forget(connection)
        self._polled = time.monotonic()

    def verdict(self) -> FailureVerdict | None:
        """Return the first failure that the reports show; None if there is none."""
        return judge(self.states, time.monotonic(), self._timeout_s, self._coming_s)

    def await_failures(self) -> None:
        """Give the other ranks a moment to report their failures."""
        self._until(lambda: not self._at_work(), REPORTS_S)

    def save_stacks(self) -> None:
        """Have the guards write the stack traces of all reachable ranks to the logs."""
        self.send_all({"do": "stacks"})
        ranks = {state.rank for state in self._in_reach() if state.ended is None}
        self._until(lambda: ranks <= self._stacks, STACKS_S)

    def stop(self) -> bool:
        """Kill all ranks. Return whether all reachable guards have killed their ranks."""
        in_reach = {state.rank for state in self._in_reach()}
        self.send_all({"do": "kill"})
        self._until(lambda: not in_reach & self._at_work(), STACKS_S)
        return not in_reach & self._at_work()

    def summary(self) -> str:
        """Return the state of the ranks in one short line; "" if there is nothing to report."""
        started = sum(s.here for s in self.states)
        if started < len(self.states):
            return f"waiting for ranks ({started} of {len(self.states)} have started)"
        now = time.monotonic()
        lossy = [
            s
            for s in self.states
            if s.ended is None and s.beat.get("resending") and s.beat.get("still_s", 0.0) > LOSSY_S
        ]
        if lossy:
            return f"the network loses packets: {lossy[0].name} is retransmitting"
        quiet = [s for s in self.states if s.ended is None and _quiet_s(s, now) > self._timeout_s / 4]
        if not quiet:
            return ""
        worst = max(quiet, key=lambda s: _quiet_s(s, now))
        if not worst.beat.get("phase"):
            return f"{worst.name} is starting ({_quiet_s(worst, now):.0f} s)"
        return f"{worst.name} quiet for {_quiet_s(worst, now):.0f} s ({worst.where})"

    def _in_reach(self) -> list[RankState]:
        """Return the ranks with a recent report. Nothing waits for the answers of other ranks."""
        now = time.monotonic()
        return [self.states[rank] for rank in self._guards.values() if now - self.states[rank].heard < IN_REACH_S]

    def _at_work(self) -> set[int]:
        """Return the ranks whose guard is connected and has not reported their end."""
        return {rank for rank in self._guards.values() if self.states[rank].ended is None}

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self.poll(0.1)

    def send_all(self, command: dict[str, object]) -> None:
        """Send a command to all guards."""
        for connection in list(self._guards):
            with suppress(ConnectionLost):
                connection.send(command)

    def _accept(self) -> None:
        """Accept new connections; if too many are unauthenticated, close the oldest."""
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

    def _receive(self, connection: JsonLineSocket) -> None:
        try:
            for message in connection.receive():
                if connection in self._unauthenticated:
                    self._authenticate(connection, Hello.model_validate(message))
                else:
                    report = MESSAGE.validate_python(message)
                    self._note(self.states[self._guards[connection]], report)
                    if isinstance(report, Beating):
                        connection.send({"heard": True})  # the guard waits for this before its next heartbeat
        except (ConnectionLost, ValueError):  # ValueError: no guard sends such a message
            if connection in self._guards:
                state = self.states[self._guards[connection]]
                state.lost = state.ended is None
            self._forget(connection)

    def _authenticate(self, connection: JsonLineSocket, message: Hello) -> None:
        # takes equally long for any wrong secret, so a stranger cannot guess it letter by letter
        authentic = hmac.compare_digest(message.hello.encode(), self._token.encode())
        if not authentic or message.rank >= len(self.states) or self.states[message.rank].here:
            raise ConnectionLost("not authenticated")
        del self._unauthenticated[connection]
        connection.longest = LONGEST
        self._guards[connection] = message.rank
        self.states[message.rank].here, self.states[message.rank].heard = True, time.monotonic()

    def _note(self, state: RankState, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Beating):
            before, seconds = state.beat.get("cpu_s", 0.0), max(now - state.heard, 1e-3)
            state.beat = message.beat.model_dump(exclude_none=True)
            state.busy = (message.beat.cpu_s - before) / seconds > BUSY_CPU
        elif isinstance(message, Ended):
            # a rank may only report its own failure
            if message.failure and message.failure.rank != state.rank:
                raise ValueError("another rank's failure")
            state.ended = message.ended
            state.beat |= message.last.model_dump(exclude_unset=True)
            state.failure = message.failure and message.failure.model_dump(exclude_unset=True)
        else:
            self._stacks.add(state.rank)
        state.heard = now

    def _forget(self, connection: JsonLineSocket) -> None:
        self._selector.unregister(connection)
        self._guards.pop(connection, None)
        self._unauthenticated.pop(connection, None)
        connection.close()


def _quiet_s(state: RankState, now: float) -> float:
    return max(now - state.heard, state.beat.get("silent_s", 0.0))


@dataclass(frozen=True, kw_only=True)
class RanksOutcome:
    """The outcome of one start: the launcher's exit code, and the failures of the ranks."""

    code: int  # exit code of the launcher
    verdict: FailureVerdict | None  # failure seen by the watch
    failures: tuple[dict[str, Any], ...]  # failures reported by ranks


def supervise(
    ranks: AbstractContextManager[subprocess.Popen[bytes]], watch: Watch, folder: RunFolder, tick: Callable[[], None]
) -> RanksOutcome:
    """Watch the ranks until they end. Call `tick` about ten times a second.

    On the first failure save stack traces and kill all reachable ranks.
    """
    verdict = None
    with ranks as process, ExitStack() as stack:
        stack.callback(watch.stop)  # also after an exception
        while process.poll() is None:
            watch.poll(POLL_S)
            tick()
            verdict = watch.verdict()
            if verdict:
                verdict = _end_ranks(verdict, watch, folder)
                break
        else:
            watch.await_failures()
            verdict = watch.verdict()  # failures that arrived with the launcher's end
        tick()
    failures = tuple(state.failure for state in watch.states if state.failure and state.failure["problems"])
    return RanksOutcome(code=process.returncode, verdict=verdict, failures=failures)


def _end_ranks(verdict: FailureVerdict, watch: Watch, folder: RunFolder) -> FailureVerdict:
    """Save stack traces, kill all ranks and record the fault. Return the verdict to show."""
    decided = time.monotonic()
    if verdict.problem.kind == "rank-ended":
        watch.await_failures()  # if a rank lost a peer, the peer's report may come later
        verdict = watch.verdict() or verdict
    if verdict.problem.kind in TRACED:
        watch.save_stacks()
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
    stacks = None
    with suppress(OSError):  # a full disk must not hide the verdict
        stacks = _move_stacks(folder)
        where = str(stacks.relative_to(folder.path)) if stacks else None
        with open_jsonl(folder.faults) as file:
            file.write(json.dumps({**fault, "stacks": where}) + "\n")
    return replace(verdict, problem=replace(verdict.problem, where=str(stacks))) if stacks else verdict


def _move_stacks(folder: RunFolder) -> Path | None:
    """Move the stack traces to a folder that later starts keep. Return it; None without traces."""
    files = [path for path in folder.logs.glob("rank-*.stacks.txt") if path.stat().st_size]
    if not files:
        return None
    number = 1
    while (fault := folder.logs / f"fault-{number}").exists():
        number += 1
    fault.mkdir()
    for path in files:
        path.rename(fault / path.name)
    return fault
