"""How the folders of checkpoints are named."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "step-"
SAVING = ".saving-"  # being written; whatever is left of one after a kill is nobody's
LEAVING = ".leaving-"  # being deleted
STATE = "state"  # the DeepSpeed tag of the engine's files; a GAN's second engine has its own


def folder_name(step: int) -> str:
    """`step-00000100`: sorts by step."""
    return f"{PREFIX}{step:08}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name, None for other folders."""
    match = re.fullmatch(PREFIX + r"(\d{8,})", path.name)
    return int(match[1]) if match else None
