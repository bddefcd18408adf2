"""Models of a user's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def tiny_vit() -> nn.Module:
    """torchvision's Transformer, whose attention uses its projection's weights without calling it."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=8)


def tiny_swin() -> nn.Module:
    """torchvision's Swin, with buffers beside the modules that accelerate takes apart."""
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=8)


def tiny_densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2), 16, num_classes=8)


class Writer(nn.Module):
    """A language model that gives its own loss, and looks one position ahead itself."""

    def __init__(self, ids: int = 90, width: int = 16):
        super().__init__()
        self.embed, self.head = nn.Embedding(ids, width), nn.Linear(width, ids)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return out


class Scale(nn.Module):
    """One number for an image."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(3 * 32 * 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x.flatten(1)).squeeze(1)


class Borrower(nn.Module):
    """Uses another module's weights outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3072, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(x.flatten(1) @ self.first.weight.T))
