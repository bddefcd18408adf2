"""The verdict on a run from its ranks' last reports."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerofit.spec.errors import Problem

PATIENT = 10  # multiple of the timeout for work that may be silent for long
USUAL = 3  # multiple of the longest pause after which a rank continued
DISK_S = 1800.0  # writing a large file to a slow disk shows no other activity
STOPPED_STATES = ("stopped", "tracing-stop")
BUSY_CPU = 0.05  # cores


# The cause of a failure, from the guards' reports. The checks go from certain to likely, and the first hit is the
# verdict:
#
#   ended by a signal        the kernel or a user killed the rank
#   guard's connection lost  the guard and the rank are gone; all ranks of a host: the host or its launcher
#   exit code not 0          the rank's own error; often it has only lost a peer
#   guard silent             the host is frozen or cut off (`timeout_s`), or never came (`coming_s`)
#   rank silent              stopped (SIGSTOP), or C++ code holds the interpreter lock; disks get more time
#   no rank advances         a hang, if all ranks stand still for longer than their longest pause so far
#
# Ranks outside the others' collective cause a hang, since the ranks inside wait for them.


@dataclass
class RankState:
    """The state of one rank as reported to the command. Times are of `time.monotonic`."""

    rank: int
    host: str
    heard: float  # time of its guard's last report, or of the start
    here: bool = False  # its guard has reported
    beat: dict[str, Any] = field(default_factory=dict)  # the last heartbeat (`zerofit.train.heartbeat`, `rank_guard`)
    ended: int | None = None  # exit code of the rank; negative: the signal
    failure: dict[str, Any] | None = None  # failure that it reported itself
    lost: bool = False  # the guard's connection closed without a report of the rank's end
    busy: bool = False  # it used a core between its last two heartbeats

    @property
    def where(self) -> str:
        """Where the rank is, such as `step 12, backward, in all_reduce`."""
        if not self.beat.get("phase"):
            return "before its first heartbeat"
        parts = [f"step {self.beat['step'] + 1}", self.beat["phase"]]
        if self.beat.get("collective"):
            parts.append(f"in {self.beat['collective']}")
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """The rank and its host, such as `rank 3 on node2`."""
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class FailureVerdict:
    """The cause of a failure that no rank reported."""

    problem: Problem
    ranks: tuple[int, ...]
    host: str
    unheard_s: float  # seconds without a report or progress when this was decided


def judge(states: Sequence[RankState], now: float, timeout_s: float, coming_s: float) -> FailureVerdict | None:
    """Return the first failure found, or None. The most certain causes come first.

    `timeout_s`: longest time without a heartbeat; `coming_s`: longest time until a guard reports.
    """
    return (
        _killed(states, now)
        or _vanished(states, now)
        or _ended(states, now)
        or _unheard(states, now, timeout_s, max(coming_s, timeout_s))
        or _silent(states, now, timeout_s)
        or _all_still(states, now, timeout_s)
    )


def _killed(states: Sequence[RankState], now: float) -> FailureVerdict | None:
    killed = [s for s in states if (s.ended or 0) < 0]
    if not killed:
        return None
    first, number = killed[0], -(killed[0].ended or 0)
    if number == signal.SIGKILL:
        message = f"{first.name} was killed (SIGKILL) in {first.where}"
        hint = "most often by the kernel, because host memory ran out: lower --micro-batch, use fewer ranks here, "
        return _verdict("killed", message, hint + "or check the kernel log (dmesg)", killed, now)
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    message = f"{first.name} was killed by {name} in {first.where}"
    hint = "SIGSEGV, SIGBUS and SIGABRT come from C++ code: see the rank's log"
    return _verdict("rank-ended", message, hint, killed, now)


def _ended(states: Sequence[RankState], now: float) -> FailureVerdict | None:
    """Find ranks that exited by themselves, including ranks that only lost a peer."""
    failed = [s for s in states if s.ended]
    if not failed:
        return None
    first = failed[0]
    message = f"{first.name} exited with code {first.ended} in {first.where}"
    return _verdict("rank-ended", message, "see its log", failed, now)


def _vanished(states: Sequence[RankState], now: float) -> FailureVerdict | None:
    gone = [s for s in states if s.lost]
    if not gone:
        return None
    host = gone[0].host
    on_host = [s for s in states if s.host == host]
    lost = [s for s in gone if s.host == host]
    if len(lost) == len(on_host):
        message = f"all ranks on {host} disappeared at once ({_ranks(lost)}), in {lost[0].where}"
        hint = f"their launcher was killed, or {host} went down: check {host}'s system log"
    else:
        message = f"{lost[0].name} and its guard process disappeared, in {lost[0].where}"
        hint = f"both were killed; check {host}'s kernel log (dmesg)"
    return _verdict("vanished", message, hint, lost, now)


def _unheard(states: Sequence[RankState], now: float, timeout_s: float, coming_s: float) -> FailureVerdict | None:
    """Find guards that are silent although their connection is open."""
    unheard = [
        s for s in states if s.ended is None and not s.lost and now - s.heard > (timeout_s if s.here else coming_s)
    ]
    if not unheard:
        return None
    host = unheard[0].host
    silent = [s for s in unheard if s.host == host]
    seconds = now - min(s.heard for s in silent)
    if not silent[0].here:
        message = f"{_ranks(silent)} on {host} did not start within {seconds:.0f} s"
        return _verdict("not-started", message, "see logs/launcher.log", silent, now)
    message = f"no report from {host} ({_ranks(silent)}) for {seconds:.0f} s; last in {silent[0].where}"
    hint = f"{host} is down, frozen or cut off from the network"
    return _verdict("host-unreachable", message, hint, silent, now)


def _silent(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    """Find ranks that send no heartbeat although their guard works."""
    for state in states:
        seconds = state.beat.get("silent_s", 0.0)
        if state.ended is not None or seconds <= timeout_s:
            continue
        # Silence is normal before the training, while libraries are imported and ops are compiled. A rank that uses the
        # CPU may be in a long C++ call, which holds the interpreter lock.
        disk = state.beat.get("state") == "disk-sleep"
        limit = DISK_S if disk else timeout_s * PATIENT if state.busy or not state.beat.get("training") else timeout_s
        if state.beat.get("state") in STOPPED_STATES:
            message = f"{state.name} has been stopped for {seconds:.0f} s (SIGSTOP, or a debugger), in {state.where}"
            return _verdict(
                "rank-stopped", message, "continue the process with kill -CONT, or leave the debugger", [state], now
            )
        if seconds > limit:
            message = f"{state.name} has sent no heartbeat for {seconds:.0f} s, in {state.where}"
            hint = "C++ code holds Python's interpreter lock, or waits for a disk: see the rank's stack traces"
            return _verdict("hang", message, hint, [state], now)
    return None


def _all_still(states: Sequence[RankState], now: float, timeout_s: float) -> FailureVerdict | None:
    """Find a hang: all ranks are alive, but no rank makes progress."""
    alive = [s for s in states if s.ended is None]
    if not alive or any("still_s" not in s.beat for s in alive):
        return None
    steady = all(s.beat["training"] and s.beat["warm"] and s.beat["phase"] != "data" for s in alive)
    seconds = min(s.beat["still_s"] for s in alive)
    lossy = [s for s in alive if s.beat.get("resending")]
    if lossy:  # a network that loses packets is no hang: ranks may wait for long
        if seconds <= timeout_s * PATIENT:
            return None
        message = f"no rank has made progress for {seconds:.0f} s; {lossy[0].name} retransmits without an answer"
        hint = f"the network of {lossy[0].host} loses packets: check the link and the error counters (ip -s link)"
        return _verdict("network", message, hint, lossy, now)
    limit = timeout_s if steady else timeout_s * PATIENT
    # a long step on a GPU is one long wait for Python
    limit = max(limit, USUAL * max(s.beat.get("longest_still_s", 0.0) for s in alive))
    if any(s.beat.get("state") == "disk-sleep" for s in alive):
        limit = max(limit, DISK_S)
    if seconds <= limit:
        return None
    behind = _behind(alive)
    others = [s for s in alive if s not in behind]
    message = f"no rank has made progress for {seconds:.0f} s: {behind[0].name} is at {behind[0].where}"
    if behind[0].beat.get("at"):
        message += f" ({behind[0].beat['at']})"
    if others:
        message += f", {'the others' if len(others) > 1 else others[0].name} at {others[0].where}"
    hint = "see the stack traces for what each rank waits on; ranks in different collectives wait forever"
    return _verdict("hang", message, hint, behind, now)


def _behind(alive: Sequence[RankState]) -> list[RankState]:
    """Find the ranks that block the others."""
    # ranks in a collective wait for those outside
    outside = [s for s in alive if not s.beat.get("collective")]
    if outside and len(outside) < len(alive):
        return outside
    # ranks of a later step wait for those of the first
    first = min(s.beat["step"] for s in alive)
    early = [s for s in alive if s.beat["step"] == first]
    if len(early) < len(alive):
        return early
    # the rank that took another branch is in a call that few ranks share
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
