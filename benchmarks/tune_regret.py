"""How near `zerofit tune` comes to the best configuration there is: against a sweep of all of them, in the same call.

python -m benchmarks.tune_regret [--out FILE.json] [--jobs llama-tiny ...] [--trials 8]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.regret.autotuner import autotune
from benchmarks.regret.failing import STATUS, failing
from benchmarks.regret.sweep import Sweep
from zerofit.app.tuning.job import TuneJob
from zerofit.app.tuning.tune import run_trials
from zerofit.launch.host import this_machine
from zerofit.spec.events import Event, Reporter
from zerofit.spec.files import plain_data
from zerofit.spec.run import Run, RunRequest
from zerofit.tune.search import Search
from zerofit.tune.trial import Candidate, describe

RANKS = 2
AGAIN, ROUNDS = 4, 3  # configurations that are measured again, the tuner's among them, and how often
SMALL_BERT = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-tiny": (
        {"model": "llama-tiny", "data": "pysource", "seq_len": 64, "global_batch": 32},
        {"zero_stage": [0, 1, 3], "micro_batch": [8, 16], "tp": [1, 2], "pp": 1, "sp": 1},
    ),
    "resnet18-small": (
        {"model": "resnet18-small", "data": "digits", "global_batch": 32, "optimizer": "adamw"},
        {"micro_batch": [4, 8, 16], "pp": 1},
    ),
    "bert": (
        {"model": "bert-base", "model_args": SMALL_BERT, "data": "pysource", "seq_len": 64, "global_batch": 32},
        {"micro_batch": [4, 8, 16], "tp": 1, "pp": 1},
    ),
}


def compare(name: str, trials: int, autotuner_s: float) -> dict[str, Any]:
    """One job: the tuning from nothing, then everything measured, then the best few again in turns."""
    options, space = JOBS[name]
    with tempfile.TemporaryDirectory(prefix="zerofit-regret-") as folder:
        os.environ["ZEROFIT_CACHE"] = folder
        job = TuneJob.of(RunRequest.of(Run(**options, ranks=RANKS)), space=space)
        print(f"{name}: {len(job.candidates)} configurations", flush=True)
        search = run_trials(job, trials=trials, minutes=60.0, report=Reporter(show))
        assert search.best
        with Sweep(RANKS) as sweep:
            swept = {c.key: told(sweep, job, c) for c in job.candidates}
            measured = {key: found["step_s"] for key, found in swept.items() if "step_s" in found}
            best = sorted(measured, key=measured.__getitem__)[: AGAIN - 1]
            again = in_turns(sweep, job, [*best, search.best.candidate.key])
        peer = autotune(job, RANKS, autotuner_s)
    winner = search.best.candidate.key
    peer["share_of_best"] = theirs(job, peer["best"], measured) if peer["best"] else None
    return {
        "job": name,
        "options": options,
        "space": space,
        "configurations": len(job.candidates),
        "share_of_best": round(min(again.values()) / again[winner], 4),
        "share_of_best_in_sweep": round(min(measured.values()) / measured[winner], 4),
        "rank_correlation": correlations(job, search, measured),
        "winner": shown(job, winner),
        "best": shown(job, min(again, key=again.__getitem__)),
        "trials": [
            {"configuration": shown(job, t.key), **{k: v for k, v in t.to_dict().items() if k != "key"}}
            for t in search.trials
        ],
        "regret": plain_data(search.regret()),
        "again": [{"configuration": shown(job, key), "step_s": step_s} for key, step_s in again.items()],
        "sweep": [entry(job, c, swept[c.key]) for c in job.candidates],
        "autotuner": peer,
    }


def here() -> dict[str, Any]:
    """Say when, where and with what it is measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {"device": this_machine().device_name, "cores": this_machine().cores, "ranks": RANKS},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")},
    }


def show(event: Event) -> None:
    """Print each trial when it ends."""
    if event.kind == "result":
        print(f"  {event}", flush=True)


def theirs(job: TuneJob, config: dict[str, Any], measured: dict[str, float]) -> float | None:
    """Speed of what DeepSpeed's autotuner recommends, as a share of the sweep's best; None if not in it."""
    stage, micro = config.get("zero_optimization", {}).get("stage", 0), config["train_micro_batch_size_per_gpu"]
    alike = [
        measured[c.key]
        for c in job.candidates
        if c.key in measured and (c.layout.zero_stage, c.layout.micro_batch, c.layout.tp) == (stage, micro, 1)
    ]
    return round(min(measured.values()) / min(alike), 4) if alike else None


def told(sweep: Sweep, job: TuneJob, candidate: Candidate) -> dict[str, Any]:
    """One line of the sweep."""
    found = sweep.measure(job, candidate)
    print(f"  {describe(candidate, job.candidates)}: {found}", flush=True)
    return {"error": found} if isinstance(found, str) else {"step_s": found.step_s, "spread": found.spread}


def in_turns(sweep: Sweep, job: TuneJob, keys: list[str]) -> dict[str, float]:
    """Median step times of a few configurations, measured one after the other, again and again."""
    by_key, times = {c.key: c for c in job.candidates}, dict[str, list[float]]()
    for _ in range(ROUNDS):
        for key in dict.fromkeys(keys):
            found = told(sweep, job, by_key[key])
            if "step_s" in found:
                times.setdefault(key, []).append(found["step_s"])
    return {key: statistics.median(one) for key, one in times.items()}


def correlations(job: TuneJob, search: Search, measured: dict[str, float]) -> dict[str, float]:
    """Spearman's, of measured step times with the planner's forecast and with the one that trials have corrected."""
    found, learned = [c for c in job.candidates if c.key in measured], search.learned()
    forecasts = {
        "planned": [c.forecast_step_s for c in found],
        "learned": [learned.expected(c)[0] for c in found],
    }
    there = [measured[c.key] for c in found]
    rank: Any = stats.spearmanr  # scipy's annotation of the result knows no fields
    return {name: round(float(rank(one, there).statistic), 4) for name, one in forecasts.items()}


def entry(job: TuneJob, candidate: Candidate, found: dict[str, Any]) -> dict[str, Any]:
    """One configuration of the sweep, with everything that a replay of the search needs."""
    forecast = {"forecast_step_s": candidate.forecast_step_s, "peak_bytes": candidate.peak_bytes}
    return {"choice": vars(candidate.layout), **forecast, **found}


def shown(job: TuneJob, key: str) -> str:
    return next(describe(c, job.candidates) for c in job.candidates if c.key == key)


def row(found: dict[str, Any]) -> str:
    """The README's line of one job."""
    peer, ranks = found["autotuner"], found["rank_correlation"]
    share = f"{peer['share_of_best']:.1%}" if peer["share_of_best"] else "another batch"
    told = f"{peer['trials']} trials, {peer['measured']} measured, {peer['seconds'] / 60:.0f} min: "
    told += share if peer["best"] else "no result"
    ours = sum(t["seconds"] for t in found["trials"])
    cells = [found["job"], str(found["configurations"]), f"{len(found['trials'])} ({ours / 60:.1f} min)"]
    cells += [f"{found['share_of_best']:.1%}", f"{ranks['planned']:.2f}", f"{ranks['learned']:.2f}", told]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--faults", nargs="*", choices=STATUS, default=list(STATUS))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--autotuner-s", type=float, default=600.0, help="how long DeepSpeed's autotuner may run")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results = {**here(), "faults": [], "jobs": []}
    for fault in asked.faults:
        results["faults"].append(failing(fault))
        print(f"{fault}: {'right' if results['faults'][-1]['right'] else results['faults'][-1]}", flush=True)
        write(asked.out, results)
    for name in asked.jobs:
        results["jobs"].append(compare(name, asked.trials, asked.autotuner_s))
        write(asked.out, results)
    print(
        "| job | configurations | trials | of the best | rank correlation: planned | learned | DeepSpeed's autotuner |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(row(found) for found in results["jobs"]))


def write(out: Path | None, results: dict[str, Any]) -> None:
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
