"""How evenly the routers of a mixture spread tokens over its experts, for the record of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofit.train.expert_split import expert_layers


class RouterBalance:
    """Counts what routers do in the forwards of a step; where experts are not spread, their loss alone."""

    def __init__(self, module: nn.Module):
        self._counters: list[Any] = [layer.tokens_per_expert for layer in expert_layers(module).values()]
        self._losses: list[Tensor] = []
        self._tokens: list[Tensor] = []  # (layers, experts) of each forward

    def begin(self) -> None:
        """Begin a forward: what evaluations and recomputations in backward have counted is forgotten."""
        for counter in self._counters:
            counter.zero_()

    def end(self, router_loss: Tensor | None) -> None:
        """Note a forward that has just been."""
        if router_loss is not None:
            self._losses.append(router_loss.detach().float())
        if self._counters:
            self._tokens.append(torch.stack(self._counters))

    def figures(self) -> dict[str, Tensor]:
        """Return the figures of the step over all ranks, and begin anew; all ranks call this.

        `router_loss` as it is added to the loss; `expert_load_most` and `_least` are the tokens of the experts with
        most and with fewest in any layer, over an even share.
        """
        losses, tokens = self._losses, self._tokens
        self._losses, self._tokens = [], []
        found: dict[str, Tensor] = {}
        if losses:
            found["router_loss"] = torch.stack(losses).mean() / dist.get_world_size()
            dist.all_reduce(found["router_loss"])
        if tokens:
            counts = torch.stack(tokens).sum(0)
            dist.all_reduce(counts)
            loads = counts / counts.mean(1, keepdim=True)
            found |= {"expert_load_most": loads.max(), "expert_load_least": loads.min()}
        return found
