"""The outcome of a run: its result, or the first error of the first failed rank."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from zerofit.spec.errors import DOES_NOT_FIT, DoesNotFit, Problem, RunFailed, Stopped
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.run_folder import RunFolder


def outcome(
    folder: RunFolder,
    code: int,
    again: str = "zerofit train",
    seen: Problem | None = None,
    heard: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the result that rank 0 wrote.

    `again`: the command that resumes a run folder. `seen`: the failure seen from outside. `heard`: failures that ranks
    reported, besides those in the folder (whose disk may be full).

    Raises RunFailed with the cause, DoesNotFit if a host that the command could not examine has too little memory, and
    Stopped if the ranks stopped on request.
    """
    written = []
    for path in folder.logs.glob("rank-*.error.json"):
        with suppress(Unreadable):  # truncated if the disk was full
            written.append(read_json(path))
    failures = list({failure["rank"]: failure for failure in [*written, *heard]}.values())
    failures.sort(key=lambda failure: failure.get("time_s", 0.0))
    # losing a peer is a consequence; the cause is the first other failure, or the one seen from outside
    causes = [failure for failure in failures if failure["problems"][0]["kind"] != "peer-lost"]
    if causes:
        cause = _reported(folder, causes[0])
        raise DoesNotFit(cause) if cause.kind == DOES_NOT_FIT else RunFailed(cause)
    if seen and not (failures and seen.kind == "rank-ended"):
        raise RunFailed(replace(seen, where=seen.where or str(folder.logs)))
    if failures:
        raise RunFailed(_reported(folder, failures[0]))
    if folder.stopped.exists():
        done = read_json(folder.stopped)
        message = f"stopped on request after step {done['step']} of {done['steps']}; a checkpoint is saved"
        hint = f"resume with `{again} {shlex.quote(str(folder.path))}`"
        raise Stopped(Problem(kind="stopped", message=message, hint=hint, where=str(folder.path)))
    if folder.result.exists():
        return read_json(folder.result)
    raise RunFailed(_silent_end(folder, code))


def _reported(folder: RunFolder, failure: dict[str, Any]) -> Problem:
    problem = Problem(**failure["problems"][0])
    host = f" on {failure['host']}" if "host" in failure else ""
    message = f"rank {failure['rank']}{host}: {problem.message}"
    return replace(problem, message=message, hint=problem.hint or f"see its log: {folder.rank_log(failure['rank'])}")


def _silent_end(folder: RunFolder, code: int) -> Problem:
    """Explain why ranks ended without a report; the launcher's log has their exit code."""
    log = folder.logs / "launcher.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    if -code == signal.SIGKILL or "return code = -9" in text:
        message = "a rank was killed (SIGKILL), most often by the kernel because host memory ran out"
        hint = "lower --micro-batch, use fewer ranks on this host, or check the kernel log (dmesg)"
        return Problem(kind="killed", message=message, hint=hint, where=str(log))
    message = f"the ranks ended without a result (exit code {code})"
    return Problem(kind="launcher", message=message, hint=f"see {log}", where=str(log))
