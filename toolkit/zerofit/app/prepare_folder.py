"""The run folder of a start: found, filled with the resolved job, made ready where it was used before."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from zerofit.app.resolve import resolve_job
from zerofit.app.resume import find_start
from zerofit.app.training_result import TrainingResult
from zerofit.checkpoint.store import Store
from zerofit.launch.run_lock import refuse_if_held
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write, write_json
from zerofit.spec.load import RunRequest
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job, RunFolder, Start
from zerofit.spec.versions import versions


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A job that ranks can start on, and its folder."""

    job: Job
    folder: RunFolder
    machine: Machine


def prepare(
    asked: RunRequest,
    report: Reporter,
    machine: Machine | None = None,
    folder: RunFolder | None = None,
    model: nn.Module | None = None,
) -> PreparedRun:
    """Resolve the run, prepare its data, find the checkpoint to go on from and make the run folder.

    `machine`: the devices of all hosts together; None: those of this one. `folder`: the run folder where this command
    holds it already. `model`: in place of the one that the run names. Raises UserError with all that is wrong.
    """
    problems = Problems()
    folder = folder or problems.attempt(lambda: find_folder(asked.run))
    resolved = resolve_job(asked, machine=machine, report=report, problems=problems, model=model)
    assert folder
    job = replace(resolved.job, start=find_start(resolved.job, folder, report))
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(kind="output-unwritable", message=f"cannot make the run folder: {error}", where="--output")
        raise UserError(problem) from None
    job.write(folder, resolved.ds_source)
    device = {name: getattr(resolved.machine, name) for name in ("accelerator", "devices", "cores")}
    python = {"versions": versions(), "python": sys.version.split()[0], "platform": platform.platform()}
    write_json(folder.env, {**python, **device, "device": resolved.machine.device_name})
    return PreparedRun(job=job, folder=folder, machine=resolved.machine)


def find_folder(run: Run) -> RunFolder:
    """Return the run folder: a new or empty one, or one in which a run was started before that may go on.

    Raises UserError for any other folder.
    """
    if run.output is None:
        return RunFolder(_new_path(run).absolute())
    path = run.output.absolute()
    folder = RunFolder(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return folder
    goes_on = run.resume != "never" and folder.plan.is_file()
    if goes_on:
        refuse_if_held(folder)
        return folder
    what = "holds another run" if folder.run.exists() else "exists and is not an empty folder"
    hint = "name another folder, or remove this one"
    if folder.plan.is_file():
        hint = "--resume auto goes on with it; for a new run name another folder"
    raise UserError(Problem(kind="output-exists", message=f"{path} {what}", hint=hint, where="--output"))


def _new_path(run: Run) -> Path:
    name = re.sub(r"[^\w.-]+", "-", f"{Path(run.model).name}-{run.data or 'default'}").strip("-")[:80]
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = stem, 1
    while path.exists():
        path, n = stem.with_name(f"{stem.name}-{n}"), n + 1
    return path


def finished_before(job: Job, folder: RunFolder) -> TrainingResult | None:
    """Return the result of a run that has nothing left to do: its last step is saved, and the model is."""
    if job.start is None or job.start.step < job.steps or not folder.result.exists() or not folder.model.exists():
        return None
    return TrainingResult.read(folder)


def make_ready(folder: RunFolder, start: Start | None) -> list[str]:
    """Set aside what earlier starts left in this folder, and return notes for the user.

    The records of steps that will be made again go to logs/, and checkpoints of such steps get another name. Only
    what was never whole is deleted. Call it while no rank is at work in the folder.
    """
    for path in [*folder.logs.glob("rank-*.error.json"), folder.stopped, folder.stop_request, folder.launch_spec]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder.model_parts, ignore_errors=True)
    step = start.step if start else 0
    store = Store(folder.checkpoints)
    store.remove_incomplete()
    later = [entry.path for entry in store.entries() if entry.step > step]
    notes = [f"{old.name} is kept as {new.name}" for old, new in zip(later, store.archive(later), strict=True)]
    if folder.result.exists():
        folder.result.unlink()
    return notes + _cut_metrics(folder, step)


def _cut_metrics(folder: RunFolder, step: int) -> list[str]:
    """Leave the records of steps up to this one in metrics.jsonl, and keep all other lines in logs/."""
    if not folder.metrics.exists():
        return []
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    if len(kept) == len(lines):
        return []
    number = 1
    while (undone := folder.logs / f"metrics-undone-{number}.jsonl").exists():
        number += 1
    undone.write_bytes(b"".join(line for line in lines if not line.endswith(b"\n") or _step_of(line) > step))
    with atomic_write(folder.metrics) as file:
        file.write(b"".join(kept))
    return [f"the records of {len(lines) - len(kept)} steps after step {step} are in {undone.relative_to(folder.path)}"]


def _step_of(line: bytes) -> float:
    """Return the step of a record; infinity for a line that is not a record."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
