"""How a run ended: its result, or the first error of the first rank that failed."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zerofit.spec.errors import Problem, RunFailed, Stopped
from zerofit.spec.run_folder import RunFolder


def outcome(
    folder: RunFolder,
    code: int,
    again: str = "zerofit train",
    seen: Problem | None = None,
    heard: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the result that rank 0 left.

    `again`: the command that goes on with a run folder. `seen`: what was seen to go wrong from outside. `heard`: what
    ranks have reported, besides what lies in the folder (whose disk may be full).

    Raises RunFailed with the one cause that a user should see, and Stopped where the ranks were asked to stop.
    """
    written = [json.loads(path.read_text()) for path in folder.logs.glob("rank-*.error.json")]
    failures = list({failure["rank"]: failure for failure in [*written, *heard]}.values())
    failures.sort(key=lambda failure: failure["time_s"])
    # a rank that lost its peers is a consequence; the cause is the first of the others, or what was seen from outside
    causes = [failure for failure in failures if failure["problems"][0]["kind"] != "peer-lost"]
    if causes:
        raise RunFailed(_reported(folder, causes[0]))
    if seen and not (failures and seen.kind == "rank-ended"):
        raise RunFailed(replace(seen, where=seen.where or str(folder.logs)))
    if failures:
        raise RunFailed(_reported(folder, failures[0]))
    if folder.stopped.exists():
        raise Stopped(_stopped(folder, again, json.loads(folder.stopped.read_text())))
    if folder.result.exists():
        return json.loads(folder.result.read_text())
    raise RunFailed(_silent_end(folder, code))


def _reported(folder: RunFolder, failure: dict[str, Any]) -> Problem:
    problem = Problem(**failure["problems"][0])
    host = f" on {failure['host']}" if "host" in failure else ""
    message = f"rank {failure['rank']}{host}: {problem.message}"
    return replace(problem, message=message, hint=problem.hint or f"its log: {folder.rank_log(failure['rank'])}")


def _stopped(folder: RunFolder, again: str, stopped: dict[str, int]) -> Problem:
    return Problem(
        kind="stopped",
        message=f"stopped on request after step {stopped['step']} of {stopped['steps']}; a checkpoint of it is saved",
        hint=f"`{again} {shlex.quote(str(folder.path))}` goes on from there",
        where=str(folder.path),
    )


def _silent_end(folder: RunFolder, code: int) -> Problem:
    """Ranks that were killed report nothing; the launcher's log names their exit code."""
    log = folder.logs / "launcher.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    killed = -code == signal.SIGKILL or "return code = -9" in text or "exits with return code = -9" in text
    if killed:
        return Problem(
            kind="killed",
            message="a rank was killed from outside (SIGKILL), most often by the kernel for want of host memory",
            hint="lower --micro-batch, take fewer ranks on this host, or look into the kernel's log (dmesg)",
            where=str(log),
        )
    return Problem(
        kind="launcher",
        message=f"the ranks ended without a result (exit code {code})",
        hint=f"see {log}",
        where=str(log),
    )
