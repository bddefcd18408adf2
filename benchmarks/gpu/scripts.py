"""`zerofit simulate -- python SCRIPT` against the same script's real memory on the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zerofit as zf
from benchmarks.meter.script_cases import task
from zerofit.spec.cluster import Cluster

from .part import Measure

TIMEOUT_S = 150
# runs a script as `python SCRIPT ...` does, and writes down torch's own count at its end
COUNTED = """
import atexit, json, os, runpy, sys
import torch
def note():
    names = ("max_memory_allocated", "max_memory_reserved")
    open(os.environ["COUNTED"], "w").write(json.dumps({name: getattr(torch.cuda, name)() for name in names}))
atexit.register(note)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cases(rehearse: bool) -> list[str]:
    """Scripts of `meter.script_cases` that set their device themselves."""
    return ["plain zero2"] if rehearse else ["plain zero2", "plain zero3", "plain offload", "torch plain"]


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Simulate a script, and run it."""
    yield lambda case: _measure(case, folder / "scripts", replace(Cluster.here(), gpus=1))


def _measure(case: str, place: Path, cluster: Cluster) -> dict[str, Any]:
    command = task(case, place / case.replace(" ", "-"))
    with chdir(command.folder):
        simulated = zf.simulate_script(list(command.command), cluster)
    found: dict[str, Any] = {"allocated_bytes": simulated.peak_bytes, "reserved_bytes": simulated.reserved_bytes}
    if cluster.on_cpu:
        return {"forecast": found}
    counted = place / "counted.json"
    argv = [sys.executable, "-c", COUNTED, *command.command[1:]]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    env = {**os.environ, **alone, "COUNTED": str(counted)}
    done = subprocess.run(argv, cwd=command.folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    real = json.loads(counted.read_text())
    errors = {name: found[name] / real[f"max_memory_{name.removesuffix('_bytes')}"] - 1 for name in found}
    return {"forecast": found, "real": real, "errors": errors}
