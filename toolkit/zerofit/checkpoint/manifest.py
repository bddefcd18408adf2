"""What a checkpoint holds, written last: every file with its size and checksum, and the job that it belongs to."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

FORMAT = 1
NAME = "manifest.json"
CHUNK_BYTES = 1 << 22
THREADS = 4  # hashing lets go of the interpreter; more threads than this wait for the disk


class ManifestError(ValueError):
    """A manifest that is missing, does not parse, or is not what was written."""


@dataclass(frozen=True, kw_only=True)
class FileMark:
    """How a file is known again: its size and the XXH3 128-bit hash of its bytes, in hexadecimal."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts of one checkpoint; `job` is what the ranks were given, so that it can be read far from its run."""

    step: int  # optimizer steps done
    samples: int  # samples consumed: the position in the endless order of samples from which training goes on
    world_size: int
    created: str  # ISO 8601, UTC
    versions: dict[str, str]  # of zerofit and the packages it stands on
    job: dict[str, Any]  # run, layout, batch, steps, facts, ds_config, inputs
    figures: dict[str, Any]  # of the last step's record: loss, lr, ...
    files: dict[str, FileMark]  # by path within the checkpoint, "/" between folders
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(mark.bytes for mark in self.files.values())

    def write(self, checkpoint: Path) -> None:
        """Write it into the checkpoint's folder, with a checksum of itself, and have it on the disk on return."""
        content = asdict(self)
        text = json.dumps({**content, "checksum": _checksum(content)}, indent=1)
        with (checkpoint / NAME).open("w", encoding="utf-8") as file:
            file.write(text)  # to its last byte, so that none can be missing unnoticed
            file.flush()
            os.fsync(file.fileno())


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises ManifestError."""
    try:
        content = json.loads((checkpoint / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError("there is no manifest.json") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"manifest.json cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise ManifestError("manifest.json is not what was written: its checksum differs")
    if content["format"] != FORMAT:
        raise ManifestError(f"manifest.json has format {content['format']}; this zerofit reads format {FORMAT}")
    return Manifest(**{**content, "files": {name: FileMark(**mark) for name, mark in content["files"].items()}})


def mark_of(path: Path) -> FileMark:
    """Size and hash of a file as it can be read now."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(CHUNK_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileMark(bytes=size, xxh3_128=digest.hexdigest())


def marks_of(folder: Path, names: list[str]) -> dict[str, FileMark]:
    """Marks of several files of a folder, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(mark_of, [folder / name for name in names]), strict=True))


def files_of(checkpoint: Path) -> list[str]:
    """All files of a checkpoint but its manifest, by path within it."""
    found = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in found if name != NAME)


def _checksum(content: dict[str, Any]) -> str:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(plain.encode())
