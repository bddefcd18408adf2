"""One start of a run, from its first process to its last."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.spec.run_folder import RunFolder
from zerofit.watch.verdict import FailureVerdict
from zerofit.watch.watch import Watch

POLL_S = 0.1
TRACED = ("hang", "rank-stopped", "host-unreachable", "vanished", "not-started", "rank-ended")


@dataclass(frozen=True, kw_only=True)
class RanksOutcome:
    """How the ranks of one start ended."""

    code: int  # of the launcher
    verdict: FailureVerdict | None  # what the watch has seen go wrong
    failures: tuple[dict[str, Any], ...]  # what ranks have reported


def supervise(
    ranks: AbstractContextManager[subprocess.Popen[bytes]], watch: Watch, folder: RunFolder, tick: Callable[[], None]
) -> RanksOutcome:
    """Watch the ranks to their end; `tick` is called about ten times a second. On the first thing that goes wrong
    stack traces are kept and all ranks that can be reached are ended."""
    verdict = None
    with ranks as process, _ending(watch):
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
    failures = tuple(state.failure for state in watch.states if state.failure)
    return RanksOutcome(code=process.returncode, verdict=verdict, failures=failures)


@contextmanager
def _ending(watch: Watch) -> Any:
    """However the block ends, the guards are told to end their ranks."""
    try:
        yield
    finally:
        watch.stop()


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
        with folder.faults.open("a", encoding="utf-8") as file:
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
