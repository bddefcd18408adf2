"""Models as users bring them."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


def fingerprint(x: Tensor) -> Tensor:
    """A number for each image that no two of them share."""
    return x.flatten(1).double() @ torch.arange(x[0].numel()).double().sqrt()


class Exploding(nn.Module):
    """A classifier of digits that gives NaN for one sample: the one whose fingerprint is `poison`."""

    def __init__(self, poison: float):
        super().__init__()
        self.poison = poison
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        bad = (fingerprint(x) - self.poison).abs() < 1e-6
        return self.linear(x.flatten(1)) + torch.where(bad, torch.nan, 0.0)[:, None]


class Unequal(nn.Module):
    """A classifier of digits on ranks of unequal speed: a sample takes rank 0 10 ms, rank 1 30 ms."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and not torch.is_grad_enabled():  # as ranks measure
            time.sleep((0.01, 0.03)[dist.get_rank()] * len(x))
        return self.net(x)


class StopRequested(nn.Module):
    """A classifier of digits. When it is evaluated, somebody asks the run to stop, by the file `request`."""

    def __init__(self, request: str):
        super().__init__()
        self.net, self.request = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), Path(request)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.request.parent.exists():
            self.request.touch()
        return self.net(x)


class OwnLoss(nn.Module):
    """A classifier with a loss of its own: the mean of squared distances to a one-hot vector, given as a key."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": functional.mse_loss(out, functional.one_hot(labels, 10).to(out.dtype))}


class Bigrams(nn.Module):
    """A language model that takes labels as transformers' do: aligned with the tokens, shifted inside."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(260, 260)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.table(input_ids)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class Pair(nn.Module):
    """A classifier that gives its logits and something else beside them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.net(x), None


class Hoarding(nn.Module):
    """A classifier of digits that keeps an activation of each training batch."""

    def __init__(self):
        super().__init__()
        self.net, self.kept = nn.Linear(64, 10), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.flatten(1).repeat(1, 66_000)  # above 32 MiB, malloc never reuses freed memory
        if self.training and torch.is_grad_enabled():
            self.kept.append(hidden)
        return self.net(hidden[:, :64])
