"""Repeat steps of a run to find where and why values stop being finite (`zerofit replay`)."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from zerofit.app.training.prepare_folder import find_start
from zerofit.app.training.run_ranks import run_ranks
from zerofit.checkpoint.store import Store
from zerofit.config.batch import regroup
from zerofit.explain.not_finite import Replay, cause_of, has_risen
from zerofit.launch.host import this_machine
from zerofit.launch.local import local_site
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.launch.run_lock import refuse_if_held
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import OnEvent, Reporter, shielded
from zerofit.spec.files import number_in, read_jsonl
from zerofit.spec.named_code import refuse_foreign_code
from zerofit.spec.run_folder import Job, Layout, ReplayRequest, RunFolder, Start
from zerofit.spec.units import counted
from zerofit.watch.supervise import Watch

WidePrecision = Literal["fp32", "fp64"]
# settings of a run that a replay replaces: they write to other places, save, compile or profile
_QUIET: dict[str, object] = {"callbacks": (), "tensorboard": False, "wandb": None, "profile": None, "compile": False}
_QUIET |= {"save_every": "0", "ema": None, "check_loss": True, "record_memory": False, "output": None}
KEPT = ("optimizer", "scheduler", "gradient_clipping")  # keys of the run's DeepSpeed JSON for a replay on one CPU


# A replay repeats steps in a folder of its own (replay/step-N). The files of the run stay unchanged.
def replay(
    run: str | Path,
    step: int | None = None,
    *,
    precision: WidePrecision | None = None,
    trust_model_code: bool = False,
    on_event: OnEvent | None = None,
) -> Replay:
    """Repeat a run's steps from the checkpoint before `step`; name the cause of a bad loss.

    The losses are those of the run, since samples, weights and random numbers are.

    Args:
        run: the run folder.
        step: the step that went wrong, from 1; by default it is found in the run's errors and metrics.
        precision: repeat on one CPU in float32 or float64; by default in the layout and precision of the run.
        trust_model_code: run the Python code that the run folder names as its model.
        on_event: gets progress.

    Raises UserError if the folder has no run or the run has no such step, and RunFailed if ranks fail for another
    reason.

    >>> import zerofit as zf
    >>> _ = zf.train(zf.Run(model="mlp", data="digits", steps=20, ranks=1, output="runs/mlp"))
    >>> found = zf.replay("runs/mlp")
    >>> found.cause, found.equal_losses
    ('unknown', 20)
    """
    report = Reporter(shielded(on_event) if on_event else None)
    folder = RunFolder(Path(run).absolute())
    folder.refuse_other(run, "give the --output of a run", "RUN")
    refuse_if_held(folder)
    job = Job.read(folder)
    # A run folder may come from somebody else, and its run.json may name code as the model.
    refuse_foreign_code(folder.run, trust_model_code, model=job.run.model, model_args=job.run.model_args)
    losses = _losses(folder)
    last = step or _failed_step(folder, losses, job)
    if not 1 <= last <= max([job.steps, *losses]):
        message = f"--step {last}: the run has {counted(job.steps, 'step')}"
        raise UserError(Problem(kind="steps", message=message, hint="give a step of at least 1", where="--step"))
    start = _start_before(last, folder, job, losses, report)
    report.note(f"replaying steps {start.step + 1 if start else 1} to {last}")
    target = RunFolder(folder.path / "replay" / f"step-{last}{f'-{precision}' if precision else ''}")
    repeated = _job(job, start, last, precision)
    shutil.rmtree(target.path, ignore_errors=True)  # of an earlier replay of this step
    target.logs.mkdir(parents=True)
    repeated.write(target, repeated.ds_config)
    machine = replace(this_machine(), accelerator="cpu") if precision else this_machine()
    site = local_site(repeated, machine)
    build_ops(needed_ops(repeated.ds_config, machine), site.env(""), report.phase)
    with closing(Watch("127.0.0.1")) as watch:
        ranks = run_ranks(target, site, watch, report)["ranks"]
    replayed = _losses(target)
    compared = sorted(replayed.keys() & losses.keys())
    result = cause_of(ranks, [losses[at] for at in sorted(losses) if at < last] + list(replayed.values())[-1:])
    return replace(
        result,
        start=start.checkpoint if start else "",
        start_step=start.step if start else 0,
        compared_losses=len(compared),
        equal_losses=sum(replayed[at] == losses[at] for at in compared),
        precision=precision or job.precision,
        run_dir=str(folder.path),
    )


def _losses(folder: RunFolder) -> dict[int, float]:
    losses = dict[int, float]()
    for record in read_jsonl(folder.metrics) if folder.metrics.is_file() else []:
        step, loss = number_in(record, "step"), number_in(record, "loss")
        if step is not None and loss is not None and math.isfinite(step):
            losses[int(step)] = loss
    return losses


def _failed_step(folder: RunFolder, losses: dict[int, float], job: Job) -> int:
    """Return the step that the ranks' errors name, else the step at which the loss rose.

    Without either, return the step after the last recorded loss, at most the run's last step.
    """
    for text in (str(failure) for _, failure in folder.errors()):
        if named := re.search(r"step (\d{1,9})\b", text) if "nan-loss" in text else None:
            return int(named[1])
    # Not every failed run has an error: the loss may only have risen.
    lowest = math.inf
    for at in sorted(losses):
        if has_risen(losses[at], lowest):
            return at
        lowest = min(lowest, losses[at])
    return min(job.steps, max(losses, default=0) + 1)


def _start_before(
    step: int, folder: RunFolder, job: Job, losses: Mapping[int, float], report: Reporter
) -> Start | None:
    """Return the newest complete checkpoint before a step, else the run's start; None for step 1.

    Raises UserError.
    """
    # An older checkpoint only makes the replay longer.
    for entry in reversed([entry for entry in Store(folder.checkpoints).entries() if entry.step < step]):
        try:
            return find_start(replace(job, run=job.run.model_copy(update={"resume": str(entry.path)})), folder, report)
        except UserError as error:
            report.note(f"{entry.path.name} is not used: {error}")
    if job.start and job.start.step >= step:
        if 1 in losses:  # plan.json has the last start, but the folder's first one was at step 1
            return None
        message = f"the run started at step {job.start.step}, and has no checkpoint before step {step}"
        raise UserError(Problem(kind="steps", message=message, hint="give a later --step", where="--step"))
    return job.start


def _job(job: Job, start: Start | None, last: int, precision: WidePrecision | None) -> Job:
    """Return the job of the replay: the run's job or, with `precision`, a job on one CPU."""
    run = job.run.model_copy(update=_QUIET)
    job = replace(job, run=run, start=start, forecast=None, fit=None, batch=replace(job.batch, limit=0))
    if precision is None:
        return replace(job, replay=ReplayRequest(step=last))
    # One rank computes the same global batch in more accumulation steps, without ZeRO.
    grouped = regroup(job.batch, 1, 1)
    assert grouped  # every batch can run on one rank
    _, batch = grouped
    config = {key: job.ds_config[key] for key in KEPT if key in job.ds_config}
    config |= {"train_batch_size": batch.total, "train_micro_batch_size_per_gpu": batch.micro}
    config |= {"gradient_accumulation_steps": batch.accumulation, "zero_optimization": {"stage": 0}}
    alone = {"precision": "fp32", "ranks": 1, "tensor_parallel": 1, "pipeline": 1, "sequence_parallel": 1}
    return replace(
        job,
        run=run.model_copy(update={**alone, "expert_parallel": 1, "micro_batch_by_rank": None}),
        layout=Layout(dp=1),
        batch=batch,
        ds_config=config,
        start=replace(start, same_layout=False, shares=()) if start else None,
        replay=ReplayRequest(step=last, double=precision == "fp64"),
    )
