"""From what a person names, a run's folder or a checkpoint's, to the checkpoint that is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zerofit.checkpoint import manifest as manifests
from zerofit.checkpoint.manifest import Manifest, ManifestError
from zerofit.checkpoint.names import step_of
from zerofit.checkpoint.store import CheckpointEntry, Store
from zerofit.checkpoint.verify import Damage, quick_look, verify
from zerofit.spec.errors import Problem, UserError

CHECKPOINTS = "checkpoints"
HINT = "`zerofit ckpt ls` shows which are whole"


def store_of(path: Path, where: str = "PATH") -> Store | None:
    """The checkpoints of a run's folder, or of the folder that holds them; None where `path` is a checkpoint itself.

    Raises UserError "no-checkpoint" for anything else.
    """
    if path.is_dir() and ((path / manifests.NAME).is_file() or step_of(path.absolute()) is not None):
        return None
    for folder in (path / CHECKPOINTS, path):
        if Store(folder).entries():
            return Store(folder)
    if not path.exists():
        raise _none(f"there is no folder {path}", where)
    raise _none(f"{path} is no checkpoint, and no run's folder that holds one", where)


def locate(
    path: Path,
    where: str = "PATH",
    progress: Callable[[str], None] | None = None,
    on_passed_over: Callable[[CheckpointEntry], None] = lambda _: None,
) -> Path:
    """The checkpoint's folder itself, or a run's newest one that is whole; newer ones go to `on_passed_over`.

    With `progress` every byte is checked, without it only that the files are there in their sizes. Raises UserError
    "no-checkpoint", or "damaged-checkpoint" where a checkpoint is named that is not whole.
    """
    store = store_of(path, where)
    if store is None:
        damage = verify(path, progress) if progress else quick_look(path)[1]
        if damage:
            raise UserError(*(_damaged(path, d, where) for d in damage))
        return path
    if progress:
        entry = store.newest_whole(on_passed_over, progress)
    else:
        entry = next((entry for entry in reversed(store.entries()) if not entry.damage), None)
    if entry is None:
        raise _none(f"every checkpoint in {store.folder} is damaged", where)
    return entry.path


def manifest_of(checkpoint: Path, where: str = "PATH") -> Manifest:
    """The manifest of a checkpoint's folder. Raises UserError."""
    try:
        return manifests.read(checkpoint)
    except ManifestError as error:
        damage = Damage(file=manifests.NAME, kind="manifest", message=str(error))
        raise UserError(_damaged(checkpoint, damage, where)) from None


def _damaged(checkpoint: Path, damage: Damage, where: str) -> Problem:
    message = f"{checkpoint / damage.file} is damaged: {damage.kind}"
    message += f" ({damage.message})" if damage.message else ""
    return Problem(kind="damaged-checkpoint", message=message, hint=f"take another one; {HINT}", where=where)


def _none(message: str, where: str) -> UserError:
    hint = "name a run's folder, or one of its checkpoints/step-... folders"
    return UserError(Problem(kind="no-checkpoint", message=message, hint=hint, where=where))
