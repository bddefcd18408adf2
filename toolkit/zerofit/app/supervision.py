"""The ranks of a job that is ready: started at a site, supervised to their end."""

from __future__ import annotations

import os
import secrets

from zerofit.app.run_events import RunEvents
from zerofit.app.training_result import TrainingResult
from zerofit.launch.launch_site import LaunchSite
from zerofit.launch.local import started
from zerofit.launch.orphans import RUN_ID, end_all
from zerofit.launch.outcome import outcome
from zerofit.spec.events import Reporter
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import LaunchSpec, as_argument
from zerofit.watch.supervise import supervise
from zerofit.watch.watch import Watch


def run_once(
    folder: RunFolder,
    site: LaunchSite,
    watch: Watch,
    report: Reporter,
    *,
    attempt: int = 1,
    handle_signals: bool = False,
) -> TrainingResult:
    """Start the ranks, tell what they do, and return their result.

    `handle_signals`: a first SIGTERM, SIGHUP or SIGUSR1 asks the ranks to save and stop (the main thread only).
    Raises RunFailed with the one cause of a failure, and Stopped.
    """
    spec = _spec(folder, site, watch.port, attempt)
    spec.write(folder.launch_spec)
    watch.expect(spec)
    events = RunEvents(folder, report)
    events.phase("starting the ranks")
    stopping = False

    def tick() -> None:
        nonlocal stopping
        events.look(watch.summary())
        if not stopping and folder.stop_request.exists():
            stopping = True
            events.phase("asked the ranks to save and stop; asking again stops at once")

    env = {**site.env(spec.run_id), RUN_ID: spec.run_id}
    ranks = started(folder, site.argv(as_argument(folder.launch_spec)), env, site.cwd, handle_signals=handle_signals)
    try:
        ended = supervise(ranks, watch, folder, tick)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(str(folder.path)) from None
    finally:
        folder.launch_spec.unlink(missing_ok=True)
        end_all(spec.run_id)  # pdsh gives each ssh a session of its own
        for note in site.sweep(spec.run_id) if site.sweep else ():
            report.note(note)
    seen = ended.verdict.problem if ended.verdict else None
    return TrainingResult.of(folder, outcome(folder, ended.code, site.again, seen, ended.failures))


def _spec(folder: RunFolder, site: LaunchSite, port: int, attempt: int) -> LaunchSpec:
    return LaunchSpec(
        folder=str(folder.path),
        token=secrets.token_hex(16),
        run_id=secrets.token_hex(8),
        attempt=attempt,
        hosts=site.hosts,
        watch={host: (address, port) for host, address in site.addresses.items()},
        master=site.master,
        accelerator=site.accelerator,
        coming_s=site.coming_s,
        timeout_s=site.timeout_s,
        environment=dict(site.forwarded),
        interfaces=dict(site.interfaces),
        cwd=os.getcwd(),
    )
