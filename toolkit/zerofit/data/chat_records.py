"""Conversations as people keep them: OpenAI's messages, ShareGPT's conversations, Alpaca's instructions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {  # ShareGPT's words
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class NotAConversation(ValueError):
    """Raised with the reason why a record is no conversation of its form."""


@dataclass(frozen=True, kw_only=True)
class ChatMessages:
    """Messages in order, as chat templates take them."""

    messages: list[dict[str, Any]]  # {"role", "content"}, and what else a template may know
    tools: list[dict[str, Any]] | None = None  # that the assistant may call


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """One way to write a conversation down."""

    title: str  # as shown to the user
    field: str  # that it is recognised by
    read: Callable[[Mapping[str, Any]], ChatMessages]  # raises NotAConversation


def form_of(row: Mapping[str, Any], text_field: str) -> ChatForm | None:
    """Return the form of a record; None for one that holds plain text in `text_field`, or nothing that is known."""
    if text_field in CHAT_FIELDS:
        return CHAT_FIELDS[text_field]
    return None if text_field in row else next((form for name, form in CHAT_FIELDS.items() if name in row), None)


def conversation_of(row: Mapping[str, Any], form: ChatForm) -> ChatMessages | str:
    """Return the conversation of a record, or why it is none."""
    if form.field not in row:
        if other := form_of(row, ""):
            return f"a record of the {other.title} form among others"
        return f"no field {form.field!r}; there is {', '.join(map(str, row)) or 'none'}"
    try:
        return form.read(row)
    except NotAConversation as error:
        return str(error)


def _openai(row: Mapping[str, Any]) -> ChatMessages:
    messages = [_message(one, n) for n, one in enumerate(_turns(row, "messages"), 1)]
    tools = row.get("tools") or None
    if not isinstance(tools, list | None):
        raise NotAConversation(f"'tools' is {type(tools).__name__}, need a list of JSON schemas")
    return ChatMessages(messages=messages, tools=tools)


def _message(one: Any, number: int) -> dict[str, Any]:
    """Return a message without what is null: templates would write "None"."""
    said = {key: value for key, value in one.items() if value is not None} if isinstance(one, Mapping) else {}
    role = said.get("role")
    if role not in ROLES:
        raise NotAConversation(f"message {number} has the role {role!r}; {_known(ROLES)}")
    if isinstance(said.get("content"), list):
        said["content"] = "".join(_part(part, number) for part in said["content"])
    if not isinstance(said.get("content", ""), str) or ("content" not in said and "tool_calls" not in said):
        raise NotAConversation(f"message {number} ({role}) has no text for its content")
    return said


def _part(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise NotAConversation(f"message {number} holds a part of type {kind!r}; only text can be trained on")


def _sharegpt(row: Mapping[str, Any]) -> ChatMessages:
    turns = _turns(row, "conversations")
    messages = [_turn(one, n) for n, one in enumerate(turns, 1)]
    return ChatMessages(messages=[*_system(row), *messages])


def _turn(one: Any, number: int) -> dict[str, Any]:
    if isinstance(one, Mapping) and "role" in one:
        return _message(one, number)
    speaker, text = (one.get("from"), one.get("value")) if isinstance(one, Mapping) else (None, None)
    if speaker not in _SPEAKERS:
        raise NotAConversation(f"turn {number} is from {speaker!r}; {_known(_SPEAKERS)}")
    if not isinstance(text, str):
        raise NotAConversation(f"turn {number} ({speaker}) has no text for its value")
    return {"role": _SPEAKERS[speaker], "content": text}


def _alpaca(row: Mapping[str, Any]) -> ChatMessages:
    texts = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise NotAConversation(f"{name!r} is {type(text).__name__}, need a string")
    if not texts["output"]:
        raise NotAConversation("no 'output' beside the instruction")
    asked = "\n\n".join(filter(None, (texts["instruction"], texts["input"])))
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]}]
    return ChatMessages(messages=[*_system(row), *said])


def _turns(row: Mapping[str, Any], field: str) -> list[Any]:
    turns = row[field]
    if not isinstance(turns, list) or not turns:
        what = "empty" if isinstance(turns, list) else type(turns).__name__
        raise NotAConversation(f"{field!r} is {what}, need a list of turns")
    return turns


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what stands beside the turns in a field of its own."""
    text = row.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _known(words: Collection[str]) -> str:
    return "known: " + ", ".join(words)


CHAT_FIELDS: dict[str, ChatForm] = {
    form.field: form
    for form in (
        ChatForm(title="OpenAI messages", field="messages", read=_openai),
        ChatForm(title="ShareGPT", field="conversations", read=_sharegpt),
        ChatForm(title="Alpaca", field="instruction", read=_alpaca),
    )
}
