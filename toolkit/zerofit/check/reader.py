"""The program that reads a DeepSpeed JSON.

It determines what "auto" means and how strict the JSON must be. Files of other programs are identified by their keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from zerofit.check.catalog import Schema, catalog, read_data
from zerofit.check.dotted import autos
from zerofit.check.neox import is_for_neox
from zerofit.features.zero import ZERO

# nearly every DeepSpeed JSON has one of these keys
MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
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


@dataclass(frozen=True, kw_only=True)
class Program:
    """A kind of file that belongs to another program, and the keys that identify it."""

    name: str
    kind: str = ""  # a kind of `zerofit.check.argument_files`; "" for files that name no DeepSpeed JSON
    needs: Sequence[str] = ()  # the file has all of these keys
    keys: Sequence[str]  # and at least `least` of these
    least: int = 1
    hint: str = ""  # what zerofit does with such a file

    def seen(self, config: Mapping[str, object]) -> tuple[str, ...]:
        """Return the keys in the file that identify the program; () for another program's file."""
        present = tuple(key for key in self.keys if key in config)
        return (*self.needs, *present) if len(present) >= self.least and all(k in config for k in self.needs) else ()


@cache
def _programs() -> tuple[Program, ...]:
    return tuple(Program(**entry) for entry in read_data("programs.yaml")["files"])


def program_of(config: object) -> tuple[Program, tuple[str, ...]] | None:
    """Return the program of a configuration, and the keys that identify it.

    Returns None for a DeepSpeed JSON.
    """
    if not isinstance(config, Mapping) or any(key in config for key in MARKS):
        return None
    return next(((program, keys) for program in _programs() if (keys := program.seen(config))), None)


def where_to_look(program: Program, config: Mapping[str, object], file: str) -> str:
    """Return a hint for another program's file: how to check the DeepSpeed JSON that it names."""
    # Accelerate makes a JSON from its own keys, unless its file names one.
    if program.kind == "accelerate":
        kind = config.get("distributed_type")
        if kind in (None, "DEEPSPEED"):
            return f"zerofit check --accelerate-config {file} checks the JSON that Accelerate makes from it"
        return f"its distributed_type is {kind}: Accelerate does not use DeepSpeed with it"
    named = config.get("deepspeed")
    if program.kind and isinstance(named, str):
        return f"zerofit check --training-args {file} checks it together with its DeepSpeed JSON, {named}"
    if program.kind and isinstance(named, Mapping):
        return f"zerofit check --training-args {file} checks it together with the DeepSpeed settings in it"
    if program.kind:
        return "it names no DeepSpeed JSON (key deepspeed): check the JSON of your command line, if it has one"
    return f"it names no DeepSpeed JSON. {program.hint}".rstrip()


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
    # Names without types, for completion in editors: Adam's eps is a number, Adafactor's eps is a pair.
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
