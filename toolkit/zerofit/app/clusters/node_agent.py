"""A node that starts its own ranks (`--no-ssh`): it waits for the orders that node 0 writes into the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import click

from zerofit.app.clusters.site import LaunchOptions, filled
from zerofit.launch.hostfile import Host
from zerofit.launch.local import started
from zerofit.launch.orphans import MARK_NAME, end_all
from zerofit.launch.run_lock import is_held
from zerofit.launch.runner import runner, runner_environment
from zerofit.spec.errors import Problem, RunFailed, Stopped, UserError
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import LaunchSpec, as_argument

POLL_S = 0.5
LEADER_S = 1800.0  # for node 0 to appear: it may prepare data first
GONE_S = 15.0  # a network file system shows a lock late
RECENT_S = 600.0  # nodes do not start at the same moment


def follow(run: Run, hosts: Sequence[Host], wish: LaunchOptions) -> dict[str, Any]:
    """Start this node's ranks each time node 0 asks for it, until node 0 has ended; what to show.

    Raises UserError without an output folder, Stopped and RunFailed as node 0's run ended.
    """
    if run.output is None:
        hint = "the same --output on all nodes, on a file system that they share"
        raise UserError(Problem(kind="output", message="--no-ssh without --output", hint=hint, where="--output"))
    folder = RunFolder(run.output.absolute())
    began, done = time.time(), set[str]()
    quiet, patience = time.monotonic(), LEADER_S
    click.echo(f"node {wish.node_rank}: waiting for node 0 ...", err=True)
    while time.monotonic() - quiet < patience:
        orders = _orders(folder)
        if orders is not None and orders.token not in done:
            done.add(orders.token)
            _start(folder, orders, hosts, wish)
            quiet, patience = time.monotonic(), GONE_S
        elif is_held(folder):
            quiet = time.monotonic()
        elif _finished(folder, began):
            patience = GONE_S
        time.sleep(POLL_S)
    if _finished(folder, began):
        return {"run_dir": str(folder.path), "node_rank": wish.node_rank}
    if folder.stopped.exists():
        word = json.loads(folder.stopped.read_text())
        message = f"stopped on request after step {word['step']} of {word['steps']}; a checkpoint of it is saved"
        raise Stopped(Problem(kind="stopped", message=message, hint="the same command goes on", where=str(folder.path)))
    message = "node 0 ended without a result" if done else "node 0 did not start this run"
    raise RunFailed(Problem(kind="leader", message=message, hint="node 0 says why", where=str(folder.path)))


def _finished(folder: RunFolder, began: float) -> bool:
    """Whether node 0 has come to the end, or found that it had: it touches the result then."""
    try:
        return folder.result.stat().st_mtime > began - RECENT_S
    except OSError:
        return False


def _orders(folder: RunFolder) -> LaunchSpec | None:
    """The orders of a start that is going on."""
    try:
        return LaunchSpec.read(folder.orders) if is_held(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _start(folder: RunFolder, orders: LaunchSpec, hosts: Sequence[Host], wish: LaunchOptions) -> None:
    """This node's ranks, until they end; nothing where the run takes fewer nodes."""
    used = filled(hosts, orders.world_size)
    if wish.node_rank is None or wish.node_rank >= len(used):
        click.echo(f"node {wish.node_rank}: this start needs no ranks here", err=True)
        return
    click.echo(f"node {wish.node_rank}: starting its ranks (start {orders.attempt})", err=True)
    logs = folder.logs / f"node-{wish.node_rank}"
    logs.mkdir(exist_ok=True)
    argv = runner("pdsh", used, logs, orders.master, as_argument(folder.orders), node_rank=wish.node_rank)
    plain = {MARK_NAME: orders.mark, "DS_ACCELERATOR": orders.accelerator}
    env = {**runner_environment(logs, plain), MARK_NAME: orders.mark}
    try:
        with started(folder, argv, env, "/") as process:
            process.wait()
    finally:
        end_all(orders.mark)
