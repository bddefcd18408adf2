"""The machine as it is: packages, DeepSpeed's C++ ops, `zerofit doctor`, `zerofit calibrate`."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerofit.launch.host import environment, this_machine
from zerofit.launch.ops import build_ops
from zerofit.spec.local_machine import libaio

from .part import Measure

PACKAGES = ("zerofit", "torch", "deepspeed", "transformers", "torchvision", "accelerate", "triton", "numpy")
OPS = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")


def cases(rehearse: bool) -> list[str]:
    """The ops before what uses them; on a CPU none is compiled for rehearsing."""
    return ["packages", *([] if rehearse else [f"op {op}" for op in OPS]), "doctor", "calibrate"]


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Look at one side of this machine."""
    yield lambda case: _measure(case, rehearse)


def _measure(case: str, rehearse: bool) -> dict[str, Any]:
    what, _, op = case.partition(" ")
    if what == "packages":
        found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
        return {"packages": dict(sorted(found.items())), "nvidia_smi": _nvidia_smi()}
    if what == "op":
        return _build(op)
    argv = [sys.executable, "-m", "zerofit.cli", what, "--json"]
    argv += {"doctor": ["--quick"], "calibrate": ["--seconds", "0.1"]}[what] if rehearse else []
    done = subprocess.run(argv, capture_output=True, text=True, timeout=140)
    lines = done.stdout.strip().splitlines()
    if not lines or done.returncode not in (0, 1):  # 1: the doctor has findings
        raise RuntimeError(done.stderr[-2000:])
    return {"answer": json.loads(lines[-1])}


def _build(op: str) -> dict[str, Any]:
    """Compile an op as a training would, or find it compiled."""
    machine = this_machine()
    if op == "AsyncIOBuilder" and not all(libaio().values()):
        return {"skipped": "no libaio"}
    env, began = environment(machine.accelerator, machine.cores, 1), time.monotonic()
    folder = Path(env["TORCH_EXTENSIONS_DIR"])
    before = {path.name for path in folder.glob("*")} if folder.exists() else set()
    build_ops([op], {**os.environ, **env}, lambda _: None)
    new = sorted({path.name for path in folder.glob("*")} - before)
    return {"build_s": round(time.monotonic() - began, 1), "compiled_now": new}


def surroundings() -> dict[str, Any]:
    """Date, hardware and versions; nothing that names a machine or a person."""
    machine = this_machine()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {"device": machine.device_name, "accelerator": machine.accelerator, "cores": machine.cores},
        "driver": _nvidia_smi().get("driver_version"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> dict[str, str]:
    """Return name, driver, memory and clocks of the first GPU; empty where there is no nvidia-smi."""
    names = ("name", "driver_version", "memory.total", "memory.used", "clocks.max.sm", "power.limit")
    argv = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, map(str.strip, done.stdout.splitlines()[0].split(",")), strict=True))
