"""A model that no simulation can run."""

from __future__ import annotations

import torch
from torch import nn


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * 224 * 224, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(1))[x.flatten(1).sum(1).nonzero().squeeze(1)]


def looks_at_values() -> nn.Module:
    return LooksAtValues()


class AsksForAValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * 224 * 224, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.flatten(1))
        return y if (y > 0).all() else -y
