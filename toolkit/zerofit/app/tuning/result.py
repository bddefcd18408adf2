"""What a tuning has come to: the winner as files, the table of trials, the picture, the answer."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from zerofit.app.tuning.job import TuneJob, candidate_json
from zerofit.report.tune_plot import draw_trials
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.files import write_json
from zerofit.spec.versions import versions
from zerofit.tune.search import Measured, Search

NAMES = ("ds_config.json", "run.yaml", "trials.json", "trials.png")


def find_output(asked: Path | None) -> Path:
    """The folder for results; one that holds results of a tuning is used again. Raises UserError for any other."""
    path = (asked or Path("runs") / f"tune-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - set(NAMES)):
        hint = "name another folder, or remove this one"
        raise UserError(
            Problem(kind="output-exists", message=f"{path} holds other things", hint=hint, where="--output")
        )
    return path


def write_results(job: TuneJob, search: Search, output: Path) -> list[str]:
    """Write the winner, the trials and their picture; their paths. Raises RunFailed where no trial succeeded."""
    best = search.best
    if best is None:
        tried = "; ".join(f"{t.status}: {t.reason}" for t in search.trials[:3]) or "no trial was made"
        hint = "raise --minutes, or see with `zerofit train` what a run of it says"
        raise RunFailed(Problem(kind="tune", message=f"no configuration could be measured: {tried}", hint=hint))
    output.mkdir(parents=True, exist_ok=True)
    paths = [output / name for name in NAMES]
    paths[0].write_text(json.dumps(job.ds_config(best.candidate), indent=2) + "\n", encoding="utf-8")
    given = job.asked.run.model_dump(mode="json", include=set(job.asked.places) | {"model"})
    tuned = {"global_batch": None, "output": None} | job.knobs(best.candidate) | {"ds_config": str(paths[0])}
    run = {name: value for name, value in {**given, **tuned}.items() if value is not None}
    paths[1].write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    rows = trials_json(job, search)
    measured = [{"choice": asdict(m.candidate.choice), **_pair(m)} for m in search.measured]
    about = {"model": job.run.model, "device": job.device, "versions": versions()}
    write_json(paths[2], {**about, "trials": rows, "regret": regret_json(search), "measured": measured})
    draw_trials(rows, paths[3])
    return [str(path) for path in paths]


def answer_of(job: TuneJob, search: Search, written: list[str]) -> dict[str, Any]:
    """What `--json` prints."""
    best = search.best
    assert best
    tokens_per_s = job.run.seq_len / best.sample_s if job.run.seq_len else None
    speed = {"step_s": best.step_s, "samples_per_s": 1 / best.sample_s, "tokens_per_s": tokens_per_s}
    return {
        "best": {**candidate_json(best.candidate), **speed, "peak_bytes": best.trial.peak_bytes, "fits": True},
        "trials": trials_json(job, search),
        "regret": regret_json(search),
        "considered": len(search.candidates),
        "written": written,
    }


def trials_json(job: TuneJob, search: Search) -> list[dict[str, Any]]:
    """All trials in their order, with what each was planned to take."""
    by_key, rows = {c.key: c for c in search.candidates}, []
    for trial in search.trials:
        candidate = by_key[trial.key]
        figures = {name: value for name, value in trial.as_dict().items() if name != "key"}
        rows.append({**candidate_json(candidate), "configuration": job.shown(candidate), **figures})
    return rows


def regret_json(search: Search) -> dict[str, Any] | None:
    """The statement of regret."""
    regret = search.regret()
    if regret is None:
        return None
    found = regret._asdict()
    by_key = {c.key: c for c in search.candidates}
    key = found.pop("untried_key")
    return {**found, "untried_best": candidate_json(by_key[key]) if key else None}


def _pair(measured: Measured) -> dict[str, Any]:
    candidate = measured.candidate
    forecast = {"forecast_step_s": candidate.forecast_step_s, "peak_bytes": candidate.peak_bytes}
    return {"compiled": candidate.compiled, **forecast, "measured_step_s": measured.step_s}
