"""Models without their weights, and which of their modules stay together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from accelerate import init_empty_weights
from torch import nn

from zerofit.infer.saved_model import SavedModel
from zerofit.models.batch_norm import BatchNorm
from zerofit.models.build import build
from zerofit.models.catalog import ModelError
from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def empty_model(saved: SavedModel, dtype: torch.dtype) -> nn.Module:
    """Build the model in evaluation mode, its parameters on the meta device in this type.

    Batch norms stay in float32, as their kernels take them beside lower precision. Buffers of other than transformers
    models are real, since they may hold what no file does. Raises UserError where it cannot be built.
    """
    try:
        if saved.source.family == "transformers":
            with torch.device("meta"):
                model = build(saved.source, None, {})
            config = cast("PreTrainedModel", model).config
            if hasattr(config, "output_router_logits"):
                config.output_router_logits = False  # the router's loss is a matter of training
            return model.to(dtype).eval()
        assert saved.info is not None  # see open_saved
        with init_empty_weights():
            model = build(saved.source, saved.inputs, dict(saved.info.model_args))
    except ModelError as error:
        raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint, where="CKPT")) from None
    return _cast(model, dtype).eval()


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for module in model.modules():
        if not isinstance(module, BatchNorm):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
    return model


def block_classes(model: nn.Module) -> list[str]:
    """Return names of the classes of which a module is never spread over devices.

    transformers names its own. Elsewhere these are the outermost of those of a model's own classes that occur more
    than once (a ResNet's bottlenecks, a Transformer's layers).
    """
    known = getattr(model, "_no_split_modules", None)
    if known is not None:
        return sorted(known)
    counts = Counter(type(module) for module in model.modules())
    return sorted({type(module).__name__ for module in _repeated(model, counts)})


def loads_whole(model: nn.Module) -> list[str]:
    """Return names of the classes whose modules get all their weights at once from memory or disk, before they run.

    transformers' modules only use weights of their own. Others may use those of their parts without calling them
    (torch's attention does), so that a block takes all of its weights.
    """
    return [] if hasattr(model, "_no_split_modules") else block_classes(model)


def _repeated(module: nn.Module, counts: Counter) -> Iterator[nn.Module]:
    for child in module.children():
        container = isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if counts[type(child)] > 1 and not container and next(child.children(), None) is not None:
            yield child
        else:
            yield from _repeated(child, counts)
