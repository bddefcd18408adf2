"""How near the choice of `--fit` comes to the fastest configuration that fits, in the sweeps of `tune_regret`.

python -m benchmarks.fit [--out FILE.json]

The sweeps are those of results/tune_regret.json, which measured every configuration of a run. Forecasts are today's,
and the choice is that of `zerofit.app.fitting.fit`. Memory is limited in turn to LIMITS sizes, from what the leanest
to what the largest configuration needs. Nothing is started.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tune_regret import JOBS, RANKS
from zerofit.app.fitting import fit
from zerofit.app.fitting.options import LayoutOption
from zerofit.app.planning.search_setup import forecast_of
from zerofit.app.tuning.job import TuneJob
from zerofit.plan.fit import check_fit
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import NOTHING_SAVED
from zerofit.spec.run import Run, RunRequest

SWEEPS = Path(__file__).parent / "results" / "tune_regret.json"
LIMITS = 12


def compare(sweep: dict[str, Any]) -> dict[str, Any]:
    """The choices of one job under every limit."""
    options, space = JOBS[sweep["job"]]
    job = TuneJob.of(RunRequest.of(Run(**options, ranks=RANKS)), space=space)
    cluster = replace(Cluster("cpu"), gpus=RANKS)
    memory = forecast_of(next(iter(job.profiles.values())), cluster)
    measured = {PlannedLayout(**one["choice"]): one["step_s"] for one in sweep["sweep"] if "step_s" in one}
    found = [
        LayoutOption(
            layout=one.layout,
            savings=NOTHING_SAVED,
            memory=memory(one.layout),
            samples_per_s=float(f"{one.layout.global_batch / one.forecast_step_s:.3g}"),
        )
        for one in job.candidates
        if one.layout in measured
    ]
    found.sort(key=lambda one: -one.samples_per_s)
    needs = sorted(check_fit(one.memory, one.layout, cluster).device_bytes for one in found)
    limits = [needs[0] + n * (needs[-1] - needs[0]) / (LIMITS - 1) + 1 for n in range(LIMITS)]
    rows = [under(limit, found, measured, cluster) for limit in limits]
    shares = [row["share_of_best"] for row in rows]
    return {
        "job": sweep["job"],
        "configurations": len(found),
        "share_of_best": round(statistics.mean(shares), 4),
        "least_share": min(shares),
        "limits": rows,
    }


def under(
    limit: float, options: list[LayoutOption], measured: dict[PlannedLayout, float], cluster: Cluster
) -> dict[str, Any]:
    """The choice under one limit of a rank's memory, beside the best measured one that fits."""
    free = replace(cluster, device_memory=int(limit))
    fitting = [one for one in options if check_fit(one.memory, one.layout, free).exceeded is None]
    best = min(fitting, key=lambda one: measured[one.layout])
    taken = fit.FitSearch(options, free, lambda _: []).run()
    assert taken
    return {
        "limit_bytes": int(limit),
        "fitting": len(fitting),
        "taken": str(taken),
        "best": str(best),
        "share_of_best": round(measured[best.layout] / measured[taken.layout], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    sweeps = json.loads(SWEEPS.read_text())
    rows = [compare(sweep) for sweep in sweeps["jobs"]]
    alike, fit.ALIKE = fit.ALIKE, 0.0
    by_time = [compare(sweep) for sweep in sweeps["jobs"]]
    print("| job | configurations | of the best throughput that fits | least | by forecast time alone |")
    print("|---|---|---|---|---|")
    for row, plain in zip(rows, by_time, strict=True):
        shares = f"{row['share_of_best']:.1%} | {row['least_share']:.1%} | {plain['share_of_best']:.1%}"
        print(f"| {row['job']} | {row['configurations']} | {shares} |")
    mean = statistics.mean(row["share_of_best"] for row in rows)
    print(f"all: {mean:.1%}")
    if asked.out:
        about = {name: sweeps[name] for name in ("date", "hardware", "versions")}
        result = {
            "sweeps": about,
            "limits": LIMITS,
            "alike": alike,
            "share_of_best": round(mean, 4),
            "share_of_best_by_time_alone": round(statistics.mean(row["share_of_best"] for row in by_time), 4),
            "jobs": rows,
        }
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
