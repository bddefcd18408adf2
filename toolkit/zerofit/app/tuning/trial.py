"""One trial: a short real run of a configuration in other processes. A failure is a result."""

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
START_S, TRAIN_S = 300.0, 60.0  # time limits: until the first step, and for all later steps
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
    shared = Path.cwd() if job.hosts else None  # the temporary folder of this machine is not on other hosts
    with tempfile.TemporaryDirectory(prefix=TRIALS, dir=shared, ignore_cleanup_errors=True) as place:
        folder = RunFolder(Path(place) / "run")
        metrics, records = JsonlTail(folder.metrics), list[dict[str, Any]]()
        process = _start(job, candidate, Path(place))
        try:
            measured, cut_short = _watch(process, metrics, records, best_s, deadline, show)
            late = process.poll() is None
        finally:
            if process.poll() is None:  # SIGINT stops the run without saving
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        records += metrics.read()
        peak = max((record["memory_bytes"] for record in records), default=None)
        error = _error(Path(place))
    trial = Trial(
        key=candidate.key,
        status="ok",
        seconds=round(time.monotonic() - began, 1),
        forecast_step_s=candidate.forecast_step_s,
        peak_bytes=peak,
    )
    if measured is not None:
        spread = measured.spread if math.isfinite(measured.spread) else None
        return replace(trial, measured_step_s=measured.step_s, spread=spread, steps=measured.steps, cut_short=cut_short)
    if job.hosts and not late and error.get("kind", "").startswith(OF_HOSTS):
        raise RunFailed(Problem(**{name: error.get(name) or "" for name in ("kind", "message", "hint", "where")}))
    status, reason = _why(process.returncode, error, late)
    return replace(trial, status=status, reason=reason)


def _start(job: TuneJob, candidate: Candidate, place: Path) -> subprocess.Popen[str]:
    # A process of its own can run out of memory or hang without harm to the search. It ends if this process dies.
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
    """Return the step time (None: unknown), and whether the trial was cut short as too slow.

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
        measured = timing(times)
        if measured and measured.spread < SURE:
            return measured, False
        has_spread = measured is not None and math.isfinite(measured.spread)
        # Even the lower end of the confidence interval loses against the best.
        if measured and has_spread and best_s and measured.step_s * (1 - measured.spread) > LOSING * best_s:
            return measured, True
        late = now > deadline or now - (first or now) > TRAIN_S or (first is None and now - began > START_S)
        if late:
            return (measured if has_spread else None), False
        show(f"{len(times)} steps ({now - began:.0f} s)" if times else f"starting ({now - began:.0f} s)")
        time.sleep(POLL_S)
    return None, False


def _error(place: Path) -> dict[str, str]:
    # The last line of `--json` is the result or the error; libraries may have printed before it.
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
