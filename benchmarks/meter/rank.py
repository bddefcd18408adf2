"""One real rank of a job under the meter: what it allocates in each phase of its life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

from torch.distributed import ProcessGroup, Work

from zerofit.simulate.record import SimulationTarget

from .script_task import ScriptTask

TIMEOUT = timedelta(minutes=2)
SETTLE_S, POLL_S = 0.002, 0.0005
PATIENCE_S = 1.0
ISSUED_AHEAD = ("allreduce", "broadcast", "allgather", "_allgather_base", "all_gather_single")


class _BuiltError(Exception):
    """The model is built, and that was all."""


def built(target: SimulationTarget) -> dict[str, Any]:
    """Build the model for real, as `metered` does, and stop before an engine takes it."""

    def stop(_: Any) -> None:
        raise _BuiltError

    return metered(target, on_built=stop)


def metered(target: SimulationTarget, on_built: Callable[[Any], None] = lambda model: None) -> dict[str, Any]:
    """Build, init and train for real in a group of gloo ranks: {"phases": [...]}, figures in bytes.

    Needs MASTER_PORT, and the same call at the same time for each other rank, in a process of its own. `on_built` gets
    the model.
    """
    world = target.job.layout.world_size
    ranks = {"RANK": target.rank, "LOCAL_RANK": target.rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}

    from zerofit.simulate.engine.phases import PhaseLog
    from zerofit.simulate.engine.rank import empty_batches, start, train_steps
    from zerofit.train import process_group

    from .meter import AllocatorMeter

    process_group.start(TIMEOUT)
    log = PhaseLog(AllocatorMeter())
    with _settling(), _even_loads(), suppress(_BuiltError):
        driver = start(target.job, target.rank, target.inputs, log, on_built)
        train_steps(driver, empty_batches(target.job, target.inputs), target.steps, log)
    log.end()
    answer = {"phases": [asdict(phase) for phase in log.done]}
    process_group.stop()
    return answer


@contextmanager
def _settling() -> Iterator[None]:
    """Let gloo's threads finish each collective before a rank goes on.

    They let go of its tensors a moment after they have said that it is done (ProcessGroupGloo::runLoop), and two of
    those that are issued ahead can run at the same time, each with its flat copy. So no two runs are alike: a rank has
    one bucket more at times. Here collectives run one by one.
    """
    with ExitStack() as stack:
        for name in filter(partial(hasattr, ProcessGroup), ISSUED_AHEAD):
            stack.enter_context(patch.object(ProcessGroup, name, _then_done(getattr(ProcessGroup, name))))
        stack.enter_context(patch.object(Work, "wait", _then_settled(Work.wait)))
        yield


@contextmanager
def _even_loads() -> Iterator[None]:
    """Let each expert that AutoEP has spread get as many tokens as any other, as a simulation takes it.

    What a rank takes goes by what its experts get, and batches without data would all go to the same ones.
    """
    import torch
    from deepspeed.moe.ep_count import count_tokens_per_expert
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    forward = TokenChoiceTopKRouter.forward

    def evenly(self: Any, *args: Any) -> tuple[Any, ...]:
        scores, selected, _ = forward(self, *args)
        even = torch.arange(selected.numel(), device=selected.device).remainder_(self.num_experts).view_as(selected)
        return scores, even, count_tokens_per_expert(even, self.num_experts)

    with patch.object(TokenChoiceTopKRouter, "forward", evenly):
        yield


def _then_done(issue: Callable[..., Work]) -> Callable[..., Work]:
    def run(*args: Any, **kwargs: Any) -> Work:
        work, start = issue(*args, **kwargs), time.monotonic()
        while not work.is_completed() and time.monotonic() < start + PATIENCE_S:
            time.sleep(POLL_S)
        time.sleep(SETTLE_S)
        return work

    return run


def _then_settled(wait: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        done = wait(*args, **kwargs)
        time.sleep(SETTLE_S)
        return done

    return run


def simulated(target: SimulationTarget) -> dict[str, Any]:
    """What `zerofit simulate` sees, with and without the scratch of this machine's kernels. In a process of its own."""
    from .tally import simulated

    return simulated(target)


def planned(target: SimulationTarget) -> dict[str, Any]:
    """What `zerofit plan` reckons for the rank that needs most."""
    from .planned import planned

    return asdict(planned(target))


def script_metered(task: dict[str, Any]) -> dict[str, Any]:
    """A real rank of a script: {"phases": [...]}."""
    from .script import metered

    with _settling():
        return metered(ScriptTask(**task))


def script_simulated(task: dict[str, Any]) -> dict[str, Any]:
    """What `zerofit simulate -- COMMAND` sees of the same rank."""
    from .script import simulated

    return simulated(ScriptTask(**task))


def _of_job(call: Callable[[SimulationTarget], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda target: call(SimulationTarget.from_dict(target))


CALLS = {
    **{call.__name__: _of_job(call) for call in (metered, built, simulated, planned)},
    **{call.__name__: call for call in (script_metered, script_simulated)},
}
