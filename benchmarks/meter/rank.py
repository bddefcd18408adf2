"""One real rank of a job under the meter: what it allocates in each phase of its life."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from zerofit.simulate.target import Target

TIMEOUT = timedelta(minutes=2)
SETTLE_S = 0.002


def metered(target: Target) -> dict[str, Any]:
    """Build, init and train for real in a group of gloo ranks: {"phases": [...]}, figures in bytes.

    Needs MASTER_PORT, and the same call at the same time for each other rank, in a process of its own.
    """
    world = target.job.layout.world_size
    ranks = {"RANK": target.rank, "LOCAL_RANK": target.rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}

    from zerofit.simulate.batches import batches
    from zerofit.simulate.phases import PhaseLog, start, train_steps
    from zerofit.train import process_group

    from .meter import AllocatorMeter

    process_group.start(TIMEOUT)
    log = PhaseLog(AllocatorMeter())
    with _settling():
        driver = start(target.job, target.rank, target.inputs, log)
        train_steps(driver, batches(target.job, target.inputs), target.steps, log)
    answer = {"phases": [phase.as_dict() for phase in log.done]}
    process_group.stop()
    return answer


@contextmanager
def _settling() -> Iterator[None]:
    """Let gloo's threads finish before a rank goes on from a collective.

    They let go of its tensors a moment after they have said that it is done (ProcessGroupGloo::runLoop). A rank that
    goes on at once still has the last bucket at times when it allocates the next one, and no two runs are alike.
    """
    from torch.distributed import Work

    wait = Work.wait

    def settled(self: Work, *args: Any, **kwargs: Any) -> Any:
        done = wait(self, *args, **kwargs)
        time.sleep(SETTLE_S)
        return done

    with patch.object(Work, "wait", settled):
        yield


def simulated(target: Target) -> dict[str, Any]:
    """What `zerofit simulate` sees, with and without the scratch of this machine's kernels. In a process of its own."""
    from .tally import simulated

    return simulated(target)


def planned(target: Target) -> dict[str, Any]:
    """What `zerofit plan` reckons for the rank that needs most."""
    from .planned import planned

    return planned(target)


CALLS = {"metered": metered, "simulated": simulated, "planned": planned}
