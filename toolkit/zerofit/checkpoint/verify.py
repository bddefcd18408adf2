"""Whether a checkpoint is what was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zerofit.checkpoint.manifest import NAME, THREADS, FileMark, Manifest, ManifestError, mark_of, read
from zerofit.checkpoint.names import step_of

QUIET_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is wrong with a checkpoint."""

    file: str  # path within the checkpoint
    kind: str  # missing, truncated (shorter than written), size, changed, unreadable, manifest, misplaced
    message: str = ""


def quick_look(checkpoint: Path) -> tuple[Manifest | None, list[Damage]]:
    """The manifest, and damage that shows without reading the files: their presence and sizes, the manifest itself."""
    try:
        manifest = read(checkpoint)
    except ManifestError as error:
        return None, [Damage(file=NAME, kind="manifest", message=str(error))]
    damage = [d for name, mark in manifest.files.items() if (d := _look(checkpoint, name, mark))]
    step = step_of(checkpoint)
    if step is not None and step != manifest.step:
        message = f"the folder is named for step {step}, its manifest is of step {manifest.step}"
        damage.append(Damage(file=NAME, kind="misplaced", message=message))
    return manifest, damage


def verify(checkpoint: Path, progress: Callable[[str], None] | None = None) -> list[Damage]:
    """Everything that is wrong with a checkpoint; empty if each byte is what was written.

    Reads all of it. `progress` is called with a text after each file, once it has taken two seconds.
    """
    manifest, damage = quick_look(checkpoint)
    if manifest is None:
        return damage
    seen = {d.file for d in damage}
    left = {name: mark for name, mark in manifest.files.items() if name not in seen}
    done, total, begun = 0, sum(mark.bytes for mark in left.values()), time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        for found, mark in zip(
            pool.map(lambda item: _read(checkpoint, *item), left.items()), left.values(), strict=True
        ):
            damage += found
            done += mark.bytes
            if progress and time.monotonic() - begun > QUIET_S:
                progress(f"verifying {checkpoint.name} ({done / max(total, 1):.0%} of {total / 2**30:.2f} GiB)")
    return sorted(damage, key=lambda d: d.file)


def _look(checkpoint: Path, name: str, mark: FileMark) -> Damage | None:
    path = checkpoint / name
    if not path.is_file():
        return Damage(file=name, kind="missing")
    size = path.stat().st_size
    if size == mark.bytes:
        return None
    kind = "truncated" if size < mark.bytes else "size"
    return Damage(file=name, kind=kind, message=f"{size} bytes, written were {mark.bytes}")


def _read(checkpoint: Path, name: str, mark: FileMark) -> list[Damage]:
    try:
        same = mark_of(checkpoint / name) == mark
    except OSError as error:
        return [Damage(file=name, kind="unreadable", message=str(error))]
    return [] if same else [Damage(file=name, kind="changed", message="its bytes are not those that were written")]
