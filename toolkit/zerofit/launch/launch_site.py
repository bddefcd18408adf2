"""Where the ranks of one start run, and the command that starts them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LaunchSite:
    """Hosts and devices for the ranks; made by `launch.local` for this machine and by `launch.runner` for many."""

    hosts: tuple[str, ...]  # one a rank
    addresses: Mapping[str, str]  # for each host: this command's address as seen from there
    master: tuple[str, int]  # where rank 0 will listen
    accelerator: str  # "cuda" or "cpu"
    argv: Callable[[str], list[str]]  # the launcher's command, from the launch spec as one argument
    env: Callable[[str], Mapping[str, str]]  # the launcher's environment, from the start's run id
    cwd: str | None = None  # the launcher's; None: this command's
    forwarded: Mapping[str, str] = field(default_factory=dict)  # environment of the ranks beside what their host sets
    interfaces: Mapping[str, str] = field(default_factory=dict)  # for each host: the network interface to the others
    again: str = "zerofit train"  # the command that goes on with the run folder, given after it
    coming_s: float = 180.0  # until a guard must have reported: ssh, Python and file systems on their first day
    timeout_s: float  # without a heartbeat for so long, the ranks are ended
    sweep: Callable[[str], list[str]] | None = None  # ends what has a run id on all hosts; returns notes for the user
