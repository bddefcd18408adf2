"""Files of other programs that are not a DeepSpeed JSON. Their keys identify the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from zerofit.check.catalog import read_data

# nearly every DeepSpeed JSON has one of these keys
MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


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
