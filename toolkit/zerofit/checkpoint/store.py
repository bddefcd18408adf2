"""Checkpoints on disk: manifests, verification, creation and removal.

A checkpoint is written to a staging folder, synced, and made visible by one rename. So all checkpoints in
`Store.entries` are complete, even if processes are killed at any time; only later damage is possible.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, TypeAdapter

from zerofit.checkpoint.direct_file import PIECE, DirectFile
from zerofit.checkpoint.foreign import foreign_at, other_format
from zerofit.features.optimizers import of_json, saved_bytes
from zerofit.models.checksums import WORD
from zerofit.models.inputs import Inputs, inputs_from_dict, inputs_to_dict
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import field_data, stays_inside, sync_folder, write_text
from zerofit.spec.foreign import Unreadable, read_json, shaped
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.run_folder import Job

# Names in a run's checkpoints/ folder; only the first is a checkpoint that a run resumes from:
#
#     step-00000100             complete: written, synced, hashed, then renamed
#     .saving-step-00000100     being written, or left over after a kill
#     .leaving-step-00000100    being deleted
#     step-00000100.put-by-1    archived, because a run from an earlier step wrote the same step again
FORMAT = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # folder in a run's folder
STATE = "state"  # DeepSpeed's tag of the engine's files; a GAN's second engine has another
PREFIX = "step-"
STAGING = ".saving-"  # being written, or left over after a kill
DELETING = ".leaving-"
HINT = "`zerofit ckpt ls` shows which are complete"
THREADS = 4  # threads; hashing releases the GIL, but more threads would wait for the disk
QUIET_S = 2.0  # seconds of verification before progress is shown

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


def expected_bytes(job: Job) -> int:
    """Estimate the bytes of a job's checkpoint: weights, master weights, optimizer states."""
    optimizer = of_json(job.ds_config.get("optimizer", {}).get("type"))
    element_bytes = ELEMENT_BYTES[job.precision]
    return sum(saved_bytes(optimizer, job.facts.trained_parameters, job.layout.zero_stage, element_bytes))


class ManifestError(ValueError):
    """A manifest that is missing, invalid, or changed."""


@dataclass(frozen=True, kw_only=True)
class FileMark:
    """The size of a file, and the XXH3 128-bit hash (hexadecimal) of its bytes."""

    bytes: Count
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """The identity of weights that a checkpoint or folder of adapters needs but lacks.

    It prevents the use of other weights.
    """

    parameters: int  # elements
    dtype: str  # in training: "float32", "bfloat16" or "float16"
    checksum: str  # checksum of all names and values; independent of the layout


def checksum_text(total: int) -> str:
    """Return the checksum of frozen weights from the sum over all parts (`models.checksums`)."""
    return f"{total % WORD:016x}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint: files with sizes and checksums, and the job. Written last."""

    step: Count  # optimizer steps done
    samples: Count  # samples consumed: the position in the sequence of samples to resume from
    world_size: Count
    created: str  # ISO 8601, UTC
    versions: dict[str, str]  # of zerofit and its main dependencies
    job: Job  # without `start`
    inputs: Inputs  # of the model
    figures: dict[str, Any]  # of the last step's record: loss, lr, ...
    files: dict[str, FileMark]  # by path within the checkpoint, "/" between folders
    frozen: FrozenWeights | None = None  # weights that are not in the files
    format: Count = FORMAT

    @property
    def total_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(mark.bytes for mark in self.files.values())

    def write(self, checkpoint: Path) -> None:
        """Write the manifest with its own checksum, and flush it to the disk."""
        job = self.job.to_dict() | {"inputs": inputs_to_dict(self.inputs)}
        content = field_data(self, "job", "inputs") | {"job": job}
        write_text(checkpoint / MANIFEST, json.dumps({**content, "checksum": checksum_of(content)}, indent=1))


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder. Raises ManifestError."""
    try:
        content = read_json(checkpoint / MANIFEST)
        if content.pop("checksum", None) != checksum_of(content):
            raise ManifestError("manifest.json was changed: its checksum differs")
    except FileNotFoundError:
        raise ManifestError("manifest.json is missing") from None
    except ManifestError:
        raise
    except (OSError, Unreadable) as error:
        raise ManifestError(f"manifest.json cannot be read: {error}") from None
    if content.get("format") != FORMAT:
        version = content.get("format", "none")
        raise ManifestError(f"manifest.json has format {version!r}; this zerofit reads format {FORMAT}")
    try:
        job = content["job"]
        parsed = {"job": Job.from_dict(job), "inputs": inputs_from_dict(job["inputs"])}
        manifest = shaped(content | parsed, TypeAdapter(Manifest))
    except (ValueError, TypeError, KeyError) as error:  # an Unreadable is a ValueError
        first = " ".join(str(error).split())[:200]
        raise ManifestError(f"manifest.json does not describe a checkpoint: {type(error).__name__}: {first}") from None
    if outside := [name for name in manifest.files if not stays_inside(name)]:
        raise ManifestError(f"manifest.json names a file outside the checkpoint: {outside[0]!r}")
    return manifest


def mark_of(path: Path) -> FileMark:
    """Return the size and the hash of a file."""
    digest, size = xxhash.xxh3_128(), 0
    with DirectFile(path) as file:
        while len(part := file.read_bytes(size, PIECE)):
            digest.update(part)
            size += len(part)
    return FileMark(bytes=size, xxh3_128=digest.hexdigest())


def marks_of(folder: Path, names: list[str]) -> dict[str, FileMark]:
    """Return the size and the hash of several files in a folder, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(mark_of, [folder / name for name in names]), strict=True))


def files_of(checkpoint: Path) -> list[str]:
    """List the paths of all files in a checkpoint except its manifest."""
    names = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST)


def checksum_of(content: dict[str, object]) -> str:
    """Return the checksum for a manifest with this content."""
    # The file is read and written again, so the text must not depend on the order of keys or on white space.
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(plain.encode())


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One fault of a checkpoint."""

    file: str  # path within the checkpoint
    kind: str  # missing, truncated (shorter than written), size, changed, unreadable, manifest, misplaced
    message: str = ""


def quick_look(checkpoint: Path) -> tuple[Manifest | None, list[Damage]]:
    """Return the manifest, and damage that shows without reading: missing files, wrong sizes."""
    try:
        manifest = read_manifest(checkpoint)
    except ManifestError as error:
        return None, [Damage(file=MANIFEST, kind="manifest", message=str(error))]
    damage = []
    for name, mark in manifest.files.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            damage.append(Damage(file=name, kind="missing"))
        elif size != mark.bytes:
            kind = "truncated" if size < mark.bytes else "size"
            damage.append(Damage(file=name, kind=kind, message=f"{size} bytes instead of {mark.bytes}"))
    step = step_of(checkpoint)
    if step is not None and step != manifest.step:
        message = f"the folder is named for step {step}, but its manifest is for step {manifest.step}"
        damage.append(Damage(file=MANIFEST, kind="misplaced", message=message))
    return manifest, damage


def verify(checkpoint: Path, progress: Callable[[str], None] | None = None) -> list[Damage]:
    """Read a checkpoint and return all damage; [] if every byte is as it was written.

    After the first two seconds, `progress` gets a text after each file.
    """
    manifest, damage = quick_look(checkpoint)
    if manifest is None:
        return damage
    seen = {d.file for d in damage}
    unread = {name: mark for name, mark in manifest.files.items() if name not in seen}
    done, total, begun = 0, sum(mark.bytes for mark in unread.values()), time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(lambda item: _read(checkpoint, *item), unread.items())
        for changed, mark in zip(results, unread.values(), strict=True):
            damage += changed
            done += mark.bytes
            if progress and time.monotonic() - begun > QUIET_S:
                progress(f"verifying {checkpoint.name} ({done / max(total, 1):.0%} of {total / 2**30:.2f} GiB)")
    return sorted(damage, key=lambda d: d.file)


def _read(checkpoint: Path, name: str, mark: FileMark) -> list[Damage]:
    try:
        is_same = mark_of(checkpoint / name) == mark
    except OSError as error:
        return [Damage(file=name, kind="unreadable", message=str(error))]
    return [] if is_same else [Damage(file=name, kind="changed", message="its content differs from what was written")]


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One visible checkpoint. `damage` is from `quick_look`, which compares no checksums."""

    step: int
    path: Path
    manifest: Manifest | None
    damage: list[Damage]


@dataclass(frozen=True)
class Store:
    """The `checkpoints/` folder of a run."""

    folder: Path

    def entries(self) -> list[CheckpointEntry]:
        """Return all visible checkpoints, sorted by step, including damaged ones."""
        if not self.folder.is_dir():
            return []
        folders = sorted((step, path) for path in self.folder.iterdir() if (step := _own_step(path)) is not None)
        looks = ((step, path, quick_look(path)) for step, path in folders)
        return [CheckpointEntry(step=s, path=p, manifest=manifest, damage=d) for s, p, (manifest, d) in looks]

    def newest_complete(
        self,
        on_damaged: Callable[[CheckpointEntry], None] = lambda _: None,
        progress: Callable[[str], None] | None = None,
    ) -> CheckpointEntry | None:
        """Return the newest undamaged checkpoint. Call `on_damaged` for each newer one."""
        # `verify` reads every byte. The newest one is usually complete, so only one checkpoint is read.
        for entry in reversed(self.entries()):
            damage = entry.damage or verify(entry.path, progress)
            if not damage:
                return entry
            on_damaged(CheckpointEntry(step=entry.step, path=entry.path, manifest=entry.manifest, damage=damage))
        return None

    def staging_path(self, step: int) -> Path:
        """Return the folder in which the checkpoint of a step is written before it becomes visible."""
        return self.folder / f"{STAGING}{folder_name(step)}"

    def make_visible(self, step: int) -> Path:
        """Rename the staging folder to its step's checkpoint. Archive an older one of that name."""
        target, staging = self.folder / folder_name(step), self.staging_path(step)
        # A run that resumed from an earlier step reaches this step again: the older checkpoint is kept under another
        # name, and folders are synced before the rename, since a crash could otherwise show the name without its
        # files.
        self.archive([target] if target.exists() else [])
        sync_folders(staging)
        os.rename(staging, target)
        sync_folder(self.folder)
        return target

    def archive(self, paths: Iterable[Path]) -> list[Path]:
        """Rename checkpoints so that no run resumes from them. Return the new paths."""
        moved = []
        for path in paths:
            number = 1
            while (target := path.with_name(f"{path.name}.put-by-{number}")).exists():
                number += 1
            os.rename(path, target)
            moved.append(target)
        return moved

    def remove_incomplete(self) -> None:
        """Remove checkpoints that a killed run left half written or half deleted.

        Call this only while no run uses the folder.
        """
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((STAGING, DELETING)):
                    shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep_last: int, keep_every: int) -> list[Path]:
        """Delete all checkpoints but the newest `keep_last` and multiples of `keep_every` (0: none).

        Damaged checkpoints are kept, for inspection. Return the deleted paths.
        """
        complete = [entry for entry in self.entries() if not entry.damage]
        # `keep_last` is at least 1 (spec/run.py). For 0 the slice would contain all checkpoints.
        steps = {entry.step for entry in complete[-keep_last:]}
        steps |= {entry.step for entry in complete if keep_every and entry.step % keep_every == 0}
        pruned = [entry.path for entry in complete if entry.step not in steps]
        for path in pruned:
            deleting = path.with_name(DELETING + path.name)
            os.rename(path, deleting)  # so that a kill during deletion does not leave a partial checkpoint
            shutil.rmtree(deleting, ignore_errors=True)
        return pruned


def folder_name(step: int) -> str:
    """Return the name of a step's folder, such as `step-00000100`. These names sort by step."""
    return f"{PREFIX}{step:08}"


def step_of(path: Path) -> int | None:
    """Return the step in a folder's name, or None for other folders."""
    # From step 100,000,000 on, names have more than 8 digits. 18 digits are below 2^63, the limit of `Count`.
    match = re.fullmatch(PREFIX + r"([0-9]{8,18})", path.name)
    return int(match[1]) if match else None


def _own_step(path: Path) -> int | None:
    """Return the result of `step_of`, but None for a universal checkpoint."""
    return None if (path / "zero").is_dir() else step_of(path)


def sync_folders(folder: Path) -> None:
    """Flush a folder and its subfolders to the disk: the names in them, not the files' contents."""
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync_folder(path)


def is_own(path: Path) -> bool:
    """Return whether a path is zerofit's checkpoint, run folder or checkpoints folder."""
    is_checkpoint = path.is_dir() and ((path / MANIFEST).is_file() or _own_step(path.absolute()) is not None)
    return is_checkpoint or any(Store(folder).entries() for folder in (path / CHECKPOINTS, path))


def store_of(path: Path, where: str = "PATH") -> Store | None:
    """Return the store of a run's folder or of its checkpoints folder.

    Returns None for a single checkpoint. Raises UserError "no-checkpoint" for other paths.
    """
    # A folder with a step's name counts as a checkpoint even without a manifest: it is then reported as damaged.
    if path.is_dir() and ((path / MANIFEST).is_file() or step_of(path.absolute()) is not None):
        return None
    for folder in (path / CHECKPOINTS, path):
        if Store(folder).entries():
            return Store(folder)
    if not path.exists():
        raise _no_checkpoint(f"folder {path} does not exist", where)
    found = foreign_at(path)
    message = other_format(path) or "neither a checkpoint nor a run folder with a checkpoint"
    raise _no_checkpoint(f"{path} is {f'{found.name}, which zerofit did not write' if found else message}", where)


def locate(path: Path, where: str = "PATH", *, deep: bool = False, report: Reporter | None = None) -> Path:
    """Return a checkpoint's folder. For a run, return its newest complete checkpoint.

    Newer damaged checkpoints are skipped with a warning. Another program's checkpoint is returned without a check:
    it has no checksums, so only reading its tensors shows damage. With `deep`, every byte is checked. Without it, the
    check covers only whether the files exist and have the right sizes. Raises UserError "no-checkpoint", or
    "damaged-checkpoint" for a named checkpoint that is damaged.
    """
    report = report or Reporter()
    if not is_own(path) and (found := foreign_at(path)):
        return found.path
    store = store_of(path, where)
    if store is None:
        damage = verify(path, report.status) if deep else quick_look(path)[1]
        if damage:
            raise UserError(*(_damage_problem(path, d, where) for d in damage))
        return path
    # cheap checks first: a checkpoint of 100 GB takes minutes to hash, a missing file is seen at once
    for entry in reversed(store.entries()):
        damage = entry.damage or (verify(entry.path, report.status) if deep else [])
        if not damage:
            return entry.path
        kinds = ", ".join(f"{d.file}: {d.kind}" for d in damage[:3])
        report.warning(f"{entry.path} is damaged and skipped ({kinds})")
    raise _no_checkpoint(f"all checkpoints in {store.folder} are damaged", where)


def manifest_of(checkpoint: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder. Raises UserError "damaged-checkpoint"."""
    try:
        return read_manifest(checkpoint)
    except ManifestError as error:
        damage = Damage(file=MANIFEST, kind="manifest", message=str(error))
        raise UserError(_damage_problem(checkpoint, damage, "PATH")) from None


def _damage_problem(checkpoint: Path, damage: Damage, where: str) -> Problem:
    message = f"{checkpoint / damage.file} is damaged: {damage.kind}"
    message += f" ({damage.message})" if damage.message else ""
    return Problem(kind="damaged-checkpoint", message=message, hint=f"use another checkpoint; {HINT}", where=where)


def _no_checkpoint(message: str, where: str) -> UserError:
    hint = "give a run's folder, one of its checkpoints/step-..., or a checkpoint "
    hint += "of DeepSpeed, Accelerate or the Trainer"
    return UserError(Problem(kind="no-checkpoint", message=message, hint=hint, where=where))
