"""A run on many hosts, restarted from its newest checkpoint after a failure.

With `--no-ssh`, each node starts its own ranks from launch specs in the run folder.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from zerofit.app.clusters.hosts import (
    HostRequest,
    build_ops_on,
    cluster_site,
    examine_hosts,
    filled,
    listening_address,
    machine_of,
)
from zerofit.app.fitting.fit import OUT_OF_MEMORY, fitted, leaner_next
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.app.training.prepare_folder import find_folder, make_ready, resuming
from zerofit.app.training.result import TrainingResult, finished_before
from zerofit.app.training.run_ranks import run_ranks
from zerofit.app.training.train import prepare
from zerofit.checkpoint.store import Store, expected_bytes
from zerofit.config.batch import regroup, shown
from zerofit.doctor.check import FAIL, OK, Check
from zerofit.doctor.compare import disk
from zerofit.doctor.preflight import Preflight
from zerofit.launch.host import RUN_ID, end_all
from zerofit.launch.hostfile import Host
from zerofit.launch.local import started
from zerofit.launch.ops import libaio_problems, needed_ops
from zerofit.launch.run_lock import CommandLock, is_held
from zerofit.launch.runner import Runner, runner_environment
from zerofit.spec.errors import Problem, Problems, RunFailed, Stopped, UserError
from zerofit.spec.events import Event, Reporter
from zerofit.spec.files import open_jsonl
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.watch.launch_spec import LaunchSpec, as_argument
from zerofit.watch.supervise import Watch

# kinds of failures that a restart would only repeat
RECURRING = ("out-of-memory", "nan-loss", "ranks-apart", "save-failed", "disk-full", "op-build")
RETRY_S = 5.0  # time between attempts to reach a host


# The life of a run on many hosts:
#
#   examine the hosts ─► resolve, gate, run folder ─► start the ranks ─► result
#        ▲                                                  │ RunFailed
#        └── wait for the hosts; without those that stay ◄──┘
#            away, the same global batch on fewer ranks
#
# A failure ends the run if a restart would fail in the same way (RECURRING), if the user has asked to stop, or after
# `max_restarts`. The run folder stays locked over all starts.
POLL_S = 0.5
LEADER_S = 1800.0  # limit for node 0 to appear: it may prepare data first
GONE_S = 15.0  # network file systems show locks late
RECENT_S = 600.0  # nodes do not start at the same time


@dataclass
class RestartingRun:
    """A run on many hosts that is restarted after failures."""

    request: RunRequest
    hosts: Sequence[Host]
    options: HostRequest
    report: Reporter
    run_file: Path | None
    max_restarts: int
    handle_signals: bool = False
    anyway: bool = False  # also start a run that does not fit
    job: Job | None = None  # job of the last start
    folder: RunFolder | None = None
    _new_folders: list[Path] = field(init=False, default_factory=list)  # folders created for the hosts' checks

    def run(self) -> TrainingResult:
        """Run the ranks until they finish, and return the result; restart them after failures.

        Raises UserError, DoesNotFit, RunFailed and Stopped.
        """
        with ExitStack() as stack:
            stack.callback(self._remove_empty_folders)
            lock = CommandLock(stack, self.report.status)  # over all starts
            for attempt in range(1, self.max_restarts + 2):
                try:
                    return self._start(attempt, lock)
                except RunFailed as failure:
                    failed = time.time()
                    if self.job is None or self.folder is None:
                        raise
                    if self.folder.stop_request.exists():
                        _stop_after(failure.problem, self.folder)
                    if attempt > self.max_restarts or self._would_recur(failure):
                        raise
                    message = f"{failure.problem.message}; restarting from the newest checkpoint"
                    self.report.warning(f"{message} (restart {attempt} of {self.max_restarts})")
                    self._prepare_restart(failure, failed)
        raise AssertionError("the last attempt must return or raise")

    def _start(self, attempt: int, lock: CommandLock) -> TrainingResult:
        # The command listens before it examines the hosts, because the examination tests the way back to this port.
        with closing(Watch(listening_address(self.hosts, self.options))) as watch:
            try:
                examined = self._ready(watch.port)
            except UserError as error:
                if attempt == 1:
                    raise
                raise RunFailed(error.problems[0]) from None  # a host failed after its last answer
            machine = machine_of(self.hosts, examined)
            # A run that fitted once restarts even if other processes have taken memory since.
            anyway = self.anyway or attempt > 1
            # Without ssh, the gate checks only this node (None); with Slurm's launcher, it checks no node ({}).
            unexamined = None if self.options.no_ssh else {}
            facts = examined.facts if examined else unexamined
            gate = MemoryGate(self.report, anyway=anyway, hosts=self.hosts, facts=facts)
            where = {"machine": machine, "hosts": self.hosts}
            fitter = partial(fitted, report=self.report, gate=gate, anyway=self.anyway, **where)
            prepared = prepare(self.request, self.report, machine, lock, gate=gate, fitter=fitter)
            job, folder = prepared.job, prepared.folder
            if examined:
                # The size of a checkpoint is known only now. The other facts were checked before.
                disks = disk(examined.facts, expected_bytes(job))
                self._refuse([check for check in disks if check.status != OK])
            _check_libaio(examined, job.ds_config)
            finished = finished_before(job, folder)
            if finished:
                self.report.note(f"all {job.steps} steps of this run are done")
                os.utime(folder.result)  # nodes that start by themselves check this file's age
                return finished
            self.job, self.folder = job, folder
            self.report.note(*make_ready(folder, job.start))
            site = cluster_site(self.hosts, job, self.options, machine, examined, folder)
            if self.options.over_ssh:
                used = list(dict.fromkeys(site.hosts))
                build_ops_on(used, needed_ops(job.ds_config, machine), self.options.ssh_port, self.report.phase)
            with leaner_next(folder, self.options.again):
                signals = {"handle_signals": self.handle_signals}
                return TrainingResult.of(
                    folder, run_ranks(folder, site, watch, self.report, attempt=attempt, **signals)
                )

    def _would_recur(self, failure: RunFailed) -> bool:
        """Return whether a restart would fail in the same way."""
        # With --fit, the next start uses a smaller layout, so running out of memory would not recur.
        has_fitted_layout = self.job is not None and self.job.fit is not None
        return failure.problem.kind in RECURRING and not (has_fitted_layout and failure.problem.kind == OUT_OF_MEMORY)

    def _ready(self, port: int) -> Preflight | None:
        if not self.options.over_ssh:
            return None
        folder = self.folder or find_folder(self.request.run)
        self._new_folders += [p for p in (folder.path, *folder.path.parents) if not p.exists()]
        folder.path.mkdir(parents=True, exist_ok=True)
        examined = examine_hosts(self.hosts, self.options, folder.path, self.request.run.model, self.run_file, port)
        self._refuse(examined.findings)
        # later starts use this folder
        self.request = self.request.updated(output=folder.path)
        return examined

    def _remove_empty_folders(self) -> None:
        """Remove the run folder that was created for the hosts' checks, if it is still empty."""
        for path in self._new_folders:
            with suppress(OSError):  # the folder is no longer empty
                path.rmdir()

    def _refuse(self, findings: Sequence[Check]) -> None:
        """Report all findings in one table. Raise UserError if a finding would make the run fail."""
        if findings:
            data = {"checks": findings, "hosts": len(self.hosts)}
            self.report.on_event(Event(kind="checks", text=f"{len(findings)} findings about the hosts", data=data))
        problems = Problems()
        for check in findings:
            if check.status == FAIL:
                problems.add(f"host-{check.name}", f"{check.host}: {check.value}", check.hint, check.host)
        problems.raise_if_any()

    def _prepare_restart(self, failure: RunFailed, failed: float) -> None:
        assert self.job and self.folder
        self.request = resuming(self.request, self.folder)
        answering = self._hosts_that_answer(failure)
        missing = [host.name for host in self.hosts if host not in answering]
        if missing:
            self._continue_on(answering, missing)
        restart = {"cause": failure.problem.message, "restarting_after_s": round(time.time() - failed, 1)}
        with open_jsonl(self.folder.faults) as file:
            file.write(json.dumps({**restart, "left_out": missing}) + "\n")

    def _hosts_that_answer(self, failure: RunFailed) -> list[Host]:
        """Wait until all hosts answer, or until the time limit. Return the hosts that answer.

        Raises RunFailed if they are too few.
        """
        if not self.options.over_ssh:
            return list(self.hosts)
        assert self.folder
        patience_s = self.request.run.heartbeat_timeout
        deadline = time.monotonic() + patience_s
        while True:
            examined = examine_hosts(self.hosts, self.options, self.folder.path, self.request.run.model, None, None)
            # A host that answers may still be unfit, for example without its GPUs.
            failing = {check.host for check in examined.checks if check.status == FAIL}
            answering = [host for host in self.hosts if host.name in examined.facts and host.name not in failing]
            missing = ", ".join(host.name for host in self.hosts if host not in answering)
            if not missing or time.monotonic() > deadline:
                break
            self.report.phase(f"waiting for {missing} to come back")
            time.sleep(RETRY_S)
        if len(answering) < (self.options.min_nodes or len(self.hosts)):
            again = f"{self.options.again} {shlex.quote(str(self.folder.path))}"
            hint = f"repair {missing}, then resume with `{again}`"
            hint += f"; --min-nodes {max(len(answering), 1)} continues without {missing}"
            message = f"{failure.problem.message}; {missing} did not come back within {patience_s:.0f} s"
            raise RunFailed(replace(failure.problem, message=message, hint=hint)) from None
        return answering

    def _continue_on(self, hosts: list[Host], missing: list[str]) -> None:
        assert self.job and self.folder
        # Only the data parallel degree can shrink: the other degrees decide which part of the model a rank has.
        layout, batch = self.job.layout, self.job.batch
        slots, ranks_per_replica = sum(host.slots for host in hosts), layout.world_size // layout.dp
        regrouped = regroup(batch, ranks_per_replica, slots)
        if regrouped is None:
            message = f"{slots} slots left, too few for tensor x pipeline x sequence degree {ranks_per_replica}"
            raise RunFailed(Problem(kind="too-few-nodes", message=message, where=str(self.folder.path)))
        ranks, smaller = regrouped
        self.report.note(f"continuing without {', '.join(missing)}: {shown(smaller)}; before: {shown(batch)}")
        self.hosts = filled(hosts, ranks)
        fields: dict[str, int | None] = {"ranks": ranks, "global_batch": smaller.total}
        if self.request.run.micro_batch_by_rank not in (None, "auto"):
            fields["micro_batch_by_rank"] = None  # the ranks that it names no longer exist
        if self.request.run.fit:  # the next start chooses a new layout for these values
            places = {**self.request.places, **dict.fromkeys(fields, "--min-nodes")}
            self.request = replace(self.request, places=places)
        else:
            fields |= {"micro_batch": smaller.micro, "gradient_accumulation_steps": smaller.accumulation}
        self.request = self.request.updated(**fields)


def _stop_after(problem: Problem, folder: RunFolder) -> None:
    """Raise Stopped if the run failed while it stopped on request, and has a checkpoint."""
    checkpoints = Store(folder.checkpoints).entries()
    if checkpoints:
        message = f"failed while stopping on request ({problem.message}); step {checkpoints[-1].step} is saved"
        hint = "run the same command to resume"
        raise Stopped(Problem(kind="stopped", message=message, hint=hint, where=str(folder.path))) from None


def _check_libaio(examined: Preflight | None, ds_config: Mapping[str, object]) -> None:
    """Check that NVMe offload can be compiled on every examined host. Raises UserError.

    If no host was examined (`examined` is None), check this machine.
    """
    problems = Problems()
    for name, facts in examined.facts.items() if examined else ():
        for problem in libaio_problems(ds_config, facts["libaio"]):
            problems.extend([replace(problem, message=f"{name}: {problem.message}")])
    if examined is None:
        problems.extend(libaio_problems(ds_config))
    problems.raise_if_any()


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
        elif _finished(folder, run, began):
            patience = GONE_S
        time.sleep(POLL_S)
    if _finished(folder, run, began):
        return folder
    if folder.stopped.exists():
        done = json.loads(folder.stopped.read_text())
        message = f"stopped on request after step {done['step']} of {done['steps']}; a checkpoint is saved"
        hint = "run the same command to resume"
        raise Stopped(Problem(kind="stopped", message=message, hint=hint, where=str(folder.path)))
    message = "node 0 ended without a result" if started_tokens else "node 0 did not start this run"
    raise RunFailed(Problem(kind="leader", message=message, hint="see the output of node 0", where=str(folder.path)))


def _finished(folder: RunFolder, run: Run, began: float) -> bool:
    """Return whether node 0 has written or touched the run's result since `began`.

    A result of fewer steps is that of an earlier run, which this run will continue.
    """
    try:
        recent = folder.result.stat().st_mtime > began - RECENT_S
        return recent and json.loads(folder.result.read_text())["steps"] >= (run.steps or 0)
    except (OSError, ValueError):  # not yet written, or still incomplete on a network file system
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
