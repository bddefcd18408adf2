"""Reading DeepSpeed JSON files: by path or by the name of one of ours, strict, with line and column on a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from zerofit.spec.errors import Problem, UserError, nearest

_ABSENT = object()


def bundled() -> dict[str, Path]:
    """Names of the files in ds_configs/ and where they lie."""
    return {p.stem: Path(str(p)) for p in Path(str(files("zerofit.ds_configs"))).glob("*.json")}


def find_config(name: str) -> Path:
    """The file that `--ds-config NAME` means: a path, or the name of one in ds_configs/. Raises UserError."""
    path = Path(name)
    if path.is_file():
        return path
    known = bundled()
    if path.name == name and path.stem in known:
        return known[path.stem]
    raise UserError(
        Problem(
            kind="unknown-ds-config",
            message=f"no DeepSpeed JSON {name!r}: neither a file nor one of the bundled names",
            hint=nearest(name, known) or "known: " + ", ".join(sorted(known)),
            where="--ds-config",
        )
    )


def read_config(path: Path) -> dict[str, Any]:
    """Parse a DeepSpeed JSON. Raises UserError with line and column, also for a key that stands twice."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        twice = sorted({k for k in keys if keys.count(k) > 1})
        if twice:
            message = f"{path}: the key {twice[0]!r} stands more than once in one object"
            raise UserError(Problem(kind="duplicate-key", message=message, where=str(path)))
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        message = f"{path} does not parse as JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise UserError(Problem(kind="json-syntax", message=message, where=where)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            Problem(kind="unreadable", message=f"cannot read {path}: {error}", where="--ds-config")
        ) from None
    if not isinstance(config, dict):
        raise UserError(Problem(kind="json-syntax", message=f"{path} holds no JSON object", where=str(path)))
    return config


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or the default where a step is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT:
            return default
    return value


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, making the objects on the way."""
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
    """Dotted paths of all values that are "auto"."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from autos(value, f"{prefix}.{key}" if prefix else str(key))
    elif config == "auto":
        yield prefix
