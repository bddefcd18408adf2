"""Keys and types: every key that DeepSpeed does not know, every value that its schema does not take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zerofit.check.catalog import Catalog, Schema
from zerofit.check.document import Document
from zerofit.check.dotted import get
from zerofit.check.edit import Assignment, Deletion, Edit, Removal, Renaming, after_comma
from zerofit.check.finding import Finding, near
from zerofit.check.schema import FILLED
from zerofit.check.subject import ZERO

# other words for the same, from users' reports
SYNONYMS = {
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "gradient_clip": "gradient_clipping",
    "zero": ZERO,
    "zero_stage": ZERO,
    "float16": "fp16",
    "autocast": "torch_autocast",
    "partitioned_activations": "partition_activations",
    "thread_count": "intra_op_parallelism",
    "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}

# what to do about a removed section beyond taking it out
INSTEAD = {
    "amp": "take fp16, bf16 or torch_autocast",
    "elasticity": "give the batch sizes themselves; a restart on other ranks needs a universal checkpoint",
    "curriculum_learning": "the same stands in data_efficiency.data_sampling.curriculum_learning, with other keys",
    "compression_training": "quantize the model before, or after, training",
    "quantize_training": "quantize the model before, or after, training",
    "nebula": "checkpoints go to files; zerofit writes them so that a kill does no harm",
    "sparse_attention": "take the model's own attention (FlashAttention, SDPA)",
    f"{ZERO}.mics_shard_size": "zero_hpz_partition_size keeps parameters within a node",
}


def keys(document: Document, catalog: Catalog) -> Iterator[Finding]:
    """Yield findings about single keys and their values; combinations are the rules' matter."""
    for path, first, last in document.duplicates():
        yield _duplicate(document, path, first, last)
    for place in document.commas:
        yield Finding(
            code="trailing-comma",
            severity="warning",
            path="",
            message="a comma after the last member",
            why="DeepSpeed takes it; Hugging Face's integrations read strict JSON and stop",
            fix="remove it",
            edits=(Deletion(place.start, place.end),),
            line=place.line,
            column=place.column,
        )
    if not isinstance(document.config, Mapping):
        yield Finding(
            code="not-an-object",
            path="",
            message="the file holds no JSON object",
            why="DeepSpeed stops: it needs keys",
            fix="write {...}",
        )
        return
    yield from _walk(document.config, catalog.schema, "", catalog)


def _duplicate(document: Document, path: str, first: Any, last: Any) -> Finding:
    start = first.place.start
    end = after_comma(document.text, first.value.place.end)
    end += len(document.text[end:]) - len(document.text[end:].lstrip())
    return Finding(
        code="duplicate-key",
        path=path,
        message=f"{path} stands twice: here and in line {last.place.line}",
        why='DeepSpeed stops: "Duplicate keys in DeepSpeed config"; other readers take the last one',
        fix="remove one of them",
        edits=(Deletion(start, end),),
        line=first.place.line,
        column=first.place.column,
    )


def _walk(config: Mapping[str, Any], schema: Schema, prefix: str, catalog: Catalog) -> Iterator[Finding]:
    known = schema.get("properties", {})
    for key, value in config.items():
        path = f"{prefix}{key}"
        if path in catalog.removed:
            yield _removed(path)
        elif key not in known:
            if not schema.get("additionalProperties", True):
                yield _unknown(path, known, config, catalog)
        else:
            if path in catalog.deprecated:
                yield _deprecated(path, value, config, catalog)
            yield from _value(path, value, known[key], catalog)


def _removed(path: str) -> Finding:
    return Finding(
        code="removed-key",
        path=path,
        message=f"{path} is gone from this DeepSpeed",
        why="DeepSpeed stops at the key, whatever its value, also where it is disabled",
        fix="remove it" + (f"; {INSTEAD[path]}" if path in INSTEAD else ""),
        edits=(Removal(path),),
    )


def _unknown(path: str, known: Mapping[str, Any], siblings: Mapping[str, Any], catalog: Catalog) -> Finding:
    parent, _, key = path.rpartition(".")
    documented = [k for k in known if f"{parent}.{k}".lstrip(".") not in catalog.deprecated]
    elsewhere = sorted(p for p in _paths(catalog.schema) if p.rpartition(".")[2] == key and p not in catalog.deprecated)
    better = None if key.startswith("_") or elsewhere else near(key, documented, SYNONYMS)
    if better and not _may_be_meant(siblings[key], known[better]):
        better = None
    edits: tuple[Edit, ...] = (Removal(path),)
    fix = "remove it"
    if better:
        fix = f"did you mean {better}?"
        edits = (Renaming(path, better),) if better not in siblings else edits
    elif elsewhere:
        fix = f"it belongs to {' or '.join(p.rpartition('.')[0] or 'the top level' for p in elsewhere[:3])}"
        if len(elsewhere) == 1 and not parent and get(siblings, elsewhere[0]) is None:
            edits = (*edits, Assignment(elsewhere[0], siblings[key]))
    if parent in catalog.strict:
        why = 'DeepSpeed stops once the ranks run: "Extra inputs are not permitted"'
    else:
        why = "DeepSpeed ignores it without a word and takes its default"
    return Finding(
        code="unknown-key",
        severity="warning" if key.startswith(("_", "$")) and parent not in catalog.strict else "error",
        path=path,
        message=f"DeepSpeed knows no key {key!r} in {parent or 'the top level'}",
        why=why,
        fix=fix,
        edits=edits,
    )


def _may_be_meant(value: Any, schema: Schema) -> bool:
    """Return whether a value may be meant for a key: an object for a section, something the key takes otherwise."""
    if "properties" in schema:
        return isinstance(value, Mapping)
    return not isinstance(value, Mapping) and (value == "auto" or isinstance(value, str) or _fits(value, schema))


def _paths(schema: Schema, prefix: str = "") -> Iterator[str]:
    for key, child in schema.get("properties", {}).items():
        yield f"{prefix}{key}"
        yield from _paths(child, f"{prefix}{key}.")


def _deprecated(path: str, value: Any, siblings: Mapping[str, Any], catalog: Catalog) -> Finding:
    parent, _, key = path.rpartition(".")
    new = catalog.deprecated[path]
    alias = catalog.deprecated.get(f"{parent}.{new}", new)
    code = "deprecated-key"
    edits: tuple[Edit, ...] = (Removal(path),)
    if not new.isidentifier():  # "a or b": the value is dropped
        message, why = f"{key} is the old form of {new}", "DeepSpeed warns and drops the value"
        fix = "remove it, and set pin_memory in these sections"
    elif new in siblings or alias in siblings:
        code = "deprecated-and-new"
        message, fix = f"{key} stands beside {alias}, which is its new name", f"keep {alias}"
        why = "DeepSpeed reads the new one only"
        if parent in catalog.strict:
            why = 'DeepSpeed stops: "Cannot provide deprecated parameter ... and replacing parameter ... together"'
    else:
        if not key.startswith("cpu_offload"):
            new, edits = alias, (Renaming(path, alias),)
        elif value is True:
            edits = (*edits, Assignment(f"{parent}.{new}", {"device": "cpu"}))
        message, fix = f"{key} is another name of {new}", f"write {new}"
        why = "DeepSpeed still takes it; its documentation and Hugging Face's integrations know the other name"
    severity = "warning" if code == "deprecated-key" else "error"
    return Finding(code=code, severity=severity, path=path, message=message, why=why, fix=fix, edits=edits)


def _value(path: str, value: Any, schema: Schema, catalog: Catalog) -> Iterator[Finding]:
    if isinstance(value, Mapping) and "properties" in schema:
        yield from _walk(value, schema, f"{path}.", catalog)
        return
    own_auto = schema.get("default") == "auto" or "auto" in schema.get("enum", ())  # a word of DeepSpeed's own
    if value == "auto" and not own_auto:
        if path not in FILLED:
            yield _auto(path, schema, catalog)
        return
    if path == ZERO and isinstance(value, bool):
        return  # a rule of its own
    yield from _faults(path, value, schema)


def _auto(path: str, schema: Schema, catalog: Catalog) -> Finding:
    default = schema.get("default")
    strict = path.rpartition(".")[0] in catalog.strict
    why = (
        f"DeepSpeed drops it and takes its default, {json.dumps(default)}" if strict else "DeepSpeed fails on the word"
    )
    section = schema.get("type") == "object" or "properties" in schema
    return Finding(
        code="auto-unfilled",
        path=path,
        message=f'{path} is "auto", which nothing fills: neither zerofit nor Hugging Face\'s integrations',
        why=why,
        fix="write a value, or remove the key",
        edits=(Removal(path),) if default is None or section else (Assignment(path, default),),
    )


def _faults(path: str, value: Any, schema: Schema) -> Iterator[Finding]:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(value))
    if error is None:
        return
    allowed = _allowed(schema)
    shown = json.dumps(value) if len(json.dumps(value)) < 60 else f"{json.dumps(value)[:57]}..."
    default = schema.get("default")
    edits: tuple[Any, ...] = (Removal(path),) if default is None else (Assignment(path, default),)
    code, why = "wrong-type", "DeepSpeed refuses it, or fails on it later"
    if isinstance(value, str) and _number(value) is not None and _fits(_number(value), schema):
        code, edits = "number-as-string", (Assignment(path, _number(value)),)
        why = "DeepSpeed converts it in some sections and fails on it in others"
    elif "properties" in schema and isinstance(value, bool) and "enabled" in schema["properties"]:
        edits = (Assignment(path, {"enabled": value}),)
    elif _fits(True, schema) and (flag := _flag(value)) is not None:
        edits = (Assignment(path, flag),)
        why = 'DeepSpeed converts it in strict sections; elsewhere any string counts as true, "false" too'
    elif error.validator in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        code = "out-of-range"
    elif error.validator == "enum" and isinstance(value, str):
        code = "not-allowed"
        better = near(value, [v for v in schema["enum"] if isinstance(v, str)])
        edits = (Assignment(path, better),) if better else edits
    yield Finding(
        code=code,
        path=path,
        message=f"{path} is {shown}; allowed: {allowed}",
        why=why,
        fix=f"take {json.dumps(edits[0].value)}" if isinstance(edits[0], Assignment) else "correct it, or remove it",
        edits=edits,
    )


def _flag(value: Any) -> bool | None:
    """Return what a word or number in the place of true or false means; None where that is not plain."""
    word = str(value).lower()
    if word in ("1", "yes", "on", "y"):
        return True
    if word in ("0", "no", "off", "n"):
        return False
    meant = near(word, ["true", "false"]) if isinstance(value, str) else None
    return None if meant is None else meant == "true"


def _fits(value: Any, schema: Schema) -> bool:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema).is_valid(value)


def _number(text: str) -> float | int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value == int(value) else value


def _allowed(schema: Schema) -> str:
    """Describe the allowed values."""
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(json.dumps(v) for v in dict.fromkeys(schema["enum"]))
    types = schema.get("type", [])
    names = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "a string",
        "array": "a list",
        "object": "an object {...}",
        "null": "null",
    }
    words = " or ".join(names[t] for t in ([types] if isinstance(types, str) else types)) or "another value"
    bounds = {
        "minimum": "from {} on",
        "exclusiveMinimum": "above {}",
        "maximum": "up to {}",
        "exclusiveMaximum": "below {}",
    }
    return " ".join([words, *(text.format(schema[key]) for key, text in bounds.items() if key in schema)])
