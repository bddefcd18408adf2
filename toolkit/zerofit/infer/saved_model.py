"""Saved models: from a folder that a user names to what the model is and takes, and where its weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.checkpoint.export import export
from zerofit.checkpoint.model_card import NAME as CARD
from zerofit.checkpoint.model_card import ModelInfo, read_model_info, refuse_untrusted_code
from zerofit.checkpoint.store import CHECKPOINTS, MANIFEST, Store, locate
from zerofit.infer.weights import StoredWeights, has_weights, read_weights
from zerofit.models.catalog import ModelError, ModelSource, find
from zerofit.models.hf import make_config, max_positions
from zerofit.models.inputs import ImageInputs, Inputs, TextInputs
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.precision import Precision
from zerofit.spec.task import Task

MODEL = "model"  # the trained model in a run's folder
IMAGE_SIZE = 224  # pixels, for a classifier whose config names no size: it takes any


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A trained model on the disk; nothing but headers and configs of it has been read."""

    folder: Path
    source: ModelSource
    task: Task
    inputs: Inputs  # what it takes; its vocabulary can hold more ids than the training's tokenizer gave
    longest: int | None  # tokens it takes at most; None without a limit
    info: ModelInfo | None  # None for a model that zerofit has not written
    weights: StoredWeights

    @property
    def own(self) -> bool:
        """Whether it is a user's own model."""
        return self.source.family == "custom"


def find_folder(path: Path, report: Reporter) -> Path:
    """Return the folder that is meant: a run's `model/`, a model's folder, else a checkpoint's, a run's newest one.

    Checkpoints are verified, byte by byte, with a warning for damaged ones that are newer. Raises UserError "no-model",
    or "damaged-checkpoint" where one is named that is not whole.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        hint = "name a run's folder, a checkpoint's or a model's"
        raise UserError(Problem(kind="no-model", message=f"{path} {what}", hint=hint, where="CKPT"))
    for folder in (path / MODEL, path):
        if has_weights(folder) or (folder / "config.json").is_file():
            return folder
    if is_checkpoint(path) or any(Store(folder).entries() for folder in (path / CHECKPOINTS, path)):
        return locate(path, "CKPT", deep=True, report=report)
    message = f"{path} holds no model, and no checkpoint"
    hint = "name a run's folder, one of its checkpoints/step-... folders, or a folder with config.json and weights"
    raise UserError(Problem(kind="no-model", message=message, hint=hint, where="CKPT"))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint's, which is exported before it is used."""
    return (folder / MANIFEST).is_file() and not has_weights(folder)


def exported(
    checkpoint: Path, scratch: Path, dtype: Precision | None, report: Reporter, trust_model_code: bool
) -> Path:
    """Export the model of a checkpoint into `scratch`, its weights in this type (None: the run's precision)."""
    return export(checkpoint, scratch / MODEL, dtype, trust_model_code=trust_model_code, report=report).out


def open_saved(folder: Path, trust_model_code: bool = False) -> SavedModel:
    """Open a model's folder. Raises UserError where it is not known what model that is, or weights lack.

    A model whose zerofit.json names a callable of somebody's own is refused unless `trust_model_code`.
    """
    info, weights = read_model_info(folder), read_weights(folder)
    try:
        if (folder / "config.json").is_file():
            return _transformers(folder, info, weights)
        if info is None:
            message = f"{folder} has weights, but neither config.json nor zerofit.json says of which model"
            hint = "write it with `zerofit ckpt export` or transformers' save_pretrained"
            raise UserError(Problem(kind="no-model", message=message, hint=hint, where="CKPT"))
        source = find(info.model)
        refuse_untrusted_code(source, info.model_args, folder / CARD, trust_model_code)
    except ModelError as error:
        raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint, where="CKPT")) from None
    return SavedModel(
        folder=folder, source=source, task=info.task, inputs=info.inputs, longest=None, info=info, weights=weights
    )


def _transformers(folder: Path, info: ModelInfo | None, weights: StoredWeights) -> SavedModel:
    source = find(str(folder.absolute()))  # a folder may have the name of a model
    assert source.task != "custom"  # see catalog.config_task
    config = make_config(source, None, {})
    longest = None if source.task == "image" else max_positions(config)
    inputs = info.inputs if info and source.task == "image" else _inputs(source, config, longest)
    return SavedModel(
        folder=folder, source=source, task=source.task, inputs=inputs, longest=longest, info=info, weights=weights
    )


def _inputs(source: ModelSource, config: Any, longest: int | None) -> Inputs:
    if source.task == "image":
        size = getattr(config, "image_size", None)
        return ImageInputs(
            channels=getattr(config, "num_channels", 3),
            size=size if isinstance(size, int) else IMAGE_SIZE,
            classes=config.num_labels,
        )
    return TextInputs(vocab_size=config.get_text_config().vocab_size, seq_len=longest or 0)
