"""The batch norms of a model, of any dimension."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = ["BatchNorm", "batch_norms"]


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the model's batch norms."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]
