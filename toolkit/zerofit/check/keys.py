"""Checks of single keys: unknown, removed and deprecated keys, and values of wrong types.

In most sections, DeepSpeed ignores an unknown key. If a key is misspelled, DeepSpeed trains with the key's default
value. A finding therefore guesses the intended key: the closest name in the same section, else a section that has this
key. The guess becomes an edit only if it is clear (one or two letters, or a known synonym), since `--fix` must not
change the meaning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from zerofit.check.catalog import Catalog, Schema, keys_of_programs, names
from zerofit.check.edit import Assignment, Edit, Move, Removal, Renaming
from zerofit.check.finding import Effect, Finding, as_number, near, plainly
from zerofit.check.reader import HUGGING_FACE, filled_by
from zerofit.check.subject import CheckSubject, TargetHardware
from zerofit.features.zero import ZERO

MAX_SECTIONS = 3  # that a hint names for a misplaced key
MOST_KEYS = 500  # of a section whose unknown keys are compared with the known ones

# findings about a value that DeepSpeed does not allow
WRONG_VALUE = ("wrong-type", "number-as-string", "out-of-range", "not-allowed")

_EXPERTS = "expert_parallel."
# flags outside of strict sections whose type DeepSpeed checks; for all others it reads any value as true or false
TYPED = (
    *("checkpoint.writer.", "checkpoint.parallel_write."),
    f"{_EXPERTS}async_",
    f"{_EXPERTS}validate_",
    f"{_EXPERTS}has_",
)
SUMMED = ("wall_clock_breakdown", "flops_profiler.enabled")  # flags that DeepSpeed joins by |, which needs integers
# integers for which DeepSpeed refuses true and false
COUNTED = ("checkpoint.writer.", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
# integers for which DeepSpeed refuses 2.0 (train_batch_size may be a float)
INTEGERS = (*COUNTED[:3], _EXPERTS, "flops_profiler.module_depth")
# what DeepSpeed does with a number below the minimum, for keys that it does not check
BELOW = {"gradient_clipping": "DeepSpeed does not clip", "steps_per_print": "DeepSpeed uses it without its sign"}
MOST_INTEGER = 2**63  # pydantic, which reads the strict sections, refuses integers from here on
INTEGER_WORD = re.compile(r"\s*[+-]?[0-9]+(_[0-9]+)*(\.0+)?\s*")  # pydantic reads it as an integer; "5e8" it refuses
FLAG_WORDS: dict[str, bool] = dict.fromkeys(("1", "t", "y", "yes", "on", "true"), True)  # pydantic's
FLAG_WORDS |= dict.fromkeys(("0", "f", "n", "no", "off", "false"), False)

# Looked up by type(value): isinstance would take true for an integer, since bool is a subclass of int.
SCALARS = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",)}


def keys(config: Mapping[str, object], catalog: Catalog, setting: TargetHardware) -> Iterator[Finding]:
    """Yield findings about single keys and their values. The rules check combinations."""
    yield from _walk(config, catalog.schema, "", CheckSubject(config=config, catalog=catalog, setting=setting))


def _walk(config: Mapping[str, object], schema: Schema, prefix: str, c: CheckSubject) -> Iterator[Finding]:
    catalog = c.catalog
    known = schema.get("properties", {})
    for key, value in config.items():
        path = f"{prefix}{key}"
        if path in catalog.removed:
            yield _removed(path, value)
        elif key not in known:
            if not schema.get("additionalProperties", True):
                yield from _unknown(path, key, known, config, c)
        else:
            if path in catalog.deprecated:
                yield _deprecated(path, value, config, catalog)
            yield from _value(path, value, known[key], c)


def _in(section: str) -> str:
    return f"in {section}" if section else "at the top level"


def _why_unknown(section: str, catalog: Catalog) -> str:
    if section in catalog.strict:
        return 'DeepSpeed stops after the ranks have started: "Extra inputs are not permitted"'
    return "DeepSpeed silently ignores it and uses its default"


def is_off(value: object) -> bool:
    """Return whether the value of a section or a flag switches nothing on."""
    if isinstance(value, Mapping):
        switched, switches = value.get("enabled"), [v for v in value.values() if isinstance(v, Mapping | bool)]
        return switched is False or (switched is None and all(map(is_off, switches)))
    return value is False


def _removed(path: str, value: object) -> Finding:
    instead = names("removed").get(path)
    return Finding(
        code="removed-key",
        path=path,
        message=f"{path} was removed from DeepSpeed",
        why="DeepSpeed stops at this key, even if it is disabled",
        fix="; ".join(["remove it", *([instead] if instead else [])]),
        edits=(Removal(path),) if is_off(value) else (),
    )


def _unknown(
    path: str, key: str, known: Mapping[str, Schema], siblings: Mapping[str, object], c: CheckSubject
) -> Iterator[Finding]:
    parent = path[: -len(key) - 1]
    elsewhere = _sections_with(key, path, siblings[key], c)
    if path in keys_of_programs():
        yield _read_by_programs(path, elsewhere)
        return
    better = None
    # A key with "_" in front is meant to be off, and the name of another section's key is no typo. A section with
    # hundreds of keys is no configuration but, for example, a vocabulary: guesses would take a minute.
    if not (key.startswith("_") or key in c.catalog.places or len(siblings) > MOST_KEYS):
        better = near(key, [k for k in known if f"{parent}.{k}".lstrip(".") not in c.catalog.deprecated], names("keys"))
    if better and not _may_be_meant(siblings[key], known[better]):
        better = None
    edits: tuple[Edit, ...] = ()
    fix = "remove it" if parent else "remove it, unless your program reads it"
    if better:
        fix = f"did you mean {better}?"
        if better not in siblings and plainly(key, better, names("keys")):
            edits = (Renaming(path, better),)
    elif elsewhere:
        fix = f"it belongs to {' or '.join(p.rpartition('.')[0] or 'the top level' for p in elsewhere)}"
        if len(elsewhere) == 1 and _is_certain(path, elsewhere[0], siblings[key], c):
            edits = (Move(path, elsewhere[0]),)
    yield Finding(
        code="unknown-key",
        severity="warning" if key.startswith(("_", "$")) and parent not in c.catalog.strict else "error",
        path=path,
        message=f"unknown key {key!r} {_in(parent)}",
        effect="stops" if parent in c.catalog.strict else "ignored",
        why=_why_unknown(parent, c.catalog),
        fix=fix,
        edits=edits,
    )
    # Report faults in a misnamed section already before its name is fixed.
    meant = known[better] if better else c.catalog.node(elsewhere[0]) if elsewhere else None
    if edits and meant:
        yield from _value(path, siblings[key], meant, c)


def _read_by_programs(path: str, elsewhere: Sequence[str]) -> Finding:
    read = f"; DeepSpeed reads it at {elsewhere[0]} only" if len(elsewhere) == 1 else ""
    return Finding(
        code="own-key",
        severity="warning",
        effect="ignored",
        path=path,
        message=f"{path!r} is not a DeepSpeed key",
        why="DeepSpeed ignores this key, but your program may read it",
        fix=f"keep it if your program reads it, else remove it{read}",
    )


def _sections_with(key: str, path: str, value: object, c: CheckSubject) -> list[str]:
    """Return the paths where the key at `path` may belong; none if there are too many."""
    paths = c.catalog.places.get(key, [])
    # A key like `enabled` is in many sections: only paths in its own top-level section count.
    generic = len(paths) > MAX_SECTIONS or (len(paths) > 1 and "_" not in key)
    section = path.partition(".")[0]
    fitting = [place for place in paths if _may_be_meant(value, c.catalog.node(place) or {})]
    likely = [place for place in fitting if not generic or place.startswith(f"{section}.")]
    return likely if len(likely) <= MAX_SECTIONS else []


def _is_certain(path: str, place: str, value: object, c: CheckSubject) -> bool:
    """Return whether an unknown key clearly belongs at `place`."""
    parent, target = path.rpartition(".")[0], place.rpartition(".")[0]
    sections = accumulate(target.split("."), "{}.{}".format)
    if any(c.has(section) and not isinstance(c.get(section), Mapping) for section in sections):
        return False  # no object, e.g. "zero_optimization": true
    if isinstance(value, Mapping):
        known = (c.catalog.node(place) or {}).get("properties", {})
        return not target or (bool(value) and value.keys() <= known.keys())
    related = not target or f"{target}.".startswith(f"{parent}." if parent else "")
    # The file must have the target section. A key at the top level needs a "_": another program may read a single word.
    return related and (not target or bool(c.section(target))) and (bool(parent) or "_" in path)


def _may_be_meant(value: object, schema: Schema) -> bool:
    """Return whether a key with this schema may have this value."""
    if "properties" in schema:
        return isinstance(value, Mapping)
    return not isinstance(value, Mapping) and (value == "auto" or isinstance(value, str) or _fits(value, schema))


def _deprecated(path: str, value: object, siblings: Mapping[str, object], catalog: Catalog) -> Finding:
    parent, _, key = path.rpartition(".")
    new = catalog.deprecated[path]
    alias = catalog.deprecated.get(f"{parent}.{new}", new)
    code = "deprecated-key"
    effect: Effect = "changes"
    edits: tuple[Edit, ...] = (Removal(path),) if value is not True else ()
    # "a or b" are two new keys, so the old key cannot be renamed
    if not new.isidentifier():
        message, why, effect = f"{key} is the old form of {new}", "DeepSpeed warns and drops the value", "ignored"
        fix = "remove it, and set pin_memory in these sections"
    elif new in siblings or alias in siblings:
        code = "deprecated-and-new"
        message, fix = f"{key} and its new name {alias} are both given", f"keep {alias}"
        why = "DeepSpeed reads only the new one"
        other = siblings.get(new, siblings.get(alias))
        edits = (Removal(path),) if value == other or (value is False and key.startswith("cpu_offload")) else ()
        if parent in catalog.strict:
            effect = "stops"
            why = 'DeepSpeed stops: "Cannot provide deprecated parameter ... and replacing parameter ... together"'
    elif key.startswith("cpu_offload"):
        if value is True:
            edits = (Removal(path), Assignment(f"{parent}.{new}", {"device": "cpu"}))
        message, fix = f"{key} is another name for {new}", f"write {new}"
        why = f"DeepSpeed still accepts it; its documentation and Hugging Face's integrations use {new}"
    else:
        new, edits = alias, (Renaming(path, alias),)
        message, fix = f"{key} is another name for {new}", f"write {new}"
        why = f"DeepSpeed still accepts it; its documentation and Hugging Face's integrations use {new}"
        if path == "bfloat16":
            why += ": Accelerate adds its own bf16, which takes precedence"
    severity = "warning" if code == "deprecated-key" else "error"
    return Finding(
        code=code, severity=severity, effect=effect, path=path, message=message, why=why, fix=fix, edits=edits
    )


def _value(path: str, value: object, schema: Schema, c: CheckSubject) -> Iterator[Finding]:
    if isinstance(value, Mapping) and "properties" in schema:
        yield from _walk(value, schema, f"{path}.", c)
        return
    deepspeeds_auto = schema.get("default") == "auto" or "auto" in schema.get("enum", ())
    if value == "auto" and not deepspeeds_auto:
        if path not in filled_by(c.setting.reader):
            yield _auto(path, schema, c.catalog, c.setting)
        return
    if path == ZERO and isinstance(value, bool):
        return  # see the rule zero-flag
    yield from _faults(path, value, schema, path.rpartition(".")[0] in c.catalog.strict)


def _auto(path: str, schema: Schema, catalog: Catalog, setting: TargetHardware) -> Finding:
    """Return the finding about an "auto" that no program fills in."""
    # DeepSpeed drops "auto" in strict sections and uses its default. But it compares autotp_size before that.
    dropped = path.rpartition(".")[0] in catalog.strict and path != "tensor_parallel.autotp_size"
    severity, effect, why = "error", "stops", 'DeepSpeed fails on "auto"'
    if schema.get("type") == "boolean" and not path.startswith((*TYPED, *SUMMED)):
        effect, why = "changes", 'DeepSpeed reads "auto" as true'
    if setting.reader == "zerofit":
        effect, why = "stops", "zerofit stops before it starts a rank"
    elif dropped and (setting.reader not in HUGGING_FACE or setting.guessed):
        severity, effect = "warning", "changes"
        why = f"DeepSpeed uses its default, {json.dumps(schema.get('default'))}"
    if setting.reader in HUGGING_FACE:
        effect = "stops"
        theirs = f'Accelerate, which the Trainer uses, stops: "`{path}` not found in kwargs"'
        why = f"{theirs}; without it {why}" if severity == "warning" else theirs
    return Finding(
        code="auto-unfilled",
        severity=severity,
        effect=effect,
        path=path,
        message=f'{path} is "auto", and nothing fills it in',
        why=why,
        fix="write a value, or remove the key for DeepSpeed's default",
    )


def _plainly_fits(value: object, schema: Schema) -> bool:
    """Return whether a scalar has the type that a simple schema requires."""
    # With this test, a file without faults needs no import of jsonschema, which takes a tenth of the command's time.
    if schema.keys() - {"type", "enum", "minimum", "exclusiveMinimum", "default", "description", "deprecated"}:
        return False
    types = schema.get("type", [])
    if not set(SCALARS.get(type(value), ())).intersection([types] if isinstance(types, str) else types):
        return False
    if value not in schema.get("enum", (value,)):
        return False
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", -math.inf)


def _faults(path: str, value: Any, schema: Schema, strict: bool) -> Iterator[Finding]:
    types = schema.get("type", ())
    integer = "integer" in types and "number" not in types
    # For a JSON Schema, 2.0 and 1e300 are integers. DeepSpeed refuses 2.0 at some keys, and 1e300 at every key.
    if isinstance(value, float) and integer and (path.startswith(INTEGERS) or abs(value) >= MOST_INTEGER):
        yield _fraction(path, value, schema)
        return
    if _plainly_fits(value, schema):
        return
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(value))
    if error is None:
        return
    allowed = _allowed(schema)
    shown = json.dumps(value) if len(json.dumps(value)) < 60 else f"{json.dumps(value)[:57]}..."
    edits: tuple[Assignment, ...] = ()
    code, why = "wrong-type", "DeepSpeed refuses it or fails later"
    effect: Effect = "stops"
    # The order of the branches matters. A number in quotes is also a value of a wrong type, which has no correction. A
    # boolean among numbers may also exceed a bound.
    if isinstance(value, str) and (number := as_number(value)) is not None and _fits(number, schema):
        code, edits = "number-as-string", (Assignment(path, number),)
        converted = strict and (not integer or INTEGER_WORD.fullmatch(value))
        effect = "changes" if converted else "stops"
        why = "DeepSpeed converts it, but other readers of the file may not" if converted else "DeepSpeed fails on it"
    elif "properties" in schema and isinstance(value, bool) and "enabled" in schema["properties"]:
        edits = (Assignment(path, {"enabled": value}),)
    elif _fits(True, schema) and "object" not in schema.get("type", ()):
        flag = _flag(value)
        edits = (Assignment(path, flag),) if flag is not None else ()
        effect, why = _reading_of_flag(path, value, shown, strict)
    elif isinstance(value, bool) and not path.startswith(COUNTED) and _fits(int(value), schema):
        effect, why = "changes", f"DeepSpeed uses it as {int(value)}"
    elif path in BELOW and error.validator == "minimum" and value:
        code, why = "out-of-range", BELOW[path]
        effect = "changes"
    elif error.validator in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        code = "out-of-range"
    elif error.validator == "enum" and isinstance(value, str):
        code = "not-allowed"
        better = near(value, [v for v in schema.get("enum", ()) if isinstance(v, str)])
        edits = (Assignment(path, better),) if better and plainly(value, better) else ()
    yield Finding(
        code=code,
        effect=effect,
        path=path,
        message=f"{path} is {shown}; allowed: {allowed}",
        why=why,
        fix=f"use {json.dumps(edits[0].value)}" if edits else "correct it, or remove it",
        edits=edits,
    )


def _fraction(path: str, value: float, schema: Schema) -> Finding:
    """Return the finding about a float at a key that needs an integer."""
    clear = value.is_integer() and abs(value) < MOST_INTEGER
    return Finding(
        code="out-of-range" if abs(value) >= MOST_INTEGER else "wrong-type",
        path=path,
        message=f"{path} is {json.dumps(value)}; allowed: {_allowed(schema)}",
        why="DeepSpeed refuses it or fails later: it needs an integer",
        fix=f"use {int(value)}" if clear else "use an integer",
        edits=(Assignment(path, int(value)),) if clear else (),
    )


def _reading_of_flag(path: str, value: object, shown: str, strict: bool) -> tuple[Effect, str]:
    if strict and (value in (0, 1) or str(value).lower() in FLAG_WORDS):
        return "changes", "DeepSpeed converts it, but other readers of the file treat any string as true"
    if strict or path.startswith(TYPED) or (path in SUMMED and not isinstance(value, int)):
        return "stops", "DeepSpeed refuses it or fails later"
    return "changes", f"DeepSpeed does not check it, and reads {shown} as {json.dumps(bool(value))}"


def _flag(value: object) -> bool | None:
    """Return the boolean that a word or number means, or None if the meaning is not clear."""
    word = str(value).lower()
    if word in FLAG_WORDS:
        return FLAG_WORDS[word]
    meant = near(word, ["true", "false"]) if isinstance(value, str) else None
    return None if meant is None else meant == "true"


def _fits(value: Any, schema: Schema) -> bool:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema).is_valid(value)


def _allowed(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(json.dumps(v) for v in dict.fromkeys(schema["enum"]))
    types = schema.get("type", [])
    words_of = {
        "boolean": "true or false",
        "integer": "an integer",
        "number": "a number",
        "string": "a string",
        "array": "a list",
        "object": "an object {...}",
        "null": "null",
    }
    words = " or ".join(words_of[t] for t in ([types] if isinstance(types, str) else types)) or "another value"
    bounds = {
        "minimum": "from {}",
        "exclusiveMinimum": "above {}",
        "maximum": "up to {}",
        "exclusiveMaximum": "below {}",
    }
    return " ".join([words, *(text.format(schema.get(key)) for key, text in bounds.items() if key in schema)])
