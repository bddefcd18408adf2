"""Options that say which hosts a run has and how ranks are started there: the same for every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

RUNNERS = ["pdsh", "slurm", "openmpi", "mpich"]
RUNNER_HELP = "what DeepSpeed's runner starts ranks with; slurm without --hostfile takes the hosts of the allocation"
FLAGS = {"runner": "--launcher", "runner_args": "--launcher-args"}
NAMES = ("hostfile", "include", "exclude", "runner", "runner_args", "ssh_port", "master_port", "env")


def add_options(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds these options to a command, in their order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


host_options = add_options(
    click.option("--hostfile", type=click.Path(path_type=Path), help="lines `node1 slots=8`"),
    click.option("--include", help="only these: node1@node2:0,2 is all of node1 and devices 0 and 2 of node2"),
    click.option("--exclude", help="all but these, written as for --include"),
    click.option(
        "--launcher", "runner", type=click.Choice(RUNNERS), default="pdsh", show_default=True, help=RUNNER_HELP
    ),
    click.option("--launcher-args", "runner_args", default="", help="passed on to pdsh, srun or mpirun"),
    click.option("--ssh-port", type=click.IntRange(1, 65535), help="of all hosts [as ~/.ssh/config says]"),
    click.option("--master-port", type=click.IntRange(1, 65535), help="where rank 0 listens [29500]"),
    click.option("--env", "env", multiple=True, metavar="NAME[=VALUE]", help="forward to all ranks; may be repeated"),
)


def host_arguments(options: dict[str, Any]) -> list[str]:
    """Return the same options as words again, for a command that this one starts."""
    words: list[str] = []
    for name in NAMES:
        flag, value = FLAGS.get(name, "--" + name.replace("_", "-")), options[name]
        for one in value if isinstance(value, tuple) else [value]:
            words += [f"{flag}={one}"] if one not in (None, "") else []
    return words
