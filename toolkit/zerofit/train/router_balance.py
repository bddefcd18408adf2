"""Balance of a mixture of experts: how evenly its routers spread tokens, for the metrics of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofit.train.expert_split import expert_layers
from zerofit.train.process_group import rank_device


class RouterBalance:
    """Counts tokens per expert in the forwards of a step; only the routers' loss if experts are not spread."""

    def __init__(self, module: nn.Module, group: Any, shared: bool = False):
        """`group`: the ranks that hold the same layers; `shared`: whether only some ranks record losses."""
        self._group, self._shared = group, shared
        self._counters: list[Any] = [layer.tokens_per_expert for layer in expert_layers(module).values()]
        self._losses: list[Tensor] = []
        self._tokens: list[Tensor] = []  # (layers, experts) of each forward

    def begin(self) -> None:
        """Begin a forward: forget tokens counted in evaluations and in recomputation during backward."""
        for counter in self._counters:
            counter.zero_()

    def end(self) -> None:
        """Record the forward that has just ended."""
        if self._counters:
            self._tokens.append(torch.stack(self._counters))

    def note(self, router_loss: Tensor) -> None:
        """Record the routers' part of a forward's loss."""
        self._losses.append(router_loss.detach().float())

    def figures(self) -> dict[str, Tensor]:
        """Return the step's figures over all ranks and reset; all ranks call this.

        `router_loss` as added to the loss; `expert_load_most` and `_least`: tokens of the experts with the most and the
        fewest in any layer, over an even share.
        """
        losses, tokens = self._losses, self._tokens
        self._losses, self._tokens = [], []
        found: dict[str, Tensor] = {}
        if losses or self._shared:
            sums = torch.tensor([0.0, len(losses)], device=rank_device())
            sums[0] = sum(losses)
            dist.all_reduce(sums)
            found["router_loss"] = sums[0] / sums[1]
        if tokens:
            counts = torch.stack(tokens).sum(0)
            dist.all_reduce(counts, group=self._group)
            loads = counts / counts.mean(1, keepdim=True)
            extremes = torch.stack([loads.max(), -loads.min()])
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            found |= {"expert_load_most": extremes[0], "expert_load_least": -extremes[1]}
        return found
