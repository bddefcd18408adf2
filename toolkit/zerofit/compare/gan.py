"""A DCGAN pair as one model with one loss, so that every strategy can train it like any other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from zerofit.models.gan import DCGAN


class GanPair(nn.Module):
    """Images with planes of noise below them (batch, channels + planes, size, size) to a loss a sample (batch,).

    Both networks step at once: the discriminator's loss does not reach the generator, and the generator's reaches the
    discriminator's input alone.
    """

    def __init__(self, pair: DCGAN, channels: int):
        super().__init__()
        self.pair, self.channels = pair, channels

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both losses of each sample."""
        real, noise = x[:, : self.channels], x[:, self.channels :].flatten(1)[:, : self.pair.generator.latent_size]
        fake, judge = self.pair.generator(noise[:, :, None, None]), self.pair.discriminator
        fixed = {name: value.detach() for name, value in judge.named_parameters()}
        fooled = functional_call(judge, fixed, (fake,))
        return _judged(judge(real), 1.0) + _judged(judge(fake.detach()), 0.0) + _judged(fooled, 1.0)


def noise_planes(latent_size: int, size: int) -> int:
    """Planes of size x size that hold a latent vector."""
    return -(-latent_size // size**2)


def _judged(logits: Tensor, truth: float) -> Tensor:
    target = torch.full_like(logits, truth)
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").flatten()
