"""The verdict on a run from what its ranks have last reported: the one place that decides what is wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zerofit.spec.errors import Problem

COMING_S = 180.0  # until a guard must have reported: ssh, Python and file systems on their first day
PATIENT = 10  # times the timeout: where work may rightly take long without a sign
USUAL = 3  # times the longest stillness that was none
DISK_S = 1800.0  # a large file on its way to a slow disk shows no other sign
STOPPED_STATES = ("stopped", "tracing-stop")
BUSY_CPU = 0.05  # cores


@dataclass
class RankState:
    """The command's knowledge of one rank. Times are of `time.monotonic`."""

    rank: int
    host: str
    heard: float  # when its guard last said something; before that, when the ranks were started
    here: bool = False  # its guard has reported
    beat: dict[str, Any] = field(default_factory=dict)  # the last heartbeat (`zerofit.train.heartbeat`, `rank_guard`)
    ended: int | None = None  # exit code of the rank; negative: the signal
    failure: dict[str, Any] | None = None  # what it has reported itself
    lost: bool = False  # the connection to its guard has gone without the rank's end being reported
    busy: bool = False  # it used a core between its last two heartbeats

    @property
    def where(self) -> str:
        """`step 12, backward, in all_reduce`."""
        if not self.beat.get("phase"):
            return "before its first heartbeat"
        parts = [f"step {self.beat['step'] + 1}", self.beat["phase"]]
        if self.beat.get("collective"):
            parts.append(f"in {self.beat['collective']}")
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """`rank 3 on node2`."""
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class FailureVerdict:
    """The cause of a failure that no rank has reported."""

    problem: Problem
    ranks: tuple[int, ...]
    host: str
    unheard_s: float  # since when nothing had been heard or had moved, when this was decided


def judge(
    states: Sequence[RankState], now: float, timeout_s: float, coming_s: float = COMING_S
) -> FailureVerdict | None:
    """Return the first thing that is wrong, or None. The most certain causes come first.

    `timeout_s`: without a heartbeat; `coming_s`: until a guard must have reported.
    """
    checks: tuple[Callable[[Sequence[RankState], float, float], FailureVerdict | None], ...]
    checks = (_killed, _vanished, _ended, partial(_unheard, coming_s=coming_s), _silent, _all_still)
    return next((verdict for check in checks if (verdict := check(states, now, timeout_s))), None)


def _killed(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    killed = [s for s in states if (s.ended or 0) < 0]
    if not killed:
        return None
    first, number = killed[0], -(killed[0].ended or 0)
    if number == signal.SIGKILL:
        message = f"{first.name} was killed from outside (SIGKILL) in {first.where}"
        hint = "most often by the kernel for want of host memory: lower --micro-batch, take fewer ranks on this host, "
        return _verdict("killed", message, hint + "or look into the kernel's log (dmesg)", killed, now)
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    message = f"{first.name} was ended by {name} in {first.where}"
    hint = "SIGSEGV, SIGBUS and SIGABRT come from C++ code: its log says where"
    return _verdict("rank-ended", message, hint, killed, now)


def _ended(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    """Find ranks that ended by themselves; those that have only lost a peer come here too."""
    failed = [s for s in states if s.ended]
    if not failed:
        return None
    first = failed[0]
    message = f"{first.name} ended with exit code {first.ended} in {first.where}"
    return _verdict("rank-ended", message, "its log says why", failed, now)


def _vanished(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    gone = [s for s in states if s.lost]
    if not gone:
        return None
    host = gone[0].host
    on_host = [s for s in states if s.host == host]
    mine = [s for s in gone if s.host == host]
    if len(mine) == len(on_host):
        message = f"all ranks on {host} are gone at once ({_ranks(mine)}), in {mine[0].where}"
        hint = f"their launcher was killed, or {host} went down: look into {host}'s system log"
    else:
        message = f"{mine[0].name} and its guard are gone, in {mine[0].where}"
        hint = f"somebody killed both; look into {host}'s kernel log (dmesg)"
    return _verdict("vanished", message, hint, mine, now)


def _unheard(states: Sequence[RankState], now: float, timeout_s: float, coming_s: float) -> FailureVerdict | None:
    """Find guards that say nothing, though nobody has closed the connection."""
    coming = max(coming_s, timeout_s)
    unheard = [
        s for s in states if s.ended is None and not s.lost and now - s.heard > (timeout_s if s.here else coming)
    ]
    if not unheard:
        return None
    host = unheard[0].host
    mine = [s for s in unheard if s.host == host]
    seconds = now - min(s.heard for s in mine)
    if not mine[0].here:
        message = f"{_ranks(mine)} on {host} did not start within {seconds:.0f} s"
        return _verdict("not-started", message, "logs/launcher.log says what the launcher did", mine, now)
    message = f"nothing has been heard of {host} ({_ranks(mine)}) for {seconds:.0f} s; last in {mine[0].where}"
    hint = f"{host} is down, frozen or cut off from the network"
    return _verdict("host-unreachable", message, hint, mine, now)


def _silent(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    """Find ranks that say nothing to their guard, which is well."""
    for state in states:
        seconds = state.beat.get("silent_s", 0.0)
        if state.ended is not None or seconds <= timeout_s:
            continue
        disk = state.beat.get("state") == "disk-sleep"
        limit = DISK_S if disk else timeout_s * PATIENT if state.busy or not state.beat.get("training") else timeout_s
        if state.beat.get("state") in STOPPED_STATES:
            message = f"{state.name} has been stopped for {seconds:.0f} s (SIGSTOP, or a debugger), in {state.where}"
            return _verdict("rank-stopped", message, "kill -CONT, or end the debugger", [state], now)
        if seconds > limit:
            message = f"{state.name} has sent no heartbeat for {seconds:.0f} s, in {state.where}"
            hint = "C++ code holds Python's interpreter lock, or waits for a disk: see its stack traces"
            return _verdict("hang", message, hint, [state], now)
    return None


def _all_still(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    """Find a hang: all ranks live, none has moved; those outside the others' collective hold them up."""
    alive = [s for s in states if s.ended is None]
    if not alive or any("still_s" not in s.beat for s in alive):
        return None
    steady = all(s.beat["training"] and s.beat["warm"] and s.beat["phase"] != "data" for s in alive)
    lossy = [s for s in alive if s.beat.get("resending")]
    if lossy:
        return _lossy(lossy, alive, now, timeout_s)
    limit = timeout_s if steady else timeout_s * PATIENT
    # a long step on a GPU is one long wait for Python
    limit = max(limit, USUAL * max(s.beat.get("longest_still_s", 0.0) for s in alive))
    if any(s.beat.get("state") == "disk-sleep" for s in alive):
        limit = max(limit, DISK_S)
    seconds = min(s.beat["still_s"] for s in alive)
    if seconds <= limit:
        return None
    behind = _behind(alive)
    others = [s for s in alive if s not in behind]
    message = f"no rank has moved for {seconds:.0f} s: {behind[0].name} is at {behind[0].where}"
    if behind[0].beat.get("at"):
        message += f" ({behind[0].beat['at']})"
    if others:
        message += f", {'the others' if len(others) > 1 else others[0].name} at {others[0].where}"
    hint = "the stack traces show what each rank waits for; ranks that run different collectives wait forever"
    return _verdict("hang", message, hint, behind, now)


def _lossy(
    lossy: Sequence[RankState], alive: Sequence[RankState], now: float, timeout_s: float
) -> FailureVerdict | None:
    """Give ranks that are slow since the network loses what they send longer than those that wait for nothing."""
    seconds = min(s.beat["still_s"] for s in alive)
    if seconds <= timeout_s * PATIENT:
        return None
    message = f"no rank has moved for {seconds:.0f} s, and {lossy[0].name} sends the same again and again unanswered"
    hint = f"the network of {lossy[0].host} loses packets: look at its link and its errors (ip -s link)"
    return _verdict("network", message, hint, lossy, now)


def _behind(alive: Sequence[RankState]) -> list[RankState]:
    """Find who holds others up: ranks outside a collective, else in the earliest step, else in the rarest call."""
    outside = [s for s in alive if not s.beat.get("collective")]
    if outside and len(outside) < len(alive):
        return outside
    first = min(s.beat["step"] for s in alive)
    early = [s for s in alive if s.beat["step"] == first]
    if len(early) < len(alive):
        return early
    calls = [(s.beat["phase"], s.beat.get("collective"), s.beat.get("at")) for s in alive]
    rarest = min(calls, key=calls.count)
    return [s for s, call in zip(alive, calls, strict=True) if call == rarest]


def _verdict(kind: str, message: str, hint: str, ranks: Sequence[RankState], now: float) -> FailureVerdict:
    first = ranks[0]
    unheard = max(now - first.heard, first.beat.get("silent_s", 0.0))
    if kind == "hang":
        unheard = max(unheard, first.beat.get("still_s", 0.0))
    problem = Problem(kind=kind, message=message, hint=hint)
    return FailureVerdict(
        problem=problem, ranks=tuple(s.rank for s in ranks), host=first.host, unheard_s=round(max(unheard, 0.0), 1)
    )


def _ranks(states: Sequence[RankState]) -> str:
    numbers = [str(s.rank) for s in states]
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(numbers)
