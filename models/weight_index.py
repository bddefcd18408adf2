"""List the files of weights in a model's folder, from its index of shards if it has one."""

from __future__ import annotations

from pathlib import Path

from zerofit.spec.files import stays_inside
from zerofit.spec.foreign import Unreadable, read_json

INDEX = ".index.json"  # suffix of an index of shards
# in transformers' order of preference
NAMES = ("model.safetensors", "model.safetensors" + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)


def weight_names(folder: Path) -> list[str]:
    """Return the names of a folder's weight files, from the index if it has one.

    Returns [] if there are no weights. Shards may be missing. Raises Unreadable for a bad index, and for a file outside
    the folder.
    """
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    names = [name] if name else []
    if name and name.endswith(INDEX):
        try:
            files = read_json(folder / name).get("weight_map")
        except OSError as error:
            raise Unreadable(f"it cannot be read: {error.strerror}") from None
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise Unreadable("it is not an index of shards: weight_map must map each tensor to a file name")
        names = sorted(set(files.values()))
    for file in names:
        if not stays_inside(file) or not _is_inside(folder, file):
            raise Unreadable(f"{file!r} is outside the folder; copy it there, or link the entire folder")
    return names


def _is_inside(folder: Path, name: str) -> bool:
    """Return whether a file is in its folder after links are followed.

    In the hub's cache, files in REPOSITORY/snapshots/REVISION are links to REPOSITORY/blobs. These count as inside.
    """
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return any((folder / name).resolve().is_relative_to(path) for path in homes)
