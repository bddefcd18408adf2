"""A node that starts its own ranks (`--no-ssh`) from launch specs in the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from zerofit.app.clusters.hosts import HostRequest, filled
from zerofit.launch.host import RUN_ID, end_all
from zerofit.launch.hostfile import Host
from zerofit.launch.local import started
from zerofit.launch.run_lock import is_held
from zerofit.launch.runner import Runner, runner_environment
from zerofit.spec.errors import Problem, RunFailed, Stopped, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import LaunchSpec, as_argument

POLL_S = 0.5
LEADER_S = 1800.0  # limit for node 0 to appear: it may prepare data first
GONE_S = 15.0  # network file systems show locks late
RECENT_S = 600.0  # nodes do not start at the same time


# With `--no-ssh`, nobody can start ranks on this node from outside. Node 0 prepares and supervises the run. It writes a
# launch spec for each start, from which this node starts its own ranks.
def follow(
    run: Run, hosts: Sequence[Host], options: HostRequest, report: Reporter, *, handle_signals: bool = False
) -> RunFolder:
    """Start this node's ranks each time node 0 starts the run, until node 0 has ended.

    Return the run folder. Raises UserError without an output folder, and Stopped or RunFailed if node 0's run was
    stopped or failed.
    """
    if run.output is None:
        hint = "use the same --output on all nodes, on a shared file system"
        raise UserError(Problem(kind="output", message="--no-ssh without --output", hint=hint, where="--output"))
    folder = RunFolder(run.output.absolute())
    began, started_tokens = time.time(), set[str]()  # each start of node 0 has another token
    # Node 0 holds the lock of the run folder from its start to its end. This node gives up once it has not seen the
    # lock for `patience` seconds.
    last_seen, patience = time.monotonic(), LEADER_S
    report.phase(f"node {options.node_rank}: waiting for node 0")
    while time.monotonic() - last_seen < patience:
        spec = _launch_spec(folder)
        if spec is not None and spec.token not in started_tokens:
            started_tokens.add(spec.token)
            _start(folder, spec, hosts, options, report, handle_signals)
            last_seen, patience = time.monotonic(), GONE_S
        elif is_held(folder):
            last_seen = time.monotonic()
        elif _finished(folder, began):
            patience = GONE_S
        time.sleep(POLL_S)
    if _finished(folder, began):
        return folder
    if folder.stopped.exists():
        done = json.loads(folder.stopped.read_text())
        message = f"stopped on request after step {done['step']} of {done['steps']}; a checkpoint is saved"
        hint = "run the same command to resume"
        raise Stopped(Problem(kind="stopped", message=message, hint=hint, where=str(folder.path)))
    message = "node 0 ended without a result" if started_tokens else "node 0 did not start this run"
    raise RunFailed(Problem(kind="leader", message=message, hint="see the output of node 0", where=str(folder.path)))


def _finished(folder: RunFolder, began: float) -> bool:
    """Return whether node 0 has written or touched the run's result since `began`."""
    try:
        return folder.result.stat().st_mtime > began - RECENT_S
    except OSError:
        return False


def _launch_spec(folder: RunFolder) -> LaunchSpec | None:
    try:
        return LaunchSpec.read(folder.launch_spec) if is_held(folder) else None
    except (OSError, ValueError, KeyError, TypeError):  # not yet written, or still incomplete on a network file system
        return None


def _start(
    folder: RunFolder,
    spec: LaunchSpec,
    hosts: Sequence[Host],
    options: HostRequest,
    report: Reporter,
    handle_signals: bool,
) -> None:
    """Run this node's ranks until they end. If the run needs no ranks on this node, do nothing."""
    used, node = filled(hosts, spec.world_size), options.node_rank
    if node is None or node >= len(used):
        report.note(f"node {node}: the run needs no ranks on this node")
        return
    report.phase(f"node {node}: starting ranks (start {spec.attempt})")
    logs = folder.logs / f"node-{node}"
    logs.mkdir(exist_ok=True)
    argv = Runner(node_rank=node).command(used, logs, spec.master, as_argument(folder.launch_spec))
    plain = {RUN_ID: spec.run_id, "DS_ACCELERATOR": spec.accelerator}
    env = {**runner_environment(logs, plain), RUN_ID: spec.run_id}
    try:
        with started(folder, argv, env, "/", handle_signals=handle_signals) as process:
            process.wait()
    finally:
        # The launcher's session is gone, but a rank's children may have left it. The run id finds them, too.
        end_all(spec.run_id)
