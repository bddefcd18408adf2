"""What `zerofit calibrate` has measured on this machine, kept for plans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zerofit.spec.cache import cache_root
from zerofit.spec.files import write_json


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates that one rank reached, in bytes or FLOP a second; None where there was nothing to measure with."""

    kind: str  # of `--gpu`
    device_name: str  # as torch reports it
    devices: int
    date: str  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)
    matmul_flops: dict[str, float] = field(default_factory=dict)  # by precision
    memory_bandwidth: float | None = None  # of the device
    launch_s: float | None = None  # from one small op to the next
    link: float | None = None  # bus bandwidth of a ring all-reduce between local ranks
    link_latency_s: float | None = None  # of a small all-reduce
    host_copy: float | None = None  # from pinned host memory to the device; on a CPU from memory to memory
    host_bandwidth: float | None = None  # of host memory under an Adam step, all cores together
    disk_read: float | None = None
    disk_write: float | None = None


def calibration_file() -> Path:
    """Where it is kept."""
    return cache_root() / "calibration.json"


def write_calibration(calibration: Calibration) -> Path:
    """Keep it, in place of an older one."""
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(calibration))
    return path


def read_calibration(kind: str) -> Calibration | None:
    """What was measured for this kind of device here; None where nothing was, or the file is of another version."""
    try:
        found = Calibration(**json.loads(calibration_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.kind == kind else None
