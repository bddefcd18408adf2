"""Conversations as tokens of a chat template, with the tokens that the assistant writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerofit.data.chat_records import REASONING, ChatMessages, Message
from zerofit.data.hashing import text_digest
from zerofit.data.limited import Exceeded, begin_step, limited
from zerofit.data.tokenizer import Tokenizer, open_tokenizer
from zerofit.spec.errors import Problem, UserError, nearest, reason_of
from zerofit.spec.files import write_text
from zerofit.spec.foreign import read_json

_FOLDER = Path(__file__).with_name("templates")
_PLAIN = _FOLDER / "bytes.jinja"  # for the tokenizer `bytes`, which has no template
# The tokens by which each format marks turns. A format without such tokens writes plain text and ends a turn with
# eos_token.
NAMED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "llama2": (),
    "zephyr": (),
    "vicuna": (),
    "alpaca": (),
}
SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")
CHAT_TEMPLATE = "chat_template.jinja"  # in a model's folder, as in transformers
COPY_IT = (
    "use --chat-template FILE with a changed copy of the template; the copy must write all messages and tool_calls, "
    "with {% generation %} ... {% endgeneration %} around the assistant's text"
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # file names of a tokenizer and a config
_PROBE = "zerofit-probe"  # an answer, to find the text that a template writes after it
# Marks the assistant's text in a template, as in transformers' return_assistant_tokens_mask.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
MOST_CHARACTERS = 1 << 26  # limit for one text; a million tokens have about 2**22 characters

Span = tuple[int, int]  # of characters


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """The tokens of a conversation."""

    ids: np.ndarray  # int64 (tokens,)
    targets: np.ndarray  # bool (tokens,): written by the assistant
    unused: tuple[str, ...]  # fields of the record without effect


class NotRendered(ValueError):
    """A conversation has no text, or not the assistant's part of it; the message is the reason."""


class Rendered(NamedTuple):
    """One conversation as text."""

    text: str
    spans: Sequence[Span]  # (start, end) of the learned text, up to the end of each turn
    unused: Sequence[str]  # fields of the record without effect


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and the tokenizer for its text."""

    text: str
    origin: str  # "chat template chatml", "chat template of /models/llama": as shown to the user
    tokenizer: Tokenizer
    missing: tuple[str, ...] = ()  # special tokens in the template that the tokenizer lacks

    @property
    def identity(self) -> str:
        """A hash of everything that determines the tokens of a conversation."""
        return text_digest(self.tokenizer.identity, self.text, repr(sorted(self._special_tokens.items())))

    @property
    def marked(self) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return MARKED.search(self.text) is not None

    def encode_all(self, conversations: Sequence[ChatMessages]) -> list[EncodedChat | str]:
        """Return the tokens of each conversation, or the reason why it has none.

        Raises UserError if the template exceeds its limits.
        """
        rendered = [
            result if isinstance(result, str) else Rendered(_bytes_safe(result[0]), *result[1:])
            for result in self._limited(self._render, conversations)
        ]
        # All texts go to the tokenizer at once, which encodes them in threads.
        texts = [result.text for result in rendered if not isinstance(result, str)]
        tokens = iter(_with_ranges(self.tokenizer, texts))
        return [result if isinstance(result, str) else self._encoded(*next(tokens), result) for result in rendered]

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return a conversation's text up to the start of the next answer. Raises UserError."""
        return self._text(messages, prompt=True)

    @cached_property
    def turn_end(self) -> str:
        """The text that the template writes after an answer; may be "". Raises UserError."""
        # What follows the probe is what the template writes after any answer.
        turns = {"user": "Hello", "assistant": _PROBE}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        return self._text(messages, prompt=False).rpartition(_PROBE)[2]

    def _text(self, messages: Sequence[Message], prompt: bool) -> str:
        chat = ChatMessages(messages=list(messages))
        (result,) = self._limited(lambda chat: [self._written(chat, prompt)[0]], [chat])
        if isinstance(result, str):
            raise UserError(_unusable(result, hint="--chat-template names another"))
        return _bytes_safe(result[0])

    def _limited(self, work: Callable[[ChatMessages], object], chats: Sequence[ChatMessages]) -> list[Any]:
        """Return the result of `work` for each conversation, or the reason why it failed.

        Results have passed through JSON: tuples are lists. Raises UserError if a limit is exceeded.
        """
        compiled("")  # imports jinja once, before processes are forked

        def attempt(chat: ChatMessages) -> object:
            try:
                return work(chat)
            except NotRendered as error:
                return str(error)

        try:
            return list(limited(attempt, chats))
        except Exceeded as error:
            hint = "use another one (--chat-template); an ordinary template takes milliseconds"
            raise UserError(_unusable(f"the {self.origin} {error}", hint=hint)) from None

    @cached_property
    def _special_tokens(self) -> dict[str, object]:
        loaded = self.tokenizer.loaded
        return {"bos_token": "", "eos_token": ""} if loaded is None else dict(loaded.special_tokens_map)

    # A token is learned if one of its characters is: tokens may cross the border of a span.
    def _encoded(self, ids: np.ndarray, ranges: np.ndarray, rendered: Rendered) -> EncodedChat:
        """Return tokens with their targets. `ranges`: each token's characters, int64 (tokens, 2)."""
        targets = np.zeros(len(ids), dtype=bool)
        special = np.isin(ids, self.tokenizer.added_ids)
        # A special token such as <|im_end|> ends the answer. The model has to learn it, or generation would not stop.
        for start, stop in rendered.spans:
            inside = np.flatnonzero((ranges[:, 0] < stop) & (ranges[:, 1] > start))
            if not len(inside):
                continue
            last = int(inside[-1])
            ends = inside[special[inside]]
            if not self.marked and len(ends) and not rendered.text[ranges[ends[-1], 1] : stop].strip():
                last = int(ends[-1])  # a turn ends with its special token, without the newline after it
            targets[int(inside[0]) : last + 1] = True
        return EncodedChat(ids=ids, targets=targets, unused=tuple(rendered.unused))

    def _render(self, chat: ChatMessages) -> Rendered:
        """Return the text of a conversation. Raises NotRendered."""
        text, spans = self._written(chat)
        self._refuse_lost_calls(chat, text)
        spans = self._learned(chat, spans) if self.marked else self._by_prefixes(chat, text)
        return Rendered(text, spans, (*self._without_effect(chat, text), *chat.unread))

    # Whether the template reads a field is found by rendering without it: the text is then the same or not.
    def _refuse_lost_calls(self, chat: ChatMessages, text: str) -> None:
        """Raise NotRendered if the template does not write the tool calls of a message."""
        for n, message in enumerate(chat.messages):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            others = [*chat.messages[:n], plain, *chat.messages[n + 1 :]]
            if "tool_calls" in message and self._same(replace(chat, messages=others), text):
                reason = f"the {self.origin} does not write the tool calls of message {n + 1}"
                raise NotRendered(f"{reason}: the assistant would learn to say nothing instead")

    def _without_effect(self, chat: ChatMessages, text: str) -> list[str]:
        """Return the fields of messages, and the variables, that have no effect on the text."""
        fields = sorted({key for message in chat.messages for key in message} - {"role", "content", "weight"})
        unused = []
        for field in fields:
            messages = [{key: value for key, value in turn.items() if key != field} for turn in chat.messages]
            if self._same(replace(chat, messages=messages), text):
                unused.append(f"messages.{field}")
        for name in chat.variables:
            variables = {key: value for key, value in chat.variables.items() if key != name}
            if self._same(replace(chat, variables=variables), text):
                unused.append(name)
        weighted = any("weight" in turn for turn in chat.messages if turn["role"] != "assistant")
        return [*unused, "messages.weight (except the assistant's)"] if weighted else unused

    def _same(self, chat: ChatMessages, text: str) -> bool:
        """Return whether a conversation has this text."""
        try:
            return self._written(chat)[0] == text
        except NotRendered:
            return False

    # Without {% generation %} in the template, an answer is the text that the template adds for it:
    #
    #     messages before, with the generation prompt   <user> 2 + 2? <assistant>
    #     the same with the answer                      <user> 2 + 2? <assistant> 4 <end>
    #                                                                             |-----| learned
    def _by_prefixes(self, chat: ChatMessages, text: str) -> list[Span]:
        """Return the spans of the assistant's text without marks. Raises NotRendered."""
        spans = []
        for n, message in enumerate(chat.messages):
            if _is_learned(message):
                prompt, _ = self._written(replace(chat, messages=chat.messages[:n]), prompt=True)
                answered, _ = self._written(replace(chat, messages=chat.messages[: n + 1]))
                if not answered.startswith(prompt) or not text.startswith(answered):
                    reason = f"the {self.origin} writes message {n + 1} differently if more messages follow"
                    raise NotRendered(reason + ", so the assistant's text cannot be found")
                spans.append((len(prompt), len(answered)))
        return spans

    def _learned(self, chat: ChatMessages, spans: list[Span]) -> list[Span]:
        """Return the marked spans of the messages that are learned. Raises NotRendered."""
        dropped: set[int] = set()
        for n, message in enumerate(chat.messages):
            if message["role"] != "assistant" or _is_learned(message):
                continue
            # The message's spans are those that its addition to the messages before it adds.
            before, after = (
                len(self._written(replace(chat, messages=chat.messages[:end]))[1]) if end else 0 for end in (n, n + 1)
            )
            dropped.update(range(before, after))
        return [span for n, span in enumerate(spans) if n not in dropped]

    def _written(self, chat: ChatMessages, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text of the messages and its marked spans. Raises NotRendered."""
        begin_step()
        blocks: list[str] = []
        spans: list[Span] = []
        size = 0
        try:
            template = compiled(self.text)
            variables: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens, **chat.variables}
            variables |= {"messages": [_as_read(message) for message in chat.messages], "add_generation_prompt": prompt}
            # The tracker appends the span of each marked part to `spans`: it starts where the text in `blocks` ends.
            with template.environment.activate_tracker(blocks, spans):
                for block in template.generate(**variables):
                    blocks.append(block)
                    size += len(block)
                    if size > MOST_CHARACTERS:
                        raise ValueError(f"its text has more than {MOST_CHARACTERS:,} characters")
        except MemoryError:  # a limit of the process, not a fault of the conversation
            raise
        except Exception as error:  # a template can raise anything
            raise NotRendered(f"the {self.origin} {self._why(chat, error)}") from None
        return "".join(blocks), spans

    def _why(self, chat: ChatMessages, error: Exception) -> str:
        """Return why the template failed."""
        calls = [n for n, turn in enumerate(chat.messages, 1) if turn.get("content") is None and turn.get("tool_calls")]
        if calls and "tool_calls" not in self.text:
            return f"writes no tool_calls, and message {calls[0]} has no other text; --chat-template qwen writes them"
        return f"rejects this conversation: {reason_of(error)}"


def _bytes_safe(text: str) -> str:
    """Replace halves of surrogate pairs, which have no UTF-8 bytes."""
    return text.encode("utf-8", "replace").decode()  # a template can produce them from escapes


def _with_ranges(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each text's ids, int64 (tokens,), and its tokens' characters, int64 (tokens, 2)."""
    if tokenizer.loaded is None:
        return [_bytes_with_ranges(text) for text in texts]
    if not texts:
        return []
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": True}
    encoded = tokenizer.loaded(texts, verbose=False, **options)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(np.array(ids, dtype=np.int64), np.array(ranges, dtype=np.int64).reshape(-1, 2)) for ids, ranges in pairs]


# UTF-8 has 1 to 4 bytes a character. A byte has the range of the character that it belongs to.
def _bytes_with_ranges(text: str) -> tuple[np.ndarray, np.ndarray]:
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    characters = np.repeat(np.arange(len(codes)), widths)
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return ids, np.stack([characters, characters + 1], axis=1)


def open_chat_template(template: Path | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a file or a name, else the tokenizer's own. Raises UserError."""
    loaded = tokenizer.loaded
    if loaded is not None and not loaded.is_fast:
        message = f"--tokenizer {tokenizer.name} does not return the character offsets of its tokens"
        hint = "use one with a tokenizer.json"
        raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
    if template is not None:
        return _open_named(template, tokenizer)
    if loaded is None:
        return ChatTemplate(text=_read(_PLAIN), origin="chat template for bytes", tokenizer=tokenizer)
    try:
        text = loaded.get_chat_template()
    except ValueError as error:  # it has no template, or several without a default
        message = f"the tokenizer of {tokenizer.name} has no chat template"
        if loaded.chat_template:
            message = f"--tokenizer {tokenizer.name} has no default chat template: {reason_of(error)}"
        hint = f"--chat-template {likely_template(loaded.get_vocab())} suits its tokens best; other names: "
        hint += f"{', '.join(NAMED_TEMPLATES)}; or a file like transformers' chat_template.jinja"
        raise UserError(Problem(kind="chat-template", message=message, hint=hint, where="--chat-template")) from None
    return ChatTemplate(text=text, origin=f"chat template of {tokenizer.name}", tokenizer=tokenizer)


# Only the syntax of a user's own template is checked. A shipped template may not suit the tokenizer. Without the
# template's tokens, the model would learn to spell them. Without an eos_token, an answer would never end.
def _open_named(name: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Open a user's file or a shipped template. Raises UserError."""
    file = template_file(name)
    text = _read(file)
    template = ChatTemplate(text=text, origin=f"chat template {name}", tokenizer=tokenizer)
    if file == name:
        _check(file, text)
    elif not template.turn_end.strip():
        message = f"the chat template {name} ends a turn with eos_token, which --tokenizer {tokenizer.name} lacks"
        hint = "--chat-template chatml ends turns with its own token; --tokenizer bytes needs no --chat-template"
        raise UserError(_unusable(message, hint=hint))
    elif tokenizer.loaded and (missing := missing_tokens(str(name), tokenizer.loaded.get_vocab())):
        return replace(template, missing=tuple(missing))
    return template


def template_file(template: Path) -> Path:
    """Return the file of a template's name or path. Raises UserError for an unknown name."""
    name, is_path = str(template), len(template.parts) > 1 or template.suffix in SUFFIXES
    # A file in the current folder takes precedence over a shipped template with its name.
    if is_path or template.expanduser().is_file():
        return template
    if name in NAMED_TEMPLATES:
        return _FOLDER / f"{name}.jinja"
    message = f"--chat-template {name} is neither a file nor the name of a template"
    hint = nearest(name.lower(), NAMED_TEMPLATES)
    raise UserError(Problem(kind="chat-template", message=message, hint=hint, where="--chat-template"))


def likely_template(vocabulary: Collection[str]) -> str:
    """Return the shipped template with most special tokens, all in `vocabulary`; else "zephyr"."""
    suited = {name: len(tokens) for name, tokens in NAMED_TEMPLATES.items() if not missing_tokens(name, vocabulary)}
    best = max(suited, key=suited.__getitem__)
    return best if suited[best] else "zephyr"


def missing_tokens(name: str, vocabulary: Collection[str]) -> list[str]:
    """Return the special tokens of a named template that are not in `vocabulary`."""
    return [token for token in NAMED_TEMPLATES.get(name, ()) if token not in vocabulary]


def tokenizer_files(tokenizer: str, chat_template: Path | None) -> Callable[[Path], None]:
    """Read a run's tokenizer and chat template; return a function that saves them to a folder.

    The function also gives the model in this folder the tokenizer's special tokens. Raises UserError.
    """
    loaded = open_tokenizer(tokenizer).loaded
    text = _read(template_file(chat_template)) if chat_template is not None else None

    def write(folder: Path) -> None:
        if loaded is not None:
            loaded.save_pretrained(folder)
            ids = {name: getattr(loaded, name) for name in SPECIAL_IDS}
            _set_special_tokens(folder, {name: token for name, token in ids.items() if token is not None})
        if text is not None:
            (folder / CHAT_TEMPLATE).write_text(text, encoding="utf-8")

    return write


# A base model's config has the base model's end token. The training's tokenizer may have another end token. Other
# programs would then generate past the end of an answer.
# As in transformers' Trainer (transformers/trainer_utils.py, align_special_tokens).
def _set_special_tokens(folder: Path, ids: Mapping[str, int]) -> None:
    """Set the ids of special tokens in a model's config.json and generation_config.json."""
    for name in ("config.json", "generation_config.json"):
        if not (folder / name).is_file():
            continue  # adapters have no config
        config = read_json(folder / name)
        before = dict(config)
        for key, token in ids.items():
            known = config.get(key)
            ends = known if isinstance(known, list) else [] if known is None else [known]
            if token in ends:
                continue
            # each of several end tokens ends a text, so the base model's end tokens stay
            several = key == "eos_token_id" and ends and (name != "config.json" or isinstance(known, list))
            config[key] = [token, *ends] if several else token
        if config != before:
            write_text(folder / name, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _read(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(_unusable(f"cannot read the chat template {file}: {error}")) from None


def _check(file: Path, text: str) -> None:
    """Raise UserError if a template is invalid."""
    import jinja2

    # In a limited process, because jinja evaluates constants while it compiles.
    def fault(text: str) -> list[object]:
        begin_step()
        try:
            compiled(text)
        except MemoryError:
            raise
        except Exception as error:  # jinja's, RecursionError, and SyntaxError in the Python code that jinja writes
            line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
            return [getattr(error, "msg", None) or getattr(error, "message", None) or str(error), line]
        return []

    compiled("")
    try:
        (faults,) = limited(fault, [text])
    except Exceeded as error:
        faults = [f"it {error}", None]
    if faults:
        reason, line = faults
        where = f"{file}:{line}" if line else str(file)
        raise UserError(_unusable(f"{file} is not a chat template: {reason}", where))


def _unusable(message: str, where: str = "--chat-template", hint: str = "a jinja template") -> Problem:
    return Problem(kind="chat-template", message=message, hint=hint, where=where)


def compiled(template: str) -> Any:  # jinja's types do not have the attributes of transformers' environment
    """Compile a template in transformers' sandbox. Raises errors of jinja and Python's compiler."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template)


def _is_learned(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def _as_read(message: Message) -> Message:
    """Return a message as transformers passes it to a template."""
    shown = {key: value for key, value in message.items() if key != "weight"}
    reasoning = next((shown[name] for name in REASONING if name in shown), None)
    if reasoning is None:
        return shown
    return {"thinking": reasoning, **shown, "reasoning_content": reasoning}  # templates use one of these names
