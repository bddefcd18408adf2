"""A JSON Schema of DeepSpeed's configuration for editors, with the keys that programs fill."""

from __future__ import annotations

import copy
from functools import cache
from typing import cast

from zerofit.check.catalog import Schema, catalog, read_data
from zerofit.check.subject import ZERO


@cache
def filled_by(reader: str = "") -> frozenset[str]:
    """Return the keys at which the program `reader` replaces "auto"; "": those of all programs."""
    fills = {name: frozenset(keys) for name, keys in read_data("programs.yaml")["fills"].items()}
    theirs = fills["trainer"] | fills["accelerate"]
    if reader in ("", "zerofit"):
        return theirs | fills["zerofit"]
    # They also fill the stage, with 2. The schema for editors should not offer that.
    return theirs | {f"{ZERO}.stage"} if reader in ("trainer", "accelerate") else frozenset()


def schema() -> dict[str, object]:
    """Return the JSON Schema of the installed DeepSpeed, with descriptions, defaults and "auto"."""
    known = catalog()
    root = copy.deepcopy(known.schema)
    _allow_auto(root, "")
    sections = root.get("properties", {})
    optimizer, scheduler = (sections[name].get("properties", {}) for name in ("optimizer", "scheduler"))
    optimizer["type"]["examples"] = ["AdamW", "Adam", *known.optimizers]
    deepspeeds = {name: parameters for name, parameters in known.schedulers.items() if parameters["own"]}
    scheduler["type"]["examples"] = list(deepspeeds)
    parameters = {p for variants in known.optimizers.values() for names in variants.values() for p in names}
    optimizer["params"]["properties"] = {name: {} for name in sorted(parameters)}
    parameters = {p for kinds in deepspeeds.values() for p in (*kinds["required"], *kinds["optional"])}
    scheduler["params"]["properties"] = {name: {} for name in sorted(parameters)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DeepSpeed {known.version} configuration",
        **root,
    }


def _allow_auto(node: Schema, prefix: str) -> None:
    properties = node.get("properties", {})
    for key, child in properties.items():
        path = f"{prefix}{key}"
        if path in filled_by() and "properties" not in child:
            # These words are about the key, not about one of its two forms.
            shown = {word: child.pop(word) for word in ("description", "default", "deprecated") if word in child}
            properties[key] = cast(Schema, {**shown, "anyOf": [child, {"const": "auto"}]})
        else:
            _allow_auto(child, f"{path}.")
