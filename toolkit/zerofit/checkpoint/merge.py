"""Merge a model's trained part with its frozen weights, which are rebuilt from their source.

Frozen weights are built in groups, like pipeline stages, so the model may be larger than memory. peft merges each
layer's adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerofit.checkpoint.model_folder import cut
from zerofit.checkpoint.store import FrozenWeights, checksum_text
from zerofit.models.build import build
from zerofit.models.catalog import ModelSource
from zerofit.models.checksums import part_checksum
from zerofit.models.deferred import Stored
from zerofit.models.inputs import Inputs
from zerofit.models.partial import lora_layers, name_without_adapters
from zerofit.models.presets import ModelArgs
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.local_machine import host_memory

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# The merged model is written without ever being in memory: trained weights come from the checkpoint; frozen weights
# are rebuilt from seed or pretrained files in groups that fit into a quarter of the free memory. A layer with adapters
# becomes W + (alpha / r) B A (for LoRA), computed by peft on this layer alone.
SHARE = 4  # a group of frozen weights uses at most 1/4 of the free memory


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """The trained part of a model, and how to rebuild its frozen weights."""

    source: ModelSource  # of the base model
    inputs: Inputs | None
    model_args: ModelArgs
    seed: int
    dtype: torch.dtype  # type of the frozen weights in training
    model: nn.Module  # on meta, with adapters
    read: Callable[[str], Tensor]  # returns a trained parameter or buffer by its name in `model`
    names: frozenset[str]  # names that `read` accepts
    frozen: FrozenWeights | None  # None: no checksum was saved

    @cached_property
    def plain(self) -> nn.Module:
        """The model without adapters, on meta."""
        with torch.device("meta"):
            return build(self.source, self.inputs, dict(self.model_args))


def merged_weights(part: TrainedPart, most_bytes: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights and buffers of the model, by name, with adapters merged in float32.

    At most `most_bytes` of frozen weights are in memory at a time (default: a quarter of the free memory). A larger
    frozen weight is built alone. If the checksum of the frozen weights differs, UserError is raised after the last
    weight.
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
    size_of = {name: state[name].numel() * part.dtype.itemsize for name in frozen}
    for group in cut(frozen, size_of.__getitem__, most_bytes or host_memory()[1] // SHARE) if frozen else ():
        # built in the same way as the training did; all weights outside of the group are on meta
        torch.manual_seed(part.seed)
        stored = Stored(dtype=part.dtype, device=torch.device("cpu"))
        built = build(part.source, part.inputs, dict(part.model_args), stored=stored, keep=set(group)).state_dict()
        for name in group:
            tensor, is_parameter = built[name], isinstance(state[name], nn.Parameter)
            total += part_checksum(name, tensor) if is_parameter else 0
            owner, _, attribute = name.rpartition(".")
            if owner in layers and is_parameter:
                tensor = _merged(part, owner, layers[owner], attribute, tensor.float())
            yield name, tensor
    if part.frozen and part.frozen.checksum != checksum_text(total):
        message = f"the weights of {part.source.name} differ from the frozen weights of the training"
        hint = "has the pretrained model's folder changed, or does another version of torch initialize the weights?"
        raise UserError(Problem(kind="other-base", message=message, hint=hint, where="PATH"))


def _merged(part: TrainedPart, path: str, layer: LoraLayer, attribute: str, weight: Tensor) -> Tensor:
    """Return a layer's frozen weight in float32, with its adapters merged."""
    if attribute != "weight":
        return weight
    merged: Any = copy.deepcopy(layer)  # on meta; an nn.Module and a LoraLayer
    merged.get_base_layer().weight = nn.Parameter(weight, requires_grad=False)
    for name, _ in list(merged.named_parameters()):
        if ".".join((path, name)) in part.names:
            owner, _, last = name.rpartition(".")
            value = nn.Parameter(part.read(f"{path}.{name}").float(), requires_grad=False)
            merged.get_submodule(owner)._parameters[last] = value  # also in a ParameterDict
    merged.merge()
    return merged.get_base_layer().weight.detach()
