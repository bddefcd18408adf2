"""Name the files of cached results, which stay valid until inputs, code or libraries change."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path

from zerofit.spec.files import cache_root
from zerofit.spec.local_machine import versions

ROOT = Path(__file__).parents[2]  # the package


def result_file(folder: str, key: object, stem: str = "") -> Path:
    """Return the file for the result of `key` (plain data).

    Its name changes with the versions of code and libraries.
    """
    text = json.dumps([key, versions(), code_digest()], sort_keys=True, default=str)
    return cache_root() / folder / f"{stem}{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@cache
def code_digest(root: Path = ROOT) -> str:
    """Return a hash of all code and data of the package."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(root, followlinks=True):  # models/ may be a link
        folders.sort()
        for name in sorted(files):
            if name.endswith((".py", ".json", ".yaml")):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
