"""`zerofit launch`: a run on many hosts, begun again when something dies."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from zerofit.app.requests import is_run_file, read_request
from zerofit.app.training_result import TrainingResult
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.host_options import host_options
from zerofit.cli.launch_files import file_options, write_file
from zerofit.cli.options import run_options
from zerofit.cli.train import show
from zerofit.spec.events import Reporter, shielded
from zerofit.spec.run import Run


@click.command()
@click.argument("target", metavar="[MODEL | RUN.yaml | RUN_FOLDER]", required=False)
@host_options
@click.option("--no-ssh", is_flag=True, help="this command runs on every node, and starts that node's ranks only")
@click.option("--node-rank", type=click.IntRange(min=0), help="with --no-ssh: which line of the hostfile this node is")
@click.option("--nodes", type=click.IntRange(min=1), help="with --no-ssh, --slurm, --kubernetes: how many there are")
@click.option("--slots", type=click.IntRange(min=1), help="with --nodes: ranks on each")
@click.option("--master-addr", help="address where rank 0 listens [of the first host]")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="begin again so often after a failure [0]")
@click.option("--min-nodes", type=click.IntRange(min=1), help="go on without lost nodes while so many are left")
@click.option("--dry-run", is_flag=True, help="print the launcher's command and start nothing")
@file_options
@run_options()
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def launch(target: str | None, as_json: bool, **options: Any) -> None:
    """Train on many hosts, through the deepspeed launcher.

    Before the start every host is asked whether it can take part; while the ranks run each has a heartbeat; when one
    dies or hangs all are stopped, and with --max-restarts the run begins again from its newest checkpoint.
    """
    names = [p.name for p in launch.params if p.name not in ("target", "as_json")]
    own = {k: options.pop(k) for k in names if k not in Run.model_fields}
    flags = {k: v for k, v in options.items() if v is not None}
    answer(lambda: _launch(target, flags, own), as_json, _show_launched)


def _launch(target: str | None, flags: dict[str, Any], own: dict[str, Any]) -> TrainingResult | dict[str, Any]:
    from zerofit.app.clusters.hosts import command, find_hosts, wish_of
    from zerofit.app.clusters.restarts import RestartingRun

    if own["slurm"] or own["kubernetes"]:
        activate = Path(sys.prefix, "bin", "activate")
        return write_file(target, flags, own, f". {shlex.quote(str(activate))}" if activate.exists() else "")
    hosts, wish = find_hosts(own), wish_of(own)
    asked = read_request(target, flags)
    if own["dry_run"]:
        return command(asked.run, hosts, wish)
    if wish.node_rank:
        from zerofit.app.clusters.node_agent import follow

        return follow(asked.run, hosts, wish)
    run_file = Path(target) if target and is_run_file(target) else None
    with EventConsole(asked.run.log_every) as console:
        run = RestartingRun(
            asked, hosts, wish, Reporter(shielded(console)), run_file, own["max_restarts"], own["min_nodes"], True
        )
        return run.run()


def _show_launched(result: TrainingResult | dict[str, Any]) -> None:
    if isinstance(result, TrainingResult):
        show(result)
    elif "command" in result:
        click.echo(shlex.join(result["command"]))
    elif "written" in result:
        click.echo(f"{result['written']}{'' if result['new'] else ' (as it was)'}; hand it in: {result['hand_in']}")
