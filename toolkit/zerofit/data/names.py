"""The names of data: KIND or KIND:ARGUMENT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.task import Task, is_text


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """One kind of data source."""

    media: frozenset[str]  # "image", "text" or both
    argument: str = ""  # what follows the colon, as shown to the user; "" where nothing may
    required: bool = False


def default_data(task: Task) -> str:
    """The data of a run that names none: present on every machine, learnable in minutes."""
    return "pysource" if is_text(task) else "digits"


def split_name(data: str) -> tuple[str, str]:
    """Split "text:books/*.txt" into ("text", "books/*.txt"); the argument is "" where there is none.

    Raises UserError: "unknown-data", or "data-argument" where an argument lacks or is too much.
    """
    word, colon, argument = data.partition(":")
    kind = KINDS.get(word)
    if kind is None:
        raise UserError(_unknown(data, word))
    shown = f"{word}:{kind.argument}" if kind.argument else word
    if kind.required and not argument:
        message = f"--data {data} names no {kind.argument}; it is written {shown}"
        raise UserError(Problem(kind="data-argument", message=message, hint=f"--data {shown}", where="--data"))
    if colon and not kind.argument:
        message = f"--data {data}: {word} takes nothing after it, got {argument!r}"
        raise UserError(Problem(kind="data-argument", message=message, hint=f"--data {word}", where="--data"))
    return word, argument


def check_task(data: str, task: Task) -> None:
    """Raise UserError "data-task" when a kind of data cannot feed a task (images to a language model)."""
    word, media = split_name(data)[0], "text" if is_text(task) else "image"
    if media not in KINDS[word].media:
        fitting = ", ".join(name for name, kind in KINDS.items() if media in kind.media)
        message = f"--data {data} holds no {media}s" if media == "image" else f"--data {data} holds no text"
        message += f", which the task {task} is trained on"
        raise UserError(Problem(kind="data-task", message=message, hint=f"--data one of {fitting}", where="--data"))


def _unknown(data: str, word: str) -> Problem:
    message = f"--data {data}: no such kind of data ({', '.join(KINDS)})"
    return Problem(kind="unknown-data", message=message, hint=_path_hint(data) or nearest(word, KINDS), where="--data")


def _path_hint(data: str) -> str:
    """People give a path and mean its obvious reading."""
    path = Path(data).expanduser()
    if path.is_dir():
        return f"did you mean imagefolder:{data} or text:{data}/*.txt?"
    if path.is_file():
        return f"did you mean {'jsonl' if path.suffix in ('.jsonl', '.ndjson') else 'text'}:{data}?"
    return ""


_IMAGE, _TEXT = frozenset({"image"}), frozenset({"text"})

KINDS: dict[str, SourceKind] = {
    "digits": SourceKind(media=_IMAGE),
    "mnist": SourceKind(media=_IMAGE),
    "fashion-mnist": SourceKind(media=_IMAGE),
    "cifar10": SourceKind(media=_IMAGE),
    "imagefolder": SourceKind(media=_IMAGE, argument="PATH", required=True),
    "pysource": SourceKind(media=_TEXT),
    "text": SourceKind(media=_TEXT, argument="GLOB", required=True),
    "jsonl": SourceKind(media=_TEXT, argument="GLOB", required=True),
    "hf": SourceKind(media=_TEXT, argument="NAME[:CONFIG]", required=True),
    "synthetic": SourceKind(media=_IMAGE | _TEXT, argument="CLASSES_OR_VOCABULARY"),
}
