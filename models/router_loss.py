"""Compute the load balancing loss of a mixture whose layers are on several stages.

The loss depends on sums over the routers of all layers (Fedus et al., 2021, equations 4 to 6). So no pipeline stage can
compute a part of the loss alone. The sums are passed on with the hidden states, and their gradients come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import MixtralForCausalLM

Carried = tuple[Tensor, Tensor]  # a layer's output, and the sums over routers so far


# The loss of Switch Transformers (Fedus et al., 2021, equation 4), over the tokens of all layers:
#
#     coefficient * experts * sum over i of f_i * P_i
#
#     f_i  share of the tokens that expert i gets (no gradient)
#     P_i  mean probability that the routers give to expert i
#
# Both are sums over layers divided by the number of rows, so a stage adds its layers' sums and passes them on.
@dataclass(frozen=True)
class RouterLoss:
    """Computes the loss from the sums that `Carrier` collects."""

    coefficient: float
    experts: int
    experts_per_token: int

    def of(self, sums: Tensor) -> Tensor:
        """Return the loss (float32 scalar) for sums (2, experts), as transformers on one device."""
        counts, probabilities = sums[0].detach(), sums[1]
        rows = counts.sum() / self.experts_per_token
        return self.coefficient * self.experts * (counts / rows * (probabilities / rows)).sum()


def router_loss(model: nn.Module) -> RouterLoss | None:
    """Return the loss of a transformers model's routers; None if the model has no such loss."""
    config = getattr(model, "config", None)
    coefficient = getattr(config, "router_aux_loss_coef", 0) if getattr(config, "output_router_logits", False) else 0
    if not coefficient:
        return None
    mixture = cast("MixtralForCausalLM", model)
    return RouterLoss(coefficient, mixture.num_experts, mixture.num_experts_per_tok)


class Carrier(nn.Module):
    """A layer that adds its own router's values to the sums over routers.

    It passes the sums on. They are float32 (2, experts): each expert's number of tokens, and the sum of its
    probabilities.
    """

    def __init__(self, module: nn.Module, loss: RouterLoss):
        super().__init__()
        self.module, self._loss = module, loss
        self._logits: list[Tensor] = []  # (tokens, experts) of the present forward
        for path, part in module.named_modules():
            if path.endswith(".gate"):
                part.register_forward_hook(self._note)

    def forward(self, previous: Tensor | Carried) -> Carried:
        """Run the layer on the previous output and sums. The first carrier has only the output."""
        x, sums = previous if isinstance(previous, tuple) else (previous, None)
        if sums is None:
            sums = torch.zeros(2, self._loss.experts, device=x.device)
        try:
            out = self.module(x)
            return out, sum(map(self._sums, self._logits), sums)
        finally:
            self._logits = []  # also after an exception: checkpointing ends a recomputation with an exception

    def _note(self, gate: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        """Keep a router's logits: the first output (transformers), or the only output (AutoEP)."""
        self._logits.append(out[0] if isinstance(out, tuple) else out)

    def _sums(self, logits: Tensor) -> Tensor:
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.detach().topk(self._loss.experts_per_token, dim=-1).indices.reshape(-1)
        counts = torch.zeros(self._loss.experts, device=logits.device)
        counts.scatter_add_(0, chosen, torch.ones(chosen.shape, device=logits.device))
        return torch.stack([counts, probabilities.float().sum(dim=0)])


def ends(output: Tensor, sums: Tensor) -> Carried:
    """Return both tensors, detached.

    A hook runs the graph's backward once, when the detached `sums` gets a gradient. DeepSpeed runs a backward from each
    tensor that it sends, in order (runtime/pipe/engine.py, `_exec_backward_pass`). So the detached output gets its
    gradient first, and the hook passes both gradients to the graph.
    """
    end, last = output.detach().requires_grad_(), sums.detach().requires_grad_()

    def backward(grad: Tensor) -> None:
        gradients = [(tensor, g) for tensor, g in ((output, end.grad), (sums, grad)) if tensor.requires_grad]
        torch.autograd.backward([tensor for tensor, _ in gradients], [g for _, g in gradients])

    last.register_hook(backward)
    return end, last
