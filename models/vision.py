"""torchvision's classifiers for other image sizes, channels and class counts than ImageNet's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn

from zerofit.models.catalog import ModelError
from zerofit.models.inputs import ImageInputs

IMAGENET = ImageInputs(channels=3, size=224, classes=1000)


def torchvision_model(name: str, inputs: ImageInputs | None, args: dict[str, Any]) -> nn.Module:
    """Build one of torchvision's models with random weights for these images; `args` are its keyword arguments."""
    import torchvision

    wanted = inputs or IMAGENET
    keywords = {"num_classes": wanted.classes, **_size_keywords(name, wanted.size if inputs else None), **args}
    try:
        with _regnet_widths_on_cpu():
            model = torchvision.models.get_model(name, weights=None, **keywords)
    except TypeError as error:
        hint = "--model-args are keyword arguments of torchvision's builder"
        raise ModelError("model-args", f"{name} with {args}: {error}", hint) from None
    except (AssertionError, ValueError) as error:
        message = f"{name} cannot take {wanted.size}x{wanted.size} images: {error}"
        raise ModelError("model-shape", message, "set --image-size, e.g. --image-size 224") from None
    if wanted.channels != 3:
        _replace_first_conv(model, wanted.channels)
    return model


def _size_keywords(name: str, size: int | None) -> dict[str, Any]:
    """Return what some families must know beforehand: the image size, and that auxiliary heads are not used."""
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": False}
    if size is not None and name.startswith("vit_"):
        return {"image_size": size}
    if size is not None and name.startswith("maxvit"):
        return {"input_size": (size, size)}
    return {}


def _replace_first_conv(model: nn.Module, channels: int) -> None:
    """A first convolution for another number of channels, initialised as torch does by default."""
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


@contextmanager
def _regnet_widths_on_cpu() -> Iterator[None]:
    """Within it RegNet computes its widths on the CPU: it reads them back, which a meta tensor does not allow."""
    from torchvision.models.regnet import BlockParams

    compute = BlockParams.from_init_params

    def on_cpu(*args: Any, **kwargs: Any) -> BlockParams:
        with torch.device("cpu"):
            return compute(*args, **kwargs)

    with patch.object(BlockParams, "from_init_params", on_cpu):
        yield
