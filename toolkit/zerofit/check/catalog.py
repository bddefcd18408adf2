"""The configuration keys of the installed DeepSpeed.

zerofit ships the keys of known versions and derives those of other versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, TypedDict

from zerofit.check.dotted import get
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.extras import installed_version
from zerofit.spec.files import cache_root, packaged_yaml, write_text
from zerofit.spec.local_machine import is_older

NEWEST = "0.19.8"  # the DeepSpeed version of data/
DERIVED_WITH = (2, 14)  # the torch version with which data/ was derived


class Schema(TypedDict, total=False):
    """A JSON Schema of one key (draft 2020-12), with the words that zerofit uses."""

    type: str | list[str]
    enum: list[object]
    const: object
    anyOf: list[Schema]
    minimum: float
    exclusiveMinimum: float
    maximum: float
    exclusiveMaximum: float
    properties: dict[str, Schema]
    additionalProperties: bool
    default: object
    description: str
    deprecated: bool
    examples: list[str]


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The keys of one DeepSpeed version (from `zerofit.check.derive`), with zerofit's additions."""

    version: str
    schema: Schema  # JSON Schema of the whole configuration
    strict: frozenset[str]  # sections that refuse unknown keys; all others ignore them
    deprecated: Mapping[str, str]  # dotted path of an old name or an alias -> documented name
    removed: frozenset[str]  # dotted paths that an older DeepSpeed supported and this one refuses
    optimizers: Mapping[str, Mapping[str, list[str]]]  # name -> variant ("fused", "cpu", "torch") -> parameters
    schedulers: Mapping[str, SchedulerParameters]

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """The dotted paths of all documented keys, by the last part of each path."""
        found: dict[str, list[str]] = {}
        for path in sorted(_paths(self.schema)):
            if path not in self.deprecated:
                found.setdefault(path.rpartition(".")[2], []).append(path)
        return found

    def node(self, path: str) -> Schema | None:
        """Return the schema of the key at a dotted path, or None if DeepSpeed has no such key."""
        return get(self.schema, "properties." + path.replace(".", ".properties."))

    def default(self, path: str) -> object:
        """Return DeepSpeed's default for the key; None if there is none."""
        return (self.node(path) or {}).get("default")


def _paths(schema: Schema, prefix: str = "") -> Iterator[str]:
    for key, child in schema.get("properties", {}).items():
        yield f"{prefix}{key}"
        yield from _paths(child, f"{prefix}{key}.")


class SchedulerParameters(TypedDict):
    """The constructor parameters of a scheduler."""

    required: list[str]
    optional: list[str]
    own: bool  # from DeepSpeed, not from torch


@cache
def catalog() -> Catalog:
    """Return the catalog of the installed DeepSpeed.

    If none is installed, return the newest catalog in zerofit. The first call for a version that zerofit does not
    ship takes seconds.
    """
    version = installed_version("deepspeed") or NEWEST
    fields = _shipped(version) or _derived(version)
    _describe(fields["schema"], fields["deprecated"])
    strict, removed = (frozenset(fields.pop(name)) for name in ("strict", "removed"))
    return Catalog(strict=strict, removed=removed, **fields)


def read_data(name: str) -> Any:
    """Return the contents of a JSON or YAML in data/, or None if the file does not exist."""
    path = files("zerofit.check") / "data" / name
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else packaged_yaml(text)


@cache
def names(kind: str) -> Mapping[str, str]:
    """Return the section `kind` of data/names.yaml: a meaning or a replacement for each name."""
    return _all_names()[kind]


@cache
def keys_of_programs() -> frozenset[str]:
    """Return the top-level keys that training programs read and DeepSpeed ignores."""
    return frozenset(_all_names()["of_programs"].split())


@cache
def _all_names() -> Mapping[str, Any]:
    return read_data("names.yaml")


def _shipped(version: str) -> dict[str, Any] | None:
    # An older torch has fewer optimizers and schedulers than the shipped catalog.
    return None if is_older("torch", DERIVED_WITH) else read_data(f"deepspeed-{version}.json")


def _derived(version: str) -> dict[str, Any]:
    # The result also has the parameters of torch's optimizers and schedulers, so it depends on both versions.
    path = cache_root() / "catalog" / f"deepspeed-{version}-torch-{importlib.metadata.version('torch')}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    logging.getLogger(__name__).warning("reading the configuration keys of DeepSpeed %s (once) ...", version)
    # in another process: importing DeepSpeed takes seconds and may log to standard output
    argv = [sys.executable, "-P", "-m", "zerofit.check.derive"]  # -P: the user's folder may have a yaml.py
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"cannot read the configuration keys of DeepSpeed {version}: {done.stderr.strip()[-600:]}"
        raise RunFailed(Problem(kind="deepspeed", message=message, hint="does `python -c 'import deepspeed'` work?"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, done.stdout)
    return json.loads(done.stdout)


def _describe(schema: Schema, deprecated: Mapping[str, str]) -> None:
    """Add zerofit's descriptions to the schema, and types if DeepSpeed has none."""
    descriptions: dict[str, str] = read_data("descriptions.json")
    refinements: dict[str, Schema] = read_data("refinements.json")

    def walk(node: Schema, prefix: str, documented_prefix: str) -> None:
        for key, child in node.get("properties", {}).items():
            path = f"{prefix}{key}"
            known_as = documented_prefix + documented(prefix, key, deprecated)
            child.update(refinements.get(path, {}))
            # an alias has the description of its key
            text = descriptions.get(path) or descriptions.get(known_as)
            if text:
                child["description"] = text if path in descriptions else f"Another name of {known_as}. {text}"
            if path in deprecated:
                child["deprecated"] = True
            walk(child, f"{path}.", f"{known_as}.")

    walk(schema, "", "")


def documented(prefix: str, key: str, deprecated: Mapping[str, str]) -> str:
    """Return the documented name of a key."""
    for _ in range(2):  # some old names were renamed twice
        new = deprecated.get(f"{prefix}{key}", key)
        # "a or b" is no new name: its value was split over two keys
        key = new if new.isidentifier() else key
    return key
