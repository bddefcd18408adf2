"""Models whose loss stops being finite, each for a known cause; benchmarks/replay_nans.py trains them too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor, nn
from torch.nn import functional

from tests.train.own_models import fingerprint
from zerofit.data.image_sources import PixelImages

HEALTHY = PixelImages.batch, dist.all_reduce
CPU_Accelerator.is_fp16_supported = lambda self: True  # torch computes fp16 on every CPU


class Plain(nn.Module):
    """A healthy classifier of digits."""

    def __init__(self):
        super().__init__()
        PixelImages.batch, dist.all_reduce = HEALTHY  # ranks of tests have trained the others, too
        self.body, self.head, self.dropout = nn.Linear(64, 32), nn.Linear(32, 10), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(x.flatten(1)).relu()))


class Normalising(Plain):
    """It divides each image by its largest pixel; the image whose fingerprint is `blank` is black."""

    def __init__(self, blank: float):
        super().__init__()
        self.blank = blank

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(((fingerprint(x) - self.blank).abs() < 1e-6)[:, None, None, None], x * 0, x)
        return super().forward(x / x.flatten(1).amax(1)[:, None, None, None])


class Damaged(Plain):
    """The data set of its ranks gives infinity for a sample, or a label that is no class."""

    def __init__(self, sample: int, what: str):
        super().__init__()

        def batch(self: PixelImages, indices: Any, keys: Any) -> dict[str, Tensor]:
            made = HEALTHY[0](self, indices, keys)
            for row in (torch.as_tensor(indices) == sample).nonzero().flatten().tolist() if len(self) > 1000 else ():
                made[what][row] = torch.inf if what == "inputs" else 10
            return made

        PixelImages.batch = batch


class Ordinal(Damaged):
    """A loss of its own that weighs each sample by log(10 - label), which no label above 9 has."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weight = torch.log((10 - labels).float())
        losses = functional.cross_entropy(super().forward(x), labels.clamp(max=9), reduction="none")
        return {"loss": (weight * losses).mean()}


class Wide(Plain):
    """Its second layer squares activations of some hundred, which fp16 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1) * 400).square())


class Logarithm(Plain):
    """It takes the log of what a ReLU gives, zero for half of all activations."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.log(self.body(x.flatten(1)).relu()))


class Lopsided(Plain):
    """Of two gains only the second gets a large gradient: with ZeRO-3 it is in the share of rank 1."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        logits = 1e-6 * super().forward(x)
        return logits + self.gain[1] * 1e5 * torch.arange(10, dtype=logits.dtype, device=logits.device)


class FaultyLink(Plain):
    """On rank 1 all-reduces of more than a thousand numbers arrive 0.1 % too large."""

    def __init__(self):
        super().__init__()

        def all_reduce(tensor: Tensor, *args: Any, **more: Any) -> Any:
            work = HEALTHY[1](tensor, *args, **more)
            if work is not None:
                work.wait()
            if dist.get_rank() == 1 and tensor.numel() > 1000:
                tensor.mul_(1.001)
            return work

        dist.all_reduce = all_reduce
