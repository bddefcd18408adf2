"""What a source of images hands over."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.data.base import Dataset


@dataclass(frozen=True, kw_only=True)
class OpenedImages:
    """Two splits of square images and the facts a model's shape depends on."""

    train: Dataset
    valid: Dataset
    channels: int
    size: int  # pixels
    classes: int
    bad: tuple[str, ...] = ()  # files that were skipped
    notes: tuple[str, ...] = ()
