"""Initial weights of transformers models: the same numbers from a seed, however little of the model is kept.

A model of a config is made on the meta device; its initialisation then runs module by module in transformers' order.
Random draws for tensors that stay on meta are made all the same, into a throwaway, so that the tensors that are kept
get the very numbers that they would get in the whole model.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DRAWLESS = ("constant_", "ones_", "zeros_", "eye_", "dirac_")


def materialise(model: nn.Module, seed: int, keep: set[str] | None = None) -> nn.Module:
    """Give a transformers model made on the meta device its initial weights on the CPU; the model itself is changed.

    `keep` names the parameters to hold in memory (None: all); the others stay on meta, whatever their size. What is
    kept is bit-identical to the weights that `build` gives after `torch.manual_seed(seed)`. A tied parameter is kept
    if any of its names is. Buffers become real everywhere: they are small.
    """
    torch.manual_seed(seed)
    return initialise(model, keep)


@torch.no_grad()
def initialise(model: nn.Module, keep: set[str] | None = None) -> nn.Module:
    """Do what `materialise` does, from wherever torch's global random stream stands."""
    from transformers.initialization import guard_torch_init_functions

    transformer = cast("PreTrainedModel", model)
    tied: dict[str, str] = dict(transformer.all_tied_weights_keys)
    wanted = _wanted(model, tied, keep)
    _untie(model, tied)
    for prefix, module in model.named_modules():
        vars(module)["_is_hf_initialized"] = False
        _make_real(module, f"{prefix}." if prefix else "", wanted)
    with guard_torch_init_functions(), _drawing_for_meta():
        _apply(model, transformer._initialize_weights)
    transformer.tie_weights()
    return model


def _wanted(model: nn.Module, tied: dict[str, str], keep: set[str] | None) -> set[str]:
    """Return names of the parameters to make real, each tied one under the name of its source."""
    names = {name for name, _ in model.named_parameters()} if keep is None else set(keep)
    return (names - set(tied)) | {tied[name] for name in names & set(tied)}


def _untie(model: nn.Module, tied: dict[str, str]) -> None:
    """Give each tied parameter a tensor of its own, since each is drawn before it is tied."""
    for name in tied:
        parent, _, attribute = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, attribute, nn.Parameter(torch.empty_like(getattr(owner, attribute), device="meta")))


def _make_real(module: nn.Module, prefix: str, wanted: set[str]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            device = "cpu" if prefix + name in wanted else "meta"
            empty = torch.empty_like(parameter, device=device)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _apply(module: nn.Module, initialise_one: Any) -> None:
    """Initialise children first, each model within a model by its own rules, as `initialize_weights` does."""
    from transformers import PreTrainedModel

    for child in module.children():
        _apply(child, child._initialize_weights if isinstance(child, PreTrainedModel) else initialise_one)
    initialise_one(module)


@contextmanager
def _drawing_for_meta() -> Iterator[None]:
    """Within it, transformers' random initialisers run for a meta tensor too, on a CPU tensor that is then dropped.

    How many numbers they draw can depend on the numbers (trunc_normal_ rejects some), so they must really run.
    """
    from transformers import initialization

    def drawn(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.is_meta:
                function(torch.empty_like(tensor, device="cpu"), *args, **kwargs)
                return tensor
            return function(tensor, *args, **kwargs)

        return run

    functions = initialization.TORCH_INIT_FUNCTIONS
    with patch.dict(functions, {name: drawn(functions[name]) for name in set(functions) - set(_DRAWLESS)}):
        yield


@contextmanager
def as_without_zero3() -> Iterator[None]:
    """Within it, a model that transformers partitions as it is built (ZeRO-3) draws the numbers that others draw.

    Its initialisation starts where the random stream stood before modules were constructed, since some constructors
    draw values that are overwritten later; and it draws on the CPU in fp32, since on another device or in another
    precision the same seed gives other numbers.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel._initialize_weights
    start: list[Tensor] = [torch.get_rng_state()]

    def on_cpu(self: PreTrainedModel, module: nn.Module, *more: Any) -> None:
        if start:
            torch.set_rng_state(start.pop())
        with _held_on_cpu(module):
            original(self, module, *more)

    with patch.object(PreTrainedModel, "_initialize_weights", on_cpu):
        yield


@contextmanager
def _held_on_cpu(module: nn.Module) -> Iterator[None]:
    """Within it the gathered parameters of a module and its children are fp32 tensors on the CPU."""
    owners = [module, *module.children()]
    parameters = {id(p): p for owner in owners for p in owner.parameters(recurse=False)}
    gathered = {key: p.data for key, p in parameters.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.to("cpu", torch.float32)
    yield
    for key, parameter in parameters.items():
        gathered[key].copy_(parameter.data)
        parameter.data = gathered[key]


def rotary_in_fp32(model: nn.Module) -> nn.Module:
    """Keep the frequencies of rotary embeddings in fp32 when the model is cast, as an engine does for bf16 and fp16.

    Rounded to bf16, angles at position 1000 would be off by whole radians.
    """
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module._apply = types.MethodType(_apply_device_only, module)
    return model


def _apply_device_only(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    return nn.Module._apply(self, lambda t: t.to(function(t.new_empty(0)).device), recurse)
