"""Build zerofit's small models for images and tables, DCGAN, and torchvision's models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.inputs import ImageInputs, Inputs, SegmentationInputs, TableInputs, inputs_from_dict
from zerofit.models.presets import NAMED, ModelArgs


def simplecnn(inputs: ImageInputs, width: int = 16) -> nn.Sequential:
    """Build two 3x3 convolutions with 2x2 max-pools and a linear layer, for any image size."""
    side = -(-inputs.size // 4)  # two poolings that round up

    def conv_pool(channels_in: int, channels: int) -> nn.Sequential:
        conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        return nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True))

    return _stages(
        conv1=conv_pool(inputs.channels, width),
        conv2=conv_pool(width, 2 * width),
        head=nn.Sequential(nn.Flatten(), nn.Linear(2 * width * side * side, inputs.classes)),
    )


def simplecnn_112(inputs: ImageInputs, width: int = 64) -> nn.Sequential:
    """Build a 3x3 convolution, a max-pool, a linear layer: 2,008,842 parameters for 3x112x112."""
    side = -(-inputs.size // 2)
    conv = nn.Conv2d(inputs.channels, width, 3, padding=1)
    return _stages(
        conv1=nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        head=nn.Sequential(nn.Flatten(), nn.Linear(width * side * side, inputs.classes)),
    )


def lenet(inputs: ImageInputs) -> nn.Sequential:
    """Build LeNet-5 (LeCun et al., 1998) with max-pooling and ReLU, as in textbooks.

    It has 61,706 parameters for 28x28. For images below 16 pixels the second 5x5 kernel is replaced by 3x3 with
    padding.
    """
    small = inputs.size < 16
    side = inputs.size // 4 if small else (inputs.size // 2 - 4) // 2
    if side < 1:
        message = f"lenet needs images of at least 4 pixels, not {inputs.size}"
        raise ModelError("model-shape", message, "set --image-size")
    second = nn.Conv2d(6, 16, 3, padding=1) if small else nn.Conv2d(6, 16, 5)
    return _stages(
        conv1=nn.Sequential(nn.Conv2d(inputs.channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        conv2=nn.Sequential(second, nn.ReLU(), nn.MaxPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(16 * side * side, 120), nn.ReLU()),
        fc2=nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        head=nn.Linear(84, inputs.classes),
    )


def lenet_scratch(inputs: ImageInputs, std: float = 0.01) -> nn.Sequential:
    """Build the LeNet of "Dive into Deep Learning" (chapter on several GPUs).

    It has two convolutions with average pooling, two linear layers and ReLU: 129,068 parameters for 28x28. Weights are
    normal with standard deviation `std`, and biases are 0.
    """
    side = ((inputs.size - 2) // 2 - 4) // 2
    if side < 1:
        message = f"lenet-scratch needs images of at least 14 pixels, not {inputs.size}"
        raise ModelError("model-shape", message, "set --image-size, e.g. --image-size 28")
    first, second = nn.Conv2d(inputs.channels, 20, 3), nn.Conv2d(20, 50, 5)
    model = _stages(
        conv1=nn.Sequential(first, nn.ReLU(), nn.AvgPool2d(2)),
        conv2=nn.Sequential(second, nn.ReLU(), nn.AvgPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(50 * side * side, 128), nn.ReLU()),
        head=nn.Linear(128, inputs.classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, 0.0, std)
            nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType] - all of them have one
    return model


def mlp_table(inputs: TableInputs, hidden: int = 100) -> nn.Sequential:
    """Build two linear layers on a row of numbers: 2,110 parameters for 10 features, 10 classes."""
    return _stages(
        hidden=nn.Sequential(nn.Linear(inputs.features, hidden), nn.ReLU()),
        head=nn.Linear(hidden, inputs.classes),
    )


def mlp(inputs: ImageInputs, hidden: int = 256) -> nn.Sequential:
    """Build two linear layers on the flattened image."""
    pixels = inputs.channels * inputs.size**2
    return _stages(
        hidden=nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU()),
        head=nn.Linear(hidden, inputs.classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut (He et al., 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int, bias: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=bias)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, h, w) to (batch, channels, h / stride, w / stride)."""
        out = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(out)) + self.shortcut(x)).relu()


def resnet18_small(inputs: ImageInputs, width: int = 64, bias: bool = False) -> nn.Sequential:
    """Build ResNet-18 for small images: a 3x3 stem of stride 1, no max-pool.

    See He et al., 2016, section 4.2. `bias` adds biases to the convolutions, as in textbooks, although the batch norms
    make biases superfluous.
    """
    stem = nn.Sequential(nn.Conv2d(inputs.channels, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width), nn.ReLU())
    blocks: dict[str, nn.Module] = {}
    channels = width
    for group in range(4):
        for index in range(2):
            stride = 2 if group and not index else 1
            blocks[f"block{2 * group + index + 1}"] = ResidualBlock(channels, width << group, stride, bias)
            channels = width << group
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, inputs.classes))
    return _stages(stem=stem, **blocks, head=head)


def resnet18_bias(inputs: ImageInputs, width: int = 64) -> nn.Sequential:
    """Build `resnet18_small` with biases: 11,177,610 parameters for 1x28x28 images."""
    return resnet18_small(inputs, width, bias=True)


def fcn_tiny(inputs: SegmentationInputs, width: int = 16) -> nn.Sequential:
    """Build a convolutional network that halves the size twice, classifies pixels, upsamples."""
    if inputs.size % 4:
        message = f"the image size of fcn-tiny must be a multiple of 4 pixels, not {inputs.size}"
        raise ModelError("model-shape", message, f"set --image-size {max(4, inputs.size // 4 * 4)}")

    def conv(channels_in: int, channels: int, stride: int) -> list[nn.Module]:
        layer = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        return [layer, nn.BatchNorm2d(channels), nn.ReLU()]

    return _stages(
        stem=nn.Sequential(*conv(inputs.channels, width, 1), *conv(width, width, 1)),
        stage1=nn.Sequential(*conv(width, 2 * width, 2), *conv(2 * width, 2 * width, 1)),
        stage2=nn.Sequential(*conv(2 * width, 4 * width, 2), *conv(4 * width, 4 * width, 1)),
        head=nn.Conv2d(4 * width, inputs.classes, 1),
        upsample=nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False),
    )


def _stages(**stages: nn.Module) -> nn.Sequential:
    """Return a plain sequence of stages, which a pipeline can split anywhere."""
    return nn.Sequential(OrderedDict(stages))


# DCGAN (Radford et al., 2016), by image size: side of the smallest feature map, and number of doublings
_SHAPES = {8: (4, 1), 28: (7, 2), 32: (4, 3), 64: (4, 4)}


class Generator(nn.Sequential):
    """Maps noise (batch, latent_size, 1, 1) to images (batch, channels, size, size) in [-1, 1]."""

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
    """Maps images (batch, channels, size, size) in [-1, 1] to logits (batch, 1) of being real."""

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
    """A generator and a symmetric discriminator. The forward returns logits for images."""

    def __init__(self, inputs: ImageInputs, latent_size: int = 100, width: int = 64):
        super().__init__()
        if inputs.size not in _SHAPES:
            message = f"dcgan supports images of {', '.join(map(str, _SHAPES))} pixels, not {inputs.size}"
            raise ModelError("model-shape", message, "set --image-size")
        self.generator = Generator(inputs, latent_size, width)
        self.discriminator = Discriminator(inputs, width)
        # standard deviation 0.02 and mean 0 (batch norm scales: mean 1), as in the paper's section 4
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 1) of images (batch, channels, size, size)."""
        return self.discriminator(images)


def _up(channels_in: int, channels: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
    conv = nn.ConvTranspose2d(channels_in, channels, kernel, stride, padding, bias=False)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU()]


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "simplecnn": simplecnn,
    "simplecnn-112": simplecnn_112,
    "lenet": lenet,
    "lenet-scratch": lenet_scratch,
    "mlp": mlp,
    "mlp-table": mlp_table,
    "resnet18-small": resnet18_small,
    "resnet18-bias": resnet18_bias,
    "fcn-tiny": fcn_tiny,
}

# of torchvision's published weights
IMAGENET = ImageInputs(channels=3, size=224, classes=1000)
VOC = SegmentationInputs(channels=3, size=520, classes=21)


def published_inputs(source: ModelSource) -> ImageInputs | TableInputs:
    """Return the inputs that a published image or table model, or zerofit's own, expects."""
    preset = NAMED.get(source.name)
    if preset and preset.inputs:
        return cast(ImageInputs | TableInputs, inputs_from_dict(preset.inputs))
    return VOC if source.task == "segmentation" else IMAGENET


def torchvision_model(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> nn.Module:
    """Build a torchvision model with random weights. `args`: the model's keyword arguments."""
    import torchvision

    name, images = source.name, inputs or published_inputs(source)
    assert isinstance(images, ImageInputs)  # checked by `build`
    keywords = {"num_classes": images.classes, **_size_keywords(source, images.size if inputs else None), **args}
    try:
        with _regnet_widths_on_cpu():
            model = torchvision.models.get_model(name, weights=None, **keywords)
    except (TypeError, RuntimeError, ArithmeticError) as error:
        if not args:  # e.g. too little memory
            raise
        hint = "--model-args must be keyword arguments of torchvision's builder"
        raise ModelError("model-args", f"{name} with {args}: {error}", hint) from None
    except (AssertionError, ValueError) as error:
        message = f"{name} does not support {images.size}x{images.size} images: {error}"
        raise ModelError("model-shape", message, "set --image-size, e.g. --image-size 224") from None
    if images.channels != 3:
        _replace_first_conv(model, images.channels)
    return model


def _size_keywords(source: ModelSource, size: int | None) -> ModelArgs:
    name = source.name
    if source.task == "segmentation":
        without = {} if name.startswith("lraspp") else {"aux_loss": False}
        # By default torchvision downloads ImageNet's weights for the backbone (models/segmentation/fcn.py).
        return {"weights_backbone": None, **without}
    # Without auxiliary heads these models return one tensor, also in training.
    # If init_weights is None, torchvision warns and uses an older, slow initialization (models/inception.py).
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": False}
    if size is not None and name.startswith("vit_"):
        return {"image_size": size}
    if size is not None and name.startswith("maxvit"):
        return {"input_size": (size, size)}
    return {}


def _replace_first_conv(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for another number of channels, initialized anew."""
    path, old = next((path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        cast(tuple[int, int], old.kernel_size),
        cast(tuple[int, int], old.stride),
        cast(tuple[int, int] | str, old.padding),
        cast(tuple[int, int], old.dilation),
        bias=old.bias is not None,
        padding_mode=old.padding_mode,
    )
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


# RegNet's constructor calls .tolist() on a tensor (torchvision/models/regnet.py, BlockParams.from_init_params).
@contextmanager
def _regnet_widths_on_cpu() -> Iterator[None]:
    """Make RegNet compute its widths on the CPU, since meta tensors have no values to read."""
    from torchvision.models.regnet import BlockParams

    compute: Callable[..., BlockParams] = BlockParams.from_init_params

    def on_cpu(*args: object, **kwargs: object) -> BlockParams:
        with torch.device("cpu"):
            return compute(*args, **kwargs)

    with patch.object(BlockParams, "from_init_params", on_cpu):
        yield
