"""What a tuning has come to: the winner as files, the table of trials, the picture, the answer."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from zerofit.app.tuning.job import TuneJob
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.files import write_json
from zerofit.spec.versions import versions
from zerofit.tune.result import TuneResult
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


def write_results(job: TuneJob, search: Search, output: Path) -> TuneResult:
    """Write the winner, the trials and their picture. Raises RunFailed where no trial succeeded."""
    result = TuneResult.of(search, job.run.seq_len)
    if result is None:
        tried = "; ".join(f"{t.status}: {t.reason}" for t in search.trials[:3]) or "no trial was made"
        hint = "raise --minutes, or see with `zerofit train` what a run of it says"
        raise RunFailed(Problem(kind="tune", message=f"no configuration could be measured: {tried}", hint=hint))
    output.mkdir(parents=True, exist_ok=True)
    paths, best = [output / name for name in NAMES], result.measured.candidate
    paths[0].write_text(json.dumps(job.ds_config(best), indent=2) + "\n", encoding="utf-8")
    given = job.asked.run.model_dump(mode="json", include=set(job.asked.places) | {"model"})
    tuned = {"global_batch": None, "output": None} | job.knobs(best) | {"ds_config": str(paths[0])}
    run = {name: value for name, value in {**given, **tuned}.items() if value is not None}
    paths[1].write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    measured = [{"choice": asdict(m.candidate.layout), **_pair(m)} for m in search.measured]
    about = {"model": job.run.model, "device": job.device, "versions": versions()}
    told = {name: value for name, value in result.to_dict().items() if name in ("trials", "regret")}
    write_json(paths[2], {**about, **told, "measured": measured})
    result.plot(paths[3])
    return replace(result, written=tuple(paths))


def _pair(measured: Measured) -> dict[str, Any]:
    candidate = measured.candidate
    forecast = {"forecast_step_s": candidate.forecast_step_s, "peak_bytes": candidate.peak_bytes}
    return {"compiled": candidate.compiled, **forecast, "measured_step_s": measured.step_s}
