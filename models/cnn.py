"""Small image classifiers, each a plain sequence of stages, so that a pipeline can cut it between any two."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from zerofit.models.catalog import ModelError
from zerofit.models.inputs import ImageInputs


def simplecnn(inputs: ImageInputs, width: int = 16) -> nn.Sequential:
    """Two 3x3 convolutions, each with a 2x2 max-pool, and one linear layer; images of any size."""
    side = -(-inputs.size // 4)  # two poolings that round up
    return _stages(
        conv1=_conv_pool(inputs.channels, width),
        conv2=_conv_pool(width, 2 * width),
        head=nn.Sequential(nn.Flatten(), nn.Linear(2 * width * side * side, inputs.classes)),
    )


def _conv_pool(channels_in: int, channels: int) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True))


def lenet(inputs: ImageInputs) -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) with max-pooling and ReLU; 28x28 gives the 61,706 parameters of the textbook.

    Images below 16 pixels are too small for two 5x5 kernels: there the second one is 3x3 with padding.
    """
    small = inputs.size < 16
    side = inputs.size // 4 if small else (inputs.size // 2 - 4) // 2
    if side < 1:
        raise ModelError(
            "model-shape", f"lenet takes images of 4 pixels and more, got {inputs.size}", "set --image-size"
        )
    second = nn.Conv2d(6, 16, 3, padding=1) if small else nn.Conv2d(6, 16, 5)
    return _stages(
        conv1=nn.Sequential(nn.Conv2d(inputs.channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        conv2=nn.Sequential(second, nn.ReLU(), nn.MaxPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(16 * side * side, 120), nn.ReLU()),
        fc2=nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        head=nn.Linear(84, inputs.classes),
    )


def mlp(inputs: ImageInputs, hidden: int = 256) -> nn.Sequential:
    """Two linear layers on the flattened image."""
    pixels = inputs.channels * inputs.size**2
    return _stages(
        hidden=nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU()),
        head=nn.Linear(hidden, inputs.classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut (He et al., 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, h, w) to (batch, channels, h / stride, w / stride)."""
        out = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(out)) + self.shortcut(x)).relu()


def resnet18_small(inputs: ImageInputs, width: int = 64) -> nn.Sequential:
    """ResNet-18 for small images: a 3x3 stem of stride 1 and no max-pool (as in He et al., 2016, section 4.2)."""
    stem = nn.Sequential(nn.Conv2d(inputs.channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks: dict[str, nn.Module] = {}
    channels = width
    for group in range(4):
        for index in range(2):
            stride = 2 if group and not index else 1
            blocks[f"block{2 * group + index + 1}"] = ResidualBlock(channels, width << group, stride)
            channels = width << group
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, inputs.classes))
    return _stages(stem=stem, **blocks, head=head)


def _stages(**stages: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(stages))


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "simplecnn": simplecnn,
    "lenet": lenet,
    "mlp": mlp,
    "resnet18-small": resnet18_small,
}

# what a table shows and a model gets where no data is known
PUBLISHED_INPUTS: dict[str, ImageInputs] = {
    "simplecnn": ImageInputs(channels=3, size=32, classes=10),
    "lenet": ImageInputs(channels=1, size=28, classes=10),
    "mlp": ImageInputs(channels=1, size=28, classes=10),
    "resnet18-small": ImageInputs(channels=3, size=32, classes=10),
    "dcgan": ImageInputs(channels=3, size=64, classes=1),
}
