"""What a command line asks of a saved model, held against what the model is: data, tokenizer, shapes."""

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
    """A folder for what is written on the way, inside `asked` or the system's place for such; gone afterwards.

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


def open_asked_data(saved: SavedModel, flags: Mapping[str, Any], progress: Reporter) -> Data:
    """The data to evaluate on: that of `flags` (fields of Run), where they are silent that of the training.

    Raises UserError with all that does not go with the model.
    """
    problems = Problems()
    if saved.task == "gan":
        hint = "the pictures of its run are in drawings.png"
        problems.add("model-task", "a GAN has no labels to be right about", hint, "CKPT")
    if saved.about is None and "data" not in flags:
        message = f"{saved.folder} does not say what it was trained on"
        problems.add("data-missing", message, f"--data {default_data(saved.task)}, for one", "--data")
    reads = is_text(saved.task) and not flags.get("data", "").startswith("synthetic")
    tokenizer = problems.attempt(lambda: tokenizer_name(saved, flags)) if reads else None
    seq_len = flags.get("seq_len") or _seq_len(saved)
    if saved.longest is not None and seq_len > saved.longest:
        message = f"{saved.folder} takes at most {saved.longest} tokens, got --seq-len {seq_len}"
        problems.add("seq-len", message, f"--seq-len {saved.longest} or less", "--seq-len")
    problems.raise_if_any()
    trained = {name: getattr(saved.about, name) for name in ("data", "text_field", "seed")} if saved.about else {}
    image = {"image_size": saved.inputs.size} if isinstance(saved.inputs, ImageInputs) else {}
    words = {"tokenizer": tokenizer} if tokenizer else {}
    run = Run(**{**trained, **image, **flags, **words})
    data = open_data(run, saved.task, seq_len, progress)
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
    """A tokenizer that gives ids which the model has no embedding for."""
    message = f"the model has a vocabulary of {mine.vocab_size} ids, the tokenizer gives {ids}"
    hint = "--tokenizer with the one that the model was trained with"
    return Problem(kind="vocabulary", message=message, hint=hint, where="--tokenizer")


def _seq_len(saved: SavedModel) -> int:
    if saved.about and saved.about.seq_len:
        return saved.about.seq_len
    return min(DEFAULT_SEQ_LEN, saved.longest or DEFAULT_SEQ_LEN)


def tokenizer_name(saved: SavedModel, flags: Mapping[str, Any]) -> str:
    """The tokenizer that was asked for, else the one beside the model, else the training's. Raises UserError."""
    if "tokenizer" in flags:
        return flags["tokenizer"]
    if any((saved.folder / name).is_file() for name in TOKENIZER_FILES):
        return str(saved.folder)
    if saved.about:
        return saved.about.tokenizer
    message = f"{saved.folder} holds no tokenizer"
    problem = Problem(
        kind="tokenizer", message=message, hint="name it: --tokenizer FOLDER, or bytes", where="--tokenizer"
    )
    raise UserError(problem)
