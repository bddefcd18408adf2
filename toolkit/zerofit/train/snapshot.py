"""Copies of state dicts in host memory, which are written while training changes the originals."""

from __future__ import annotations

from copy import copy as shallow
from typing import Any

import torch
from torch import Tensor


class Snapshots:
    """Keeps its buffers from one checkpoint to the next: the first touch of memory costs as much as the copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def of(self, value: Any, file: str) -> Any:
        """The same structure with every tensor copied; tensors that are one stay one. `file` names the structure."""
        copies: dict[tuple[int, int, torch.Size, tuple[int, ...]], Tensor] = {}

        def copy(item: Any) -> Any:
            if isinstance(item, Tensor):
                key = (item.data_ptr(), item.storage_offset(), item.shape, item.stride())
                if key not in copies or not item.numel():
                    copies[key] = self._copy(item, (file, len(copies)))
                return copies[key]
            if isinstance(item, dict):
                same = shallow(item)
                same.update((key, copy(part)) for key, part in item.items())
                return same
            if type(item) in (list, tuple):
                return type(item)(copy(part) for part in item)
            return item

        return copy(value)

    def finish(self) -> None:
        """Wait for copies that a device is still making."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _copy(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)
