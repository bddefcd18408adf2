"""Where zerofit keeps what can be computed again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$ZEROFIT_CACHE, else ~/.cache/zerofit."""
    chosen = os.environ.get("ZEROFIT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "zerofit"
