"""Options shared by several commands; the run's options come from the fields of `Run`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click

from zerofit.features import checkpointing
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.foreign import Unreadable, parse_json
from zerofit.spec.run import AUTO, Run, plain_type, switch

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from zerofit.spec.cluster import Cluster

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# click would stop at the first bad path. The commands check paths themselves, and report all problems at once.
PATH = click.Path(path_type=Path)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
INPUT = click.option(
    "--input",
    "image",
    metavar="KIND:SIZE",
    help="the model's input, without --data: image:CxHxW, features:N, decoder:TOKENS, frames:N, packed",
)
ANYWAY = click.option("--anyway", is_flag=True, help="start even if the forecast exceeds the free memory")
TRUST_MODEL_CODE = click.option(
    "--trust-model-code",
    is_flag=True,
    help="import and run the code (package.module:callable) of a model or callback that is named in the folder",
)
RUNNERS = ["pdsh", "slurm", "openmpi", "mpich"]
RUNNER_HELP = "how DeepSpeed's runner starts ranks; slurm without --hostfile uses the hosts of the allocation"
HOST_FLAGS = {"runner": "--launcher", "runner_args": "--launcher-args"}
HOST_FIELDS = ("hostfile", "include", "exclude", "runner", "runner_args", "ssh_port", "master_port", "env")
HARDWARE: dict[str, dict[str, Any]] = {
    "gpus": {"type": int, "help": "devices per node"},
    "nodes": {"type": int, "help": "number of equal nodes [1]"},
    "host_memory": {"metavar": "SIZE", "help": "host memory per node"},
    "device_memory": {"metavar": "SIZE", "help": "memory per device [as in the catalog]"},
    "nvme": {"metavar": "SIZE", "help": "local disk space per node that offloading may use"},
    "network": {"metavar": "SIZE", "help": "network bandwidth to other nodes, in bytes per second for each device"},
}


# `key=value` needs no quotes in a shell, JSON does.
_PAIRS = re.compile(r"[A-Za-z_][\w.]*=[^,={}\[\]\"']+(,[A-Za-z_][\w.]*=[^,={}\[\]\"']+)*")


class JsonObject(click.ParamType):
    """A JSON object on the command line, or `key=value,...`."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        """Parse a JSON object; other text is a usage error (exit code 2)."""
        if isinstance(value, dict):
            return value
        if pairs := _PAIRS.fullmatch(value):
            return dict(map(_pair, pairs[0].split(",")))
        try:
            parsed = parse_json(value)
        except Unreadable as error:
            self.fail(f"{value[:80]!r} is not valid JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value[:80]!r} is not a JSON object", param, ctx)
        return parsed


def _pair(word: str) -> tuple[str, object]:
    """Return the key and the value of `key=value`."""
    key, _, value = word.partition("=")
    # Release 0.10 is not 0.1.
    if key.endswith("release"):
        return key, value
    # Numbers, true, false and null are values of JSON, and everything else is text.
    try:
        return key, parse_json(value)
    except Unreadable:
        return key, value


class CountOrAuto(click.ParamType):
    """An integer or "auto". `Run` checks whether the number is allowed."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse the value; anything else is a usage error (exit code 2)."""
        if value == AUTO or isinstance(value, int):
            return value
        if not value.isdecimal():
            self.fail(f"{value!r} is neither auto nor an integer", param, ctx)
        return int(value)


class NameList(click.ParamType):
    """Names of `noun`s in any case, separated by commas. Each of them is in `known`."""

    name = "names"

    def __init__(self, noun: str, known: Sequence[str]):
        self._noun, self._known = noun, {name.lower(): name for name in known}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the names, each once; an unknown name is a usage error (exit code 2)."""
        words = [word.strip().lower() for word in value.split(",")]
        if unknown := [word for word in words if word not in self._known]:
            self.fail(f"no {self._noun} {unknown[0]!r}; there are: {', '.join(self._known.values())}", param, ctx)
        return tuple(dict.fromkeys(self._known[word] for word in words))


class Number(click.FloatRange):
    """A finite number within bounds (click would accept nan)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the value; text that is no such number is a usage error (exit code 2)."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Group(click.Group):
    """A group of commands. Its --help shows the first paragraph about each command uncut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and first paragraphs of the commands."""
        # click would cut the paragraphs after 45 letters.
        rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in rows])


def add_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds these options to a command, in this order."""

    def add(command: Callable[..., object]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def given(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that the user gave."""
    return {name: value for name, value in options.items() if value is not None}


def run_options(fields: Collection[str] | None = None) -> Decorator:
    """Return a decorator that adds an option for each of these fields of Run.

    Without `fields`, all fields except `model` become options.
    """
    named = Run.model_fields.keys() - {"model"} if fields is None else fields
    return add_options(*(_option(field, info) for field, info in Run.model_fields.items() if field in named))


def _option(field: str, info: FieldInfo) -> Decorator:
    """Return the option for a field of Run, according to the field's type."""
    name = "--" + field.replace("_", "-")
    kind = plain_type(info.annotation)
    extra: dict[str, Any] = {"default": None, "help": info.description}
    if info.default not in (None, False, ()) and info.default != {}:
        extra["help"] += f" [{info.default}]"
    if kind is bool:
        return click.option(f"{name}/--no-{field.replace('_', '-')}", field, **extra)
    # A Literal next to bool, as of activation_checkpointing, needs a switch for each word.
    if bool in get_args(kind):
        return _switches(field, get_args(get_args(kind)[1]), extra)
    if get_origin(kind) is tuple:
        # click passes () if the option is missing. None means that a run file's value stays.
        return click.option(name, field, multiple=True, callback=lambda c, p, v: v or None, help=info.description)
    if get_origin(kind) is Literal:
        return click.option(name, field, type=click.Choice(get_args(kind)), **extra)
    if get_origin(kind) is Union:
        return click.option(name, field, type=CountOrAuto(), **extra)
    types_of: dict[object, Any] = {int: int, float: float, str: str, Path: PATH}
    return click.option(name, field, type=types_of.get(kind, JsonObject()), **extra)


def _switches(field: str, words: Sequence[str], extra: Mapping[str, object]) -> Decorator:
    """Return a switch for each value of a field that is true, false or one of `words`."""
    helps = {True: extra["help"], False: f"switch {switch(field, True)} off", **checkpointing.HELP}
    options = {"type": click.UNPROCESSED, "default": None}
    return add_options(
        *(
            click.option(switch(field, value), field, flag_value=value, help=helps.get(value), **options)
            for value in (True, False, *words)
        )
    )


host_options = add_options(
    click.option("--hostfile", type=PATH, help="file with a line like `node1 slots=8` for each host"),
    click.option("--include", help="use only these: node1@node2:0,2 is all of node1, and devices 0 and 2 of node2"),
    click.option("--exclude", help="use all except these, written like --include"),
    click.option(
        "--launcher", "runner", type=click.Choice(RUNNERS), default="pdsh", show_default=True, help=RUNNER_HELP
    ),
    click.option("--launcher-args", "runner_args", default="", help="arguments for pdsh, srun or mpirun"),
    click.option("--ssh-port", type=click.IntRange(1, 65535), help="ssh port of all hosts [from ~/.ssh/config]"),
    click.option("--master-port", type=click.IntRange(1, 65535), help="port of rank 0 [29500]"),
    click.option("--env", "env", multiple=True, metavar="NAME[=VALUE]", help="variable for all ranks; may be repeated"),
)


def host_arguments(options: dict[str, object]) -> list[str]:
    """Return these options as arguments of a command line."""
    words: list[str] = []
    for name in HOST_FIELDS:
        flag, value = HOST_FLAGS.get(name, "--" + name.replace("_", "-")), options[name]
        for word in value if isinstance(value, tuple) else [value]:
            # After `=`, a value that begins with a dash is not read as an option.
            if word not in (None, "") and (name, word) != ("runner", "pdsh"):  # the default
                words.append(f"{flag}={word}")
    return words


def hardware_options(*names: str, kinds: str) -> Decorator:
    """Return a decorator that adds `--gpu` (with `kinds` as help) and these options of HARDWARE."""
    gpu = click.option("--gpu", "kinds", multiple=True, metavar="KIND", help=kinds)
    return add_options(gpu, *(click.option("--" + name.replace("_", "-"), name, **HARDWARE[name]) for name in names))


def clusters(kinds: Sequence[str], **sizes: object) -> list[Cluster]:
    """Return one cluster for each kind; this machine if no kind is given.

    Kinds may be comma-separated. Raises UserError with all problems.
    """
    from zerofit.spec.cluster import Cluster

    overridden = given(sizes)
    names = list(dict.fromkeys(k.strip() for word in kinds for k in word.split(",") if k.strip()))
    # `zerofit plan` without hardware is about this machine, also if some sizes are overridden.
    if not names:
        return [replace(Cluster.here(), **overridden)]
    problems = Problems()
    hardware = [problems.attempt(lambda name=name: Cluster(name, **overridden)) for name in names]
    if problems:  # a wrong size is the same problem for each kind
        raise UserError(*dict.fromkeys(problems))
    return [cluster for cluster in hardware if cluster]


def only_cluster(kinds: Sequence[Cluster], what: str = "a simulation") -> Cluster:
    """Return the only cluster. Raises UserError if there are several, which `what` does not support."""
    if len(kinds) > 1:
        message, hint = f"{what} supports only one kind of machine", "name one kind; `zerofit plan` compares several"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--gpu"))
    return kinds[0]
