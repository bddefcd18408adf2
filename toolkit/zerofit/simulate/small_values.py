"""Values of the small tensors with which a model's constructor reckons, such as a rate of drop path for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

MOST = 1024  # elements: as many layers as a model has


def small_values() -> None:
    """Let fakes on the CPU keep the values of small tensors: torch keeps those of single numbers that were given.

    Hiera adds up the depths of its stages, and many models space rates evenly: with other values they would be other
    models. (torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT, torch.linspace)
    """
    original = torch.linspace

    def linspace(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, FakeTensor) and made.device.type == "cpu" and made.numel() <= MOST:
            with unset_fake_temporarily():
                made.constant = original(*args, **kwargs)
        return made

    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST
    torch.linspace = linspace
