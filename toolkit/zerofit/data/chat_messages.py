"""Convert messages of any supported form into the form that chat templates accept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerofit.spec.foreign import Unreadable, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")


class NotAConversation(ValueError):
    """Raised with the reason why a record is not a conversation of its form."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object for templates that format it, JSON for those that print it as text.

    Records have either. OpenAI's arguments are JSON in a string, which `| tojson` would encode a second time. An
    object would become Python's notation in `{{ arguments }}`.
    """

    def __init__(self, values: Mapping[str, Any], text: str):
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_messages(turns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form without null fields, as transformers does. Raises NotAConversation."""
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def _message(turn: Any, number: int) -> dict[str, Any]:
    message = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else {}
    if message.get("role") == "function":  # OpenAI's older name of the role "tool"
        message["role"] = "tool"
    role = message.get("role")
    if role not in ROLES:
        raise NotAConversation(f"message {number} has the role {role!r}; known: {', '.join(ROLES)}")
    if role == "assistant":
        _read_calls(message, number)
        weight = message.get("weight", 1)
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise NotAConversation(f"message {number} has the weight {weight!r}; must be 1 (learned) or 0 (not)")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(part, number) for part in message["content"])
    if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
        raise NotAConversation(f"message {number} ({role}) has no text for its content")
    return message


def _part(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise NotAConversation(f"message {number} has a part of type {kind!r}; only text can be trained on")


def _read_calls(message: dict[str, Any], number: int) -> None:
    """Convert the tool calls of a message, or OpenAI's older "function_call", to the form that templates accept."""
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise NotAConversation(f"message {number}: 'tool_calls' is {type(calls).__name__}, need a list")
    if "function_call" in message:
        calls = [*calls, message.pop("function_call")]
    if calls:
        message["tool_calls"] = [tool_call(call, f"message {number}, tool call {n}") for n, call in enumerate(calls, 1)]


def tool_call(call: Any, place: str) -> dict[str, Any]:
    """Return a call with its name and arguments under "function". Raises NotAConversation."""
    call = {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise NotAConversation(f"{place} names no function; expected {{'function': {{'name', 'arguments'}}}}")
    known = {"type": "function"} if function is call else {"type": "function", **call}
    return {**known, "function": {**function, "arguments": _arguments(function.get("arguments"), place)}}


def _arguments(given: Any, place: str) -> Arguments:
    values = given
    if isinstance(given, str):
        try:
            values = parse_json(given) if given.strip() else {}
        except Unreadable as error:
            raise NotAConversation(f"{place}: its arguments are not JSON: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise NotAConversation(f"{place}: its arguments are {type(values).__name__}, need an object")
    return Arguments(values, given if isinstance(given, str) and given.strip() else _json(values))


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a record as JSON schemas; they may be JSON in a string, or OpenAI's older "functions"."""
    named = [name for name in ("tools", "functions") if row.get(name)]
    tools = [schema for name in named for schema in _schemas(row[name], name)]
    return tools or None


def _schemas(given: Any, field: str) -> Iterator[dict[str, Any]]:
    if isinstance(given, str):
        try:
            given = parse_json(given) if given.strip() else []
        except Unreadable as error:
            raise NotAConversation(f"{field!r} is not JSON: {error}") from None
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise NotAConversation(f"{field!r} is {type(given).__name__}, need a list of JSON schemas")
    for tool in given:
        yield dict(tool) if "function" in tool or "name" not in tool else {"type": "function", "function": dict(tool)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
