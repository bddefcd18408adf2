"""Tuning: the fastest configuration of a run that fits, measured in a handful of short real runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofit.app.requests import as_request
from zerofit.app.tuning.files import find_output, write_results
from zerofit.app.tuning.job import TrialHosts, TuneJob
from zerofit.app.tuning.trial import run_trial
from zerofit.app.tuning.trial_store import TrialStore
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.load import RunRequest
from zerofit.spec.run import Run
from zerofit.tune.result import TuneResult
from zerofit.tune.search import Search
from zerofit.tune.trial import Trial, describe

LEAST_S = 20.0  # with less time left no trial is started


def tune(
    run: Run | RunRequest | str | Path,
    *,
    trials: int = 8,
    minutes: float | None = 10.0,
    space: Path | str | Mapping[str, Any] | None = None,
    hosts: Path | str | TrialHosts | None = None,
    output: Path | str | None = None,
    on_event: OnEvent | None = None,
) -> TuneResult:
    """Measure short real runs of a run, and write the fastest configuration as ds_config.json and run.yaml.

    Searched are the ZeRO stage, offload, micro batch x accumulation at the run's global batch, activation
    checkpointing, overlap, bucket, prefetch and persistence sizes, tensor, pipeline and sequence degrees. Precision,
    global batch and compile stay unless `space` names them. Trials are kept by what the run is: the same call goes on
    after a kill.

    Args:
        run: the model, data and whatever else the run has, or a run file; a degree above 1 is kept.
        trials: at most so many, earlier ones of the same run included.
        minutes: no trial is started later; None: no limit.
        space: the values that are allowed, by knob, or a YAML file of them: `{"zero_stage": [1, 2], "pp": 1}`.
        hosts: a hostfile, where trials are to run on several hosts.
        output: the folder for results (default runs/tune-TIME).
        on_event: hears the progress, and each trial (kind "result") when it ends.

    Raises:
        UserError: with everything that is wrong with the run or the space.
        RunFailed: if no trial could be measured, or the hosts cannot be reached.

    Example:
        >>> import zerofit as zf
        >>> run = zf.Run(model="mlp", data="digits", global_batch=64, ranks=1)
        >>> tuned = zf.tune(run, trials=1, space={"zero_stage": 1, "micro_batch": 64})
        >>> tuned.layout.micro_batch, tuned.step_s > 0, [path.name for path in tuned.written]
        (64, True, ['ds_config.json', 'run.yaml', 'trials.json', 'trials.png'])
    """
    report, folder = Reporter(on_event), find_output(Path(output) if output else None)
    job = TuneJob.of(as_request(run), space=space, hosts=hosts, report=report)
    return write_results(job, run_trials(job, trials=trials, minutes=minutes, report=report), folder)


def run_trials(job: TuneJob, *, trials: int, minutes: float | None, report: Reporter) -> Search:
    """Run trials until there are `trials`, earlier ones included, the time is over, or none is worth its while."""
    deadline, store = time.monotonic() + 60 * minutes if minutes else math.inf, TrialStore(job)
    search = Search(job.candidates, store.trials())
    if search.trials:
        report.note(f"{len(search.trials)} trials of this run are known ({store.path})")
    report.note(f"{len(job.candidates)} configurations fit by the forecast")
    while len(search.trials) < trials and deadline - time.monotonic() > LEAST_S:
        candidate = search.next()
        if candidate is None:
            break
        name = f"trial {len(search.trials) + 1} of {trials}: {describe(candidate, job.candidates)}"
        best_s = search.best.sample_s * candidate.layout.global_batch if search.best else None
        trial = run_trial(job, candidate, best_s, deadline, lambda text, name=name: report.status(f"{name}: {text}"))
        search.add(trial)
        store.keep(trial)
        report.result(f"{name}: {_outcome(trial)}", {**candidate.to_dict(), **trial.to_dict()})
    return search


def _outcome(trial: Trial) -> str:
    if trial.measured_step_s is None:
        return f"{trial.status}: {trial.reason}"
    spread = "" if trial.spread is None else f" +- {trial.spread:.1%}"
    short = ", slower than the best: cut short" if trial.cut_short else ""
    return f"{trial.measured_step_s:.4f} s a step{spread} (forecast {trial.forecast_step_s:.4f}){short}"
