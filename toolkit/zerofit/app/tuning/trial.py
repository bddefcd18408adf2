"""One trial: a short real run of a configuration in separate processes. A failure is a result, too."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from zerofit.app.tuning.job import TuneJob
from zerofit.launch.parent_death import COMMAND
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.files import JsonlTail
from zerofit.spec.run_folder import RunFolder
from zerofit.tune.trial import Candidate, Status, Timing, Trial, timing

SURE = 0.03  # a trial ends when half its confidence interval is below this share of the mean
LOSING = 1.1  # a trial whose full interval is above this multiple of the best step time is cut short
START_S, TRAIN_S = 300.0, 60.0  # time limits: until the first step, and between later steps
OF_HOSTS = ("host", "network", "not-started", "vanished", "launcher")  # errors not caused by a configuration
TRIALS = ".zerofit-trial-"
POLL_S = 0.2
STOP_S = 60.0
HANGS = ("hang", "rank-stopped")


def run_trial(
    job: TuneJob, candidate: Candidate, best_s: float | None, deadline: float, show: Callable[[str], None]
) -> Trial:
    """Train with this configuration until its step time is known or it fails.

    `best_s`: the step time that this candidate has to reach to be as fast as the best one so far. `deadline`: a
    time of `time.monotonic`. Raises RunFailed if the hosts, not the configuration, caused the failure.
    """
    began = time.monotonic()
    shared = Path.cwd() if job.hosts else None  # all hosts must see it
    with tempfile.TemporaryDirectory(prefix=TRIALS, dir=shared, ignore_cleanup_errors=True) as place:
        folder = RunFolder(Path(place) / "run")
        metrics, records = JsonlTail(folder.metrics), list[dict[str, Any]]()
        process = _start(job, candidate, Path(place))
        try:
            found, cut_short = _watch(process, metrics, records, best_s, deadline, show)
            late = process.poll() is None
        finally:
            _end(process)
        records += metrics.read()
        peak = max((record["memory_bytes"] for record in records), default=None)
        error = _error(Path(place))
    known = {"forecast_step_s": candidate.forecast_step_s, "peak_bytes": peak}
    trial = Trial(key=candidate.key, status="ok", seconds=round(time.monotonic() - began, 1), **known)
    if found is not None:
        spread = found.spread if math.isfinite(found.spread) else None
        return replace(trial, measured_step_s=found.step_s, spread=spread, steps=found.steps, cut_short=cut_short)
    if job.hosts and not late and error.get("kind", "").startswith(OF_HOSTS):
        raise RunFailed(Problem(**{name: error.get(name) or "" for name in ("kind", "message", "hint", "where")}))
    status, reason = _why(process.returncode, error, late)
    return replace(trial, status=status, reason=reason)


def _start(job: TuneJob, candidate: Candidate, place: Path) -> subprocess.Popen[str]:
    file = place / "run.yaml"
    file.write_text(yaml.safe_dump(job.trial_run(candidate), sort_keys=False), encoding="utf-8")
    argv = [sys.executable, "-m", "zerofit.launch.parent_death", str(os.getpid()), COMMAND]
    argv += ["launch", *job.host_flags] if job.hosts else ["train"]
    argv += [str(file), "--output", str(place / "run"), "--json", "--trust-model-code"]
    argv += ["--anyway"] if job.anyway else []
    with (place / "err").open("w") as err, (place / "out").open("w") as out:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, start_new_session=True
        )


def _watch(
    process: subprocess.Popen[str],
    metrics: JsonlTail,
    records: list[dict[str, Any]],
    best_s: float | None,
    deadline: float,
    show: Callable[[str], None],
) -> tuple[Timing | None, bool]:
    """Return the step time, and whether the trial was stopped early because it is slower than the best.

    The function returns as soon as the step time is precise enough. If `deadline` or another time limit passes
    first, it returns the step time measured so far. The step time is None if the run ends first, or if too few
    steps were measured. The function adds the steps that it reads to `records`.
    """
    began, first = time.monotonic(), None
    while process.poll() is None:
        records += metrics.read()
        times = [record["step_s"] for record in records]
        now = time.monotonic()
        if times and first is None:
            first = now
        found = timing(times)
        if found and found.spread < SURE:
            return found, False
        if found and best_s and math.isfinite(found.spread) and found.step_s * (1 - found.spread) > LOSING * best_s:
            return found, True
        late = now > deadline or now - (first or now) > TRAIN_S or (first is None and now - began > START_S)
        if late:
            return (found, False) if found and math.isfinite(found.spread) else (None, False)
        show(f"{len(times)} steps ({now - began:.0f} s)" if times else f"starting ({now - began:.0f} s)")
        time.sleep(POLL_S)
    return None, False


def _end(process: subprocess.Popen[str]) -> None:
    """If the run is still running, stop it without saving."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _error(place: Path) -> dict[str, str]:
    lines = (place / "out").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])["error"]
    except (IndexError, ValueError, KeyError, TypeError):
        return {}


def _why(code: int | None, error: dict[str, str], late: bool) -> tuple[Status, str]:
    if late:
        return "stopped", "ran out of time before its step time was known"
    kind, message = error.get("kind", ""), error.get("message") or f"exited with code {code}"
    if kind == "does-not-fit":
        return "does-not-fit", message
    if kind == "out-of-memory":
        return "oom", message
    return ("hang" if kind in HANGS else "crash"), message
