"""A run's checkpoints on the disk: what is there, how a new one appears, which old ones go.

A checkpoint is written under another name, synced, and made visible by one rename. What `entries` lists is therefore
whole at any moment, whatever is killed when, unless something damages it later.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from zerofit.checkpoint.manifest import Manifest
from zerofit.checkpoint.names import LEAVING, SAVING, folder_name, step_of
from zerofit.checkpoint.verify import Damage, quick_look, verify
from zerofit.spec.files import sync_folder


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint that is visible; `damage` is what a quick look finds, without checksums."""

    step: int
    path: Path
    manifest: Manifest | None
    damage: list[Damage]


@dataclass(frozen=True)
class Store:
    """The `checkpoints/` folder of a run."""

    folder: Path

    def entries(self) -> list[CheckpointEntry]:
        """All visible checkpoints by step, damaged ones too."""
        if not self.folder.is_dir():
            return []
        found = sorted((step, path) for path in self.folder.iterdir() if (step := step_of(path)) is not None)
        return [_entry(step, path) for step, path in found]

    def newest_whole(
        self,
        on_damaged: Callable[[CheckpointEntry], None] = lambda _: None,
        progress: Callable[[str], None] | None = None,
    ) -> CheckpointEntry | None:
        """The newest checkpoint of which every byte is as written; those passed over are handed to `on_damaged`."""
        for entry in reversed(self.entries()):
            damage = entry.damage or verify(entry.path, progress)
            if not damage:
                return entry
            on_damaged(CheckpointEntry(step=entry.step, path=entry.path, manifest=entry.manifest, damage=damage))
        return None

    def aside(self, step: int) -> Path:
        """Where the checkpoint of this step is written before it is one."""
        return self.folder / f"{SAVING}{folder_name(step)}"

    def make_visible(self, step: int) -> Path:
        """Turn what lies aside into the checkpoint of its step. What had that name is kept under another one."""
        target = self.folder / folder_name(step)
        self.put_by([target] if target.exists() else [])
        sync_folders(self.aside(step))
        os.rename(self.aside(step), target)
        sync_folder(self.folder)
        return target

    def put_by(self, paths: Iterable[Path]) -> list[Path]:
        """Rename checkpoints so that no run takes them up, and nothing is lost; their new paths."""
        moved = []
        for path in paths:
            number = 1
            while (target := path.with_name(f"{path.name}.put-by-{number}")).exists():
                number += 1
            os.rename(path, target)
            moved.append(target)
        return moved

    def clear_leftovers(self) -> None:
        """Remove what killed runs left half written or half deleted. Only while no run is at work here."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((SAVING, LEAVING)):
                    shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep_last: int, keep_every: int) -> list[Path]:
        """Delete whole checkpoints but the newest `keep_last` and every step that `keep_every` divides (0: none).

        Damaged ones are left alone: a person may want to look at them. Gives the paths that went.
        """
        whole = [entry for entry in self.entries() if not entry.damage]
        kept = {entry.step for entry in whole[-keep_last:]}
        kept |= {entry.step for entry in whole if keep_every and entry.step % keep_every == 0}
        gone = [entry.path for entry in whole if entry.step not in kept]
        for path in gone:
            leaving = path.with_name(LEAVING + path.name)
            os.rename(path, leaving)  # so that a kill in the midst of it leaves no part of a checkpoint visible
            shutil.rmtree(leaving, ignore_errors=True)
        return gone


def _entry(step: int, path: Path) -> CheckpointEntry:
    manifest, damage = quick_look(path)
    return CheckpointEntry(step=step, path=path, manifest=manifest, damage=damage)


def sync_folders(folder: Path) -> None:
    """Have the entries of a folder and of all below it on the disk on return."""
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync_folder(path)
