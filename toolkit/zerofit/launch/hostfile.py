"""Hosts and their slots: the hostfile of the deepspeed launcher, read strictly, and its include and exclude filters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.spec.errors import Problem, Problems, UserError, nearest

# what a host may be called: no character that a shell, pdsh (commas, %, brackets) or ssh (a leading dash) would read
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LINE = re.compile(r"(?P<name>\S+)(?:(?P<gap>\s+)(?P<rest>.*))?")
SLOTS = re.compile(r"slots=(?P<count>\d+)\s*(?P<more>.*)")


@dataclass(frozen=True)
class Host:
    """One node, and the devices on it that ranks may use."""

    name: str
    slots: int  # ranks on it
    devices: tuple[int, ...] | None = None  # their device ids; None: the first `slots` ones

    @property
    def ids(self) -> tuple[int, ...]:
        """Device ids, one a rank."""
        return self.devices if self.devices is not None else tuple(range(self.slots))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read the hosts in order: lines `name slots=N`, blank lines and # comments. Raises UserError with all faults."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "one line a host: `node1 slots=8`; for this machine alone take `zerofit train`"
        problem = Problem(kind="hostfile", message=f"cannot read the hostfile: {error}", hint=hint, where=str(path))
        raise UserError(problem) from None
    problems, hosts = Problems(), []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].rstrip()
        if content.strip():
            host = _host(content, f"{path}:{number}", {h.name: i for i, h in hosts}, problems)
            if host:
                hosts.append((number, host))
    if not hosts and not problems:
        problems.add("hostfile", "the hostfile names no host", "one line a host: `node1 slots=8`", str(path))
    problems.raise_if_any()
    return tuple(host for _, host in hosts)


def _host(content: str, place: str, before: dict[str, int], problems: Problems) -> Host | None:
    """Return one line's host; what is wrong with it is noted with line and column."""
    indent = len(content) - len(content.lstrip())
    match = LINE.fullmatch(content.strip())
    assert match
    name, rest = match["name"], match["rest"] or ""
    column = indent + 1
    at = indent + len(name) + len(match["gap"] or "") + 1
    if not NAME.fullmatch(name):
        message = f"{name!r} is not a valid host name: letters, digits, '.', '-' and '_' are allowed"
        hint = "give users, ports and other options of ssh in ~/.ssh/config"
        problems.add("hostfile", message, hint, f"{place}:{column}")
        return None
    if name in before:
        message = f"{name} stands here a second time, after line {before[name]}"
        problems.add("hostfile", message, "give all its slots in one line", f"{place}:{column}")
        return None
    slots = SLOTS.fullmatch(rest)
    if not slots or not int(slots["count"]):
        message = f"{name} needs `slots=` and a positive number, the ranks on it; got {rest!r}"
        problems.add("hostfile", message, f"{name} slots=8", f"{place}:{at}")
        return None
    if slots["more"]:
        where = f"{place}:{at + slots.start('more')}"
        problems.add("hostfile", f"{slots['more']!r} after the slots of {name} means nothing", "remove it", where)
        return None
    return Host(name, int(slots["count"]))


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts that a filter leaves: `node1@node2:0,2` means all of node1 and devices 0 and 2 of node2.

    Raises UserError for names and devices that the hostfile does not have, and where nothing is left.
    """
    if include and exclude:
        problem = Problem(kind="conflict", message="--include and --exclude are both given", hint="give one of them")
        raise UserError(problem)
    if not include and not exclude:
        return tuple(hosts)
    flag = "--include" if include else "--exclude"
    problems = Problems()
    named = dict(_parts(include or exclude or "", {h.name: h for h in hosts}, flag, problems))
    problems.raise_if_any()
    left = []
    for host in hosts:
        picked = (named[host.name] or host.ids) if host.name in named else ()
        keep = [i for i in host.ids if (i in picked) == bool(include)]
        if keep:
            whole = tuple(keep) == tuple(range(len(keep)))
            left.append(replace(host, slots=len(keep), devices=None if whole else tuple(keep)))
    if not left:
        raise UserError(Problem(kind="hostfile", message=f"{flag} leaves no host", hint="", where=flag))
    return tuple(left)


def _parts(text: str, hosts: dict[str, Host], flag: str, problems: Problems) -> Iterable[tuple[str, list[int]]]:
    for part in text.split("@"):
        name, colon, ids = part.partition(":")
        if name not in hosts:
            message = f"{name!r} is not in the hostfile"
            problems.add("hostfile", message, nearest(name, hosts), flag)
        elif colon and not re.fullmatch(r"\d+(,\d+)*", ids):
            message = f"{part!r}: after the colon stand device ids, as in {name}:0,2"
            problems.add("hostfile", message, "", flag)
        else:
            wanted = [int(i) for i in ids.split(",")] if colon else []
            beyond = [i for i in wanted if i not in hosts[name].ids]
            if beyond:
                message = f"{name} has devices 0 to {hosts[name].slots - 1}, not {', '.join(map(str, beyond))}"
                problems.add("hostfile", message, "raise its slots in the hostfile, or take others", flag)
            yield name, wanted


def write_hostfile(path: Path, hosts: Sequence[Host]) -> None:
    """Write a hostfile with these hosts, for DeepSpeed's runner."""
    path.write_text("".join(f"{host.name} slots={max(host.ids) + 1}\n" for host in hosts), encoding="utf-8")
