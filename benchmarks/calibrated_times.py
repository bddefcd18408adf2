"""How far `zerofit plan`'s step times on CPU ranks are from real ones, before and after `zerofit calibrate`.

    python -m benchmarks.calibrated_times --out FILE.json              # calibrates, measures; half an hour, idle cores
    python -m benchmarks.calibrated_times --out FILE.json --forecast   # forecasts again what FILE has measured

The configurations are those of `tune_regret`, each measured by the same ranks, steps and clock as a trial of `tune`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.regret.sweep import Sweep
from benchmarks.tune_regret import JOBS, RANKS, here, told
from zerofit.app.tuning.job import TuneJob
from zerofit.spec.local_machine import Calibration, calibration_file, write_calibration
from zerofit.spec.run import Run, RunRequest
from zerofit.tune.trial import describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="keep all figures here")
    parser.add_argument("--forecast", action="store_true", help="measure nothing")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zerofit-calibrated-") as folder:
        os.environ["ZEROFIT_CACHE"] = folder
        result = json.loads(asked.out.read_text()) if asked.forecast else {**about(), "jobs": {}}
        for name in asked.jobs:
            result["jobs"][name] = compared(name, result)
            print(
                name, {key: value for key, value in result["jobs"][name].items() if key != "configurations"}, flush=True
            )
            asked.out.write_text(json.dumps(result, indent=1) + "\n")


def about() -> dict[str, Any]:
    """Calibrate; say where and with what."""
    done = subprocess.run(
        [sys.executable, "-m", "zerofit.cli", "calibrate", "--json"], stdout=subprocess.PIPE, check=True
    )
    calibration = json.loads(done.stdout)
    print(f"zerofit calibrate took {calibration['seconds']:g} s", flush=True)
    return {
        **here(),
        "calibrate_s": calibration.pop("seconds"),
        "calibration": {key: value for key, value in calibration.items() if key != "file"},
    }


def compared(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return a job's step times, measured and forecast, with errors and Spearman's correlation."""
    options, space = JOBS[name]
    jobs = dict[str, TuneJob]()
    calibration_file().unlink(missing_ok=True)
    for how in ("before", "calibrated"):
        jobs[how] = TuneJob.of(RunRequest.of(Run(**options, ranks=RANKS)), space=space)
        write_calibration(Calibration.from_dict(result["calibration"]))
    known = result["jobs"].get(name)
    measured = {one["key"]: one["step_s"] for one in known["configurations"]} if known else measure(jobs["before"])
    forecasts = {how: {c.key: c.forecast_step_s for c in job.candidates} for how, job in jobs.items()}
    rows = [
        {
            "key": c.key,
            "configuration": describe(c, jobs["before"].candidates),
            "step_s": measured[c.key],
            **{how: forecasts[how][c.key] for how in forecasts},
        }
        for c in jobs["before"].candidates
        if c.key in measured
    ]
    return {
        **{how: judged([r["step_s"] for r in rows], [r[how] for r in rows]) for how in jobs},
        "configurations": rows,
    }


def measure(job: TuneJob) -> dict[str, float]:
    """Return the seconds of a step by configuration."""
    with Sweep(RANKS) as sweep:
        swept = {candidate.key: told(sweep, job, candidate) for candidate in job.candidates}
    return {key: found["step_s"] for key, found in swept.items() if "step_s" in found}


def judged(measured: Sequence[float], forecast: Sequence[float]) -> dict[str, float]:
    """Return the median ratio, median and 90th percentile of |forecast / measured - 1|, and the rank correlation."""
    ratios = [one / there for one, there in zip(forecast, measured, strict=True)]
    off = [abs(ratio - 1) for ratio in ratios]
    rank: Any = stats.spearmanr  # scipy's annotation of the result knows no fields
    figures = {
        "ratio": statistics.median(ratios),
        "median_error": statistics.median(off),
        "p90_error": statistics.quantiles(off, n=10, method="inclusive")[-1],
        "rank_correlation": float(rank(measured, forecast).statistic),
    }
    return {name: round(value, 4) for name, value in figures.items()}


if __name__ == "__main__":
    main()
