"""Tuning: find the fastest configuration of a run that fits, with a few short real runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from zerofit.app.job.requests import as_request
from zerofit.app.tuning.job import TrialHosts, TuneJob
from zerofit.launch.parent_death import COMMAND
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import JsonlTail, cache_root, open_jsonl, read_jsonl, write_json, write_text
from zerofit.spec.foreign import Unreadable, shaped
from zerofit.spec.local_machine import versions
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import RunFolder
from zerofit.tune.search import Search, TuneResult
from zerofit.tune.trial import Candidate, Status, Timing, Trial, describe, timing

LEAST_S = 20.0  # start no trial with less time left
NAMES = ("ds_config.json", "run.yaml", "trials.json", "trials.png")
# fields of the run that a candidate sets, or that do not affect the step time
FREE = {
    *("ranks", "micro_batch", "gradient_accumulation_steps", "tensor_parallel", "pipeline"),
    *("sequence_parallel", "expert_parallel"),
    *("activation_checkpointing", "precision", "global_batch", "compile", "steps", "epochs", "output", "resume"),
    *("seed", "lr", "log_every", "eval_every", "eval_samples", "save_every", "save_async", "keep_last", "keep_every"),
    *("callbacks", "tensorboard", "wandb", "profile", "profile_ranks", "ds_config", "warmup_steps", "schedule"),
    *("weight_decay", "heartbeat_timeout"),
}
SURE = 0.03  # a trial ends when half its confidence interval is below this share of the mean
LOSING = 1.1  # a trial whose full interval is above this multiple of the best step time is cut short
START_S, TRAIN_S = 300.0, 60.0  # time limits: until the first step, and for all later steps
OF_HOSTS = ("host", "network", "not-started", "vanished", "launcher")  # errors not caused by a configuration
TRIALS = ".zerofit-trial-"
POLL_S = 0.2
STOP_S = 60.0
HANGS = ("hang", "rank-stopped")


# How a tuning runs:
#
#   candidates: configurations that fit by forecast (`TuneJob`)
#     ─► the most promising one, by forecasts corrected with all trials so far (`Search.next`)
#     ─► a trial: a short real run, until its step time is known (`run_trial`)   ─► back, until no time is left
#     ─► the fastest measured configuration as files
def tune(
    run: Run | RunRequest | str | Path,
    *,
    trials: int = 8,
    minutes: float | None = 10.0,
    space: Path | str | Mapping[str, object] | None = None,
    hosts: Path | str | TrialHosts | None = None,
    output: Path | str | None = None,
    anyway: bool = False,
    on_event: OnEvent | None = None,
) -> TuneResult:
    """Measure short real runs, and write the fastest as ds_config.json and run.yaml.

    The search covers ZeRO stage, offload, micro batch x accumulation at the run's global batch, activation
    checkpointing and overlap. It also covers the sizes of bucket, prefetch and persistence, and the degrees of tensor,
    pipeline and sequence parallelism. Precision, global batch and compile stay fixed unless `space` names them. Trials
    are stored by run: the same call resumes after a kill.

    Args:
        run: a run or a run file. Degrees above 1 in it are kept.
        trials: the maximum number of trials, including earlier trials of the same run.
        minutes: start no trial after this time; no limit if None.
        space: allowed values by knob, or a YAML file of them: `{"zero_stage": [1, 2], "pp": 1}`.
        hosts: a hostfile, to run trials on several hosts.
        output: the folder for results (default runs/tune-TIME).
        anyway: start even trials that do not fit into the free memory.
        on_event: gets progress, and each trial (kind "result") when it ends.

    Raises:
        UserError: with all problems of the run or the space.
        RunFailed: if no trial could be measured, or the hosts cannot be reached.

    >>> import zerofit as zf
    >>> run = zf.Run(model="mlp", data="digits", global_batch=64, ranks=1)
    >>> tuned = zf.tune(run, trials=1, space={"zero_stage": 1, "micro_batch": 64})
    >>> tuned.layout.micro_batch, tuned.step_s > 0, [path.name for path in tuned.written]
    (64, True, ['ds_config.json', 'run.yaml', 'trials.json', 'trials.png'])
    """
    folder = Path(output or Path("runs") / f"tune-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - set(NAMES)):
        message, hint = f"{folder} contains other files", "use another folder, or remove this one"
        raise UserError(Problem(kind="output-exists", message=message, hint=hint, where="--output"))
    report = Reporter(on_event)
    job = TuneJob.of(as_request(run), space=space, hosts=hosts, anyway=anyway, report=report)
    return _write_results(job, run_trials(job, trials=trials, minutes=minutes, report=report), folder)


def run_trials(job: TuneJob, *, trials: int, minutes: float | None, report: Reporter) -> Search:
    """Run trials until `trials` have run, the time is over, or no candidate is promising.

    Earlier trials count.
    """
    deadline, store = time.monotonic() + 60 * minutes if minutes is not None else math.inf, TrialStore(job)
    search = Search(job.candidates, store.trials())
    if search.trials:
        report.note(f"found {len(search.trials)} earlier trials of this run ({store.path})")
    report.note(f"{len(job.candidates)} configurations fit, according to their forecasts")
    while len(search.trials) < trials and deadline - time.monotonic() > LEAST_S:
        candidate = search.next()
        if candidate is None:
            break
        name = f"trial {len(search.trials) + 1} of {trials}: {describe(candidate, job.candidates)}"
        # Trials may have other global batches, so they are compared by seconds per sample.
        best_s = search.best.sample_s * candidate.layout.global_batch if search.best else None
        trial = run_trial(job, candidate, best_s, deadline, lambda text, name=name: report.status(f"{name}: {text}"))
        search.add(trial)
        store.keep(trial)
        outcome = f"{trial.status}: {trial.reason}"
        if trial.measured_step_s is not None:
            spread = "" if trial.spread is None else f" +- {trial.spread:.1%}"
            short = ", slower than the best: cut short" if trial.cut_short else ""
            outcome = f"{trial.measured_step_s:.4f} s per step{spread} (forecast {trial.forecast_step_s:.4f}){short}"
        report.result(f"{name}: {outcome}", {**candidate.to_dict(), **trial.to_dict()})
    return search


def _write_results(job: TuneJob, search: Search, folder: Path) -> TuneResult:
    result = TuneResult.of(search, job.run.seq_len)
    if result is None:
        tried = "; ".join(f"{t.status}: {t.reason}" for t in search.trials[:3]) or "no trial ran"
        hint = "raise --minutes, or try the run with `zerofit train`"
        raise RunFailed(Problem(kind="tune", message=f"no configuration could be measured: {tried}", hint=hint))
    folder.mkdir(parents=True, exist_ok=True)
    config, run_file, trials, picture = paths = tuple(folder / name for name in NAMES)
    best = result.measured.candidate
    write_json(config, job.ds_config(best))
    given = job.request.run.model_dump(mode="json", include=set(job.request.places) | {"model"})
    # the micro batch and the accumulation steps of the configuration determine the global batch
    tuned = {"global_batch": None, "output": None} | job.run_fields(best) | {"ds_config": config.name}
    run = {name: value for name, value in {**given, **tuned}.items() if value is not None}
    write_text(run_file, yaml.safe_dump(run, sort_keys=False))
    about = {"model": job.run.model, "device": job.device, "versions": versions()}
    shown = {name: value for name, value in result.to_dict().items() if name in ("trials", "regret")}
    measured = []
    for trial in search.measured:
        candidate = asdict(trial.candidate)
        measured.append({"choice": candidate.pop("layout"), **candidate, "measured_step_s": trial.step_s})
    write_json(trials, {**about, **shown, "measured": measured})
    result.plot(picture)
    return replace(result, written=paths)


class TrialStore:
    """A file of trials, one per line."""

    def __init__(self, job: TuneJob):
        # Trials are comparable if all that affects a step time is equal, except for what candidates set.
        run = {k: v for k, v in job.run.model_dump(mode="json").items() if k not in FREE}
        config = {k: v for k, v in job.ds_source.items() if k != "zero_optimization"}
        hosts = [[host.name, host.slots] for host in job.hosts]
        environment = [flag for flag in job.host_flags if "--env" in flag]
        machine = [job.device, job.candidates[0].layout.world_size, hosts, environment]
        content = json.dumps([run, config, machine, versions()], sort_keys=True, default=str)
        self._keys = {candidate.key for candidate in job.candidates}
        self.path: Path = cache_root() / "tune" / f"{hashlib.sha256(content.encode()).hexdigest()[:20]}.jsonl"

    def trials(self) -> list[Trial]:
        """Return the earlier trials of the candidates. Invalid lines are skipped."""
        if not self.path.exists():
            return []
        trials = {}
        for values in read_jsonl(self.path):
            try:
                trial = shaped(values, TypeAdapter(Trial))
            except Unreadable:  # written by another version
                continue
            if trial.key in self._keys:
                trials[trial.key] = trial  # the latest of a configuration counts
        return list(trials.values())

    def keep(self, trial: Trial) -> None:
        """Add a trial to the file, unless it says nothing about its configuration."""
        # The time limit stopped the trial, or other runs left too little memory free.
        if trial.status in ("stopped", "does-not-fit"):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_jsonl(self.path) as file:
            file.write(json.dumps(trial.to_dict()) + "\n")


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
    argv = [sys.executable, "-P", "-m", "zerofit.launch.parent_death", str(os.getpid()), COMMAND]
    argv += ["launch", *job.host_flags] if job.hosts else ["train"]
    argv += [str(file), "--output", str(place / "run"), "--json", "--trust-model-code"]
    argv += ["--anyway"] if job.anyway else []
    with (place / "err").open("w") as err, (place / "out").open("w") as out:
        # Ctrl-C reaches all processes of a terminal's group. In its own session, the trial gets only our SIGINT.
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
