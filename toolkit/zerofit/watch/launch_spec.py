"""The launch spec: a file in the run folder that tells each rank's guard what to start and whom to report to.

Nothing of the user's goes through a shell this way.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofit.spec.files import write_json

HEARTBEAT_FD = "ZEROFIT_HEARTBEAT_FD"  # in a rank's environment: the descriptor of the pipe to its guard
HOST_NAME = "ZEROFIT_HOST"  # there, where ranks run on several hosts: the host's name in the hostfile
JOINED = "--joined"  # argument of a guard that a launcher of the user's has started
RANK_NAMES = (  # who says which rank this is: the deepspeed launcher, Slurm, OpenMPI, MPICH
    ("RANK", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One start of a run on its hosts."""

    folder: str  # the run folder
    token: str  # secret of this start: guards authenticate with it
    run_id: str  # in the environment of all its processes, so that orphans can be told
    attempt: int  # 1, and one more for each restart
    hosts: tuple[str, ...]  # one a rank
    watch: dict[str, tuple[str, int]]  # for each host: address and port of the command that watches
    master: tuple[str, int]  # address and port where rank 0 listens
    accelerator: str  # "cuda" or "cpu"
    coming_s: float  # until a guard must have reported
    timeout_s: float  # without a heartbeat for so long, the ranks are ended
    environment: dict[str, str] = field(default_factory=dict)  # for all ranks
    interfaces: dict[str, str] = field(default_factory=dict)  # for each host: the network interface to the master
    cwd: str = "/"  # where the command was started; the user's own modules are found there

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def write(self, path: Path) -> None:
        """Write for `read`; only the owner can read the secret."""
        write_json(path, asdict(self), mode=0o600)

    @classmethod
    def read(cls, path: Path) -> LaunchSpec:
        """Read what `write` has written."""
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        pairs = {"watch": {k: tuple(v) for k, v in value["watch"].items()}, "master": tuple(value["master"])}
        return cls(**{**value, **pairs, "hosts": tuple(value["hosts"])})


def rank_group(run_id: str, rank: int) -> str:
    """Return the name of the control group that a rank on a CPU may make for itself."""
    return f"zerofit-{run_id}-{rank}"


def as_argument(path: Path) -> str:
    """Return a path in letters that mean nothing to any shell, to pdsh or to DeepSpeed."""
    return base64.urlsafe_b64encode(os.fsencode(path)).decode().rstrip("=")


def from_argument(text: str) -> Path:
    """Return the path that `as_argument` was given. Raises ValueError."""
    try:
        return Path(os.fsdecode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))))
    except binascii.Error as error:
        raise ValueError(f"{text!r} is not a path encoded by zerofit") from error


def rank_of(env: Mapping[str, str], names: Sequence[tuple[str, str]] = RANK_NAMES) -> tuple[int, int]:
    """Return rank and local rank from what the launcher has set. Raises KeyError where none did."""
    for rank, local in names:
        if rank in env:
            return int(env[rank]), int(env.get(local, 0))
    raise KeyError("no launcher has set a rank: " + ", ".join(rank for rank, _ in names))
