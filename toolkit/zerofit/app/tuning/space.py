"""The values that a tuning may try, by knob."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.precision import PRECISIONS

FLAG = (bool,)
# the types of values; the knobs of the second part stay as in the run unless the space names them
KNOBS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("zero_stage", "micro_batch", "gradient_accumulation_steps", "tp", "pp", "sp"), (int,)),
    **dict.fromkeys(("bucket_elements", "prefetch_elements", "persistence_elements"), (int,)),
    **dict.fromkeys(("activation_checkpointing", "overlap_comm"), FLAG),
    "offload": (str,),
    "precision": (str,),
    "global_batch": (int,),
    "compile": FLAG,
}


def read_space(space: Path | str | Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the allowed values by knob, given as a mapping or as a YAML file of one.

    Raises:
        UserError: with everything that is wrong in it.
    """
    place = "space" if isinstance(space, Mapping) else str(space)
    problems, allowed = Problems(), dict[str, list[Any]]()
    for key, value in (space if isinstance(space, Mapping) else _parse(Path(space))).items():
        if key not in KNOBS:
            problems.add("unknown-key", f"unknown knob {key!r}", nearest(str(key), KNOBS), place)
            continue
        allowed[key] = list(value) if isinstance(value, list | tuple) else [value]
        for one in allowed[key]:
            _check(key, one, place, problems)
    problems.raise_if_any()
    return allowed


def _parse(path: Path) -> dict[Any, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(Problem(kind="space", message=f"cannot read {path}: {error}", where="--space")) from None
    if not isinstance(found, dict):
        hint = "write lines such as `zero_stage: [1, 2]`"
        raise UserError(Problem(kind="space", message=f"{path} holds no mapping", hint=hint, where="--space"))
    return found


def _check(key: str, value: Any, place: str, problems: Problems) -> None:
    kinds = KNOBS[key]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != FLAG):
        words = {int: "a whole number", bool: "true or false", str: "a word"}[kinds[0]]
        problems.add("space", f"{key}: {value!r} is not {words}", f"write {key}: [value, value]", place)
    elif key == "global_batch" and value < 1:
        problems.add("space", f"global_batch: {value}", "take 1 or more samples", place)
    elif key == "precision" and value not in PRECISIONS:
        problems.add("space", f"precision: {value!r}", f"take {', '.join(PRECISIONS)}", place)


def allows(allowed: Mapping[str, list[Any]], row: Mapping[str, Any]) -> bool:
    """Return whether a configuration, as --json shows it, has only values that are allowed."""
    return all(row[knob] in values for knob, values in allowed.items())
