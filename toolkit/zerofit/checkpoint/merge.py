"""The trained part of a model put together with the frozen weights, which are built again from where they came from.

The frozen weights are built group by group, as the stages of a pipeline are, so that a model larger than memory can be
put together. Each layer's adapters are merged by peft itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zerofit.checkpoint.frozen import FrozenWeights, checksum_text
from zerofit.models.build import build
from zerofit.models.catalog import ModelSource
from zerofit.models.checksums import part_checksum
from zerofit.models.deferred import Stored
from zerofit.models.inputs import Inputs
from zerofit.models.partial import lora_layers, name_without_adapters
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.local_machine import host_memory

SHARE = 4  # of the memory that is free, one part in so many for frozen weights at a time


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """What was trained of a model, and how the rest of it is built again."""

    source: ModelSource  # without what is trained of it
    inputs: Inputs | None
    model_args: dict[str, Any]
    seed: int
    dtype: torch.dtype  # in which the frozen weights were used
    model: nn.Module  # on meta, with its adapters
    read: Callable[[str], Tensor]  # a trained parameter or buffer, by its name in `model`
    names: frozenset[str]  # of what `read` has
    frozen: FrozenWeights | None  # None: whoever trained it has left no checksum

    @cached_property
    def plain(self) -> nn.Module:
        """The model without adapters, on meta."""
        with torch.device("meta"):
            return build(self.source, self.inputs, dict(self.model_args))


def whole_weights(part: TrainedPart, most_bytes: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights and buffers of the model without adapters, by name, merged in float32.

    Frozen weights are in memory for `most_bytes` at a time (by default a quarter of what is free), a larger one by
    itself. Raises UserError after the last one where the frozen weights are not those that the checksum is of.
    """
    layers, read, total = dict(lora_layers(part.model)), {name_without_adapters(n): n for n in part.names}, 0
    state = part.plain.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    frozen = []
    for name, tensor in state.items():
        if firsts.setdefault(id(tensor), name) != name:
            continue
        if name in read:
            yield name, part.read(read[name])
        else:
            frozen.append(name)
    for group in _groups(frozen, state, most_bytes or host_memory()[1] // SHARE, part.dtype):
        held = _built(part, set(group)).state_dict()
        for name in group:
            tensor, parameter = held[name], isinstance(state[name], nn.Parameter)
            total += part_checksum(name, tensor) if parameter else 0
            owner, _, attribute = name.rpartition(".")
            if owner in layers and parameter:
                tensor = _merged(part, owner, layers[owner], attribute, tensor.float())
            yield name, tensor
    if part.frozen and part.frozen.checksum != checksum_text(total):
        message = f"the weights of {part.source.name} are not those that were frozen in the training"
        hint = "has the folder of the pretrained model changed, or is another version of torch drawing the weights?"
        raise UserError(Problem(kind="other-base", message=message, hint=hint, where="PATH"))


def _groups(names: list[str], state: dict[str, Tensor], most: int, dtype: torch.dtype) -> Iterator[list[str]]:
    group: list[str] = []
    room = most
    for name in names:
        size = state[name].numel() * dtype.itemsize
        if size > room and group:
            yield group
            group, room = [], most
        group.append(name)
        room -= size
    if group:
        yield group


def _built(part: TrainedPart, keep: set[str]) -> nn.Module:
    """Build the weights of these names as the training did; the others are on meta."""
    torch.manual_seed(part.seed)
    stored = Stored(dtype=part.dtype, device=torch.device("cpu"))
    return build(part.source, part.inputs, dict(part.model_args), stored=stored, keep=keep)


def _merged(part: TrainedPart, path: str, layer: Any, attribute: str, weight: Tensor) -> Tensor:
    """Return a layer's frozen weight, float32, with its adapters merged into it."""
    if attribute != "weight":
        return weight
    one = copy.deepcopy(layer)  # on meta
    one.get_base_layer().weight = nn.Parameter(weight, requires_grad=False)
    for name, _ in list(one.named_parameters()):
        if ".".join((path, name)) in part.names:
            owner, _, last = name.rpartition(".")
            value = nn.Parameter(part.read(f"{path}.{name}").float(), requires_grad=False)
            one.get_submodule(owner)._parameters[last] = value  # a ParameterDict's, too
    one.merge()
    return one.get_base_layer().weight.detach()
