"""Keep the values of small tensors that a model's constructor computes with, e.g. drop path rates of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributions import Distribution

MOST = 1024  # elements: as many layers as a model has


def small_values() -> None:
    """Let fakes on the CPU keep the values of small tensors; torch keeps only those of scalars.

    Hiera sums the depths of its stages, and many models space rates evenly, so other values would give other models.
    (torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT, torch.linspace, torch.distributions)
    """
    original = torch.linspace

    def linspace(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, FakeTensor) and made.device.type == "cpu" and made.numel() <= MOST:
            with unset_fake_temporarily():
                made.constant = original(*args, **kwargs)
        return made

    Distribution._validate_args = False  # Gemma 3n makes a distribution in each forward; its checks read values
    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST
    torch.linspace = linspace
