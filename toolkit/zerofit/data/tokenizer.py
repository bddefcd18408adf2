"""Tokenizers: bytes, or transformers' from a folder, a tokenizer.json or the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zerofit.data.hashing import text_digest
from zerofit.data.hf import hub_if_reachable
from zerofit.data.published_images import CARD
from zerofit.spec.errors import Problem, UserError, reason_of
from zerofit.spec.foreign import Unreadable, read_json

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")
_MASK_TOKENS = ("[MASK]", "<mask>")
_KNOWN = "use bytes, a tokenizer.json, a folder that contains one, or a hub name (needs a network)"
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")  # transformers' and convertible files


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Turns text into ids and back."""

    name: str
    identity: str  # hash of everything that determines a text's ids
    vocab_size: int  # upper bound of ids
    eod_id: int  # follows each document
    mask_id: int | None
    ordinary_ids: np.ndarray  # int64: ids that are not special tokens
    encode_all: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[list[int]], str]
    loaded: Any = None  # the transformers tokenizer; None for bytes

    @cached_property
    def added_ids(self) -> np.ndarray:
        """Return the ids of added tokens, such as the end of a turn, int64."""
        added = self.loaded.added_tokens_decoder if self.loaded is not None else ()
        return np.array(sorted(added), dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-document id."""
        return self.encode_all([text])[0].tolist()


def open_tokenizer(name: str) -> Tokenizer:
    """Open `bytes`, a folder with a tokenizer, a tokenizer.json, or a name on the hub.

    Never runs remote code. Raises UserError "tokenizer".
    """
    if name == "bytes" or was_trained_on_bytes(Path(name).expanduser()):
        return _bytes_tokenizer()
    return _transformers_tokenizer(name)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has a tokenizer, or needs none because it learned bytes."""
    return any(next(folder.glob(pattern), None) for pattern in _FILES) or was_trained_on_bytes(folder)


def was_trained_on_bytes(folder: Path) -> bool:
    """Return whether zerofit trained the model in `folder` on bytes, without tokenizer files."""
    try:
        return read_json(folder / CARD).get("tokenizer") == "bytes"
    except (OSError, Unreadable):
        return False


def _bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer of 256 bytes, end of document (256), mask (257) and padding (258)."""
    return Tokenizer(
        name="bytes",
        identity="bytes-1",
        vocab_size=260,  # id 259 is unused: tensor parallelism splits the vocabulary, so 4 must divide it
        eod_id=256,
        mask_id=257,
        ordinary_ids=np.arange(256),
        encode_all=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        # A model may generate a part of a character, which must not be an error.
        decode=lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
    )


def _transformers_tokenizer(name: str) -> Tokenizer:
    """Open a transformers tokenizer that has a vocabulary and an end token. Raises UserError."""
    # transformers opens a folder without a vocabulary as an empty tokenizer, and does not raise an error.
    loaded = load_transformers(name)
    vocab = loaded.get_vocab()
    if set(vocab.values()) <= {*loaded.all_special_ids, *loaded.added_tokens_decoder}:  # no file was found
        message = f"--tokenizer {name} has no vocabulary, only {len(vocab)} special tokens"
        raise UserError(Problem(kind="tokenizer", message=message, hint=_KNOWN, where="--tokenizer"))
    end = _first_id(vocab, (loaded.eos_token, loaded.sep_token, *_END_TOKENS))
    if end is None:
        message = f"--tokenizer {name} has no token that ends a document (eos_token or sep_token)"
        hint = "set eos_token in its tokenizer_config.json, or use --tokenizer bytes"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
    mask = _first_id(vocab, (loaded.mask_token, *_MASK_TOKENS))
    special = {*loaded.all_special_ids, end, mask}
    # Only a tokenizer of the Rust library has all its rules as text.
    backend = getattr(loaded, "backend_tokenizer", None)
    content = backend.to_str() if backend else repr(sorted(vocab.items()))

    def encode_all(texts: Sequence[str]) -> list[np.ndarray]:
        if not texts:  # transformers fails for an empty list
            return []
        # Documents are joined later, so they do not begin with [CLS] or <s>. `verbose` would warn of long ones.
        ids = loaded(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.int64) for row in ids]

    return Tokenizer(
        name=name,
        identity=text_digest(type(loaded).__name__, content, str(end)),
        vocab_size=max(len(loaded), 1 + max(vocab.values())),  # ids may have gaps
        eod_id=end,
        mask_id=mask,
        ordinary_ids=np.array([i for i in sorted(vocab.values()) if i not in special], dtype=np.int64),
        encode_all=encode_all,
        decode=loaded.decode,
        loaded=loaded,
    )


def load_transformers(name: str) -> Any:  # Any: transformers' types of special tokens and decode() are wide unions
    """Open transformers' tokenizer of a folder, a tokenizer.json or the hub. Raises UserError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(name).expanduser()
    if path.is_dir() and not has_tokenizer(path):
        message = f"{name} has no tokenizer files, and its weights were not trained on bytes"
        hint = "use --tokenizer FOLDER with the model's own tokenizer; --tokenizer bytes trains on raw bytes"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
    if path.is_dir() and not (path / "tokenizer_config.json").is_file() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    try:
        if path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        with hub_if_reachable():
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and the hub client raise many unrelated types
        message = f"cannot open --tokenizer {name}: {reason_of(error)}"
        hint = "did you mean bytes?" if get_close_matches(name, ["bytes"]) else _KNOWN
        if path.is_dir() and not (path / "tokenizer.json").is_file():
            make = f"AutoTokenizer.from_pretrained({name!r}).save_pretrained({name!r})"
            hint = f"with sentencepiece and tiktoken installed, make a tokenizer.json: {make}; or use --tokenizer bytes"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer")) from error


def _first_id(vocab: dict[str, int], tokens: Sequence[str | None]) -> int | None:
    """Return the id of the first of these tokens that is in the vocabulary; None if none is."""
    return next((vocab[token] for token in tokens if token in vocab), None)
