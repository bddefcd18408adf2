"""A JSON Schema of DeepSpeed's configuration, for editors: completion, hover help and squiggles."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zerofit.check.auto import FILLED
from zerofit.check.catalog import catalog


def schema() -> dict[str, Any]:
    """Draft 2020-12, of the installed DeepSpeed: descriptions, defaults, allowed values, "auto" where it is filled."""
    known = catalog()
    root = copy.deepcopy(known.schema)
    _allow_auto(root, "")
    optimizer, scheduler = root["properties"]["optimizer"], root["properties"]["scheduler"]
    optimizer["properties"]["type"]["examples"] = ["AdamW", "Adam", *known.optimizers]
    own = [name for name, found in known.schedulers.items() if found["own"]]
    scheduler["properties"]["type"]["examples"] = own
    for params, names in (
        (
            optimizer["properties"]["params"],
            {p for kinds in known.optimizers.values() for v in kinds.values() for p in v},
        ),
        (scheduler["properties"]["params"], {p for n in own for p in _names(known.schedulers[n])}),
    ):
        params["properties"] = {name: {} for name in sorted(names)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DeepSpeed {known.version} configuration",
        **root,
    }


def _names(scheduler: Mapping[str, Any]) -> list[str]:
    return [*scheduler["required"], *scheduler["optional"]]


def _allow_auto(node: dict[str, Any], prefix: str) -> None:
    properties = node.get("properties", {})
    for key, child in properties.items():
        path = f"{prefix}{key}"
        if path in FILLED and "properties" not in child:
            shown = {k: child.pop(k) for k in ("description", "default", "deprecated") if k in child}
            properties[key] = {**shown, "anyOf": [child, {"const": "auto"}]}
        else:
            _allow_auto(child, f"{path}.")
