"""Where data is kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from zerofit.spec.run import RunSpec


def cache_root() -> Path:
    """The folder for what can be computed again: $ZEROFIT_CACHE, else ~/.cache/zerofit."""
    chosen = os.environ.get("ZEROFIT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "zerofit"


def data_root(run: RunSpec) -> Path:
    """The folder that holds (or gets) torchvision's data sets: --data-root, else ~/.cache/zerofit/data."""
    return run.data_root.expanduser() if run.data_root else Path.home() / ".cache" / "zerofit" / "data"
