"""A node that starts its own ranks (`--no-ssh`): it waits for the orders that node 0 writes into the run folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from zerofit.cli.cluster import Wish
from zerofit.launch.hold import is_held
from zerofit.launch.hostfile import Host
from zerofit.launch.leftovers import TOKEN_NAME
from zerofit.launch.local import started
from zerofit.launch.runner import DEFAULT_PORT, runner, runner_environment
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.folder import RunFolder
from zerofit.spec.run import RunSpec
from zerofit.watch.orders import Orders, as_argument

POLL_S = 0.5
LEADER_S = 1800.0  # for node 0 to appear: it may prepare data first
GONE_S = 15.0  # a network file system shows a lock late


def follow(run: RunSpec, hosts: Sequence[Host], wish: Wish) -> dict[str, Any]:
    """Start this node's ranks each time node 0 asks for it, until node 0 has ended; what to show.

    Raises UserError without an output folder, and RunFailed where node 0 ended without a result.
    """
    if run.output is None:
        hint = "the same --output on all nodes, on a file system that they share"
        raise UserError(Problem(kind="output", message="--no-ssh without --output", hint=hint, where="--output"))
    folder = RunFolder(run.output.absolute())
    began = time.time()
    done: set[str] = set()
    quiet = time.monotonic()
    patience = LEADER_S
    click.echo(f"node {wish.node_rank}: waiting for node 0 ...", err=True)
    while time.monotonic() - quiet < patience:
        orders = _orders(folder)
        if orders is not None and orders.token not in done:
            done.add(orders.token)
            click.echo(f"node {wish.node_rank}: starting its ranks (start {orders.attempt})", err=True)
            _start(folder, orders, hosts, wish)
            quiet, patience = time.monotonic(), GONE_S
        elif is_held(folder):
            quiet = time.monotonic()
        time.sleep(POLL_S)
    if (folder.result.exists() and folder.result.stat().st_mtime >= began) or folder.stopped.exists():
        return {"run_dir": str(folder.path), "node_rank": wish.node_rank}
    message = "node 0 ended without a result" if done else "node 0 did not start this run"
    raise RunFailed(Problem(kind="leader", message=message, hint="node 0 says why", where=str(folder.path)))


def _orders(folder: RunFolder) -> Orders | None:
    """The orders of a start that is going on."""
    try:
        return Orders.read(folder.orders) if is_held(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _start(folder: RunFolder, orders: Orders, hosts: Sequence[Host], wish: Wish) -> None:
    logs = folder.logs / f"node-{wish.node_rank}"
    logs.mkdir(exist_ok=True)
    master = (orders.master[0], orders.master[1] or DEFAULT_PORT)
    argv = runner("pdsh", hosts, logs, master, as_argument(folder.orders), node_rank=wish.node_rank)
    plain = {TOKEN_NAME: orders.token, "DS_ACCELERATOR": orders.accelerator}
    env = {**runner_environment(logs, plain), TOKEN_NAME: orders.token}
    with started(folder, argv, env, "/") as process:
        process.wait()
