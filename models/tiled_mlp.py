"""Make MLPs process a long sequence in tiles, and recompute each tile in backward.

An MLP's saved activations are several times as wide as its input. Each token is independent, so tiling does not
change the result.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_TOKENS = "tile_tokens"  # attribute of a tiled MLP


def tile_mlps(model: nn.Module, tokens: int) -> None:
    """Make each block's MLP process `tokens` tokens at a time. Names stay the same."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "mlp":
            vars(module)[_TOKENS] = tokens
            module.forward = types.MethodType(_forward_tiled, module)


def _forward_tiled(self: nn.Module, x: Tensor) -> Tensor:
    # The module's own `forward` is this function, so the original is taken from its class.
    run: Callable[[Tensor], Tensor] = types.MethodType(type(self).forward, self)
    if self.training and torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)  # no dropout
    return torch.cat([run(tile) for tile in x.split(vars(self)[_TOKENS], dim=1)], dim=1)
