"""Save checkpoints: all ranks write and sync files, and rank 0 verifies and publishes them.

Frozen weights are left out of checkpoints and identified by a checksum.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor

from zerofit.checkpoint.store import (
    STATE,
    FileMark,
    FrozenWeights,
    Manifest,
    Store,
    checksum_text,
    expected_bytes,
    files_of,
    folder_name,
    marks_of,
)
from zerofit.models.checksums import part_checksum
from zerofit.models.dtypes import torch_name
from zerofit.models.inputs import Inputs
from zerofit.models.quantized import source_of_bits
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import sync_file, write_json
from zerofit.spec.local_machine import versions
from zerofit.spec.run_folder import RunFolder
from zerofit.spec.units import shown_bytes
from zerofit.train.callbacks import Callback, EventLog, SavedCheckpoint, overridden
from zerofit.train.checkpoint_engine import SyncedCheckpointEngine
from zerofit.train.shard_index import IndexedShard, build_index, indexed_frozen
from zerofit.train.trainer import EngineTrainer
from zerofit.train.zero_layouts import Engine

# The steps of a save, of which only the last one makes the checkpoint visible:
#
#     all ranks  write their files into .saving-step-N/, sync and hash them, then write acks/rank-R.json
#     rank 0     waits for all acknowledgements, writes manifest.json with all hashes, renames the folder to step-N/
#
# A kill at any moment leaves the staging folder, which the next start removes. The acknowledgements are files, not
# collectives: in the background, collectives would mix with those of the training steps that continue.
ACKS = "acks"
POLL_S = 0.02
SPARE_BYTES = 64 << 20  # for metrics, logs and the manifest
# The checksum is a sum over all numbers, each hashed with its name and position. A sum does not depend on the order, so
# ranks get the same result when they add up their stretches in any layout.
_EXTRAS = (".SCB", ".weight_format")  # of Linear8bitLt


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save in progress."""

    step: int  # optimizer steps done
    staging: Path
    figures: dict[str, object]  # for the manifest
    start: float


class Saver:
    """Saves checkpoints. All ranks must call `save` and `wait` at the same steps."""

    def __init__(
        self,
        trainer: EngineTrainer,
        inputs: Inputs,
        folder: RunFolder,
        events: EventLog,
        callbacks: Sequence[Callback] = (),
    ):
        self._trainer, self._job, self._events = trainer, trainer.job, events
        self._on_save = overridden(callbacks, "on_save")
        self._inputs, self._folder = inputs, folder
        self._store = Store(folder.checkpoints)
        self._files = SyncedCheckpointEngine(trainer.job.layout.zero_stage)
        self._thread: threading.Thread | None = None
        self._frozen: FrozenWeights | None = None
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        for engine in trainer.engines().values():
            engine.checkpoint_engine = self._files
            engine._copy_recovery_script = lambda _: None  # its script unpickles anything, `zerofit ckpt` does not
            if self._job.run.partial:
                leave_out_frozen(engine)

    def save(self, step: int, figures: dict[str, object], background: bool) -> Problem | None:
        """Save the state after `step` optimizer steps. Return the problem of a failure on all ranks.

        `background`: copy the state and write the copy while training continues. A failure is then reported as an
        event. `figures`: the latest metrics record, written to the manifest.
        """
        self.wait()
        save = _Save(step=step, staging=self._store.staging_path(step), figures=figures, start=time.monotonic())
        if self._job.run.partial and self._frozen is None:
            self._frozen = frozen_weights(self._trainer)
        problem = self._on_rank_0(lambda: self._make_staging(save.staging))
        if problem:
            return self._failed(save, problem)
        # Until `take_snapshot`, all writes become copies in host memory. Training continues as soon as they are made.
        if background:
            self._files.begin_snapshot()
        for tag, engine in self._trainer.engines().items():
            trained_only = self._job.run.partial is not None
            engine.save_checkpoint(str(save.staging), tag, save_latest=False, exclude_frozen_parameters=trained_only)
        stem = save.staging / "ranks" / f"rank-{self._rank:05}"
        self._files.save(self._trainer.rank_state(), stem.with_suffix(".pt"))
        self._files.write_text(json.dumps(build_index(self._trainer)), stem.with_suffix(".json"))
        if background:
            snapshot, stalled_s = self._files.take_snapshot(), time.monotonic() - save.start
            self._thread = threading.Thread(target=self._finish, args=(save, snapshot, stalled_s), name="save")
            self._thread.start()
            return None
        self._write_ack(save.staging)
        dist.barrier()  # rank 0 then finds all acknowledgements at once
        problem = self._on_rank_0(lambda: self._complete(save))
        if problem:
            return self._failed(save, problem)
        self._saved(save, time.monotonic() - save.start)
        return None

    def wait(self) -> None:
        """Wait until the background save is complete or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            dist.barrier()  # rank 0 publishes the checkpoint: no rank may go on before

    def _write_ack(self, staging: Path) -> None:
        """Acknowledge that this rank's files are on disk, or report why they are not."""
        try:
            marks = {p.relative_to(staging).as_posix(): vars(mark) for p, mark in self._files.marks().items()}
            write_json(staging / ACKS / f"rank-{self._rank:05}.json", {"files": marks, "failure": None})
        except OSError as error:
            self._write_failure(staging, str(error))

    def _write_failure(self, staging: Path, failure: str) -> None:
        try:
            write_json(staging / ACKS / f"rank-{self._rank:05}.json", {"files": {}, "failure": failure})
        except OSError:  # a full disk may have no room for the reason, but an empty file fits
            (staging / ACKS / f"rank-{self._rank:05}.failed").touch()

    def _finish(self, save: _Save, snapshot: list[tuple[object, Path]], stalled_s: float) -> None:
        """Write the copies in this thread and finish the save. All errors are caught and reported."""
        try:
            self._files.write_snapshot(snapshot)
            self._write_ack(save.staging)
        except Exception as error:  # else rank 0 would wait for this rank's acknowledgement forever
            traceback.print_exc()
            self._write_failure(save.staging, f"{type(error).__name__}: {error}")
        if self._rank != 0:
            return
        try:
            problem = self._complete(save)
            if not problem:
                self._saved(save, stalled_s)
        except Exception as error:
            traceback.print_exc()
            message = f"saving in the background raised {type(error).__name__}: {error}"
            problem = Problem(kind="save-failed", message=message, hint="logs/rank-0.log has the traceback")
        if problem:
            self._failed(save, problem)

    def _complete(self, save: _Save) -> Problem | None:
        """On rank 0, publish the checkpoint when all ranks' files are written, and delete old ones."""
        try:
            marks = self._gather(save.staging)
            shutil.rmtree(save.staging / ACKS)
            (save.staging / "latest").write_text(STATE)  # lets DeepSpeed's own tools read the folder
            # files that DeepSpeed writes itself, past the checkpoint engine
            unhashed = [name for name in files_of(save.staging) if name not in marks]
            for name in unhashed:
                sync_file(save.staging / name)
            marks |= marks_of(save.staging, unhashed)
            Manifest(
                step=save.step,
                samples=self._job.samples_after(save.step),
                world_size=self._world,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                versions=versions(),
                job=self._job,
                inputs=self._inputs,
                figures=save.figures,
                files=dict(sorted(marks.items())),
                frozen=self._frozen,
            ).write(save.staging)
            self._store.make_visible(save.step)
            self._store.prune(self._job.run.keep_last, self._job.run.keep_every)
        except OSError as error:
            shutil.rmtree(save.staging, ignore_errors=True)
            return _problem(str(error), self._folder.checkpoints)
        return None

    def _gather(self, staging: Path) -> dict[str, FileMark]:
        """Wait for all ranks' acknowledgements. Return the marks of their files.

        Raises OSError for a failure of any rank.
        """
        marks: dict[str, FileMark] = {}
        for rank in range(self._world):
            ack, failed = (staging / ACKS / f"rank-{rank:05}.{kind}" for kind in ("json", "failed"))
            while not ack.exists():
                if failed.exists():
                    raise OSError(f"rank {rank} could not write")
                time.sleep(POLL_S)
            answer = json.loads(ack.read_text())
            if answer["failure"]:
                raise OSError(f"rank {rank}: {answer['failure']}")
            marks |= {name: FileMark(**mark) for name, mark in answer["files"].items()}
        return marks

    def _make_staging(self, staging: Path) -> Problem | None:
        """Make the staging folder. Return a problem if there is too little space on the disk."""
        self._folder.checkpoints.mkdir(exist_ok=True)
        # The last checkpoint shows the size best. Before the first save there is only an estimate.
        sizes = [entry.manifest.total_bytes for entry in self._store.entries() if entry.manifest]
        needed = sizes[-1] if sizes else expected_bytes(self._job)
        free = shutil.disk_usage(self._folder.checkpoints).free
        if free < needed + SPARE_BYTES:
            spare = f"plus {shown_bytes(SPARE_BYTES)} for logs and metrics"
            reason = f"needs about {shown_bytes(needed)} {spare}, {shown_bytes(free)} free"
            return _problem(reason, self._folder.checkpoints)
        for part in ("ranks", ACKS):
            (staging / part).mkdir(parents=True)
        return None

    def _on_rank_0(self, work: Callable[[], Problem | None]) -> Problem | None:
        """Run `work` on rank 0, and return its result on all ranks."""
        answer: list[Problem | None] = [None]
        if self._rank == 0:
            try:
                answer = [work()]
            except OSError as error:
                answer = [_problem(str(error), self._folder.checkpoints)]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _failed(self, save: _Save, problem: Problem) -> Problem:
        self._events.save_failed(save.step, f"{problem.message}; {problem.hint}")
        return problem

    def _saved(self, save: _Save, stalled_s: float) -> None:
        if self._rank != 0:
            return
        path, seconds = self._folder.checkpoints / folder_name(save.step), time.monotonic() - save.start
        checkpoint = SavedCheckpoint(step=save.step, path=path, save_s=seconds, stalled_s=stalled_s)
        self._events.on_save(checkpoint)
        for on_save in self._on_save:
            on_save(checkpoint)


def _problem(reason: str, folder: Path) -> Problem:
    message = f"cannot save the checkpoint: {reason}"
    hint = "free some disk space, lower --keep-last, or use another --output; older checkpoints are unchanged"
    return Problem(kind="save-failed", message=message, hint=hint, where=str(folder))


def frozen_weights(trainer: EngineTrainer) -> FrozenWeights:
    """Return checksum, dtype and count of the frozen parameters. All ranks must call this."""
    total, parameters, dtype = 0, 0, torch.float32
    for tag, engine in trainer.engines().items():
        for indexed in indexed_frozen(trainer, engine, tag):
            source = source_of_bits(indexed.shard.parameter)
            if source is not None:  # checksum of the numbers before quantization, counted with the first stretch
                counted = indexed.first and indexed.shard.start == 0 and indexed.shard.numel > 0
                total += (source.checksum or 0) * counted
                parameters += source.elements * counted
                dtype = source.dtype
                continue
            # all ranks must call this, since it may gather
            stretch = _stretch(indexed)
            if indexed.first:
                total += part_checksum(indexed.name, stretch, indexed.shard.start)
                parameters += indexed.shard.numel
            dtype = stretch.dtype
    shared: list[tuple[int, int, str | None]] = [(0, 0, None)] * dist.get_world_size()
    dist.all_gather_object(shared, (total, parameters, torch_name(dtype) if parameters else None))
    dtypes = [name for _, _, name in shared if name]
    return FrozenWeights(
        parameters=sum(count for _, count, _ in shared),
        dtype=dtypes[0] if dtypes else torch_name(dtype),
        checksum=checksum_text(sum(part for part, _, _ in shared)),
    )


def refuse_other_frozen(trainer: EngineTrainer, saved: FrozenWeights | None) -> None:
    """Raise UserError if the frozen weights differ from those of the run that was saved."""
    if saved is None:
        return
    own = frozen_weights(trainer)
    if own.dtype != saved.dtype or own == saved:  # bits of different precisions cannot be compared
        return
    message = f"the frozen weights of {trainer.job.run.model} differ from those of the checkpoint: checksum "
    message += f"{own.checksum} here, {saved.checksum} in the checkpoint"
    hint = "check whether the pretrained model's folder has changed; the checkpoint has only the trained part"
    raise UserError(Problem(kind="other-base", message=message, hint=hint, where="MODEL"))


def leave_out_frozen(engine: Engine) -> None:
    """Keep frozen weights out of DeepSpeed's files."""
    original = engine.module_state_dict

    def module_state_dict(*args: object, **kwargs: object) -> dict[str, object]:
        state = original(*args, **kwargs)
        if isinstance(state, dict):  # a pipeline writes its layers to other files
            # DeepSpeed saves a tied weight under each of its names (engine.py:4013)
            parameters = dict(engine.module.named_parameters(remove_duplicate=False))
            frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
            layers = {name.removesuffix("weight") for name in frozen if source_of_bits(parameters[name]) is not None}
            for name in [name for name in state if name in frozen or _of_bits(name, layers)]:
                del state[name]
        return state

    engine.module_state_dict = module_state_dict


def _of_bits(name: str, layers: set[str]) -> bool:
    """Return whether a name is data that bitsandbytes saves with weights of these layers."""
    layer, separator, _ = name.partition("weight.")
    return (bool(separator) and layer in layers) or (name.endswith(_EXTRAS) and f"{name.rpartition('.')[0]}." in layers)


def _stretch(indexed: IndexedShard) -> Tensor:
    """Return this rank's part of a frozen weight. If it is on NVMe, all ranks gather the weight."""
    shard, parameter = indexed.shard, indexed.shard.parameter
    partitioned: Any = getattr(parameter, "ds_tensor", None)
    if partitioned is not None and partitioned.status is not PartitionedParamStatus.AVAILABLE:
        with GatheredParameters([parameter]):
            return parameter.detach().reshape(-1)[shard.start : shard.start + shard.numel].clone()
    return shard.master.detach().reshape(-1)[shard.offset : shard.offset + shard.numel]
