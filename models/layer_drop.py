"""Make every layer run in models with LayerDrop, which compares a random value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode


class EveryLayer(TorchFunctionMode):
    """Inside this mode, LayerDrop skips no layer.

    LayerDrop would skip a layer if torch.rand([]) is below a threshold. BART, Whisper and wav2vec 2.0 have LayerDrop.
    In transformers before 5.23, LayerDrop calls torch.rand even if the threshold is 0.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Instead of drawing a single random number, return 1, which is never below the threshold."""
        if func is torch.rand and args and args[0] == []:
            return 1.0
        return func(*args, **(kwargs or {}))
