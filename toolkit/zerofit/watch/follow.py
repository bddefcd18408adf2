"""The program of a launcher's processes except the first: wait, then become a rank's guard."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from zerofit.launch.local import GUARD
from zerofit.launch.parent_death import end_with_parent
from zerofit.launch.rendezvous import Rendezvous
from zerofit.launch.world import Member, World
from zerofit.spec.local_machine import versions, visible_gpus
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import JOINED

VISIBLE_S = 15.0  # limit for a new folder to be visible on a network file system
LAST_S = 0.5  # lets the first process end before this one


def follow(world: World) -> int:
    """Wait for the first process, then become the guard of this rank.

    If no guard is needed, return an exit code. Raises RunFailed if the first process cannot be reached.
    """
    end_with_parent(os.getppid())
    rendezvous = Rendezvous(world)
    rendezvous.report(asdict(Member.here(world, versions(), visible_gpus())))
    for order in rendezvous.orders():
        if "see" in order:
            rendezvous.answer(_why_not_visible(Path(order["see"])))
        elif "spec" in order:
            # The guard replaces this program, since the user's launcher watches this process. The kernel keeps the
            # signal of `end_with_parent` across execve (prctl(2)).
            argv = [sys.executable, str(GUARD), JOINED, order["spec"]]
            os.execve(sys.executable, argv, {**os.environ, **world.place})
        else:
            rendezvous.leave()
            time.sleep(LAST_S)
            return order["exit"]
    raise AssertionError("the iterator of orders never ends")


def _why_not_visible(folder: Path) -> str:
    """Return why this host cannot use the run folder; "" if it can."""
    deadline = time.monotonic() + VISIBLE_S
    while not RunFolder(folder).plan.is_file():
        if time.monotonic() > deadline:
            return f"{folder} does not exist"
        time.sleep(0.2)
    return "" if os.access(RunFolder(folder).logs, os.W_OK) else f"{folder} is not writable"
