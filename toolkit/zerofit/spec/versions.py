"""Which versions of what a run stands on."""

from __future__ import annotations

import importlib.metadata

NAMES = ("zerofit", "torch", "torchvision", "deepspeed", "transformers", "accelerate")


def versions() -> dict[str, str]:
    """Installed versions by distribution."""
    return {name: importlib.metadata.version(name) for name in NAMES}
