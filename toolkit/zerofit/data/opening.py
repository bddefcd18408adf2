"""From a run's words to samples."""

from __future__ import annotations

from functools import partial

import numpy as np

from zerofit.data.base import Data, Dataset
from zerofit.data.documents import Source
from zerofit.data.names import check_task, default_data, split_name
from zerofit.data.synthetic import SyntheticText, parse_size
from zerofit.data.text import CausalText, MaskedText
from zerofit.data.token_cache import TokenFile, Tokens, open_tokens
from zerofit.data.tokenizer import Tokenizer, open_tokenizer
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.spec.task import DEFAULT_SEQ_LEN, Task, is_text


def open_data(run: Run, task: Task, seq_len: int | None, progress: Reporter) -> Data:
    """Open the data of a run; prepare and cache what that takes.

    `seq_len` (tokens a sample) is that of the model, as resolved; else run.seq_len, else DEFAULT_SEQ_LEN. Every process
    gets the same: the first makes the cache, others find it, or wait for it and say so through `progress`.
    Raises UserError with all that is wrong.
    """
    name = run.data or default_data(task)
    check_task(name, task)
    word, argument = split_name(name)
    if not is_text(task):
        return _open_images(name, word, argument, run, task, progress)
    length = seq_len or run.seq_len or DEFAULT_SEQ_LEN
    if word == "synthetic":
        return _open_synthetic_text(name, argument, run, task, length)
    return _open_text(name, word, argument, run, task, length, progress)


def _open_images(name: str, word: str, argument: str, run: Run, task: Task, progress: Reporter) -> Data:
    from zerofit.data.image_sources import IMAGE_SOURCES

    images = IMAGE_SOURCES[word](run, argument, task, progress)
    return Data(
        name=name,
        train=images.train,
        valid=images.valid,
        inputs=ImageInputs(channels=images.channels, size=images.size, classes=images.classes),
        bad_samples=images.bad,
        notes=images.notes,
    )


def _open_synthetic_text(name: str, argument: str, run: Run, task: Task, seq_len: int) -> Data:
    """A vocabulary of 256 (`synthetic:N`: N); its last id is the mask of a masked language model."""
    vocab = parse_size(argument, default=256, what="ids in the vocabulary")
    mask_id = vocab - 1 if task == "masked-lm" else None
    used = vocab if mask_id is None else vocab - 1
    make = partial(SyntheticText, vocab=used, seq_len=seq_len, seed=run.seed, mask_id=mask_id)
    return Data(
        name=name,
        train=make(n=16_384, first=0),
        valid=make(n=512, first=16_384),
        inputs=TextInputs(vocab_size=vocab, seq_len=seq_len, mask_id=mask_id),
        unigram_entropy_nats=float(np.log(used)),
    )


def _open_text(name: str, word: str, argument: str, run: Run, task: Task, seq_len: int, progress: Reporter) -> Data:
    from zerofit.data.text_sources import TEXT_SOURCES

    problems = Problems()
    source: Source | None = problems.attempt(lambda: TEXT_SOURCES[word](run, argument))
    tokenizer: Tokenizer | None = problems.attempt(lambda: _tokenizer_for(run.tokenizer, task))
    problems.raise_if_any()
    assert source is not None and tokenizer is not None
    tokens = open_tokens(source, tokenizer, progress)
    _refuse_short(name, tokens, seq_len)
    splits = [_samples(task, getattr(tokens, s), tokens.counts[s], seq_len, tokenizer) for s in ("train", "valid")]
    mask_id = tokenizer.mask_id if task == "masked-lm" else None
    return Data(
        name=name,
        train=splits[0],
        valid=splits[1],
        inputs=TextInputs(vocab_size=tokenizer.vocab_size, seq_len=seq_len, mask_id=mask_id),
        unigram_entropy_nats=tokens.unigram_entropy_nats,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        notes=tuple(_notes(tokens, task, seq_len)),
    )


def _tokenizer_for(name: str, task: Task) -> Tokenizer:
    tokenizer = open_tokenizer(name)
    if task == "masked-lm" and tokenizer.mask_id is None:
        message = f"--tokenizer {name} has no mask token, which a masked language model needs"
        hint = "--tokenizer bytes, or one with a mask_token (BERT's)"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
    return tokenizer


def _refuse_short(name: str, tokens: Tokens, seq_len: int) -> None:
    """At least one whole training sample, and something to validate on."""
    train, valid = tokens.counts["train"], tokens.counts["valid"]
    if train <= seq_len or valid < 2:
        message = f"--data {name} has {train:,} training tokens and {valid:,} validation tokens"
        message += f"; one sample takes {seq_len + 1:,}, validation at least 2"
        hint = f"more text, or --seq-len {max(1, train // 20)} or less"
        raise UserError(Problem(kind="data-too-short", message=message, hint=hint, where="--data"))


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


def _notes(tokens: Tokens, task: Task, seq_len: int) -> list[str]:
    """Padded last windows."""
    labels = {split: count - (task == "causal-lm") for split, count in tokens.counts.items()}
    words = {"train": "training", "valid": "validation"}
    return [
        f"the last {words[split]} sequence holds {count % seq_len} of {seq_len} tokens; "
        "the rest is padding that the loss ignores"
        for split, count in labels.items()
        if count % seq_len
    ]
