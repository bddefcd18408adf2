"""The options that name hardware, and the clusters that they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from zerofit.spec.cluster import Cluster

OPTIONS: dict[str, dict[str, Any]] = {
    "gpus": {"type": int, "help": "devices of one node"},
    "nodes": {"type": int, "help": "equal nodes [1]"},
    "host_memory": {"metavar": "SIZE", "help": "memory of one node, for offloading"},
    "device_memory": {"metavar": "SIZE", "help": "memory of one device, in place of the catalogue's"},
    "nvme": {"metavar": "SIZE", "help": "local disks of one node that offloading may fill"},
    "network": {"metavar": "SIZE", "help": "bytes a second to other nodes, for each device"},
}


def hardware_options(*names: str, kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds these of OPTIONS, and `--gpu` with `kinds` as its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            command = click.option("--" + name.replace("_", "-"), name, **OPTIONS[name])(command)
        return click.option("--gpu", "kinds", multiple=True, metavar="KIND", help=kinds)(command)

    return add


def clusters(kinds: Sequence[str], **sizes: Any) -> list[Cluster]:
    """Return one cluster for each kind (several may stand in one word, with commas), or this machine.

    Raises UserError with everything that is wrong.
    """
    from zerofit.spec.cluster import Cluster

    given = {name: size for name, size in sizes.items() if size is not None}
    names = list(dict.fromkeys(k.strip() for word in kinds for k in word.split(",") if k.strip()))
    if not names:
        return [replace(Cluster.here(), **given)]
    problems: list[Problem] = []
    found = []
    for name in names:
        try:
            found.append(Cluster(name, **given))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return found
