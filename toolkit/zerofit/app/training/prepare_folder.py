"""Find the run folder of a start and the checkpoint to resume from, and archive earlier leftovers."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from pathlib import Path

from zerofit.checkpoint.compatible import obstacles, same_storage
from zerofit.checkpoint.foreign import Foreign, foreign_at
from zerofit.checkpoint.store import CheckpointEntry, Manifest, Store, is_own, quick_look, verify
from zerofit.features.optimizers import of_json
from zerofit.launch.run_lock import refuse_if_held
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write, number_in, parse_line
from zerofit.spec.foreign import read_json, refused
from zerofit.spec.partial_training import PART_FIELDS
from zerofit.spec.run import Run, RunRequest, flag
from zerofit.spec.run_folder import Job, RunFolder, Start

# What a start in a used folder resumes from: the newest checkpoint whose bytes verify. Newer, damaged checkpoints get a
# note. All fields that decide the weights must be equal (SAME_RUN); other changes are notes. If the layout has
# changed, each rank assembles its part from all shards; else DeepSpeed loads its own files (`same_storage`).
MODEL = ("model", "model_args")
SAME_RUN = (*MODEL, *PART_FIELDS, "loss", "data", "text_field", "tokenizer", "chat_template", "packing", "image_size")
SAME_RUN += ("seq_len", "stream", "seed", "optimizer")
UNREMARKABLE = {"output", "resume", "ds_config", "steps", "epochs", "ranks", "log_every", "tensorboard", "wandb"}
UNREMARKABLE |= {"profile", "profile_ranks", "check_loss", "record_memory"}
# all that a start has written if it was killed before plan.json was complete
BEGUN = re.compile(r"logs|(run|profile)\.json|\.(run|profile|plan)\.json\.\w+")
ADAMS = ("adam", "adamw")  # optimizers whose states are called exp_avg and exp_avg_sq by other programs


def find_folder(run: Run) -> RunFolder:
    """Return the run folder: new, empty, left by a killed start, or of a run that may resume.

    Raises UserError for any other folder.
    """
    if run.output is None:
        model = Path(run.model.removesuffix("/config.json")).name
        name = re.sub(r"[^\w.-]+", "-", f"{model}-{run.data or 'default'}").strip("-")[:80]
        mark = secrets.token_hex(2)  # a sweep starts several runs of a model in the same second
        return RunFolder((Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{mark}").absolute())
    path = run.output.absolute()
    folder = RunFolder(path)
    # [""] stands for a path that is a file
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else [""] * path.exists()
    # A start that was killed before plan.json was complete leaves only files that the next start writes again.
    if not names or (folder.lock.exists() and all(map(BEGUN.fullmatch, names))):
        return folder
    if run.resume != "never" and folder.plan.is_file():
        refuse_if_held(folder)
        return folder
    what = "contains another run" if folder.run.exists() else "exists and is not an empty folder"
    hint = "use another folder, or remove this one"
    if folder.plan.is_file():
        hint = "--resume auto resumes it; for a new run use another folder"
    raise UserError(Problem(kind="output-exists", message=f"{path} {what}", hint=hint, where="--output"))


def resuming(request: RunRequest, folder: RunFolder) -> RunRequest:
    """Return the request for the next start in this folder.

    It resumes from the newest checkpoint, if there is one.
    """
    request = request.updated(output=folder.path)
    if request.run.resume == "never" or Store(folder.checkpoints).entries():
        return request.updated(resume="auto")
    return request


def make_ready(folder: RunFolder, start: Start | None) -> list[str]:
    """Archive what earlier starts left in this folder, and return notes for the user.

    Records of steps that will be repeated move to logs/, and checkpoints of such steps are renamed. Error files,
    the earlier result and incomplete checkpoints are deleted. Call this only while no rank runs in the folder.
    """
    failures = [*folder.logs.glob("rank-*.error.json"), *folder.logs.glob("rank-*.memory.pickle")]
    for path in [*failures, folder.stopped, folder.stop_request]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder.model_parts, ignore_errors=True)
    step = start.step if start else 0
    store = Store(folder.checkpoints)
    store.remove_incomplete()
    later = [entry.path for entry in store.entries() if entry.step > step]
    notes = [f"{old.name} renamed to {new.name}" for old, new in zip(later, store.archive(later), strict=True)]
    folder.result.unlink(missing_ok=True)
    return notes + _cut_metrics(folder, step)


def _cut_metrics(folder: RunFolder, step: int) -> list[str]:
    """Keep the records of steps up to `step` in metrics.jsonl. Move all other lines to logs/."""
    if not folder.metrics.exists():
        return []
    done, undone = list[bytes](), list[bytes]()
    for line in folder.metrics.read_bytes().splitlines(keepends=True):
        line_step = number_in(parse_line(line) or {}, "step")
        # A killed rank may leave a last line without its end, or without a step.
        if line.endswith(b"\n") and line_step is not None and line_step <= step:
            done.append(line)
        else:
            undone.append(line)
    if not undone:
        return []
    number = 1
    while (archive := folder.logs / f"metrics-undone-{number}.jsonl").exists():
        number += 1
    # The archive is written first, so that no record is lost if this process is killed in between.
    archive.write_bytes(b"".join(undone))
    with atomic_write(folder.metrics) as file:
        file.write(b"".join(done))
    return [f"moved {len(undone)} records of steps after step {step} to {archive.relative_to(folder.path)}"]


def find_start(job: Job, folder: RunFolder, report: Reporter) -> Start | None:
    """Find and verify the checkpoint from which this job resumes; None for a start at step 1.

    `report` gets notes about damaged checkpoints and changed settings. Raises UserError if the job cannot resume.
    """
    resume = job.run.resume
    if resume == "never" or (resume == "auto" and not folder.plan.exists()):
        return None
    # The folder may have another run. It must not be continued, or overwritten, by accident.
    if resume == "auto":
        with refused(folder.run):
            former = read_json(folder.run)
        _refuse_another_run(former, job, folder, SAME_RUN)
        entry = _newest(folder.checkpoints, report)
        if entry is None:
            report.note(f"no checkpoint in {folder.path} yet: training starts at step 1")
            return None
    elif not is_own(Path(resume)) and (foreign := foreign_at(Path(resume).absolute())):
        return _start_from_foreign(foreign, job, report)
    else:
        entry = _named_checkpoint(Path(resume).absolute(), report)
    assert entry.manifest is not None
    return _start_from(entry.path, entry.manifest, job, folder, report)


def _newest(checkpoints: Path, report: Reporter) -> CheckpointEntry | None:
    damaged: list[CheckpointEntry] = []

    def on_damaged(entry: CheckpointEntry) -> None:
        damaged.append(entry)
        first = entry.damage[0]
        report.note(f"skipping damaged checkpoint {entry.path}: {first.file}: {first.kind} {first.message}".rstrip())

    newest = Store(checkpoints).newest_complete(on_damaged, report.status)
    if newest is None and damaged:
        message = f"all checkpoints in {checkpoints} are damaged: {', '.join(e.path.name for e in damaged)}"
        hint = "`zerofit ckpt verify` lists the damage; to start over use --resume never and another --output"
        raise UserError(Problem(kind="checkpoint-damaged", message=message, hint=hint, where=str(checkpoints)))
    return newest


def _named_checkpoint(path: Path, report: Reporter) -> CheckpointEntry:
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not (path / "manifest.json").exists() and path.is_dir():
        entry = _newest(path, report)
        if entry:
            return entry
    # A named checkpoint must be complete: falling back to an older one would surprise whoever named it.
    manifest, _ = quick_look(path)
    damage = verify(path, report.status)
    if damage or manifest is None:
        first = damage[0]
        message = f"{path} is not a complete checkpoint: {first.file}: {first.kind} {first.message}".rstrip()
        hint = "set --resume to a run folder or one of its checkpoints/step-* (listed by `zerofit ckpt ls`)"
        raise UserError(Problem(kind="checkpoint-damaged", message=message, hint=hint, where="--resume"))
    return CheckpointEntry(step=manifest.step, path=path, manifest=manifest, damage=[])


def _start_from_foreign(foreign: Foreign, job: Job, report: Reporter) -> Start:
    """Return the start from another program's checkpoint. Raises UserError."""
    from zerofit.checkpoint.foreign_facts import facts_of, verify_foreign
    from zerofit.checkpoint.full_state import FullState

    if damage := verify_foreign(foreign, report.status):
        message = f"{foreign.path} is damaged: {damage[0].file}: {damage[0].kind} {damage[0].message}".rstrip()
        hint = "`zerofit ckpt verify` lists all damage; use an older checkpoint"
        raise UserError(Problem(kind="checkpoint-damaged", message=message, hint=hint, where="--resume"))
    facts, state = facts_of(foreign), FullState(foreign.path, run=job.run)
    step, problems = state.counters["global_steps"], Problems()
    # The files contain no loss, so a run that trains no step would have none to report.
    if step >= job.steps:
        message = f"{foreign.path} is at step {step}, which leaves nothing to train with --steps {job.steps}"
        problems.add("steps", message, "raise --steps, or resume an older checkpoint", "--steps")
    kinds = {kind for name in state.names for kind in state.kinds(name)}
    entry = of_json(str(job.ds_config.get("optimizer", {}).get("type", "")).lower())
    if "exp_avg" in kinds and (entry is None or entry.name not in ADAMS):
        message = f"{foreign.path} has the states of Adam, but this run trains with {job.run.optimizer}"
        problems.add("optimizer", message, "use --optimizer adamw", "--optimizer")
    problems.raise_if_any()
    report.note(f"resuming from {facts.name}")
    for note in state.notes:
        report.note(f"{foreign.path}: {note}; the optimizer starts with fresh states")
    # The groups of the files name all settings of Adam; a run's JSON may leave out those that are Adam's defaults.
    defaults = {"betas": [0.9, 0.999]} if "exp_avg_sq" in kinds else {}  # of Adam (deepspeed/ops/adam)
    for name, new in (defaults | job.ds_config.get("optimizer", {}).get("params", {})).items():
        saved = [group.settings[name] for group in state.groups if name in group.settings]
        saved = [list(value) if isinstance(value, tuple) else value for value in saved]
        if name != "lr" and saved and new not in saved:  # of lr the files have the scheduled value
            report.note(f"the optimizer's {name} is now {new} (was {saved[0]})")
    samples = state.counters["global_samples"] or step * job.batch.total
    report.note(f"the checkpoint has no random states and no sample order: training continues at sample {samples:,}")
    return Start(checkpoint=str(foreign.path), step=step, samples=samples, same_layout=False)


def _start_from(checkpoint: Path, manifest: Manifest, job: Job, folder: RunFolder, report: Reporter) -> Start:
    old, new = manifest.job.run.model_dump(mode="json"), job.run.model_dump(mode="json")
    _refuse_another_run(old, job, folder, (*MODEL, *PART_FIELDS))
    problems = obstacles(manifest.job, job)
    if manifest.step > job.steps:
        message = f"{checkpoint} is at step {manifest.step}, past --steps {job.steps}"
        problems.append(Problem(kind="steps", message=message, hint="raise --steps, or resume an older checkpoint"))
    if problems:
        raise UserError(*problems)
    same = same_storage(manifest.job, job)
    changed = [name for name in new if name not in UNREMARKABLE and old[name] != new[name]]
    for name in changed:
        report.note(f"{flag(name)} is now {new[name]} (was {old[name]})")
    if not same:
        report.note(f"the layout changes from {manifest.job.layout} to {job.layout}")
    was, batch = manifest.job.batch, job.batch
    # Measured shares of the same batch stay valid, so a resume does not measure again.
    same_batch = batch.limit and (was.limit, was.dp, was.micro) == (batch.limit, batch.dp, batch.micro)
    return Start(
        checkpoint=str(checkpoint),
        step=manifest.step,
        samples=manifest.samples,
        same_layout=same,
        shares=was.by_rank if same_batch else (),
    )


def _refuse_another_run(old: dict[str, object], job: Job, folder: RunFolder, fields: tuple[str, ...]) -> None:
    new = job.run.model_dump(mode="json")
    old = Run().model_dump(mode="json") | old  # runs of older versions lack some fields
    changed = [name for name in fields if old[name] != new[name]]
    if changed:
        what = ", ".join(f"{flag(name)} was {old[name]}, now {new[name]}" for name in changed)
        message = f"{folder.path} contains another run: {what}"
        hint = "use another --output; `--resume CHECKPOINT --output NEW` trains the checkpoint's weights on other data"
        raise UserError(Problem(kind="output-exists", message=message, hint=hint, where="--output"))
