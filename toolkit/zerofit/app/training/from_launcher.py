"""Training in processes that a launcher (deepspeed, torchrun, srun, ...) has started.

The first process prepares and supervises the run, like `zerofit train` on one machine, and starts a guard for its
own rank. The other processes wait for the first one. Then each becomes the guard of its rank (`watch.follow`).
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from zerofit.app.clusters.hosts import machine_of
from zerofit.app.training.prepare_folder import resuming
from zerofit.app.training.result import TrainingResult
from zerofit.app.training.train import PreparedRun, claim, train_at
from zerofit.launch.host import environment, this_machine
from zerofit.launch.hostfile import Host
from zerofit.launch.local import GUARD, HERE, LaunchSite, free_port
from zerofit.launch.parent_death import end_with_parent
from zerofit.launch.rendezvous import Rendezvous
from zerofit.launch.world import LOOPBACK, Member, World, hosts_of, threads_of
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter, shielded
from zerofit.spec.local_machine import versions, visible_gpus
from zerofit.spec.run import RunRequest
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.supervise import Watch

STOPPED, FAILED = 130, 3
FOLDER = "folder"  # key of the stored value that a restart reads


def lead(request: RunRequest, world: World, *, on_event: OnEvent | None = None, anyway: bool = False) -> TrainingResult:
    """Train as the first process of a world.

    SIGTERM, SIGHUP and SIGUSR1 ask the ranks to save and stop. All processes exit right after this process, with the
    same exit code. Raises UserError, DoesNotFit, RunFailed and Stopped.
    """
    end_with_parent(os.getppid())
    leading = _Leading(world, Reporter(shielded(on_event) if on_event else None), anyway)
    code = FAILED
    try:
        result = leading.train(request)
        code = 0
        return result
    except KeyboardInterrupt:
        code = STOPPED
        raise
    except Exception as error:
        code = getattr(error, "exit_code", FAILED)
        raise
    finally:
        # The others exit only after this process has printed, since a launcher kills it when another has failed.
        atexit.register(leading.dismiss, code)


# A launcher has started one process for each rank, so ranks cannot be started. The processes become guards instead:
#
#   all processes report host and cores to rank 0         `Rendezvous.report`
#   rank 0 checks the run and prepares its folder         `claim`
#   rank 0 sends the launch spec to the others            `Rendezvous.order`
#   each process guards its rank, rank 0 supervises       `train_at`
#   at the end, all processes exit with rank 0's code     `dismiss`
class _Leading:
    def __init__(self, world: World, report: Reporter, anyway: bool):
        self._world, self._report, self._anyway = world, report, anyway
        self._rendezvous = Rendezvous(world)
        self._watch: Watch | None = None  # set when the others become guards

    def train(self, request: RunRequest) -> TrainingResult:
        self._rendezvous.report(asdict(Member.here(self._world, versions(), visible_gpus())))
        reports = self._rendezvous.reports(self._report.phase)
        members = [Member(**{**values, "cores": tuple(values["cores"])}) for values in reports]
        machine = this_machine()
        hosts = hosts_of(members, machine.accelerator == "cuda")
        several = len(hosts) > 1
        with ExitStack() as stack:
            prepared, finished = claim(
                self._request(request),
                self._report,
                stack,
                anyway=self._anyway or self._world.attempt > 1,  # a run that fitted once restarts
                machine=machine_of(hosts, None) if several else None,
                hosts=hosts if several else (),
            )
            if finished:
                return finished
            # After a restart by the launcher, the new processes find the folder here, and resume.
            self._rendezvous.keep(FOLDER, str(prepared.folder.path))
            if several:
                self._check_folder(prepared.folder, hosts)
            watch = Watch("" if several else LOOPBACK)  # open until the process ends, like the guards
            threads = threads_of(members, hosts)
            site = self._site(prepared, hosts, watch, {"OMP_NUM_THREADS": str(threads)} if threads else {})
            signals = {"attempt": self._world.attempt, "handle_signals": True}
            return train_at(site, prepared, watch, self._report, **signals)

    def dismiss(self, code: int) -> None:
        if self._watch:
            self._watch.send_all({"code": code})
        else:
            with suppress(RuntimeError):  # torchrun's store is gone
                self._rendezvous.dismiss(code)

    def _request(self, request: RunRequest) -> RunRequest:
        """Return the request for all ranks; after a restart, it resumes the run. Raises UserError."""
        ranks, world = request.run.ranks, self._world
        if ranks not in (None, world.size):
            message = f"{request.place('ranks')} sets {ranks} ranks, but {world.launcher} started {world.size}"
            hint = f"use --ranks {world.size}, or start {ranks} with {world.launcher}"
            raise UserError(Problem(kind="ranks", message=message, hint=hint, where=request.place("ranks")))
        request = request.updated(ranks=world.size)
        folder = request.run.output or self._rendezvous.kept(FOLDER)
        return resuming(request, RunFolder(Path(folder).absolute())) if folder and world.attempt > 1 else request

    def _check_folder(self, folder: RunFolder, hosts: tuple[Host, ...]) -> None:
        """Raise UserError with the hosts that cannot read the run folder."""
        self._rendezvous.order(see=str(folder.path))
        names = [host.name for host in hosts for _ in range(host.slots)]
        problems, reasons = Problems(), dict[str, str]()
        for rank, answer in self._rendezvous.answers().items():
            if answer:
                reasons.setdefault(names[rank], answer)
        for name, reason in reasons.items():
            hint = "use a --output on a file system that all hosts share"
            problems.add("output-not-shared", f"on {name}: {reason}", hint, name)
        problems.raise_if_any()

    def _site(self, prepared: PreparedRun, hosts: tuple[Host, ...], watch: Watch, extra: dict[str, str]) -> LaunchSite:
        """Return the `LaunchSite` of ranks whose processes exist. It starts only rank 0's guard."""
        world, machine = self._world, prepared.machine
        several = len(hosts) > 1
        address, names = (world.master[0], [host.name for host in hosts]) if several else (LOOPBACK, [HERE])
        env = environment(machine.accelerator, machine.cores, hosts[0].slots) | world.place

        def argv(spec: str) -> list[str]:
            self._rendezvous.order(spec=spec)
            self._watch = watch
            return [sys.executable, str(GUARD), spec]

        return LaunchSite(
            hosts=tuple(name for name, host in zip(names, hosts, strict=True) for _ in range(host.slots)),
            addresses=dict.fromkeys(names, address),
            master=(address, free_port()),
            accelerator=machine.accelerator,
            argv=argv,
            env=lambda mark: env,
            # With torchrun's value, all ranks would be clients of its store (torch/distributed/rendezvous.py).
            forwarded={"TORCHELASTIC_USE_AGENT_STORE": str(False), **extra},  # rank 0 listens on a separate port
            again=f"{world.launcher} ... zerofit train",
            timeout_s=prepared.job.run.heartbeat_timeout,
        )
