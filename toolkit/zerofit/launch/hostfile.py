"""Hosts and their slots, from the deepspeed launcher's hostfile and its filters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.units import MOST_RANKS

# valid host names: no special characters of a shell, of pdsh (commas, %, brackets) or of ssh (a leading dash)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
MOST_SLOTS = 4096  # ranks per host; no host has more cores
LINE = re.compile(r"(?P<name>\S+)(?:(?P<gap>\s+)(?P<rest>.*))?")
SLOTS = re.compile(r"slots=(?P<count>\d+)\s*(?P<more>.*)")


@dataclass(frozen=True)
class Host:
    """A node and the devices on it that ranks may use."""

    name: str
    slots: int  # number of ranks
    devices: tuple[int, ...] | None = None  # device ids; None: the first `slots`

    @property
    def ids(self) -> tuple[int, ...]:
        """Device ids, one per rank."""
        return self.devices if self.devices is not None else tuple(range(self.slots))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of the lines `name slots=N`, in order. Skip blank lines and # comments.

    Raises UserError with all problems.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        hint = "write one line per host: `node1 slots=8`; for this machine alone use `zerofit train`"
        problem = Problem(kind="hostfile", message=f"cannot read the hostfile: {error}", hint=hint, where=str(path))
        raise UserError(problem) from None
    problems, hosts, lines = Problems(), list[Host](), dict[str, int]()
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].rstrip()
        if content.strip():
            host = _host(content, f"{path}:{number}", lines, problems)
            if host:
                hosts.append(host)
                lines[host.name.lower()] = number
    if not hosts and not problems:
        problems.add("hostfile", "no host in the hostfile", "write one line per host: `node1 slots=8`", str(path))
    problems.raise_if_any()
    return tuple(hosts)


def _host(content: str, line: str, before: dict[str, int], problems: Problems) -> Host | None:
    indent = len(content) - len(content.lstrip())
    match = LINE.fullmatch(content.strip())
    assert match
    name, rest = match["name"], match["rest"] or ""
    column = indent + 1
    at = indent + len(name) + len(match["gap"] or "") + 1
    if not NAME.fullmatch(name):
        message = f"{name!r} is not a valid host name: letters A to Z, digits, '.', '-' and '_' are allowed"
        problems.add("hostfile", message, _other_form(name), f"{line}:{column}")
        return None
    if name.lower() in before:  # DNS ignores case
        message = f"{name} is listed twice, first on line {before[name.lower()]}"
        problems.add("hostfile", message, "put all its slots on one line", f"{line}:{column}")
        return None
    slots = SLOTS.fullmatch(rest)
    # [:9]: Python refuses to convert very long digits
    if not slots or not 0 < int(slots["count"][:9]) <= MOST_SLOTS:
        message = f"{name} needs `slots=` and its number of ranks, 1 to {MOST_SLOTS}; got {rest[:80]!r}"
        problems.add("hostfile", message, f"write {name} slots=8", f"{line}:{at}")
        return None
    if slots["more"]:
        where = f"{line}:{at + slots.start('more')}"
        problems.add("hostfile", f"unknown text {slots['more']!r} after the slots of {name}", "remove it", where)
        return None
    return Host(name, int(slots["count"]))


def _other_form(name: str) -> str:
    """Return how to write a name of another launcher's hostfile."""
    host, _, number = name.partition(":")
    if NAME.fullmatch(host) and number.isdigit():
        return f"write {host} slots={number}; if {number} is the port of ssh, use --ssh-port {number}"
    if name.count(":") > 1:
        return "name the host of an IPv6 address in /etc/hosts or ~/.ssh/config"
    if re.search(r"[\[,]", name):
        return "write one line per host; `--launcher slurm` needs no hostfile"
    return "put users and other ssh options into ~/.ssh/config"


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts that a filter selects.

    `node1@node2:0,2` means all of node1 and devices 0 and 2 of node2. Raises UserError for names and devices that are
    not in the hostfile, or if no host is selected.
    """
    if include and exclude:
        problem = Problem(kind="conflict", message="--include and --exclude are both given", hint="use one of them")
        raise UserError(problem)
    if not include and not exclude:
        return tuple(hosts)
    flag = "--include" if include else "--exclude"
    problems = Problems()
    named = _named_devices(include or exclude or "", {h.name: h for h in hosts}, flag, problems)
    problems.raise_if_any()
    selected = []
    for host in hosts:
        picked = named.get(host.name, ())
        ids = tuple(i for i in host.ids if (i in picked) == bool(include))
        if ids:
            first_devices = ids == tuple(range(len(ids)))  # no filter is needed then; some launchers have none
            selected.append(replace(host, slots=len(ids), devices=None if first_devices else ids))
    if not selected:
        raise UserError(Problem(kind="hostfile", message=f"{flag} leaves no host", hint="", where=flag))
    return tuple(selected)


def _named_devices(text: str, hosts: Mapping[str, Host], flag: str, problems: Problems) -> dict[str, set[int]]:
    """Return the devices that a filter names, by host. Parts for the same host add up."""
    picked, complete = dict[str, set[int]](), set[str]()
    # parts for the same host add up, as in DeepSpeed
    for part in text.split("@"):
        name, colon, ids = part.partition(":")
        if name not in hosts:
            problems.add("hostfile", f"{name!r} is not in the hostfile", nearest(name, hosts), flag)
            continue
        if colon and not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", ids):
            message = f"{part!r}: device ids have to follow the colon, as in {name}:0,2"
            problems.add("hostfile", message, "use no spaces and no ranges", flag)
            continue
        if name in picked and (not colon or name in complete):  # DeepSpeed would use only the listed devices
            message = f"{name} is named twice, once without devices"
            problems.add("hostfile", message, "name it once, or always with devices", flag)
        complete |= set() if colon else {name}
        devices = {int(i) for i in ids.split(",")} if colon else set(hosts[name].ids)
        missing = sorted(devices.difference(hosts[name].ids))
        if missing:
            message = f"{name} has devices 0 to {hosts[name].slots - 1}, not {', '.join(map(str, missing))}"
            problems.add("hostfile", message, "raise its slots in the hostfile, or use other devices", flag)
        picked[name] = picked.get(name, set()) | devices
    return picked


def check_size(nodes: int, slots: int, problems: Problems) -> None:
    """Add a problem if `nodes` times `slots` are more ranks than possible."""
    if nodes * slots > MOST_RANKS:
        message = f"--nodes {nodes} with --slots {slots} exceeds the limit of {MOST_RANKS:,} ranks"
        problems.add("bad-value", message, "use fewer", "--nodes and --slots")


def write_hostfile(path: Path, hosts: Sequence[Host]) -> None:
    """Write a hostfile of these hosts for DeepSpeed's runner."""
    # DeepSpeed refuses an --include of device ids from the number of slots on (launcher/runner.py,
    # parse_resource_filter).
    path.write_text("".join(f"{host.name} slots={max(host.ids) + 1}\n" for host in hosts), encoding="utf-8")
