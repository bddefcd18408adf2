"""From what a person names, a run's folder or a checkpoint's, to the checkpoint that is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zerofit.checkpoint import manifest as manifests
from zerofit.checkpoint.manifest import Manifest, ManifestError
from zerofit.checkpoint.store import Entry, Store
from zerofit.checkpoint.verify import quick_look
from zerofit.spec.errors import Problem, UserError

CHECKPOINTS = "checkpoints"


def store_of(path: Path, where: str = "PATH") -> Store | None:
    """The checkpoints of a run's folder, or of the folder that holds them; None where `path` is a checkpoint itself.

    Raises UserError "no-checkpoint" for anything else.
    """
    if (path / manifests.NAME).is_file():
        return None
    for folder in (path / CHECKPOINTS, path):
        if Store(folder).entries():
            return Store(folder)
    if not path.exists():
        raise _none(f"there is no folder {path}", where)
    raise _none(f"{path} is no checkpoint, and no run's folder that holds one", where)


def locate(path: Path, where: str = "PATH", on_passed_over: Callable[[Entry], None] = lambda _: None) -> Path:
    """The checkpoint's folder itself, or a run's newest checkpoint whose files are all there in their sizes.

    Damaged ones that are newer are handed to `on_passed_over`. Raises UserError "no-checkpoint", or
    "damaged-checkpoint" where a checkpoint is named that is not whole.
    """
    store = store_of(path, where)
    if store is None:
        _refuse_damaged(path, where)
        return path
    for entry in reversed(store.entries()):
        if not entry.damage:
            return entry.path
        on_passed_over(entry)
    raise _none(f"every checkpoint in {store.folder} is damaged", where)


def manifest_of(checkpoint: Path, where: str = "PATH") -> Manifest:
    """The manifest of a checkpoint's folder. Raises UserError."""
    try:
        return manifests.read(checkpoint)
    except ManifestError as error:
        hint = "take another checkpoint; `zerofit ckpt ls` shows which are whole"
        problem = Problem(kind="damaged-checkpoint", message=f"{checkpoint}: {error}", hint=hint, where=where)
        raise UserError(problem) from None


def _refuse_damaged(checkpoint: Path, where: str) -> None:
    _, damage = quick_look(checkpoint)
    hint = "take another checkpoint; `zerofit ckpt ls` shows which are whole"
    problems = [
        Problem(
            kind="damaged-checkpoint",
            message=f"{checkpoint / d.file} is damaged: {d.kind}" + (f" ({d.message})" if d.message else ""),
            hint=hint,
            where=where,
        )
        for d in damage
    ]
    if problems:
        raise UserError(*problems)


def _none(message: str, where: str) -> UserError:
    hint = "name a run's folder, or one of its checkpoints/step-... folders"
    return UserError(Problem(kind="no-checkpoint", message=message, hint=hint, where=where))
