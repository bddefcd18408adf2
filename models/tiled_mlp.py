"""MLPs that take a long sequence in tiles, and compute each tile again in backward.

What an MLP keeps for its backward is several times as wide as its input. A token needs no other here, so that the
tiles' results are those of the whole.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_TOKENS = "tile_tokens"  # set on an MLP that takes its input in tiles


def tile_mlps(model: nn.Module, tokens: int) -> None:
    """Let each block's MLP take `tokens` tokens of a sequence at a time. Changes the model, whose names stay."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "mlp":
            vars(module)[_TOKENS] = tokens
            module.forward = types.MethodType(_forward_tiled, module)


def _forward_tiled(self: nn.Module, x: Tensor) -> Tensor:
    """Run the class's forward on hidden states (batch, seq_len, hidden_size), tile by tile."""
    run = types.MethodType(type(self).forward, self)
    if self.training and torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)  # there is no dropout in it
    tiles: list[Any] = [run(tile) for tile in x.split(vars(self)[_TOKENS], dim=1)]
    return torch.cat(tiles, dim=1)
