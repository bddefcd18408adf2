"""Rewriting weights once into the files that a forward can read from disk each time."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from zerofit.checkpoint.export import PublishedModel, PublishedTensor
from zerofit.checkpoint.safe_load import load
from zerofit.checkpoint.safetensors_writer import TensorEntry, write_file
from zerofit.checkpoint.staging import refuse_small_disk
from zerofit.infer.quiet import quiet
from zerofit.infer.saved_model import SavedModel
from zerofit.infer.weights import StoredWeights, read_weights
from zerofit.spec.events import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "model.safetensors"
COPIES = 4  # of a merged tensor in memory at once: its parts mapped, both halves stacked, the whole


class WeightRewrite:
    """What a saved model's files lack so that each forward can read from them; perhaps nothing."""

    def __init__(self, saved: SavedModel, empty: nn.Module, dtype: torch.dtype):
        self._saved, self._empty, self._dtype = saved, empty, dtype
        self._stored = saved.weights.tensors
        self._merged = _merged(saved, empty)
        self._wanted = {name: self._type(name) for name in self._stored}
        alike = all(where.dtype == self._wanted[name] for name, where in self._stored.items())
        known = None not in self._wanted.values()
        self.needed = known and (bool(self._merged) or saved.weights.pickled or not alike)

    @property
    def host_bytes(self) -> int:
        """The most that merging experts takes in memory."""
        shapes = {name: tensor.shape for name, tensor in self._empty.state_dict().items()}
        largest = max((math.prod(shapes[part.source]) for part in self._merged), default=0)
        return COPIES * largest * max(self._saved.weights.dtype.itemsize, self._dtype.itemsize)

    def write(self, scratch: Path, report: Reporter) -> SavedModel:
        """Write the model with its weights in one safetensors file inside `scratch`, a tensor at a time in memory.

        Raises UserError where the disk is too small, and where a number has no place in the type ("overflow").
        """
        folder = scratch / "rewritten"
        folder.mkdir()
        parts = {part.source: part for part in self._merged}
        gone = {name for part in self._merged for name in part.outputs}
        shapes = {name: tuple(self._empty.state_dict()[name].shape) for name in parts}
        shapes |= {name: where.shape for name, where in self._stored.items() if name not in gone}
        types = {name: wanted for name, wanted in self._wanted.items() if wanted} | dict.fromkeys(parts, self._dtype)
        entries = [TensorEntry(name=name, shape=shape, dtype=types[name]) for name, shape in shapes.items()]
        total = sum(entry.bytes for entry in entries)
        refuse_small_disk(folder, total, "--offload-folder")

        def read(name: str) -> Tensor:
            return self._merge(parts[name]) if name in parts else _tensor(self._saved.weights, name)

        with quiet(), report.task(f"writing the weights to {folder}", total, "bytes") as task:
            write_file(folder / FILE, entries, read, task.advance)
        for config in self._saved.folder.glob("*config.json"):
            shutil.copy(config, folder)
        return replace(self._saved, folder=folder, weights=read_weights(folder))

    def _type(self, name: str) -> torch.dtype | None:
        stored = self._stored[name].dtype
        if stored is None or not stored.is_floating_point:
            return stored
        own = self._empty.state_dict(keep_vars=True).get(name)
        return self._dtype if own is None else own.dtype

    def _merge(self, part: PublishedTensor) -> Tensor:
        """Return one tensor of the model out of several of the files, as transformers puts them together."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        pieces = {name: _tensor(self._saved.weights, name) for name in part.outputs}
        model = cast("PreTrainedModel", self._empty)
        mapping = cast(Any, get_model_conversion_mapping(model))
        config = LoadStateDictConfig(device_map={"": "cpu"}, dtype=self._dtype, weight_mapping=mapping)
        convert_and_load_state_dict_in_model(model, pieces, config)
        owner, _, name = part.source.rpartition(".")
        merged = getattr(self._empty.get_submodule(owner), name).detach()
        setattr(self._empty.get_submodule(owner), name, nn.Parameter(merged.to("meta"), requires_grad=False))
        return merged


def _merged(saved: SavedModel, empty: nn.Module) -> list[PublishedTensor]:
    """Return the tensors of the model that the files hold in several (a mixture's experts, one by one)."""
    if saved.source.family != "transformers":
        return []
    several = [part for part in PublishedModel(empty, transformers=True).parts if len(part.outputs) > 1]
    return [part for part in several if set(part.outputs) <= set(saved.weights.tensors)]


def _tensor(weights: StoredWeights, name: str) -> Tensor:
    """Read a tensor from a file opened for it alone: what a mapping has shown stays resident until it is closed."""
    where = weights.tensors[name]
    if weights.pickled:
        return load(where.file)[name]
    with safe_open(where.file, framework="pt") as file:
        return file.get_tensor(name)
