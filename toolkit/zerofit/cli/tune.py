"""`zerofit tune`: find the fastest configuration that fits, with a few short real runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.app.job.requests import read_request
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, fitting_table, out, print_facts, print_verdict
from zerofit.cli.options import (
    ANYWAY,
    AS_JSON,
    HOST_FIELDS,
    PATH,
    TRUST_MODEL_CODE,
    Number,
    given,
    host_arguments,
    host_options,
    run_options,
)
from zerofit.cli.train import DEFAULT_JOB
from zerofit.spec.run import Run

if TYPE_CHECKING:
    from zerofit.tune.search import Regret, TuneResult


@click.command()
@click.argument("target", metavar="[MODEL | RUN.yaml]", required=False)
@click.option("--trials", type=click.IntRange(min=1), default=8, show_default=True, help="most trials")
@click.option("--minutes", type=Number(min=0.1), default=10.0, show_default=True, help="most minutes")
@click.option("--space", type=PATH, help="YAML: allowed values of each knob")
@run_options(Run.model_fields.keys() - {"model", "fit"})
@host_options
@ANYWAY
@TRUST_MODEL_CODE
@AS_JSON
def tune(
    target: str | None,
    trials: int,
    minutes: float,
    space: Path | None,
    anyway: bool,
    trust_model_code: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a run in short real trials, and write the fastest configuration that fits as ds_config.json and run.yaml.

    The search covers ZeRO stage, offload, micro batch x accumulation at the run's global batch, activation
    checkpointing and overlap. It also covers the sizes of bucket, prefetch and persistence, and the degrees of tensor,
    pipeline and sequence parallelism. Precision, global batch and compile change only if --space names them. With
    --hostfile, the trials run on the hosts in this file. Repeat the command to resume: tune keeps finished trials.
    --output is the folder for results.
    """

    def work() -> TuneResult:
        click.echo("checking the run, the model and the data ...", err=True)  # importing torch alone takes seconds
        from zerofit.app.clusters.hosts import HostRequest, find_hosts
        from zerofit.app.tuning.job import TrialHosts
        from zerofit.app.tuning.tune import tune

        host_options = {name: options.pop(name) for name in HOST_FIELDS}
        # Each trial on many hosts is a `zerofit launch` of its own, which gets the same options about hosts.
        words, output = host_arguments(host_options), options.pop("output")
        hosts = TrialHosts(hosts=find_hosts(HostRequest(**host_options)), flags=tuple(words)) if words else None
        flags = given(options)
        run = read_request(target, flags if target or flags else DEFAULT_JOB, trust_model_code)
        with EventConsole() as events:
            chosen = {"space": space, "hosts": hosts, "output": output, "anyway": anyway}
            return tune(run, trials=trials, minutes=minutes, **chosen, on_event=events)

    answer(work, as_json, show, "repeat the command: zerofit keeps finished trials")


def show(result: TuneResult) -> None:
    """Print the trials, the best configuration, and the gain that untried ones may offer."""
    console, tokens_per_s = out(), result.tokens_per_s
    rate = f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s else f"{result.samples_per_s:,.0f} samples/s"
    print_verdict(console, "BEST", f"{_seconds(result.step_s)} per step, {rate}")
    rows, notes = [], []
    for number, row in enumerate(result.trials, start=1):
        trial = row.trial
        cells = {"": str(number), "configuration": row.configuration, "forecast": _seconds(trial.forecast_step_s)}
        cells["measured"] = trial.status if trial.measured_step_s is None else _seconds(trial.measured_step_s)
        cells["+-"] = "-" if trial.spread is None else f"{trial.spread:.1%}"
        rows.append(cells)
        # why a trial has no step time, or that its time is less certain
        note = trial.reason if trial.measured_step_s is None else "cut short" if trial.cut_short else ""
        if note:
            notes.append((f"trial {number}", note))
    keep = ("", "configuration", "measured", "forecast", "+-")
    # highlight the best trial
    styles = ["bold green" if row.trial.measured_step_s == result.step_s else None for row in result.trials]
    console.print(fitting_table(console, rows, ("measured", "forecast", "+-"), keep, "configuration", styles))
    print_facts(console, notes)
    print_facts(console, [("regret", _regret(result.regret)), *(("written", str(path)) for path in result.written)])


def _regret(regret: Regret) -> str:
    """Return how much time per step the untried configurations may save, in words."""
    if regret.untried_step_s is None:
        return "none: every configuration that fits was tried"
    untried = f"{regret.untried} configurations were not tried; the best of them should take"
    gain = f"{regret.gap:.1%} less than the best measured" if regret.gap else "not faster than the best measured"
    chance = f"with a probability of 95% none saves more than {regret.at_most:.1%}"
    return f"{untried} {_seconds(regret.untried_step_s)} per step, {gain}; {chance}"


def _seconds(value: float) -> str:
    return f"{f'{value:#.3g}'.rstrip('.')} s"
