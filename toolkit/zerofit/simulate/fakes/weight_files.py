"""Open files of weights in a simulation: names, types and shapes, but no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


class WeightFile:
    """A file of weights without its data: its tensors are fakes that are not tracked.

    Real ones are mapped pages of the file, which the kernel can drop, until they are copied or cast.
    """

    def __init__(self, file: Any, *args: Any, **kwargs: Any):
        from safetensors import safe_open

        self._file = safe_open(file, *args, **kwargs)

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the tensors' names."""
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory, in the file's type."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> WeightSlice:
        """Return a tensor's shape and type before it is read."""
        return WeightSlice(self._file.get_slice(name))


class WeightSlice:
    """A tensor in a file of weights before it is read."""

    def __init__(self, lazy: Any):
        self.get_shape: Callable[[], list[int]] = lazy.get_shape
        self.get_dtype: Callable[[], str] = lazy.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        from transformers.modeling_utils import str_to_torch_dtype

        fakes = next(mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, FakeTensorMode))
        with _disable_current_modes(), fakes:
            mapped = torch.empty(self.get_shape(), dtype=str_to_torch_dtype[self.get_dtype()])
        return mapped[index]
