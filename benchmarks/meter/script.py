"""A user's script as a real rank under the meter, and as a simulated one; both are cut into the same phases."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zerofit.simulate.record import SentTensors
from zerofit.simulate.script.command import LATER_STAGE, ScriptCommand, ScriptTarget, read_command
from zerofit.simulate.script.errors import ScriptStop
from zerofit.simulate.script.launchers import environment
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError

from .script_task import ScriptTask

TIMEOUT = timedelta(minutes=4)


def metered(task: ScriptTask) -> dict[str, Any]:
    """Run the script for real in a group of gloo ranks until its optimizer steps are made: {"phases": [...]}."""
    import deepspeed
    import torch.distributed as dist

    from zerofit.simulate.engine.phases import PhaseLog
    from zerofit.simulate.script.generation import announce_generation
    from zerofit.simulate.script.phases import ScriptPhases

    from .meter import AllocatorMeter

    command = read_command(_in_folder(task))
    port = os.environ["MASTER_PORT"]
    os.environ |= environment(_target(task, command)) | {"MASTER_PORT": port}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=TIMEOUT)
    dist.init_process_group = lambda *_, **__: None  # a script's own: the group stands
    log = PhaseLog(AllocatorMeter())
    _loaded_here()
    announce_generation(log)
    with suppress(ScriptStop):
        ScriptPhases(log, task.steps, _nothing, _nothing, _nothing, _call).cut()
        _run(command)
    log.end()
    return {"phases": [asdict(phase) for phase in log.done]}


def simulated(task: ScriptTask) -> dict[str, Any]:
    """The same of the simulation, for a cluster of CPU ranks: {"phases": [...], "notes": [...], "sends": ...}.

    The phases are None where the rank is in a later stage of a pipeline and nothing is known to be received.
    """
    from zerofit.simulate.script.rank import simulate_script_rank

    from .scratch import KernelScratch

    target = _target(task, read_command(_in_folder(task)))
    try:
        record = simulate_script_rank(target, KernelScratch() if task.kernels else None)
    except UserError as error:
        if error.problems[0].kind != LATER_STAGE:
            raise
        return {"phases": None}
    assert record.script
    sends = record.pipeline and record.pipeline.sends
    notes = [asdict(note) for note in record.script.notes]
    return {"phases": [asdict(p) for p in record.phases], "notes": notes, "sends": sends and asdict(sends)}


def _target(task: ScriptTask, command: ScriptCommand) -> ScriptTarget:
    device = Cluster("cpu", gpus=task.ranks).device
    target = ScriptTarget(command=command, device=device, gpus=task.ranks, nodes=1, rank=task.rank, steps=task.steps)
    return replace(target, received=_SENT.validate_python(task.received))


_SENT = TypeAdapter(SentTensors | None)


def _in_folder(task: ScriptTask) -> list[str]:
    os.chdir(task.folder)
    return list(task.command)


def _run(command: ScriptCommand) -> None:
    sys.argv = [command.script, *command.arguments]
    sys.path.insert(0, str(Path(command.script).resolve().parent))
    runpy.run_path(command.script, run_name="__main__")


def _nothing(*_: object) -> None:
    """Note no models and batches: the meter needs phases alone."""


def _call(method: Callable[..., object], module: object, args: Sequence[object], kwargs: dict[str, object]) -> object:
    return method(module, *args, **kwargs)


def _loaded_here() -> None:
    """Load batches in this process, as a simulation does: workers' tensors come in shared memory, not torch's."""
    from zerofit.simulate.script.host import loaders

    loaders()
