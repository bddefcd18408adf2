"""Opening the data that a run names: KIND or KIND:ARGUMENT."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from zerofit.data.base import Data, Dataset, data_error
from zerofit.data.chat_records import CHAT_FIELDS
from zerofit.data.chats import open_chats
from zerofit.data.hf import open_hf
from zerofit.data.image_sources import open_packaged_set, open_vision_set
from zerofit.data.imagefolder import SUFFIXES, open_imagefolder
from zerofit.data.jsonl import open_jsonl
from zerofit.data.labelled import open_labelled
from zerofit.data.labelled_rows import KINDS as LABELLED_KINDS
from zerofit.data.mixing import ErasedImages
from zerofit.data.plain_files import COMPRESSED
from zerofit.data.published_images import as_published, published_images
from zerofit.data.segmentation import open_segmentation
from zerofit.data.stream import open_stream
from zerofit.data.synthetic import (
    open_synthetic_images,
    open_synthetic_labelled,
    open_synthetic_named,
    open_synthetic_table,
    open_synthetic_text,
)
from zerofit.data.table import open_table
from zerofit.data.text import CausalText, MaskedText
from zerofit.data.text_sources import ChatSource, TextSource, open_pysource, open_text
from zerofit.data.token_cache import TokenFile, Tokens, open_tokens
from zerofit.data.tokenizer import Tokenizer, open_tokenizer
from zerofit.models.catalog import find, label_names
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, Task, gives_loss, has_head, has_pairs, is_text
from zerofit.spec.run import Run


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """One kind of data source."""

    media: frozenset[str]  # "image", "masks", "table", "text" or some of them
    argument: str = ""  # describes the argument after the colon; "" if the kind has none
    required: bool = False


ARCHIVES = frozenset({".tar", ".tgz", ".zip", ".7z", ".rar"})
_IMAGE, _TABLE, _TEXT = frozenset({"image"}), frozenset({"table"}), frozenset({"text"})
_MASKS = frozenset({"masks"})

_MEDIA = {"table": "table", "segmentation": "masks"}  # tasks without text; all other tasks use images

# A new kind of data is a row here, and a function in one of the tables below.
KINDS: dict[str, SourceKind] = {
    "digits": SourceKind(media=_IMAGE),
    "mnist-5k": SourceKind(media=_IMAGE),
    "mnist": SourceKind(media=_IMAGE),
    "fashion-mnist": SourceKind(media=_IMAGE),
    "cifar10": SourceKind(media=_IMAGE),
    "imagefolder": SourceKind(media=_IMAGE, argument="PATH", required=True),
    "segmentation": SourceKind(media=_MASKS, argument="PATH", required=True),
    "csv": SourceKind(media=_TABLE, argument="FILE[:COLUMN]", required=True),
    "npy": SourceKind(media=_TABLE, argument="FILE[:COLUMN]", required=True),
    "pysource": SourceKind(media=_TEXT),
    "text": SourceKind(media=_TEXT, argument="GLOB", required=True),
    "jsonl": SourceKind(media=_TEXT, argument="GLOB", required=True),
    "hf": SourceKind(media=_TEXT, argument="NAME[:CONFIG]", required=True),
    "synthetic": SourceKind(media=_IMAGE | _MASKS | _TABLE | _TEXT, argument="CLASSES_OR_VOCABULARY"),
}

IMAGE_SOURCES: dict[str, Callable[[str, Run, Task, Reporter], Data]] = {  # called with the full name
    "digits": open_packaged_set,
    "mnist-5k": open_packaged_set,
    "mnist": open_vision_set,
    "fashion-mnist": open_vision_set,
    "cifar10": open_vision_set,
    "imagefolder": open_imagefolder,
    "segmentation": open_segmentation,
    "synthetic": open_synthetic_images,
}

TABLE_SOURCES: dict[str, Callable[[str, Run], Data]] = {  # called with the full name
    "csv": open_table,
    "npy": open_table,
    "synthetic": open_synthetic_table,
}

TEXT_SOURCES: dict[str, Callable[[Run, str], TextSource | ChatSource]] = {  # called with the name's argument
    "pysource": open_pysource,
    "text": open_text,
    "jsonl": open_jsonl,
    "hf": open_hf,
}


def default_data(task: Task) -> str:
    """Return the default data of a task: available everywhere, if possible learned in minutes."""
    if gives_loss(task) or has_head(task) or task in ("table", "segmentation"):
        return "synthetic"
    return "pysource" if is_text(task) else "digits"


def split_name(data: str) -> tuple[str, str]:
    """Split "text:books/*.txt" into ("text", "books/*.txt"), or "digits" into ("digits", "").

    Raises UserError: "unknown-data", or "data-argument" if an argument is missing or not allowed.
    """
    word, colon, argument = data.partition(":")
    kind = KINDS.get(word)
    if kind is None:
        message = f"--data {data}: unknown kind of data ({', '.join(KINDS)})"
        path, hint = Path(data).expanduser(), nearest(word, KINDS)
        # a part of the files is enough to tell: a folder may have millions
        suffixes = {file.suffix for file in islice(path.rglob("*"), 1000)} if path.is_dir() else {path.suffix}
        if suffixes & ARCHIVES and not suffixes - ARCHIVES - {"", ".json"}:  # WebDataset has an index beside them
            message = f"--data {data}: archives (also WebDataset's) are not read"
            hint = "extract them: imagefolder:PATH needs PATH/CLASS/*.jpg, text:GLOB and jsonl:GLOB need plain files"
        elif path.is_dir():
            hint = f"did you mean {_kinds_of_folder(suffixes, data)}?"
        elif path.is_file():
            hint = f"did you mean {kind_of_file(path)}:{data}?"
        elif path.suffix or len(path.parts) > 1:
            message, hint = f"--data {data}: no such file or folder", "check the path"
        raise data_error("unknown-data", message, hint)
    shown = f"{word}:{kind.argument}" if kind.argument else word
    if kind.required and not argument:
        raise data_error("data-argument", f"--data {data} needs {kind.argument}: {shown}", f"use --data {shown}")
    if colon and not kind.argument:
        message = f"--data {data}: {word} does not accept the argument {argument!r}"
        raise data_error("data-argument", message, f"use --data {word}")
    return word, argument


def _kinds_of_folder(suffixes: Set[str], data: str) -> str:
    """Return the data names that fit a folder, by the suffixes of its files."""
    if suffixes & {".parquet", ".arrow", ".jsonl", ".json", ".csv"} and not suffixes & SUFFIXES:
        return f"hf:{data}"
    return f"imagefolder:{data} or text:{data}/*.txt"


def kind_of_file(path: Path) -> str:
    """Return the kind of data for a file name."""
    kinds = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".npy": "npy"}
    kinds |= {".parquet": "hf", ".arrow": "hf"}
    return kinds.get(Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix, "text")


def check_data(data: str, task: Task | None) -> None:
    """Check a data name and, if the task is known, that the task can use such data.

    Raises UserError "data-task", and the errors of `split_name`.
    """
    word = split_name(data)[0]
    if task is None:
        return
    media = "text" if is_text(task) else _MEDIA.get(task, "image")
    if has_pairs(task):
        if word in (*LABELLED_KINDS, "synthetic"):
            return
        message = f"--data {data} has no labeled text, which the task {task} needs"
        raise data_error("data-task", message, "use --data jsonl:GLOB, csv:GLOB, hf:NAME or synthetic")
    if gives_loss(task) and word != "synthetic":
        message = f"--data {data}: zerofit trains {task} models on synthetic tensors only, to measure memory and speed"
        hint = "use --data synthetic; to train on your data, use transformers' Trainer (docs/scripts.md)"
        raise data_error("data-task", message, hint)
    if media not in KINDS[word].media:
        fitting = ", ".join(name for name, kind in KINDS.items() if media in kind.media)
        what = {"image": "images", "masks": "images with masks", "table": "table of numbers", "text": "text"}[media]
        message = f"--data {data} has no {what}, which the task {task} needs"
        raise data_error("data-task", message, f"use --data with {fitting}")


# The branches by task: tables, labeled text, models with their own loss, images, then text. Text needs a tokenizer;
# all mistakes in data and tokenizer are reported together.
def open_data(
    run: Run, task: Task, seq_len: int | None, progress: Reporter, known: Sequence[str] | None = None
) -> Data:
    """Open the data of a run; prepare and cache them as needed.

    `seq_len`: the resolved number of tokens per sample; default run.seq_len, else DEFAULT_SEQ_LEN. Every process
    gets the same data. The first process makes the cache. The other processes use it, or wait for it and report that to
    `progress`. `known`: the classes of a trained model, in order; default: the classes of the run's model. Raises
    UserError with all problems.
    """
    name = run.data or default_data(task)
    check_data(name, task)
    word, argument = split_name(name)
    if task == "table":
        return TABLE_SOURCES[word](name, run)
    length = seq_len or run.seq_len or DEFAULT_SEQ_LEN
    if has_head(task) and word == "synthetic":
        return open_synthetic_labelled(name, run, task, length)
    if has_pairs(task) and word != "synthetic":
        if run.stream:
            return _streamed(name, word, argument, run, task, length)  # always raises an error
        known = label_names(find(run.model)) if known is None and has_head(task) else known or ()
        return open_labelled(name, run, task, length, known, progress)
    if gives_loss(task):
        return open_synthetic_named(name, run, length)
    if not is_text(task):
        return _open_images(name, word, run, task, progress)
    if word == "synthetic":
        return open_synthetic_text(name, run, task, length)
    if run.stream:
        return _streamed(name, word, argument, run, task, length)
    problems = Problems()
    source = problems.attempt(lambda: TEXT_SOURCES[word](run, argument))
    tokenizer = problems.attempt(lambda: _tokenizer_for(run.tokenizer, task))
    problems.raise_if_any()
    assert source is not None and tokenizer is not None
    if isinstance(source, ChatSource):
        if task != "causal-lm":
            message = f"--data {name} has conversations, but the task is {task}"
            hint = "use a causal language model, or --text-field with a field of plain text"
            raise data_error("data-task", message, hint)
        return open_chats(source, tokenizer, run, length, progress)
    if run.chat_template is not None:
        message = f"--chat-template: --data {name} has plain text, not conversations"
        hint = f"remove it; conversations have a field {', '.join(CHAT_FIELDS)}"
        raise UserError(Problem(kind="chat-template", message=message, hint=hint, where="--chat-template"))
    return _tokenized(name, open_tokens(source, tokenizer, progress), tokenizer, task, length)


def _open_images(name: str, word: str, run: Run, task: Task, progress: Reporter) -> Data:
    """Open images in the largest size of the run, scaled as those of its pretrained weights."""
    if task == "gan":
        return IMAGE_SOURCES[word](name, run, task, progress)
    # A size of the run takes precedence over that of the weights. Without both, the data's own size is used.
    published = published_images(run)
    size = ImageSizes.parse(run.image_sizes).largest if run.image_sizes else run.image_size or published.size
    data = IMAGE_SOURCES[word](name, run.model_copy(update={"image_size": size}), task, progress)
    # Erased after scaling, so that an erased rectangle has the mean color.
    if run.random_erasing and task == "image":
        data = replace(data, train=ErasedImages(images=data.train, odds=run.random_erasing))
    return as_published(data, published)


def _streamed(name: str, word: str, argument: str, run: Run, task: Task, length: int) -> Data:
    """Open a stream. Raises UserError for data or models that do not support it."""
    if word != "hf" or task != "causal-lm":
        message = f"--stream needs --data hf:NAME and a causal language model, not {name} with the task {task}"
        raise UserError(Problem(kind="stream", message=message, hint="remove --stream", where="--stream"))
    return open_stream(run, argument, _tokenizer_for(run.tokenizer, task), length)


def _tokenizer_for(name: str, task: Task) -> Tokenizer:
    tokenizer = open_tokenizer(name)
    if task == "masked-lm" and tokenizer.mask_id is None:
        message = f"--tokenizer {name} has no mask token, which a masked language model needs"
        hint = "use --tokenizer bytes, or a tokenizer with a mask_token, like BERT's tokenizer"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
    return tokenizer


def _tokenized(name: str, tokens: Tokens, tokenizer: Tokenizer, task: Task, seq_len: int) -> Data:
    """Make samples of tokens. Raises UserError if they are too few for one full training sample."""
    train, valid = tokens.counts["train"], tokens.counts["valid"]
    if train <= seq_len or valid < 2:
        message = f"--data {name} has {train:,} training tokens and {valid:,} validation tokens"
        message += f"; a sample needs {seq_len + 1:,} tokens, and validation needs at least 2"
        hint = f"add text, or use --seq-len {train // 20} or less" if train >= 20 else "add text"
        raise data_error("data-too-short", message, hint)
    # The first token of causal text is not a label.
    labels = {"training": train - (task == "causal-lm"), "validation": valid - (task == "causal-lm")}
    notes = (
        f"the last {split} sequence has {count % seq_len} of {seq_len} tokens; the rest is padding, ignored by the loss"
        for split, count in labels.items()
        if count % seq_len
    )
    mask_id = tokenizer.mask_id if task == "masked-lm" else None
    return Data(
        name=name,
        train=_samples(task, tokens.train, train, seq_len, tokenizer),
        valid=_samples(task, tokens.valid, valid, seq_len, tokenizer),
        inputs=TextInputs(vocab_size=tokenizer.vocab_size, seq_len=seq_len, mask_id=mask_id),
        unigram_entropy_nats=tokens.unigram_entropy_nats,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        notes=tuple(notes),
    )


def _samples(task: Task, file: TokenFile, count: int, seq_len: int, tokenizer: Tokenizer) -> Dataset:
    if task == "causal-lm":
        return CausalText(file=file, tokens=count, seq_len=seq_len, pad_id=tokenizer.eod_id)
    assert tokenizer.mask_id is not None
    return MaskedText(
        file=file,
        tokens=count,
        seq_len=seq_len,
        pad_id=tokenizer.eod_id,
        mask_id=tokenizer.mask_id,
        ordinary_ids=tokenizer.ordinary_ids,
    )
