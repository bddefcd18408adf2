"""DCGAN (Radford et al., 2016): a generator and a discriminator that mirror each other."""

from __future__ import annotations

from torch import Tensor, nn

from zerofit.models.catalog import ModelError
from zerofit.models.inputs import ImageInputs

# image size: the side of the smallest map, and how often it doubles
_SHAPES = {8: (4, 1), 28: (7, 2), 32: (4, 3), 64: (4, 4)}


class Generator(nn.Sequential):
    """Noise (batch, latent_size, 1, 1) to images (batch, channels, size, size) in [-1, 1]."""

    def __init__(self, inputs: ImageInputs, latent_size: int, width: int):
        base, doublings = _SHAPES[inputs.size]
        channels = width << (doublings - 1)
        layers: list[nn.Module] = [*_up(latent_size, channels, base, 1, 0)]
        for _ in range(doublings - 1):
            layers += _up(channels, channels // 2, 4, 2, 1)
            channels //= 2
        last = nn.ConvTranspose2d(channels, inputs.channels, 4, 2, 1, bias=False)
        super().__init__(*layers, last, nn.Tanh())
        self.latent_size = latent_size


class Discriminator(nn.Sequential):
    """Images (batch, channels, size, size) in [-1, 1] to logits (batch, 1) of being real."""

    def __init__(self, inputs: ImageInputs, width: int):
        base, doublings = _SHAPES[inputs.size]
        layers: list[nn.Module] = [nn.Conv2d(inputs.channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        channels = width
        for _ in range(doublings - 1):  # no batch norm on the image itself: section 3 of the paper
            conv = nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(2 * channels), nn.LeakyReLU(0.2)]
            channels *= 2
        super().__init__(*layers, nn.Conv2d(channels, 1, base, bias=False), nn.Flatten())


class DCGAN(nn.Module):
    """The pair, for whoever trains both; forward gives the discriminator's logits of images."""

    def __init__(self, inputs: ImageInputs, latent_size: int = 100, width: int = 64):
        super().__init__()
        if inputs.size not in _SHAPES:
            allowed = ", ".join(str(size) for size in _SHAPES)
            raise ModelError(
                "model-shape", f"dcgan draws images of {allowed} pixels, got {inputs.size}", "set --image-size"
            )
        self.generator = Generator(inputs, latent_size, width)
        self.discriminator = Discriminator(inputs, width)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 1) of images (batch, channels, size, size)."""
        return self.discriminator(images)


def _up(channels_in: int, channels: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
    conv = nn.ConvTranspose2d(channels_in, channels, kernel, stride, padding, bias=False)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU()]


def _initialise(module: nn.Module) -> None:
    """Draw from a normal of standard deviation 0.02 (section 4 of the paper), batch norm's scales around 1."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)
