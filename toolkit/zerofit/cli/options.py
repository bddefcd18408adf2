"""Options made from the fields of the run: one field, one option, one key of run.yaml."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from zerofit.spec.run import Run

AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
TRUST_MODEL_CODE = click.option(
    "--trust-model-code",
    is_flag=True,
    help="import and run a model of the form package.module:callable that the folder's files name",
)


class JsonObject(click.ParamType):
    """A JSON object on the command line."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Parse; anything but an object is a usage error (exit code 2)."""
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not valid JSON: {error.msg} at column {error.colno}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return parsed


def run_options(fields: Collection[str] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an option for each of these fields of Run (None: all but `model`, the argument)."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for field, info in reversed(Run.model_fields.items()):
            if field in fields if fields is not None else field != "model":
                command = _option(field, info)(command)
        return command

    return add


def _option(field: str, info: Any) -> Callable[..., Any]:
    name = "--" + field.replace("_", "-")
    kind = _plain(info.annotation)
    extra: dict[str, Any] = {"default": None, "help": info.description}
    if info.default not in (None, False, ()) and info.default != {}:
        extra["help"] += f" [{info.default}]"
    if kind is bool:
        return click.option(f"{name}/--no-{field.replace('_', '-')}", field, **extra)
    if get_origin(kind) is tuple:
        return click.option(name, field, multiple=True, callback=_none_if_empty, help=info.description)
    if get_origin(kind) is Literal:
        return click.option(name, field, type=click.Choice(get_args(kind)), **extra)
    types_of = {int: int, float: float, str: str, Path: click.Path(path_type=Path)}
    return click.option(name, field, type=types_of.get(kind, JsonObject()), **extra)


def _none_if_empty(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...] | None:
    return value or None


def _plain(annotation: Any) -> Any:
    """Return the type of a value on the command line: without Optional and Annotated, str where it may be one."""
    if get_origin(annotation) is typing.Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [_plain(a) for a in get_args(annotation) if a is not type(None)]
        return str if str in kinds else kinds[0]
    return annotation
