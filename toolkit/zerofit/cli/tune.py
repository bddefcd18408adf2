"""`zerofit tune`: the fastest configuration that fits, measured in a handful of real runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.app.requests import read_request
from zerofit.cli.answer import answer
from zerofit.cli.host_options import NAMES, host_arguments, host_options
from zerofit.cli.options import run_options

if TYPE_CHECKING:
    from zerofit.app.tuning.job import TuneJob
    from zerofit.tune.search import Search

LEAST_S = 20.0  # left of the time, below which no trial is begun
# the flags of hosts where none is given
UNASKED = {**dict.fromkeys(NAMES), "runner": "pdsh"}


@click.command()
@click.argument("target", metavar="[MODEL | RUN.yaml]", required=False)
@click.option("--trials", type=click.IntRange(min=1), default=8, show_default=True, help="at most so many in all")
@click.option("--minutes", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="at most so long")
@click.option("--space", type=click.Path(path_type=Path), help="YAML: values that are allowed, by knob")
@run_options()
@host_options
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def tune(target: str | None, trials: int, minutes: float, space: Path | None, as_json: bool, **options: Any) -> None:
    """Measure short real runs of the run, and write the fastest configuration that fits as ds_config.json and run.yaml.

    Searched: ZeRO stage, offload, micro batch x accumulation at the global batch of the run, activation checkpointing,
    overlap, bucket, prefetch and persistence sizes, tensor, pipeline and sequence degrees. Precision, global batch and
    compile stay unless --space names them. With --hostfile trials run on those hosts. Killed, it goes on where it
    was; trials are kept by what the run is. --output is the folder for results.
    """
    from zerofit.cli.tune_show import show

    on_hosts = {name: options.pop(name) for name in NAMES}
    flags = {k: v for k, v in options.items() if v is not None}
    answer(lambda: _tune(target, flags, trials, minutes, space, on_hosts), as_json, show)


def _tune(
    target: str | None,
    flags: dict[str, Any],
    most: int,
    minutes: float,
    space: Path | None,
    on_hosts: dict[str, Any],
) -> dict[str, Any]:
    click.echo("checking the run, the model and the data ...", err=True)
    from zerofit.app.clusters.hosts import HostRequest, find_hosts
    from zerofit.app.tuning.job import TuneJob
    from zerofit.app.tuning.result import find_output, write_results

    output = find_output(flags.pop("output", None))
    words = host_arguments(on_hosts)
    hosts = find_hosts(HostRequest(**on_hosts)) if words != host_arguments(UNASKED) else ()
    job = TuneJob.of(read_request(target, flags), space, hosts, words)
    search = tuned(job, most, minutes)
    return write_results(job, search, output).to_dict()


def tuned(job: TuneJob, most: int, minutes: float) -> Search:
    """All trials of a job: those that are known, and new ones until there are `most`, or the time is over."""
    from zerofit.app.tuning.trial import run_trial
    from zerofit.app.tuning.trial_store import TrialStore
    from zerofit.cli.progress import StatusLine
    from zerofit.tune.search import Search
    from zerofit.tune.trial import describe

    deadline, kept = time.monotonic() + 60 * minutes, TrialStore(job)
    search = Search(job.candidates, kept.trials())
    if search.trials:
        click.echo(f"note: {len(search.trials)} trials of this run are known ({kept.path})", err=True)
    click.echo(f"{len(job.candidates)} configurations fit by the forecast", err=True)
    with StatusLine() as line:
        while len(search.trials) < most and deadline - time.monotonic() > LEAST_S:
            candidate = search.next()
            if candidate is None:
                break
            name = f"trial {len(search.trials) + 1} of {most}: {describe(candidate, job.candidates)}"
            best_s = search.best.sample_s * candidate.layout.global_batch if search.best else None
            trial = run_trial(job, candidate, best_s, deadline, lambda what, name=name: line.show(f"{name}: {what}"))
            search.add(trial)
            kept.keep(trial)
            line.say(f"{name}: {_outcome(trial)}")
    return search


def _outcome(trial: Any) -> str:
    if trial.status != "ok":
        return f"{trial.status}: {trial.reason}"
    sure = "" if trial.spread is None else f" +- {trial.spread:.1%}"
    short = ", slower than the best: cut short" if trial.cut_short else ""
    return f"{trial.measured_step_s:.4f} s a step{sure} (forecast {trial.forecast_step_s:.4f}){short}"
