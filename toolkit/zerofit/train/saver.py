"""Saving a checkpoint: DeepSpeed writes the files, all ranks sync them, rank 0 checks and makes the checkpoint visible.

Ranks tell each other through small files beside the checkpoint's own (`words/`), not through collectives, so that
writing can go on in the background while the ranks train.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zerofit.checkpoint.store import STATE, FileMark, Manifest, Store, files_of, marks_of
from zerofit.models.inputs import Inputs
from zerofit.spec.errors import Problem
from zerofit.spec.files import sync_file, write_json
from zerofit.spec.run_folder import RunFolder
from zerofit.spec.units import shown_bytes
from zerofit.spec.versions import versions
from zerofit.train import rank_state, shard_index
from zerofit.train.checkpoint_engine import SyncedCheckpointEngine
from zerofit.train.loggers import Events
from zerofit.train.loop import EngineTrainer

WORDS = "words"
POLL_S = 0.02
SPARE_BYTES = 64 << 20  # for metrics, logs and the manifest


class Saver:
    """All ranks call `save` and `wait` at the same steps."""

    def __init__(self, driver: EngineTrainer, inputs: Inputs, folder: RunFolder, events: Events):
        self._driver, self._job, self._events = driver, driver.job, events
        self._inputs, self._folder = inputs, folder
        self._store = Store(folder.checkpoints)
        self._files = SyncedCheckpointEngine(driver.job.layout.zero_stage)
        self._thread: threading.Thread | None = None
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        for engine in shard_index.engines(driver).values():
            engine.checkpoint_engine = self._files
            engine._copy_recovery_script = lambda _: None  # its scripts unpickle anything; `zerofit ckpt` does not

    def save(self, step: int, figures: dict[str, Any], background: bool) -> Problem | None:
        """Save the state after `step` optimizer steps; what went wrong, the same on all ranks.

        In the background the state is copied and written while training goes on; what goes wrong then is an event.
        `figures`: the last record, for the manifest.
        """
        self.wait()
        start = time.monotonic()
        aside = self._store.staging_path(step)
        problem = self._shared(lambda: self._make_room(aside))
        if problem:
            return self._failed(step, problem)
        if background:
            self._files.hold()
        self._write(aside)
        if background:
            held = self._files.release()
            stalled = time.monotonic() - start
            self._thread = threading.Thread(
                target=self._finish_held, args=(held, aside, step, figures, start, stalled), name="save"
            )
            self._thread.start()
            return None
        self._leave_word(aside)
        dist.barrier()
        problem = self._shared(lambda: self._complete(aside, step, figures))
        if problem:
            return self._failed(step, problem)
        self._saved(step, start, time.monotonic() - start)
        return None

    def wait(self) -> None:
        """Until what is being written in the background is visible, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            dist.barrier()

    def _write(self, aside: Path) -> None:
        """DeepSpeed's files and this rank's own."""
        for tag, engine in shard_index.engines(self._driver).items():
            engine.save_checkpoint(str(aside), tag=tag, save_latest=False)
        self._files.save(rank_state.capture(self._driver), aside / "ranks" / f"rank-{self._rank:05}.pt")
        index = aside / "ranks" / f"rank-{self._rank:05}.json"
        index.write_text(json.dumps(shard_index.describe(self._driver)))

    def _leave_word(self, aside: Path) -> None:
        """Once this rank's files are on the disk, say so, or what went wrong."""
        try:
            marks = self._files.marks()
            word: dict[str, Any] = {p.relative_to(aside).as_posix(): vars(mark) for p, mark in marks.items()}
            write_json(aside / WORDS / f"rank-{self._rank:05}.json", {"files": word, "failure": None})
        except OSError as error:
            self._leave_failure(aside, str(error))

    def _leave_failure(self, aside: Path, failure: str) -> None:
        try:
            write_json(aside / WORDS / f"rank-{self._rank:05}.json", {"files": {}, "failure": failure})
        except OSError:  # the disk may be too full for a word: a name takes no room
            (aside / WORDS / f"rank-{self._rank:05}.failed").touch()

    def _finish_held(
        self,
        held: list[tuple[Any, Path]],
        aside: Path,
        step: int,
        figures: dict[str, Any],
        start: float,
        stalled: float,
    ) -> None:
        """In a thread of its own: what `save` does after the copies are taken."""
        try:
            self._files.write_held(held)
            self._leave_word(aside)
        except Exception as error:  # else rank 0 would wait for this rank's word forever
            traceback.print_exc()
            self._leave_failure(aside, f"{type(error).__name__}: {error}")
        if self._rank != 0:
            return
        problem = self._complete(aside, step, figures)
        if problem:
            self._failed(step, problem)
        else:
            self._saved(step, start, stalled)

    def _complete(self, aside: Path, step: int, figures: dict[str, Any]) -> Problem | None:
        """Rank 0: gather what all ranks have written, write the manifest, make the checkpoint visible, prune."""
        try:
            marks = self._gather(aside)
            shutil.rmtree(aside / WORDS)
            (aside / "latest").write_text(STATE)  # with it the folder is one that DeepSpeed's own tools read
            others = [name for name in files_of(aside) if name not in marks]
            marks |= _synced_marks(aside, others)
            self._manifest(step, figures, marks).write(aside)
            self._store.make_visible(step)
            self._store.prune(self._job.run.keep_last, self._job.run.keep_every)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            return _disk_problem(str(error), self._folder.checkpoints)
        return None

    def _gather(self, aside: Path) -> dict[str, FileMark]:
        """Marks of the files of all ranks, once each has left its word. Raises OSError with the first failure."""
        marks: dict[str, FileMark] = {}
        for rank in range(self._world):
            word, failed = (aside / WORDS / f"rank-{rank:05}.{kind}" for kind in ("json", "failed"))
            while not word.exists():
                if failed.exists():
                    raise OSError(f"rank {rank} could not write")
                time.sleep(POLL_S)
            said = json.loads(word.read_text())
            if said["failure"]:
                raise OSError(f"rank {rank}: {said['failure']}")
            marks |= {name: FileMark(**mark) for name, mark in said["files"].items()}
        return marks

    def _manifest(self, step: int, figures: dict[str, Any], marks: dict[str, FileMark]) -> Manifest:
        return Manifest(
            step=step,
            samples=self._job.samples_after(step),
            world_size=self._world,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            job=self._job,
            inputs=self._inputs,
            figures=figures,
            files=dict(sorted(marks.items())),
        )

    def _make_room(self, aside: Path) -> Problem | None:
        """The folder aside, unless the disk has no room for one more checkpoint."""
        self._folder.checkpoints.mkdir(exist_ok=True)
        known = [entry.manifest.total_bytes for entry in self._store.entries() if entry.manifest]
        needed = known[-1] if known else self._job.facts.checkpoint_bytes(self._job.run.precision or "fp32")
        free = shutil.disk_usage(self._folder.checkpoints).free
        if free < needed + SPARE_BYTES:
            spare = f"beside {shown_bytes(SPARE_BYTES)} for logs and metrics"
            reason = f"it takes about {shown_bytes(needed)} {spare}, and {shown_bytes(free)} are free"
            return _disk_problem(reason, self._folder.checkpoints)
        for part in ("ranks", WORDS):
            (aside / part).mkdir(parents=True)
        return None

    def _shared(self, work: Any) -> Problem | None:
        """What rank 0's work gives, on all ranks."""
        answer: list[Problem | None] = [None]
        if self._rank == 0:
            try:
                answer = [work()]
            except OSError as error:
                answer = [_disk_problem(str(error), self._folder.checkpoints)]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _failed(self, step: int, problem: Problem) -> Problem:
        self._events("save-failed", step=step, text=f"{problem.message}; {problem.hint}")
        return problem

    def _saved(self, step: int, start: float, stalled: float) -> None:
        self._events("saved", step=step, save_s=time.monotonic() - start, stalled_s=stalled)


def _synced_marks(folder: Path, names: list[str]) -> dict[str, FileMark]:
    for name in names:
        sync_file(folder / name)
    return marks_of(folder, names)


def _disk_problem(reason: str, folder: Path) -> Problem:
    return Problem(
        kind="save-failed",
        message=f"the checkpoint could not be saved: {reason}",
        hint="make room on the disk, lower --keep-last, or name another --output; older checkpoints are untouched",
        where=str(folder),
    )
