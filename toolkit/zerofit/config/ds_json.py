"""Reading DeepSpeed JSON files, by path or bundled name; errors have line and column."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import hjson

from zerofit.check.document import Document, of_hjson, parse, parse_yaml
from zerofit.check.dotted import get, put
from zerofit.check.neox import is_for_neox
from zerofit.check.reader import MARKS, program_of, where_to_look
from zerofit.check.scan import SyntaxFault
from zerofit.check.subject import MICRO, STEPS
from zerofit.features.zero import ZERO
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.files import write_text
from zerofit.spec.foreign import parse_json

LARGEST = 64 * 2**20  # bytes; a configuration has a few thousand
LARGEST_YAML = 2**18  # characters to try as YAML; PyYAML reads 100,000 a second
YAML = "; the text looks like YAML"
YAML_HINT = "use --accelerate-config for Accelerate's YAML, --training-args for the YAML of axolotl or LLaMA-Factory"

# Bundled files have numbers here for other programs; zerofit's runs decide these values themselves.
RUN_DECIDES = (
    *(MICRO, "gradient_clipping", "tensor_parallel.autotp_size", "sequence_parallel_size"),
    *(f"{ZERO}.reduce_bucket_size", f"{ZERO}.allgather_bucket_size", f"{ZERO}.stage3_prefetch_bucket_size"),
    *(f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.offload_param.buffer_size"),
)


def bundled() -> dict[str, Path]:
    """Return the paths of the files in ds_configs/, by name."""
    return {p.stem: Path(str(p)) for p in Path(str(files("zerofit.ds_configs"))).glob("*.json")}


def find_config(name: str, where: str = "--ds-config") -> Path:
    """Return the file for `--ds-config NAME`: a path, or a bundled name. Raises UserError."""
    path = Path(name)
    if name == "-" or (path.exists() and not path.is_dir()):  # is_file() is false for a pipe
        return path
    if path.is_dir():
        hint = f"give a file in it, {name.rstrip('/')}/*.json"
        raise UserError(Problem(kind="unreadable", message=f"{name} is a folder", hint=hint, where=where))
    known = bundled()
    if path.name == name and path.stem in known:
        return known[path.stem]
    message = f"no DeepSpeed JSON {name!r}: neither a file nor one of the bundled names"
    hint = nearest(name, known) or "known: " + ", ".join(sorted(known))
    raise UserError(Problem(kind="unknown-ds-config", message=message, hint=hint, where=where))


def is_bundled(path: Path) -> bool:
    """Return whether a path leads to a file in ds_configs/."""
    return path.is_file() and any(path.samefile(own) for own in bundled().values())


def read_for_run(name: str) -> Document:
    """Parse the JSON of a run. Raises UserError.

    In a bundled JSON, values that the run decides become "auto".
    """
    path = find_config(name)
    document = read_document(path)
    return for_run(document) if is_bundled(path) else document


def for_run(document: Document) -> Document:
    """Return a bundled document with "auto" for each value that the run decides."""
    config = copy.deepcopy(document.config)
    for path in RUN_DECIDES:
        if get(config, path) is not None:
            put(config, path, "auto")
    left_out = [STEPS] if {"bf16", "fp16"} & config.keys() else [STEPS, "bf16.enabled", "fp16.enabled"]
    for path in left_out:  # key is missing in the file, so other programs use their own values
        put(config, path, "auto")
    config.pop("zero_force_ds_cpu_optimizer", None)  # for programs with their own optimizer
    return replace(document, root=replace(document.root, data=config))


def write_for_trainer(name: str, path: Path) -> None:
    """Write a bundled JSON with "auto" for each value that the Trainer or Accelerate fills in."""
    write_text(path, json.dumps(read_for_run(name).config, indent=2) + "\n")


def read_document(path: Path, where: str = "--ds-config") -> Document:
    """Parse a DeepSpeed JSON, with or without comments. Raises UserError with line and column."""
    try:
        text, encoding = read_text(path)
        document = replace(parse_text(text, yaml=path.suffix in (".yml", ".yaml")), encoding=encoding)
    except SyntaxFault as fault:
        place = f"{path}:{fault.line}:{fault.column}"
        message = f"{path} is not valid {fault.notation} at line {fault.line}, column {fault.column}: {fault.message}"
        hint = YAML_HINT if fault.message.endswith(YAML) else ""
        raise UserError(Problem(kind="json-syntax", message=message, hint=hint, where=place)) from None
    except OSError as error:
        raise UserError(Problem(kind="unreadable", message=f"cannot read {path}: {error}", where=where)) from None
    if not isinstance(document.config, dict):
        got = {list: "a list", type(None): "empty"}.get(type(document.config), "a single value")
        message, hint = f"{path} is {got}, not a JSON object", 'a DeepSpeed JSON is an object: {"key": value, ...}'
        raise UserError(Problem(kind="json-syntax", message=message, hint=hint, where=str(path)))
    if other_program := program_of(document.config):
        program, keys = other_program
        message = f"{path} is not a DeepSpeed JSON: it has the keys of {program.name} ({', '.join(keys)})"
        hint = where_to_look(program, document.config, str(path))
        raise UserError(Problem(kind="not-deepspeed", message=message, hint=hint, where=where))
    return document


def read_text(path: Path) -> tuple[str, str]:
    """Return the text of a file (or of standard input for "-") and its detected encoding.

    Raises OSError, and SyntaxFault with the position of a byte that is not text.
    """
    # one byte more than allowed tells that a file is too large: a pipe has no size to ask for
    raw = sys.stdin.buffer.read(LARGEST + 1) if str(path) == "-" else path.open("rb").read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise OSError(f"more than {LARGEST:,} bytes, too large for a DeepSpeed JSON")
    encoding = json.detect_encoding(raw)
    try:
        return raw.decode(encoding), encoding
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode(encoding, errors="replace")
        message = f"byte 0x{raw[error.start]:02x} is not {encoding.upper()}; save the file as UTF-8"
        raise SyntaxFault(message, before.count("\n") + 1, len(before) - before.rfind("\n")) from None


def parse_text(text: str, *, yaml: bool = False) -> Document:
    """Parse a JSON, another program's YAML, or HJSON as DeepSpeed reads it.

    Raises SyntaxFault with the position of the error: in the YAML if `yaml` is true, otherwise in the JSON.
    """
    try:
        # The order matters, since some texts are valid in several notations. JSON comes first, then the YAML of a known
        # program, then HJSON, which accepts almost any text as a string.
        document = parse(text)
        return (is_for_neox(document.config, yaml=yaml) and _as_yaml(text, yaml)) or document
    except SyntaxFault as fault:
        if document := _as_yaml(text, yaml):
            return document
        if yaml and len(text) <= LARGEST_YAML:
            parse_yaml(text)  # raises: in a YAML file, the position in the YAML is the one that helps
        # A text that begins with a brace or a comment is not meant as YAML, so its error is reported for JSON.
        braces = text.lstrip().startswith(("{", "#", "/"))
        kind = YAML if not braces and re.match(r"\s*(---|[A-Za-z_]+:)", text) else ""
        json_fault = SyntaxFault(fault.message + kind, fault.line, fault.column)
        config = None if fault.final else _read_hjson(text)
        if config is not None and (braces or _is_meant(config)):
            return of_hjson(text, config, json_fault)
        if kind and (document := _as_yaml(text, yaml, MARKS)):
            return document
        raise json_fault from None


def _as_yaml(text: str, yaml: bool, marks: Sequence[str] = ()) -> Document | None:
    """Parse a YAML for GPT-NeoX or another program, or with a key in `marks`; else None."""
    if len(text) > LARGEST_YAML:
        return None
    try:
        document = parse_yaml(text)
    except SyntaxFault:
        return None
    known = is_for_neox(document.config, yaml=yaml) or program_of(document.config)
    return document if known or not document.config.keys().isdisjoint(marks) else None


def _read_hjson(text: str) -> object:
    """Return the value that DeepSpeed's reader parses from a text, or None if it fails."""
    try:
        return parse_json(json.dumps(hjson.loads(text), allow_nan=False))
    except (ValueError, OverflowError, RecursionError):
        return None


def _is_meant(config: object) -> bool:
    """Return whether HJSON without outer braces was meant.

    It has DeepSpeed's keys, but no sections of a YAML. HJSON reads a YAML's section (`fp16:` with `enabled: true` below
    it) as one string.
    """
    if not isinstance(config, dict) or config.keys().isdisjoint(MARKS):
        return False
    return not any(isinstance(value, str) and ":" in value for value in config.values())
