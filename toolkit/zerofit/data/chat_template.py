"""Conversations as tokens: a chat template, and which of the tokens the assistant writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from zerofit.data.chat_records import ChatMessages
from zerofit.data.hashing import text_digest
from zerofit.data.tokenizer import Tokenizer, load_transformers
from zerofit.spec.errors import Problem, UserError

# what marks the assistant's words in a template (transformers' own return_assistant_tokens_mask)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# for bytes, which have no template
PLAIN = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>
{% endgeneration %}{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
CHAT_TEMPLATE = "chat_template.jinja"  # beside a model, as transformers has it
MARK_IT = "--chat-template FILE, with {% generation %} ... {% endgeneration %} around what the assistant writes"

Span = tuple[int, int]  # of characters


class NotRendered(ValueError):
    """Raised with the reason why a template does not take a conversation, or does not tell what is the assistant's."""


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """The tokens of a conversation."""

    ids: np.ndarray  # int64 (tokens,)
    targets: np.ndarray  # bool (tokens,): written by the assistant


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and the tokenizer that reads what it writes."""

    text: str
    origin: str  # whose template it is, as shown to the user
    tokenizer: Tokenizer

    @property
    def identity(self) -> str:
        """A hash of all that decides which tokens a conversation becomes."""
        return text_digest(self.tokenizer.identity, self.text, repr(sorted(self._special_tokens().items())))

    @property
    def marked(self) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return MARKED.search(self.text) is not None

    def encode_all(self, conversations: Sequence[ChatMessages]) -> list[EncodedChat | str]:
        """Return the tokens of each conversation, or why it has none."""
        rendered = [self._attempt(one) for one in conversations]
        texts = [one[0] for one in rendered if not isinstance(one, str)]
        tokens = iter(_with_places(self.tokenizer, texts))
        return [one if isinstance(one, str) else self._targets(*next(tokens), *one) for one in rendered]

    def _attempt(self, conversation: ChatMessages) -> tuple[str, list[Span]] | str:
        try:
            text, spans = self._spans(conversation)
        except NotRendered as error:
            return str(error)
        return text.encode("utf-8", "replace").decode(), spans  # half a surrogate pair has no bytes

    def _spans(self, conversation: ChatMessages) -> tuple[str, list[Span]]:
        """Return the text and where the assistant writes in it, to the end of each turn. Raises NotRendered."""
        messages, tools = conversation.messages, conversation.tools
        text, spans = self._render(messages, tools)
        if self.marked:
            return text, spans
        for n, message in enumerate(messages):
            if message["role"] == "assistant":
                asked, _ = self._render(messages[:n], tools, prompt=True)
                answered, _ = self._render(messages[: n + 1], tools)
                if not answered.startswith(asked) or not text.startswith(answered):
                    message = f"the chat template of {self.origin} writes message {n + 1} otherwise once others follow"
                    raise NotRendered(message + ", so that what the assistant writes cannot be told from the rest")
                spans.append((len(asked), len(answered)))
        return text, spans

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of the messages, and the spans that the template marks. Raises NotRendered."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # annotated as text alone
                conversations=[messages],
                tools=cast(Any, tools),
                chat_template=self.text,
                return_assistant_tokens_mask=self.marked,
                add_generation_prompt=prompt,
                **self._special_tokens(),
            )
        except Exception as error:  # a template can raise anything
            what = " ".join(str(error).split())[:200]
            raise NotRendered(f"the chat template of {self.origin} does not take this conversation: {what}") from None
        texts, spans = rendered
        return texts[0], list(spans[0]) if spans else []

    def _special_tokens(self) -> dict[str, Any]:
        loaded = self.tokenizer.loaded
        return {"bos_token": "", "eos_token": ""} if loaded is None else dict(loaded.special_tokens_map)

    def _targets(self, ids: np.ndarray, places: np.ndarray, text: str, spans: list[Span]) -> EncodedChat:
        """Mark the tokens of the spans, from the first that has a character of one to the last."""
        targets = np.zeros(len(ids), dtype=bool)
        special = np.isin(ids, self.tokenizer.added_ids)
        for start, stop in spans:
            inside = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > start))
            if not len(inside):
                continue
            last = int(inside[-1])
            ends = inside[special[inside]]
            if not self.marked and len(ends) and not text[places[ends[-1], 1] : stop].strip():
                last = int(ends[-1])  # a turn ends with its special token: the new line after it is nobody's
            targets[int(inside[0]) : last + 1] = True
        return EncodedChat(ids=ids, targets=targets)


def _with_places(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ids int64 (tokens,) of each text, and the characters that each token stands for, int64 (tokens, 2)."""
    if tokenizer.loaded is None:
        return [_bytes_with_places(text) for text in texts]
    if not texts:
        return []
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": True}
    found = tokenizer.loaded(texts, verbose=False, **options)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [(np.array(ids, dtype=np.int64), np.array(places, dtype=np.int64).reshape(-1, 2)) for ids, places in pairs]


def _bytes_with_places(text: str) -> tuple[np.ndarray, np.ndarray]:
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    characters = np.repeat(np.arange(len(codes)), widths)
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return ids, np.stack([characters, characters + 1], axis=1)


def open_chat_template(file: Path | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template in `file`, else the tokenizer's own. Raises UserError where there is none."""
    loaded = tokenizer.loaded
    if loaded is not None and not loaded.is_fast:
        message = f"--tokenizer {tokenizer.name} does not say which characters its tokens stand for"
        hint = "take one with a tokenizer.json"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
    if file is not None:
        return ChatTemplate(text=_read(file), origin=str(file), tokenizer=tokenizer)
    if loaded is None:
        return ChatTemplate(text=PLAIN, origin="zerofit for bytes", tokenizer=tokenizer)
    try:
        return ChatTemplate(text=loaded.get_chat_template(), origin=tokenizer.name, tokenizer=tokenizer)
    except ValueError as error:  # none, or several without a default
        message = f"--tokenizer {tokenizer.name} has no chat template of its own: {' '.join(str(error).split())[:120]}"
        hint = "--chat-template FILE, in the form of transformers' chat_template.jinja"
        raise UserError(Problem(kind="chat-template", message=message, hint=hint, where="--chat-template")) from None


def tokenizer_files(tokenizer: str, chat_template: Path | None) -> Callable[[Path], None]:
    """Read a run's tokenizer and chat template; return what writes them into a model's folder. Raises UserError."""
    loaded = load_transformers(tokenizer) if tokenizer != "bytes" else None
    text = _read(chat_template) if chat_template is not None else None

    def write(folder: Path) -> None:
        if loaded is not None:
            loaded.save_pretrained(folder)
        if text is not None:
            (folder / CHAT_TEMPLATE).write_text(text, encoding="utf-8")

    return write


def _read(file: Path) -> str:
    """Return a template that parses. Raises UserError."""
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = file.expanduser().read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError) as error:
        message, where = f"cannot read the chat template {file}: {error}", "--chat-template"
    except jinja2.TemplateSyntaxError as error:
        message, where = f"{file} is not a chat template: {error.message}", f"{file}:{error.lineno}"
    else:
        return text
    raise UserError(Problem(kind="chat-template", message=message, hint="a jinja template", where=where))
