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
    """The result that rank 0 left.

    `again`: the command that goes on with a run folder. `seen`: what was seen to go wrong from outside. `heard`: what
    ranks said they died of, besides what lies in the folder (whose disk may be full).

    Raises RunFailed with the one cause that a user should see, and Stopped where the ranks were asked to stop.
    """
    written = [json.loads(path.read_text()) for path in folder.logs.glob("rank-*.error.json")]
    words = list({word["rank"]: word for word in [*written, *heard]}.values())
    words.sort(key=lambda w: w["time_s"])
    # a rank that lost its peers is a consequence; the cause is the first of the others, or what was seen from outside
    causes = [word for word in words if word["problems"][0]["kind"] != "peer-lost"]
    if causes:
        raise RunFailed(_said(folder, causes[0]))
    if seen and not (words and seen.kind == "rank-ended"):
        raise RunFailed(replace(seen, where=seen.where or str(folder.logs)))
    if words:
        raise RunFailed(_said(folder, words[0]))
    if folder.stopped.exists():
        raise Stopped(_stopped(folder, again, json.loads(folder.stopped.read_text())))
    if folder.result.exists():
        return json.loads(folder.result.read_text())
    raise RunFailed(_silent_end(folder, code))


def _said(folder: RunFolder, word: dict[str, Any]) -> Problem:
    problem = Problem(**word["problems"][0])
    host = f" on {word['host']}" if "host" in word else ""
    message = f"rank {word['rank']}{host}: {problem.message}"
    return replace(problem, message=message, hint=problem.hint or f"its log: {folder.rank_log(word['rank'])}")


def _stopped(folder: RunFolder, again: str, word: dict[str, int]) -> Problem:
    return Problem(
        kind="stopped",
        message=f"stopped on request after step {word['step']} of {word['steps']}; a checkpoint of it is saved",
        hint=f"`{again} {shlex.quote(str(folder.path))}` goes on from there",
        where=str(folder.path),
    )


def _silent_end(folder: RunFolder, code: int) -> Problem:
    """Ranks that were killed leave no word; the launcher's log names their exit code."""
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
