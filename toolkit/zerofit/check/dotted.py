"""Values in nested objects by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or the default if a key is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT:
            return default
    return value


def has(config: Mapping[str, Any], path: str) -> bool:
    """Return whether there is a value, null included, at a dotted path."""
    return get(config, path, _ABSENT) is not _ABSENT


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path; create missing parents."""
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def drop(config: dict[str, Any], path: str) -> None:
    """Remove the value at a dotted path if it is there."""
    parent, _, last = path.rpartition(".")
    owner = get(config, parent) if parent else config
    if isinstance(owner, dict):
        owner.pop(last, None)


def autos(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all values that are "auto"."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from autos(value, f"{prefix}.{key}" if prefix else str(key))
    elif config == "auto":
        yield prefix


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of everything that is not an object. Empty objects count as values."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
