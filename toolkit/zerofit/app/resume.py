"""The checkpoint that a run resumes from: the newest whole one, if it is this run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerofit.checkpoint.compatible import obstacles, same_storage
from zerofit.checkpoint.store import CheckpointEntry, Manifest, Store, quick_look, verify
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.layout import Layout
from zerofit.spec.load import flag
from zerofit.spec.run_folder import Job, RunFolder, Start

MODEL = ("model", "model_args")
SAME_RUN = (*MODEL, "loss", "data", "text_field", "tokenizer", "image_size", "seq_len", "seed", "optimizer")
UNREMARKABLE = {"output", "resume", "ds_config", "steps", "epochs", "ranks", "log_every", "tensorboard", "wandb"}


def find_start(job: Job, folder: RunFolder, report: Reporter) -> Start | None:
    """Find and verify the checkpoint from which this job goes on; None where it starts at step 1.

    `report` hears notes: damaged checkpoints that are skipped, settings that have changed.
    Raises UserError where there is no way to go on.
    """
    asked = job.run.resume
    if asked == "never" or (asked == "auto" and not folder.plan.exists()):
        return None
    if asked == "auto":
        _refuse_another_run(json.loads(folder.run.read_text()), job, folder, SAME_RUN)
        entry = _newest(folder.checkpoints, report)
        if entry is None:
            report.note(f"{folder.path} holds no checkpoint yet: training begins with step 1")
            return None
    else:
        entry = _named(Path(asked).absolute(), report)
    assert entry.manifest is not None
    return _start(entry.path, entry.manifest, job, folder, report)


def _newest(checkpoints: Path, report: Reporter) -> CheckpointEntry | None:
    damaged: list[CheckpointEntry] = []

    def passed_over(entry: CheckpointEntry) -> None:
        damaged.append(entry)
        first = entry.damage[0]
        report.note(f"{entry.path} is damaged and passed over: {first.file}: {first.kind} {first.message}".rstrip())

    found = Store(checkpoints).newest_whole(passed_over, report.status)
    if found is None and damaged:
        message = f"all checkpoints in {checkpoints} are damaged: {', '.join(e.path.name for e in damaged)}"
        hint = "`zerofit ckpt verify` names what is wrong with each; --resume never with another --output begins anew"
        raise UserError(Problem(kind="checkpoint-damaged", message=message, hint=hint, where=str(checkpoints)))
    return found


def _named(path: Path, report: Reporter) -> CheckpointEntry:
    """Return the checkpoint that --resume names: its own folder, or a run's folder for its newest one."""
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not (path / "manifest.json").exists() and path.is_dir():
        entry = _newest(path, report)
        if entry:
            return entry
    manifest, _ = quick_look(path)
    damage = verify(path, report.status)
    if damage or manifest is None:
        first = damage[0]
        message = f"{path} is not a complete checkpoint: {first.file}: {first.kind} {first.message}".rstrip()
        hint = "give --resume a run folder or one of its checkpoints/step-* (`zerofit ckpt ls` lists them)"
        raise UserError(Problem(kind="checkpoint-damaged", message=message, hint=hint, where="--resume"))
    return CheckpointEntry(step=manifest.step, path=path, manifest=manifest, damage=[])


def _start(checkpoint: Path, manifest: Manifest, job: Job, folder: RunFolder, report: Reporter) -> Start:
    old, new = (one.run.model_dump(mode="json") for one in (manifest.job, job))
    _refuse_another_run(old, job, folder, MODEL)
    found = obstacles(manifest.job, job)
    if manifest.step > job.steps:
        message = f"{checkpoint} has {manifest.step} steps done, and --steps asks for {job.steps} in all"
        found.append(Problem(kind="steps", message=message, hint="raise --steps, or resume an older checkpoint"))
    if found:
        raise UserError(*found)
    same = same_storage(manifest.job, job)
    changed = [name for name in new if name not in UNREMARKABLE and old[name] != new[name]]
    for name in changed:
        report.note(f"{flag(name)} is now {new[name]} (was {old[name]})")
    if not same:
        report.note(f"the layout changes from {_shown(manifest.job.layout)} to {_shown(job.layout)}")
    return Start(checkpoint=str(checkpoint), step=manifest.step, samples=manifest.samples, same_layout=same)


def _refuse_another_run(old: dict[str, Any], job: Job, folder: RunFolder, fields: tuple[str, ...]) -> None:
    new = job.run.model_dump(mode="json")
    other = [name for name in fields if old.get(name) != new[name]]
    if other:
        what = ", ".join(f"{flag(name)} {old.get(name)} there, {new[name]} here" for name in other)
        message = f"{folder.path} holds another run: {what}"
        hint = "name another --output; `--resume CHECKPOINT --output NEW` goes on from its weights with other data"
        raise UserError(Problem(kind="output-exists", message=message, hint=hint, where="--output"))


def _shown(layout: Layout) -> str:
    degrees = layout.as_dict().items()
    return ", ".join(f"{name} {value}" for name, value in degrees if value > 1 or name in ("dp", "zero_stage"))
