"""The ranks of a job that is ready: started at a site, watched to their end."""

from __future__ import annotations

import os
import secrets
from typing import Any

import click

from zerofit.cli.view import RunView
from zerofit.launch.launch_site import LaunchSite
from zerofit.launch.local import started
from zerofit.launch.orphans import MARK_NAME, end_all
from zerofit.launch.outcome import outcome
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import LaunchSpec, as_argument
from zerofit.watch.supervise import supervise
from zerofit.watch.watch import Watch


def run_once(folder: RunFolder, site: LaunchSite, watch: Watch, view: RunView, attempt: int = 1) -> dict[str, Any]:
    """The result of the ranks. Raises RunFailed with the one cause of a failure, and Stopped."""
    orders = _orders(folder, site, watch.port, attempt)
    orders.write(folder.orders)
    watch.expect(orders)
    view.phase("starting the ranks")
    env = {**site.env(orders.mark), MARK_NAME: orders.mark}
    ranks = started(folder, site.argv(as_argument(folder.orders)), env, site.cwd)
    try:
        ended = supervise(ranks, watch, folder, _Ticks(view, watch, folder))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(str(folder.path)) from None
    finally:
        folder.orders.unlink(missing_ok=True)
        end_all(orders.mark)  # pdsh gives each ssh a session of its own
        for note in site.sweep(orders.mark) if site.sweep else ():
            click.echo(f"note: {note}", err=True)
    seen = ended.verdict.problem if ended.verdict else None
    return outcome(folder, ended.code, site.again, seen, ended.words)


def _orders(folder: RunFolder, site: LaunchSite, port: int, attempt: int) -> LaunchSpec:
    return LaunchSpec(
        folder=str(folder.path),
        token=secrets.token_hex(16),
        mark=secrets.token_hex(8),
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


class _Ticks:
    """Shows what is new, ten times a second."""

    def __init__(self, view: RunView, watch: Watch, folder: RunFolder):
        self._view, self._watch, self._folder = view, watch, folder
        self._asked = False

    def __call__(self) -> None:
        self._view.update(self._watch.summary())
        if not self._asked and self._folder.stop_request.exists():
            self._asked = True
            self._view.phase("asked the ranks to save and stop; asking again stops at once")
