"""Conversations as text of a chat template, and which parts of it the assistant writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerofit.data.chat_records import REASONING, ChatMessages, Message
from zerofit.data.limited import begin_step
from zerofit.spec.errors import reason_of

# Marks the assistant's text in a template, as in transformers' return_assistant_tokens_mask.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
MOST_CHARACTERS = 1 << 26  # limit for one text; a million tokens have about 2**22 characters

Span = tuple[int, int]  # of characters


class NotRendered(ValueError):
    """A conversation has no text, or not the assistant's part of it; the message is the reason."""


class Rendered(NamedTuple):
    """One conversation as text."""

    text: str
    spans: Sequence[Span]  # (start, end) of the learned text, up to the end of each turn
    unused: Sequence[str]  # fields of the record without effect


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A template that renders conversations."""

    template: str
    origin: str  # "chat template chatml", as shown to the user
    special_tokens: Mapping[str, object]

    def render(self, chat: ChatMessages) -> Rendered:
        """Return the text of a conversation. Raises NotRendered."""
        text, spans = self.written(chat)
        self._refuse_lost_calls(chat, text)
        spans = self._learned(chat, spans) if MARKED.search(self.template) else self._by_prefixes(chat, text)
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
            return self.written(chat)[0] == text
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
                prompt, _ = self.written(replace(chat, messages=chat.messages[:n]), prompt=True)
                answered, _ = self.written(replace(chat, messages=chat.messages[: n + 1]))
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
                len(self.written(replace(chat, messages=chat.messages[:end]))[1]) if end else 0 for end in (n, n + 1)
            )
            dropped.update(range(before, after))
        return [span for n, span in enumerate(spans) if n not in dropped]

    def written(self, chat: ChatMessages, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text of the messages and its marked spans. Raises NotRendered."""
        begin_step()
        blocks: list[str] = []
        spans: list[Span] = []
        size = 0
        try:
            template = compiled(self.template)
            variables: dict[str, object] = {"tools": None, "documents": None, **self.special_tokens, **chat.variables}
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
        if calls and "tool_calls" not in self.template:
            return f"writes no tool_calls, and message {calls[0]} has no other text; --chat-template qwen writes them"
        return f"rejects this conversation: {reason_of(error)}"


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
