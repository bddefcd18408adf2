"""`zerofit tune`: the fastest configuration that fits, measured in a handful of real runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.app.requests import read_request
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.host_options import NAMES, host_arguments, host_options
from zerofit.cli.options import run_options
from zerofit.cli.train import DEFAULT_JOB

if TYPE_CHECKING:
    from zerofit.tune.result import TuneResult

# the flags of hosts where none is given
DEFAULTS = {**dict.fromkeys(NAMES), "runner": "pdsh"}


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

    def work() -> TuneResult:
        click.echo("checking the run, the model and the data ...", err=True)  # importing torch alone takes seconds
        from zerofit.app.clusters.hosts import HostRequest, find_hosts
        from zerofit.app.tuning.job import TrialHosts
        from zerofit.app.tuning.tune import tune

        on = {name: options.pop(name) for name in NAMES}
        words, output = host_arguments(on), options.pop("output")
        hosts = TrialHosts(hosts=(), flags=())
        if words != host_arguments(DEFAULTS):
            hosts = TrialHosts(hosts=find_hosts(HostRequest(**on)), flags=tuple(words))
        flags = {name: value for name, value in options.items() if value is not None}
        run = read_request(target, flags if target or flags else DEFAULT_JOB)
        with EventConsole() as events:
            return tune(run, trials=trials, minutes=minutes, space=space, hosts=hosts, output=output, on_event=events)

    answer(work, as_json, show)
