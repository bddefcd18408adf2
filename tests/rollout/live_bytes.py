"""Live bytes of torch's tensors on the host, as an independent reference for forecasts."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the live bytes of all tensors that are made while it is active, and their peak."""

    def __init__(self):
        super().__init__()
        self.bytes, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return out

    def free(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.bytes -= size
