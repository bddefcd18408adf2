"""LayerDrop where tensors have no values: every layer runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class EveryLayer(TorchFunctionMode):
    """Keeps the layers that LayerDrop would leave out: a model draws a number for each and asks if it is below a share.

    Before 5.23 transformers draws where the share is 0, too. (BART, Whisper, wav2vec 2.0: torch.rand([]))
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a draw of one number with 1, which is below no share."""
        if func is torch.rand and args and args[0] == []:
            return 1.0
        return func(*args, **(kwargs or {}))
