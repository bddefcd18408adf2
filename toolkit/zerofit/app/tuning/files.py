"""The files of a tuning: the fastest configuration, the table of trials and their picture."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from zerofit.app.tuning.job import TuneJob
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.files import write_json
from zerofit.spec.versions import versions
from zerofit.tune.result import TuneResult
from zerofit.tune.search import Search

NAMES = ("ds_config.json", "run.yaml", "trials.json", "trials.png")


def find_output(output: Path | None) -> Path:
    """Return the folder for results: a new one, or one of an earlier tuning. Raises UserError for any other."""
    path = (output or Path("runs") / f"tune-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - set(NAMES)):
        hint = "name another folder, or remove this one"
        raise UserError(
            Problem(kind="output-exists", message=f"{path} holds other things", hint=hint, where="--output")
        )
    return path


def write_results(job: TuneJob, search: Search, folder: Path) -> TuneResult:
    """Write the fastest configuration, the trials and their picture. Raises RunFailed where no trial succeeded."""
    result = TuneResult.of(search, job.run.seq_len)
    if result is None:
        tried = "; ".join(f"{t.status}: {t.reason}" for t in search.trials[:3]) or "no trial was made"
        hint = "raise --minutes, or see with `zerofit train` what a run of it says"
        raise RunFailed(Problem(kind="tune", message=f"no configuration could be measured: {tried}", hint=hint))
    folder.mkdir(parents=True, exist_ok=True)
    config, run_file, trials, picture = paths = tuple(folder / name for name in NAMES)
    best = result.measured.candidate
    config.write_text(json.dumps(job.ds_config(best), indent=2) + "\n", encoding="utf-8")
    given = job.asked.run.model_dump(mode="json", include=set(job.asked.places) | {"model"})
    tuned = {"global_batch": None, "output": None} | job.run_fields(best) | {"ds_config": str(config)}
    run = {name: value for name, value in {**given, **tuned}.items() if value is not None}
    run_file.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    about = {"model": job.run.model, "device": job.device, "versions": versions()}
    shown = {name: value for name, value in result.to_dict().items() if name in ("trials", "regret")}
    measured = [
        {
            "choice": asdict(one.candidate.layout),
            "compiled": one.candidate.compiled,
            "forecast_step_s": one.candidate.forecast_step_s,
            "peak_bytes": one.candidate.peak_bytes,
            "measured_step_s": one.step_s,
        }
        for one in search.measured
    ]
    write_json(trials, {**about, **shown, "measured": measured})
    result.plot(picture)
    return replace(result, written=paths)
