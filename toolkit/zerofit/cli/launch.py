"""`zerofit launch`: a run on many hosts, restarted after a failure."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from zerofit.app.clusters.hosts import HostRequest, find_hosts, launcher_command
from zerofit.app.clusters.job_files import JobFile, JobFileRequest, write_job_file
from zerofit.app.job.requests import is_run_file, read_request
from zerofit.app.training.result import TrainingResult
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, out, print_facts, print_verdict
from zerofit.cli.options import (
    ANYWAY,
    AS_JSON,
    HOST_FLAGS,
    PATH,
    TRUST_MODEL_CODE,
    add_options,
    given,
    host_options,
    run_options,
)
from zerofit.cli.train import show
from zerofit.spec.errors import Problems
from zerofit.spec.events import Reporter, shielded
from zerofit.spec.run import Run

file_options = add_options(
    click.option("--slurm", type=PATH, metavar="FILE", help="write an sbatch job to FILE instead of starting"),
    click.option("--kubernetes", type=PATH, metavar="FILE", help="write a Kubeflow manifest to FILE instead"),
    click.option("--job-name", help="--slurm, --kubernetes: name of the job [zerofit]"),
    click.option(
        "--device",
        type=click.Choice(["gpu", "cpu"]),
        default="gpu",
        help="--slurm, --kubernetes: kind of device for the ranks [gpu]",
    ),
    click.option(
        "--time", help="--slurm: time limit, like 12:00:00; the run saves before the limit and is queued again"
    ),
    click.option(
        "--save-before-limit",
        "save_s",
        type=click.IntRange(min=1),
        help="--slurm: save this many seconds before --time [300]",
    ),
    click.option("--partition", help="--slurm: partition"),
    click.option("--account", help="--slurm: account"),
    click.option("--setup", help="--slurm: shell line to set up zerofit [. VENV/bin/activate]"),
    click.option("--image", help="--kubernetes: container image with zerofit"),
    click.option("--claim", help="--kubernetes: PersistentVolumeClaim for run folders and data"),
    click.option(
        "--kind", type=click.Choice(["trainjob", "pytorchjob"]), default="trainjob", help="kind of job [trainjob]"
    ),
)


@click.command()
@click.argument("target", metavar="[MODEL | RUN.yaml | RUN_FOLDER]", required=False)
@host_options
@click.option(
    "--no-ssh", is_flag=True, help="do not use ssh: you run this command on every node, and it starts that node's ranks"
)
@click.option(
    "--node-rank", type=click.IntRange(min=0), help="--no-ssh: number of this node's line in the hostfile, from 0"
)
@click.option("--nodes", type=click.IntRange(min=1), help="--no-ssh, --slurm, --kubernetes: number of nodes")
@click.option("--slots", type=click.IntRange(min=1), help="ranks per node, with --nodes")
@click.option("--master-addr", help="address of rank 0 [the first host's]")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="restarts after a failure [0]")
@click.option("--min-nodes", type=click.IntRange(min=1), help="fewest nodes to continue with if nodes are lost")
@click.option("--dry-run", is_flag=True, help="only print the launcher's command")
@file_options
@run_options()
@ANYWAY
@TRUST_MODEL_CODE
@AS_JSON
def launch(target: str | None, as_json: bool, **options: object) -> None:
    """Train on many hosts with the deepspeed launcher.

    All hosts are checked before the start. If a rank dies or hangs (has no heartbeat), all ranks are stopped. With
    --max-restarts the run then restarts from its newest checkpoint.
    """
    # The run's options go to every node, the others are for this command.
    own = {name: options.pop(name) for name in list(options) if name not in Run.model_fields}
    answer(lambda: _launch(target, given(options), own), as_json, _show)


def _launch(
    target: str | None, flags: dict[str, Any], own: dict[str, Any]
) -> TrainingResult | JobFile | dict[str, object]:
    """Write a job file, return the launcher's command, or train. `own`: options of no run."""
    if own["slurm"] or own["kubernetes"]:
        # The job runs on other hosts, which share this file system: it activates the environment of this command.
        activate = Path(sys.prefix, "bin", "activate")
        if own["setup"] is None:
            own["setup"] = f". {shlex.quote(str(activate))}" if activate.exists() else ""
        # The other options in `own` name hosts, which the scheduler chooses.
        values = {field.name: own.pop(field.name) for field in fields(JobFileRequest) if field.name in own}
        # These are the defaults of the options, so what is left was given by the user.
        _refuse_unused({name: value for name, value in own.items() if value not in (None, "", False, "pdsh")})
        return write_job_file(JobFileRequest(target=target, flags=flags, **values))
    host_request = HostRequest(**{field.name: own[field.name] for field in fields(HostRequest)})
    hosts = find_hosts(host_request)
    request = read_request(target, flags, own["trust_model_code"])
    if own["dry_run"]:
        return {"command": launcher_command(request.run, hosts, host_request)}
    with EventConsole(request.run.log_every) as console:
        # An error while an event is shown must not end the supervision of the ranks.
        report = Reporter(shielded(console))
        # With --no-ssh every node runs this command. The first node supervises, the others follow.
        if host_request.node_rank:
            from zerofit.app.clusters.restarts import follow

            folder = follow(request.run, hosts, host_request, report, handle_signals=True)
            return {"run_dir": str(folder.path), "node_rank": host_request.node_rank}
        from zerofit.app.clusters.restarts import RestartingRun

        return RestartingRun(
            request=request,
            hosts=hosts,
            options=host_request,
            report=report,
            # The hosts compare their copy of this file with the one here.
            run_file=Path(target) if target and is_run_file(target) else None,
            max_restarts=own["max_restarts"],
            handle_signals=True,
            anyway=own["anyway"],
        ).run()


def _refuse_unused(given: dict[str, object]) -> None:
    """Raise UserError if an option was given that cannot be used with a job file."""
    problems = Problems()
    for name in given:
        flag = HOST_FLAGS.get(name, "--" + name.replace("_", "-"))
        hint = "leave it out: the scheduler chooses the hosts"
        problems.add("conflict", f"{flag} cannot be used with --slurm or --kubernetes", hint, flag)
    problems.raise_if_any()


def _show(result: TrainingResult | JobFile | dict[str, Any]) -> None:
    if isinstance(result, TrainingResult):
        show(result)
    elif isinstance(result, JobFile):
        print_verdict(out(), "WRITTEN" if result.new else "UNCHANGED", str(result.written))
        print_facts(out(), [("next", result.hand_in)], 9)
    elif "command" in result:
        click.echo(shlex.join(result["command"]))
