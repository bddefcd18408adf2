"""Results as plain JSON data."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


def plain_data(value: Any) -> Any:
    """Convert dataclasses (by their `to_dict` if they have one), tuples and paths in `value` to what JSON knows."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return field_data(value)
    if isinstance(value, dict):
        return {key: plain_data(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def field_data(value: Any, *left_out: str) -> dict[str, Any]:
    """Convert a dataclass to plain data field by field, without the fields `left_out`."""
    return {f.name: plain_data(getattr(value, f.name)) for f in fields(value) if f.name not in left_out}
