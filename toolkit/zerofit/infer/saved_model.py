"""Saved models: find the model in a user's folder, its inputs, and the files of its weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open

from zerofit.checkpoint.adapters import is_adapters
from zerofit.checkpoint.foreign import foreign_at
from zerofit.checkpoint.model_folder import CARD, SAFETENSORS_NAMES, ModelInfo, read_model_info
from zerofit.checkpoint.safe_load import load
from zerofit.checkpoint.store import CHECKPOINTS, MANIFEST, Store, is_own, locate
from zerofit.models.catalog import NAMES, ModelSource, find, label_names, weight_names
from zerofit.models.hf_config import make_config, max_positions
from zerofit.models.inputs import Fed, ImageInputs, Inputs, LabelledTextInputs, TextInputs
from zerofit.models.named_inputs import named_inputs
from zerofit.spec.errors import Problem, Problems, UserError, models_say
from zerofit.spec.events import Reporter
from zerofit.spec.foreign import Unreadable
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, Task, gives_loss, has_head
from zerofit.spec.named_code import refuse_foreign_code

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODEL = "model"  # the trained model in a run's folder
IMAGE_SIZE = 224  # pixels, for a classifier whose config has no size, since it supports any size
DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A trained model on disk, of which only headers and configs have been read."""

    folder: Path
    source: ModelSource
    task: Task
    inputs: Inputs  # the vocabulary can have more ids than the training's tokenizer
    longest: int | None  # largest number of tokens; None without a limit
    info: ModelInfo | None  # None for a model that was not written by zerofit
    weights: StoredWeights


# Users may name a run, its model, a checkpoint, adapters or a folder from the hub.
def find_folder(path: Path, report: Reporter) -> Path:
    """Return the folder of the model or checkpoint that `path` names; of a run the newest.

    Checkpoints are verified byte by byte. If newer checkpoints of a run are damaged, they are skipped with a warning.
    Raises UserError "no-model", or "damaged-checkpoint" if `path` is an incomplete checkpoint.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        hint = "name the folder of a run, a checkpoint or a model"
        raise UserError(Problem(kind="no-model", message=f"{path} {what}", hint=hint, where="CKPT"))
    if not is_own(path) and not has_weights(path) and not is_adapters(path) and (foreign := foreign_at(path)):
        return foreign.path
    for folder in (path / MODEL, path):
        if has_weights(folder) or (folder / "config.json").is_file() or is_adapters(folder):
            return folder
    if is_checkpoint(path) or any(Store(folder).entries() for folder in (path / CHECKPOINTS, path)):
        return locate(path, "CKPT", deep=True, report=report)
    message = f"{path} contains neither a model nor a checkpoint"
    hint = "name a run's folder, one of its checkpoints/step-... folders, or a folder with config.json and weights"
    raise UserError(Problem(kind="no-model", message=message, hint=hint, where="CKPT"))


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint. A checkpoint is exported before use."""
    return not has_weights(folder) and ((folder / MANIFEST).is_file() or foreign_at(folder) is not None)


def open_saved(folder: Path, trust_model_code: bool = False) -> SavedModel:
    """Open a model's folder. Raises UserError if weights are missing or it is no known model.

    A model whose zerofit.json names a user's Python code is refused unless `trust_model_code`.
    """
    info, weights = read_model_info(folder), read_weights(folder)
    with models_say("CKPT"):
        if (folder / "config.json").is_file():
            return _open_transformers(folder, info, weights)
        if info is None:
            message = "CKPT has weights, but no config.json or zerofit.json that names the model"
            hint = "`zerofit ckpt export CKPT OUT --model FOLDER` writes a model with the config.json in FOLDER"
            raise UserError(Problem(kind="no-model", message=message, hint=hint, where="CKPT"))
        source = find(info.model)
        refuse_foreign_code(folder / CARD, trust_model_code, model=info.model, model_args=info.model_args)
    return SavedModel(
        folder=folder, source=source, task=info.task, inputs=info.inputs, longest=None, info=info, weights=weights
    )


def _open_transformers(folder: Path, info: ModelInfo | None, weights: StoredWeights) -> SavedModel:
    """Open a folder with a config.json of transformers. Raises UserError and ModelError."""
    source = find(str(folder.absolute()))  # a folder may have the name of a model
    assert source.task != "custom"  # see catalog.config_task
    if gives_loss(source.task) and source.task != "seq2seq-lm":
        message = f"{folder} is a model for the task {source.task}, which `zerofit eval` and `generate` do not support"
        hint = "use transformers' pipelines, which can read this folder"
        raise UserError(Problem(kind="model-task", message=message, hint=hint, where="CKPT"))
    config = make_config(source, None, {})
    longest = None if source.task == "image" else max_positions(config)
    inputs = info.inputs if info and source.task == "image" else _inputs(source, config, longest)
    return SavedModel(
        folder=folder, source=source, task=source.task, inputs=inputs, longest=longest, info=info, weights=weights
    )


def _inputs(source: ModelSource, config: PretrainedConfig, longest: int | None) -> Inputs:
    """Return the inputs of a transformers model, as its config describes them."""
    if source.task == "image":
        size = getattr(config, "image_size", None)
        return ImageInputs(
            channels=getattr(config, "num_channels", 3),
            size=size if isinstance(size, int) else IMAGE_SIZE,
            classes=cast(int, config.num_labels),
        )
    length = longest or DEFAULT_SEQ_LEN
    if source.task == "seq2seq-lm":
        return named_inputs(source, {}, length, Fed())
    if has_head(source.task):
        return LabelledTextInputs(
            vocab_size=config.get_text_config().vocab_size,
            seq_len=length,
            classes=label_names(source),
            pad_id=config.get_text_config().pad_token_id or 0,
            tags=source.task == "tag",
        )
    return TextInputs(vocab_size=config.get_text_config().vocab_size, seq_len=longest or 0)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor is stored."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for a type that zerofit does not write (8-bit floats)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """A model's weights on disk, by name."""

    tensors: dict[str, StoredTensor]
    pickled: bool  # written by torch.save, and not in the safetensors format

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of the floating point numbers."""
        counts: Counter[torch.dtype] = Counter()
        for stored in self.tensors.values():
            if stored.dtype is not None and stored.dtype.is_floating_point:
                counts[stored.dtype] += math.prod(stored.shape)
        return counts.most_common(1)[0][0] if counts else torch.float32


def has_weights(folder: Path) -> bool:
    """Return whether a folder contains weight files with transformers' names."""
    return any((folder / name).is_file() for name in NAMES)


# Headers are enough to plan the placement of weights. Reading them also detects incomplete downloads before memory is
# allocated.
def read_weights(folder: Path) -> StoredWeights:
    """Return the weights in a model's folder; only the files' headers are read.

    Raises UserError: "weights-missing", "weights-damaged", or for a pickle "unsafe-file" or "damaged-file".
    """
    try:
        names = weight_names(folder)
    except Unreadable as error:
        raise _damaged(folder, error.reason) from None
    if not names:
        message = f"{folder} contains no weights: none of {', '.join(NAMES)}"
        raise UserError(Problem(kind="weights-missing", message=message, hint="is the copy complete?", where="CKPT"))
    problems = Problems()
    for name in names:
        if not (folder / name).is_file():
            message = f"{folder} lacks {name}, which its index names"
            problems.add("weights-missing", message, "is the copy complete?", "CKPT")
    problems.raise_if_any()
    pickled = names[0].endswith(".bin")
    tensors: dict[str, StoredTensor] = {}
    for file in (folder / name for name in names):
        of_file = problems.attempt(lambda file=file: _pickled(file) if pickled else _in_header(file)) or {}
        if in_both := of_file.keys() & tensors.keys():
            first = min(in_both)
            problems.extend(_damaged(file, f"{first} is also in {tensors[first].file.name}").problems)
        tensors |= of_file
    problems.raise_if_any()
    return StoredWeights(tensors=tensors, pickled=pickled)


def _in_header(file: Path) -> dict[str, StoredTensor]:
    """Return a safetensors file's tensors. Raises UserError."""
    try:
        # The library checks types, shapes and offsets against the length of the file.
        with safe_open(file, framework="pt") as opened, file.open("rb") as raw:
            # A safetensors file begins with the length of its JSON header, as 8 bytes.
            header = raw.read(int.from_bytes(raw.read(8), "little"))
            json.loads(header, object_pairs_hook=_named_once)  # the library uses the last of two equal names
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            return {
                name: StoredTensor(file=file, shape=tuple(tensor.get_shape()), dtype=DTYPES.get(tensor.get_dtype()))
                for name, tensor in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(file, str(error)) from None


def _named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. Raises ValueError if it has a name twice."""
    tensors = dict(pairs)
    if len(tensors) < len(pairs):
        raise ValueError("its header gives a name twice")
    return tensors


def _pickled(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a torch file, mapped to memory and not read. Raises UserError."""
    content = load(file)
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise _damaged(file, "it is not a dictionary of tensors")
    return {
        name: StoredTensor(file=file, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in content.items()
    }


def _damaged(file: Path, what: str) -> UserError:
    hint = "copy or export it again"
    message = f"{file} is damaged: {what}"
    return UserError(Problem(kind="weights-damaged", message=message, hint=hint, where="CKPT"))
