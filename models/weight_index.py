"""Files of weights in a model's folder, and the index of several: which there are, and that they lie in the folder."""

from __future__ import annotations

from pathlib import Path

from zerofit.spec.files import stays_inside
from zerofit.spec.foreign import Unreadable, read_json

INDEX = ".index.json"  # of several files
# in the order in which transformers takes them
NAMES = ("model.safetensors", "model.safetensors" + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files that hold a folder's weights, of shards those that its index names; [] for none.

    Shards may lack. Raises Unreadable for an index that is none, and for a file outside of the folder.
    """
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    names = [name] if name else []
    if name and name.endswith(INDEX):
        names = _shard_names(folder / name)
    for one in names:
        if not stays_inside(one) or not _lies_in(folder, one):
            raise Unreadable(f"{one!r} lies outside of the folder; copy it there, or link the whole folder")
    return names


def _shard_names(index: Path) -> list[str]:
    try:
        found = read_json(index).get("weight_map")
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    if not isinstance(found, dict) or not found or not all(isinstance(one, str) for one in found.values()):
        raise Unreadable("it is not an index of shards: weight_map must give each tensor the name of a file")
    return sorted(set(found.values()))


def _lies_in(folder: Path, name: str) -> bool:
    """Return whether a file lies in its folder, where links lead to; the hub's cache links to blobs of the repository.

    A snapshot is REPOSITORY/snapshots/REVISION, whose files are links to REPOSITORY/blobs.
    """
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return any((folder / name).resolve().is_relative_to(one) for one in homes)
