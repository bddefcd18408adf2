"""Apply activation checkpointing, which recomputes a block's activations in backward."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._ops import OpOverload
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zerofit.features.checkpointing import Checkpointing
from zerofit.models.batch_norm import batch_norms
from zerofit.models.catalog import ModelError

GROUPS = "checkpointed_groups"  # set on a sequence of layers that runs in groups (`_group_by_pooling`)
TO_HOST = "checkpoint_to_host"  # set on a checkpointed module whose inputs are kept in host memory
SELECTIVE = "checkpoint_selectively"  # set on a checkpointed module that keeps what takes long to compute
_Contexts = tuple[AbstractContextManager, AbstractContextManager]  # around forward and around recomputation
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.linear.default)
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _aten.bmm.default,
)


def checkpoint_model(model: nn.Module) -> nn.Module:
    """Checkpoint a model's repeated blocks in place, or its stages if no block repeats."""
    for block in cut_into_blocks(model):
        checkpoint_block(block)
    return model


# The policy of torchtitan's SelectiveAC: recomputing norms and activation functions costs little time and frees most
# of the memory; of the matrix products, every second one is recomputed.
def selective_contexts() -> _Contexts:
    """Return contexts that keep outputs of attention and of every second matrix product."""
    counts: Counter[bool] = Counter()

    def policy(ctx: SelectiveCheckpointContext, op: OpOverload, *_: object, **__: object) -> CheckpointPolicy:
        counts[ctx.is_recompute] += op in _PRODUCTS
        first = op in _PRODUCTS and counts[ctx.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if first or op in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def keep_on_host(model: nn.Module) -> None:
    """Keep the inputs of checkpointed blocks in host memory until backward.

    The model must already use checkpointing, by zerofit or by transformers.
    """
    for module in chain(model.modules(), *(vars(module).get(GROUPS, ()) for module in model.modules())):
        checkpoint_function = getattr(module, "_gradient_checkpointing_func", None)  # transformers' hook
        if getattr(vars(module).get("forward"), "__func__", None) is _forward_checkpointed:
            vars(module)[TO_HOST] = True
        elif checkpoint_function is not None and getattr(module, "gradient_checkpointing", False):
            vars(module)["_gradient_checkpointing_func"] = partial(_on_host, checkpoint_function)


def _on_host(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run a checkpointed function, with its saved inputs in host memory until backward."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return function(*args, **kwargs)


def cut_into_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules to checkpoint: the outermost modules of a repeated class.

    Without such modules, they are the model's stages: the children with parameters, except the last child. In a long
    sequence of torch's layers (AlexNet, VGG), each group of layers up to a pooling is a stage.
    """
    counts = Counter(type(module) for module in model.modules())
    blocks = list(_outermost_repeated(model, counts))
    if len(blocks) > 1:
        return blocks
    features = getattr(model, "features", None)
    if isinstance(features, nn.Sequential):
        return _group_by_pooling(features)
    called = (child for child in model.children() if not isinstance(child, nn.ModuleList | nn.ModuleDict))
    stages = [child for child in called if _has_parameters(child)]
    if len(stages) < 2:
        message = f"{type(model).__name__} has no repeated blocks or stages to checkpoint"
        raise ModelError("model-checkpointing", message, "train without --activation-checkpointing")
    # Backward begins with the last stage, so its activations would be computed again at once. That saves nothing.
    return stages[:-1]


def checkpoint_block(block: nn.Module, kind: Checkpointing = True) -> None:
    """Make a block recompute its forward in backward during training. Names do not change."""
    vars(block)[SELECTIVE] = kind == "selective"
    replaced = vars(block).get("forward")
    if getattr(replaced, "__func__", None) is _forward_checkpointed:
        return
    if replaced is not None:
        raise ModelError("model-checkpointing", f"the forward of {type(block).__name__} is already replaced")
    block.forward = types.MethodType(_forward_checkpointed, block)  # a bound method survives deepcopy


def _forward_checkpointed(self: nn.Module, *args: object, **kwargs: object) -> object:
    """Run the class's forward without keeping activations. Batch norms count each batch once."""
    forward = types.MethodType(type(self).forward, self)
    if not (self.training and is_grad_enabled()):
        return forward(*args, **kwargs)

    def contexts() -> _Contexts:
        forward_context, again = selective_contexts() if getattr(self, SELECTIVE, False) else (nullcontext(),) * 2
        return forward_context, _statistics_untouched(self, again)

    run = cast(Callable[..., object], checkpoint)
    if getattr(self, TO_HOST, False):
        run = partial(_on_host, run)
    # With use_reentrant=True, torch refuses keyword arguments and context_fn (utils/checkpoint.py).
    return run(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


# Backward runs the forward a second time. Without this, batch norms would count each batch twice in their running
# statistics.
@contextmanager
def _statistics_untouched(module: nn.Module, inner: AbstractContextManager) -> Iterator[None]:
    """Keep the running statistics unchanged by forwards in this context, which includes `inner`.

    Forwards update copies of the statistics. Afterwards each module gets its originals back. Autograd has saved the
    originals, so no forward may change them in place.
    """
    norms = batch_norms(module)
    originals = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: b if b is None else b.clone() for name, b in norm._buffers.items()})
    try:
        with inner:
            yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)


def _outermost_repeated(module: nn.Module, counts: Counter) -> Iterator[nn.Module]:
    for child in module.children():
        # a model's own class, or torch's class for a block; a layer that occurs often, like nn.Linear, is no block
        is_model_class = not type(child).__module__.startswith("torch.nn") and not isinstance(child, nn.Sequential)
        is_block = is_model_class or isinstance(child, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if is_block and counts[type(child)] > 1 and _has_parameters(child):
            yield child
        else:
            yield from _outermost_repeated(child, counts)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _group_by_pooling(features: nn.Sequential) -> list[nn.Sequential]:
    """Make a long sequence of layers run in groups that end with a pooling. Return the groups.

    The groups are not registered with the model, so parameter names do not change.
    """
    groups: list[list[nn.Module]] = [[]]
    for layer in features:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    sequences = [nn.Sequential(*layers) for layers in groups if layers]
    object.__setattr__(features, GROUPS, sequences)
    features.forward = types.MethodType(_forward_groups, features)
    return sequences


def _forward_groups(self: nn.Sequential, x: Tensor) -> Tensor:
    for group in vars(self)[GROUPS]:
        group.train(self.training)  # the model's train() and eval() do not reach the groups
        x = group(x)
    return x
