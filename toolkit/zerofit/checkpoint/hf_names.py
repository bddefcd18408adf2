"""The names and shapes under which a model's tensors are published: transformers' own files, or its state_dict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    """One tensor of the model and what it becomes in the files."""

    source: str  # its name in the model's state_dict
    outputs: dict[str, tuple[int, ...]]  # names in the files, and shapes


class PublishedModel:
    """How a model that is on the meta device is published: as transformers does it, or just as its state_dict."""

    def __init__(self, model: nn.Module, transformers: bool):
        self._model = model
        self._converts = False
        left_out = _left_out(model) if transformers else ()
        state = {name: t for name, t in model.state_dict().items() if name not in left_out}
        self.parts = [PublishedTensor(source=name, outputs={name: tuple(t.shape)}) for name, t in state.items()]
        if transformers:
            self._convert(state)

    def tensors(self, part: PublishedTensor, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor of a part as the files have it, by name."""
        return _converted(self._model, {part.source: tensor}) if self._converts else {part.source: tensor}

    def _convert(self, state: dict[str, Tensor]) -> None:
        """Go over to the names that transformers publishes models of this kind under, which may differ from its own.

        A mixture of experts has one tensor an expert there. A model of which one published tensor takes several of
        ours keeps its own names, which transformers loads as well.
        """
        whole = _converted(self._model, dict(state))
        try:
            parts = [(name, _converted(self._model, {name: tensor})) for name, tensor in state.items()]
        except (RuntimeError, ValueError, IndexError, KeyError):
            return
        times = Counter(name for _, outputs in parts for name in outputs)
        alone = {name: t.shape for _, outputs in parts for name, t in outputs.items()}
        if max(times.values()) == 1 and alone == {name: t.shape for name, t in whole.items()}:
            self._converts = True
            shapes = [(source, {name: tuple(t.shape) for name, t in outputs.items()}) for source, outputs in parts]
            self.parts = [PublishedTensor(source=source, outputs=outputs) for source, outputs in shapes]


def published_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each tensor of the model's state_dict: `dtype` for floating parameters, buffers keep their own."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {name: dtype if name in parameters and t.is_floating_point() else t.dtype for name, t in state.items()}


def _left_out(model: nn.Module) -> set[str]:
    """Names that transformers does not write: tied to others, or made anew when the model is loaded."""
    return {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}


def _converted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
