"""Evaluation data of a saved model, checked against what the model takes: tokenizer, shapes, classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zerofit.data import Data, default_data, open_data
from zerofit.infer.saved_model import SavedModel
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.spec.task import DEFAULT_SEQ_LEN, is_text

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@contextmanager
def scratch_folder(asked: Path | None) -> Iterator[Path]:
    """Give a folder for what is written on the way, inside `asked` or among temporary files; it is removed afterwards.

    Raises UserError where it cannot be made.
    """
    try:
        if asked is not None:
            asked.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix="zerofit-", dir=asked)
    except OSError as error:
        message = f"nothing can be written into {asked or 'the folder for temporary files'}: {error.strerror or error}"
        problem = Problem(kind="unwritable", message=message, hint="name another folder", where="--offload-folder")
        raise UserError(problem) from None
    with folder as made:
        yield Path(made)


def open_eval_data(saved: SavedModel, fields: Mapping[str, Any], report: Reporter) -> Data:
    """Open the data to evaluate on: that of `fields` (of Run), where they name none that of the training.

    Raises UserError with all that does not go with the model.
    """
    problems = Problems()
    if saved.task == "gan":
        hint = "the pictures of its run are in drawings.png"
        problems.add("model-task", "a GAN has no labels to be right about", hint, "CKPT")
    if saved.info is None and "data" not in fields:
        message = f"{saved.folder} does not say what it was trained on"
        problems.add("data-missing", message, f"--data {default_data(saved.task)}, for one", "--data")
    reads = is_text(saved.task) and not fields.get("data", "").startswith("synthetic")
    tokenizer = problems.attempt(lambda: fields.get("tokenizer") or default_tokenizer(saved)) if reads else None
    seq_len = fields.get("seq_len") or _seq_len(saved)
    if saved.longest is not None and seq_len > saved.longest:
        message = f"{saved.folder} takes at most {saved.longest} tokens, got --seq-len {seq_len}"
        problems.add("seq-len", message, f"--seq-len {saved.longest} or less", "--seq-len")
    problems.raise_if_any()
    trained = {name: getattr(saved.info, name) for name in ("data", "text_field", "seed")} if saved.info else {}
    image = {"image_size": saved.inputs.size} if isinstance(saved.inputs, ImageInputs) else {}
    words = {"tokenizer": tokenizer} if tokenizer else {}
    run = Run(**{**trained, **image, **fields, **words})
    data = open_data(run, saved.task, seq_len, report)
    check_data(saved, data)
    return data


def check_data(saved: SavedModel, data: Data) -> None:
    """Raise UserError where the model was not made for such data: other classes or channels, more token ids."""
    mine, theirs, problems = saved.inputs, data.inputs, Problems()
    if isinstance(mine, ImageInputs) and isinstance(theirs, ImageInputs):
        for what, kind in (("classes", "classes"), ("channels", "channels")):
            if getattr(mine, what) != getattr(theirs, what):
                message = f"the model has {getattr(mine, what)} {what}, --data {data.name} {getattr(theirs, what)}"
                problems.add(kind, message, "take data like that which it was trained on", "--data")
    elif isinstance(mine, TextInputs) and isinstance(theirs, TextInputs) and theirs.vocab_size > mine.vocab_size:
        problems.extend([too_many_ids(mine, theirs.vocab_size)])
    problems.raise_if_any()


def too_many_ids(mine: TextInputs, ids: int) -> Problem:
    """Return the problem of a tokenizer that gives ids which the model has no embedding for."""
    message = f"the model has a vocabulary of {mine.vocab_size} ids, the tokenizer gives {ids}"
    hint = "--tokenizer with the one that the model was trained with"
    return Problem(kind="vocabulary", message=message, hint=hint, where="--tokenizer")


def _seq_len(saved: SavedModel) -> int:
    if saved.info and saved.info.seq_len:
        return saved.info.seq_len
    return min(DEFAULT_SEQ_LEN, saved.longest or DEFAULT_SEQ_LEN)


def default_tokenizer(saved: SavedModel) -> str:
    """Return the tokenizer beside the model, else the training's. Raises UserError where there is none."""
    if any((saved.folder / name).is_file() for name in TOKENIZER_FILES):
        return str(saved.folder)
    if saved.info:
        return saved.info.tokenizer
    message, hint = f"{saved.folder} holds no tokenizer", "name it: --tokenizer FOLDER, or bytes"
    raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
