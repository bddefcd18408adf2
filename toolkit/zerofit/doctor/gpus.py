"""The GPUs of this host as nvidia-smi lists them: no CUDA context, no torch."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "compute_cap", "driver_version")
USERS = ("gpu_uuid", "pid", "used_memory", "process_name")  # a name may have commas: it comes last
PATIENCE_S = 8.0  # without persistence mode the driver is loaded first, which takes seconds
MIB = 2**20


def gpus() -> dict[str, Any]:
    """`gpus`: one object each with the processes on it; `driver`; `gpu_error` where nvidia-smi is there and fails."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "driver": None, "gpu_error": None}
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(_asked, "gpu", FIELDS), pool.submit(_asked, "compute-apps", USERS)]
        rows, users = (one.result() for one in asked)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return {"gpus": [], "driver": None, "gpu_error": " ".join(str(said).split())[:300]}
    found = [_gpu(row, users) for row in rows]
    return {"gpus": found, "driver": rows[0]["driver_version"] if rows else None, "gpu_error": None}


def _asked(what: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of one query. Raises OSError and SubprocessError."""
    argv = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    rows = [line.split(", ", len(fields) - 1) for line in done.stdout.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _gpu(row: dict[str, str], users: list[dict[str, str]]) -> dict[str, Any]:
    processes = [
        {"pid": int(one["pid"]), "name": one["process_name"], "used_bytes": _bytes(one["used_memory"])}
        for one in users
        if one["gpu_uuid"] == row["uuid"] and one["pid"].isdigit()
    ]
    return {
        "index": int(row["index"]),
        "uuid": row["uuid"],
        "name": row["name"],
        "total_bytes": _bytes(row["memory.total"]),
        "used_bytes": _bytes(row["memory.used"]),
        "compute_capability": row["compute_cap"],
        "processes": processes,
    }


def _bytes(mib: str) -> int | None:
    """None for "[N/A]", which is shown for parts of a divided GPU and inside containers."""
    return int(mib) * MIB if mib.isdigit() else None
