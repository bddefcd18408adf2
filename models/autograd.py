"""Types for autograd functions that are written by hand."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Context(Protocol):
    """What autograd passes to a function's forward and backward.

    A function that sets further attributes declares them in a subclass.
    """

    saved_tensors: tuple[Any, ...]  # what forward has saved: tensors, or None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors until backward, as `saved_tensors`."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Return these outputs without gradients."""
