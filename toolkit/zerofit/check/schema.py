"""A JSON Schema of DeepSpeed's configuration for editors, and the keys whose "auto" a program fills in."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from zerofit.check.catalog import catalog, read_data
from zerofit.check.subject import ZERO


@cache
def filled_by(reader: str = "") -> frozenset[str]:
    """Return the keys at which the program `reader` replaces "auto" before DeepSpeed reads the JSON.

    "": the keys of all programs.
    """
    fills = {name: frozenset(keys) for name, keys in read_data("programs.yaml")["fills"].items()}
    theirs = fills["trainer"] | fills["accelerate"]
    if reader in ("", "zerofit"):
        return theirs | fills["zerofit"]
    # they also fill the stage, with 2; the schema should not offer that
    return theirs | {f"{ZERO}.stage"} if reader in ("trainer", "accelerate") else frozenset()


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the installed DeepSpeed, with descriptions, defaults and "auto"."""
    known = catalog()
    root = copy.deepcopy(known.schema)
    _allow_auto(root, "")
    optimizer, scheduler = root["properties"]["optimizer"], root["properties"]["scheduler"]
    optimizer["properties"]["type"]["examples"] = ["AdamW", "Adam", *known.optimizers]
    own = [name for name, found in known.schedulers.items() if found["own"]]
    scheduler["properties"]["type"]["examples"] = own
    taken = {p for kinds in known.optimizers.values() for names in kinds.values() for p in names}
    optimizer["properties"]["params"]["properties"] = {name: {} for name in sorted(taken)}
    taken = {p for name in own for kind in ("required", "optional") for p in known.schedulers[name][kind]}
    scheduler["properties"]["params"]["properties"] = {name: {} for name in sorted(taken)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DeepSpeed {known.version} configuration",
        **root,
    }


def _allow_auto(node: dict[str, Any], prefix: str) -> None:
    properties = node.get("properties", {})
    for key, child in properties.items():
        path = f"{prefix}{key}"
        if path in filled_by() and "properties" not in child:
            shown = {k: child.pop(k) for k in ("description", "default", "deprecated") if k in child}
            properties[key] = {**shown, "anyOf": [child, {"const": "auto"}]}
        else:
            _allow_auto(child, f"{path}.")
