"""The launch spec: a file that tells guards how to start their rank and where to report.

Since guards read a file, no text of the user passes through a shell.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofit.launch.world import NAMES
from zerofit.spec.files import write_json

HEARTBEAT_FD = "ZEROFIT_HEARTBEAT_FD"  # variable of a rank: descriptor of the pipe to its guard
HOST_NAME = "ZEROFIT_HOST"  # variable of a rank, with several hosts: the host's name in the hostfile
JOINED = "--joined"  # argument of a guard that the user's launcher has started


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One start of a run on its hosts."""

    folder: str  # the run folder
    token: str  # secret of this start, with which guards authenticate
    run_id: str  # in the environment of all its processes, to find orphans
    attempt: int  # 1, plus 1 for each restart
    hosts: tuple[str, ...]  # one per rank
    watch: dict[str, tuple[str, int]]  # by host: address and port of the watching command
    master: tuple[str, int]  # address and port of rank 0
    accelerator: str  # "cuda" or "cpu"
    coming_s: float  # limit for a guard to report
    timeout_s: float  # limit without a heartbeat before ranks are killed
    environment: dict[str, str] = field(default_factory=dict)  # for all ranks
    interfaces: dict[str, str] = field(default_factory=dict)  # by host: the network interface to the master
    cwd: str = "/"  # working directory of the command, where the user's modules are

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def write(self, path: Path) -> None:
        """Write the spec. Only the owner can read the secret."""
        write_json(path, asdict(self), mode=0o600)

    @classmethod
    def read(cls, path: Path) -> LaunchSpec:
        """Read a written spec."""
        # not with pydantic, whose import would slow down each guard
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        pairs = {"watch": {k: tuple(v) for k, v in value["watch"].items()}, "master": tuple(value["master"])}
        return cls(**{**value, **pairs, "hosts": tuple(value["hosts"])})


def rank_group(run_id: str, rank: int) -> str:
    """Return the name of the control group that a CPU rank may create for itself."""
    return f"zerofit-{run_id}-{rank}"


def as_argument(path: Path) -> str:
    """Return a path encoded in letters without special meaning to shells, pdsh or DeepSpeed."""
    return base64.urlsafe_b64encode(os.fsencode(path)).decode().rstrip("=")


def from_argument(text: str) -> Path:
    """Return the path that `as_argument` encoded. Raises ValueError."""
    try:
        return Path(os.fsdecode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))))
    except binascii.Error as error:
        raise ValueError(f"{text!r} is not a path encoded by zerofit") from error


def rank_of(env: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and local rank from the variables of the innermost launcher.

    Raises KeyError if there are none.
    """
    launchers = [names for names in NAMES if names.rank in env]
    if not launchers:
        raise KeyError("no launcher has set a rank: " + ", ".join(names.rank for names in NAMES))
    names = next((names for names in launchers if names.local_rank in env), launchers[0])  # Slurm sets PMI_RANK alone
    return int(env[names.rank]), int(env.get(names.local_rank, 0))
