"""The program that reads a DeepSpeed JSON.

It determines what "auto" means and how strict the JSON must be.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

from zerofit.check.catalog import Schema, catalog, read_data
from zerofit.check.dotted import autos
from zerofit.check.neox import is_for_neox
from zerofit.check.subject import ZERO

READERS = ("deepspeed", "trainer", "accelerate", "lightning", "zerofit")
SPOKEN = {
    "deepspeed": "DeepSpeed itself",
    "trainer": "Hugging Face's Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "zerofit": "zerofit",
    "neox": "GPT-NeoX",
}
# STRICT_READERS call json.load: transformers 5.23 integrations/deepspeed.py, accelerate 1.15 utils/deepspeed.py:104,
# lightning strategies/deepspeed.py
HUGGING_FACE = ("trainer", "accelerate")
STRICT_READERS = ("trainer", "accelerate", "lightning")
MAX_KEYS = 3  # that the note names
# keys of parallel degrees at which only zerofit fills an "auto"
DEGREES = ("sequence_parallel_size", "tensor_parallel.autotp_size")


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


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The program that reads a file, and the reason for the guess."""

    name: str
    why: str = ""  # the reason for the guess; "" if the user named the reader
    note: str = ""  # difference to plain DeepSpeed or to the merged file

    def sentences(self) -> list[str]:
        """Return a sentence about the reader, and one about what other programs do with the file."""
        guess = f", because {self.why}; use --for NAME if another program reads it" if self.why else ""
        return [f"read as a file for {SPOKEN[self.name]}{guess}", *([self.note] if self.note else [])]


def guess(config: object, *, yaml: bool = False) -> Reader:
    """Return the most likely reader of a configuration (JSON or YAML)."""
    if not isinstance(config, Mapping):
        return Reader(name="deepspeed", why="it is not a JSON object")
    if is_for_neox(config, yaml=yaml):
        return Reader(
            name="neox", why="it has arguments of GPT-NeoX", note="GPT-NeoX merges files, but only this one is checked"
        )
    # Only zerofit and the Trainer fill in "auto", and only zerofit fills in degrees.
    first = next(autos(config), None)
    degree = next((path for path in autos(config) if path in DEGREES), None)
    if degree is not None:
        return Reader(name="zerofit", why=f'it has "auto" for {degree}, which only zerofit fills')
    if first is not None:
        return Reader(name="trainer", why=f'it has "auto" ({first})', note=_left_to_trainer(config))
    return Reader(name="deepspeed", why='it has no "auto"')


def _left_to_trainer(config: Mapping[str, object]) -> str:
    """Return what plain DeepSpeed does with the "auto"s that the Trainer fills, or ""."""
    filled = [path for path in autos(config) if path in filled_by()]
    if not filled:
        return ""
    # DeepSpeed drops "auto" only in its strict sections.
    stops = [path for path in filled if path.rpartition(".")[0] not in catalog().strict]
    named = ", ".join(stops[:MAX_KEYS]) + ", ..." * (len(stops) > MAX_KEYS)
    effects = [f"stops at {len(stops)} of them ({named})"] if stops else []
    if len(filled) > len(stops):
        effects.append(f"uses its default for {len(filled) - len(stops)} of them")
    count = f"{len(filled)} keys" if len(filled) > 1 else "a key"
    return f'the Trainer fills the "auto" of {count}; plain DeepSpeed {" and ".join(effects)}'
