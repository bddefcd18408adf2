"""Values in nested objects by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()  # None is a value: null


def get(config: Mapping[str, object], path: str, default: object = None) -> Any:
    """Return the value at a dotted path, or the default if a key is missing."""
    value: object = config
    for key in path.split("."):
        value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT:
            return default
    return value


def has(config: Mapping[str, object], path: str) -> bool:
    """Return whether there is a value, null included, at a dotted path."""
    return get(config, path, _ABSENT) is not _ABSENT


def put(config: dict[str, Any], path: str, value: object) -> None:
    """Set the value at a dotted path; create missing parents."""
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def drop(config: dict[str, object], path: str) -> None:
    """Remove the value at a dotted path if it is there."""
    parent, _, last = path.rpartition(".")
    owner = get(config, parent) if parent else config
    if isinstance(owner, dict):
        owner.pop(last, None)


def with_parents(path: str) -> list[str]:
    """Return a dotted path and its parents, the longest first."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def autos(config: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all values that are "auto"."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from autos(value, f"{prefix}.{key}" if prefix else str(key))
    elif config == "auto":
        yield prefix


def leaves(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted path and the value of everything that is not an object."""
    for key, value in config.items():
        # An empty object counts as a value: `"zero_optimization": {}` has an effect.
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
